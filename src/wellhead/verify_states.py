"""`verify --deep`: every tensor of every shard is read, hashed, decoded and judged as a capture is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from wellhead.capture import check_states, suspects
from wellhead.core import FINAL, INPUT_IDS, Capture, layer_number, sample_id
from wellhead.errors import StoreDamaged
from wellhead.finding import Finding
from wellhead.hashes import prefix_hashes, row_hashes
from wellhead.run import Run
from wellhead.store.index import ShardInfo
from wellhead.store.pread import ShardFiles
from wellhead.store.reader import decode_tensor
from wellhead.store.records import Commit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.core import Bits


class DeepCheck:
    """One pass over a run. `checked` counts what was looked at; what is only suspect is told once a kind and tensor,
    with the number of samples, since sound runs have it too (sink tokens, above all)."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._files = ShardFiles()
        self._rows = RowsSeen()
        self._suspects: dict[tuple[str, str], _Tally] = {}
        self.checked = {"tensors": 0, "values": 0, "stored_bytes": 0}

    def findings(self, progress: Callable[[int, int], None]) -> Iterator[Finding]:
        """Reads all shards in the order of their names; `progress` gets (done, total) stored bytes."""
        for shard in self._run.index.shards:
            try:
                yield from self._shard(shard)
            except (StoreDamaged, OSError, MemoryError, OverflowError) as error:
                yield Finding("corrupt", str(error) or type(error).__name__, shard.name)
            self.checked["stored_bytes"] += shard.size
            progress(self.checked["stored_bytes"], self._run.index.stored_bytes)
        self._files.close()
        for (reason, name), tally in sorted(self._suspects.items()):
            words = reason.replace("_", " ")
            yield Finding("suspect", f"{words} in {name} of {tally.samples} samples, first: {tally.first}", id=tally.id)

    def _shard(self, shard: ShardInfo) -> Iterator[Finding]:
        commit, path = self._run.index.commit_of(shard), self._run.paths.states / shard.name
        tables: dict[str, NDArray[np.uint8]] = {}
        for name, (offset, size, xxh3) in commit.tables.items():
            data = self._files.read(path, offset, size)
            if xxhash.xxh3_64_intdigest(data) == xxh3:
                tables[name] = np.frombuffer(data, np.uint8)
            else:
                yield Finding("corrupt", f"the bias table of {name} does not have its hash", shard.name)
        for row, id in enumerate(commit.ids):
            columns = [column for column in range(len(commit.tensors)) if commit.sizes[row, column]]
            extents = [(int(commit.offsets[row, column]), int(commit.sizes[row, column])) for column in columns]
            sound: dict[str, memoryview] = {}
            for column, data in zip(columns, self._files.read_many(path, extents), strict=True):
                self.checked["tensors"] += 1
                if xxhash.xxh3_64_intdigest(data) == int(commit.xxh3[row, column]):
                    sound[commit.tensors[column]] = data
                else:
                    detail = f"the stored bytes of {commit.tensors[column]} do not have their hash"
                    yield Finding("corrupt", detail, shard.name, id)
            yield from self._sample(commit, row, sound, tables)

    def _sample(
        self, commit: Commit, row: int, stored: dict[str, memoryview], tables: dict[str, NDArray[np.uint8]]
    ) -> Iterator[Finding]:
        """One member whose stored bytes are what was recorded: do they mean what they must?"""
        id, tokens, shard = commit.ids[row], commit.tokens[row], commit.shard
        if INPUT_IDS not in stored:
            return
        ids = np.frombuffer(stored.pop(INPUT_IDS), "<i4")
        if sample_id(ids.tobytes()) != id or len(ids) != tokens:
            yield Finding("corrupt", f"its {len(ids)} token ids are not those that its name is the hash of", shard, id)
            return
        states: dict[str, Bits] = {}
        for name, data in stored.items():
            if name not in tables and commit.tables.get(name):
                continue  # its bias table is damaged, and that is a finding already
            try:
                states[name] = decode_tensor(data, commit.codec, tokens, tables.get(name))
            except StoreDamaged as error:
                yield Finding("corrupt", f"{name}: {error.message}", shard, id)
        self.checked["values"] += sum(bits.size for bits in states.values())
        bad = check_states(states, tokens, self._run.spec.hidden_size)
        if bad is not None:
            yield Finding("corrupt", f"{bad.reason}: {bad.detail}", shard, id)
        self._suspect(id, ids, states, commit)

    def _suspect(self, id: str, ids: NDArray[np.int32], states: dict[str, Bits], commit: Commit) -> None:
        for found in suspects(Capture(id, ids, states, commit.provenance)):
            self._tell(found.reason, found.detail.split()[0], id, found.detail)
        for name, bits in states.items():
            if name == FINAL or layer_number(name) > 0:  # rows of r_0, the embedding, repeat with their tokens
                for other, count in self._rows.look(id, name, ids, bits).items():
                    self._tell("rows_of_another", name, id, f"{count} rows as in {other}, after another prefix")

    def _tell(self, reason: str, name: str, id: str, detail: str) -> None:
        tally = self._suspects.setdefault((reason, name), _Tally(id, detail))
        tally.samples += 1


@dataclass(slots=True)
class _Tally:
    id: str
    first: str
    samples: int = 0


class RowsSeen:
    """Sees rows of one sample in another: equal values where the token prefixes differ.

    Bounded memory: of all rows those are kept whose hash is divisible by a power of two that grows when they become
    too many; equal rows have equal hashes, so both are kept or neither is."""

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._every = 1
        self._seen: dict[tuple[str, int], tuple[int, str]] = {}

    def look(self, id: str, name: str, ids: NDArray[np.int32], bits: Bits) -> dict[str, int]:
        """Other samples of which `bits` holds rows, and how many."""
        hashes, prefixes = row_hashes(bits), prefix_hashes(ids)
        equal: dict[str, int] = {}
        for at in np.flatnonzero(hashes % np.uint64(self._every) == 0).tolist():
            prefix, other = self._seen.setdefault((name, int(hashes[at])), (int(prefixes[at]), id))
            if prefix != int(prefixes[at]) and other != id:
                equal[other] = equal.get(other, 0) + 1
        while len(self._seen) > self._most:
            self._every *= 2
            self._seen = {key: value for key, value in self._seen.items() if key[1] % self._every == 0}
        return equal
