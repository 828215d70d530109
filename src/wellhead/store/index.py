"""What a run holds, from its ledgers alone: which tensors of which samples are durable, and where.

Read-only, and a snapshot: a line appended later is seen by the next `load`. A sample may be in several shards (a
layer added later); the same tensor twice counts once, and the shard with the lowest name wins.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from wellhead.core import INPUT_IDS
from wellhead.errors import StoreDamaged
from wellhead.paths import RunPaths
from wellhead.store.columns import Columns, distinct_rows
from wellhead.store.gather import Gathered, LedgerInfo, LedgerProblem, Position, ShardInfo, gather
from wellhead.store.head import in_stored_order
from wellhead.store.ledger import read_record
from wellhead.store.records import ID_BYTES, Commit, Quarantine, Replace, Retired, Tombstone, split_ids

T = TypeVar("T")

_LINES_KEPT = 256
"""Commit lines kept in decoded form for `locate`: about 120 bytes a member."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where the stored bytes of a tensor are. `offset` is absolute in the shard's file; `xxh3` is of these bytes.

    `table` is (offset, size, xxh3) of the bias table, None where the tensor needs none.
    """

    shard: str
    offset: int
    size: int
    xxh3: int
    tokens: int
    codec: str
    table: tuple[int, int, int] | None


class StoreIndex:
    """See the module. Safe to read from several threads; picklable.

    `shards` are the recorded shards that count, by name; `removed` maps those that do not count any more to why;
    `problems` is what is wrong with the ledgers; `ledgers` and `settled` (ids of lives whose ledger a `recover`
    record settles) are for recovery and verify.
    """

    def __init__(self, gathered: Gathered) -> None:
        self._run_dir = gathered.run_dir
        self.ledgers: dict[str, LedgerInfo] = gathered.ledgers
        self.settled = frozenset(gathered.recovers)
        self.problems: list[LedgerProblem] = list(gathered.problems)
        self.removed = _removed(gathered)
        live = self._live(gathered)
        self.shards: list[ShardInfo] = [gathered.shards[at] for at in live]
        self._columns = Columns.build(gathered, live)
        self.quarantined = self._quarantined(gathered)
        self._attempts = gathered.attempts

    @classmethod
    def load(cls, run_dir: Path, fingerprint: str | None = None) -> StoreIndex:
        """Reads every ledger of the run. Raises OtherSpec for another schema version; damage is in `problems`.

        With `fingerprint`, ledgers of another capture spec are a problem (`foreign`) and do not count.
        """
        return cls(gather(run_dir, fingerprint))

    @property
    def tensors(self) -> tuple[str, ...]:
        """The state tensors that some sample has, in stored order."""
        return in_stored_order([name for name, flags in self._columns.has.items() if name != INPUT_IDS and flags.any()])

    @property
    def samples(self) -> int:
        """Distinct samples with at least one state."""
        return int(self._columns.has_state.sum())

    @property
    def tokens(self) -> int:
        """Tokens of these, each sample once."""
        return int(self._columns.sample_tokens[self._columns.has_state].sum(dtype=np.int64))

    @functools.cached_property
    def raw_bytes(self) -> int:
        """Bytes of the distinct states (sample × tensor) before the codec."""
        return self._columns.distinct_raw_bytes([shard.raw_bytes for shard in self.shards])

    @property
    def stored_bytes(self) -> int:
        """Bytes of the shard files that count."""
        return sum(shard.size for shard in self.shards)

    def engines(self) -> set[tuple[str, str]]:
        """(engine, version) of everything that counts."""
        return {(shard.provenance.engine, shard.provenance.version) for shard in self.shards}

    def ids(self) -> list[str]:
        """Distinct samples with at least one state, in the order of their ids."""
        return self._columns.hex_ids(self._columns.has_state)

    def having(self, tensor: str) -> set[str]:
        """The samples that have the tensor."""
        return set(self._columns.hex_ids(self._columns.has[tensor])) if tensor in self._columns.has else set()

    def tensors_of(self, id: str) -> frozenset[str]:
        """The state tensors of a sample; empty if it is unknown."""
        [at] = self._columns.find([id])
        return frozenset(name for name in self.tensors if at >= 0 and self._columns.has[name][at])

    def missing(self, ids: Sequence[str], tensors: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Which of the state tensors each of the ids lacks, in the order asked for; complete ids are not in it."""
        rows, lacks = self._columns.lacking(ids, tensors)
        kinds, kind = distinct_rows(lacks)
        names = [tuple(name for name, lacking in zip(tensors, flags, strict=True) if lacking) for flags in kinds]
        return {ids[row]: names[k] for row, k in zip(rows.tolist(), kind.tolist(), strict=True)}

    def locate(self, id: str, tensor: str) -> Location:
        """Where a tensor is; `input_ids` is stored with every shard of the sample. KeyError if it is nowhere."""
        found = self._columns.entry(id, tensor)
        if found is None:
            raise KeyError(f"no {tensor} of {id}")
        shard, row, tokens = self.shards[found[0]], found[1], found[2]
        life, offset = shard.position
        line = _line(RunPaths(self._run_dir).writer(life).ledger, offset, shard.line_length)
        column = line.tensors.index(tensor)
        return Location(
            shard=shard.name,
            offset=int(line.offsets[row, column]),
            size=int(line.sizes[row, column]),
            xxh3=int(line.xxh3[row, column]),
            tokens=tokens,
            codec=shard.codec,
            table=line.tables.get(tensor),
        )

    def lost_shards(self) -> list[str]:
        """Recorded shards whose file is not there or has another size. Looks at sizes only; OSError."""
        sizes = file_sizes(RunPaths(self._run_dir).states)
        return [shard.name for shard in self.shards if sizes.get(shard.name) != shard.size]

    def commit_of(self, shard: ShardInfo) -> Commit:
        """The whole record of a shard, read again from its ledger."""
        life, offset = shard.position
        return read_commit(RunPaths(self._run_dir).writer(life).ledger, offset, shard.line_length)

    def attempts_lost(self, ids: Sequence[str]) -> dict[str, int]:
        """For each of the ids that has no state and is not quarantined: how many lives had it in hand and ended.

        For a warning only: a sample that several lives died with may be what kills them."""
        sample = self._columns.find(ids)
        stored = (sample >= 0) & np.append(self._columns.has_state, False)[sample]
        wanted = {id for id, there in zip(ids, stored, strict=True) if not there and id not in self.quarantined}
        found: Counter[str] = Counter()
        for packed in self._attempts.values():
            found.update(wanted.intersection(split_ids(packed.hex())))
        return dict(found)

    def _live(self, gathered: Gathered) -> list[int]:
        """Positions in `gathered.shards` of what counts, by shard name, each shard once."""
        first: dict[str, int] = {}
        for at, shard in enumerate(gathered.shards):
            if shard.name in self.removed or not gathered.counts(shard.position):
                continue
            known = gathered.shards[first.setdefault(shard.name, at)]
            if (known.size, known.head_xxh3) != (shard.size, shard.head_xxh3):
                detail = f"{shard.name} is recorded as {known.size} and as {shard.size} bytes, or with another head"
                self.problems.append(LedgerProblem("conflict", shard.position[0], shard.position[1], detail))
        return [first[name] for name in sorted(first)]

    def _quarantined(self, gathered: Gathered) -> dict[str, Quarantine]:
        """A later commit ends a quarantine for good, also if its shard was lost since: it can be captured."""
        counting = [(position, record) for position, record in gathered.quarantines if gathered.counts(position)]
        latest = {record.id: (position, record) for position, record in _sorted(counting)}
        lost = self._lost_commits(gathered) if latest else []
        out = {}
        for id, (position, record) in latest.items():
            commits = [self.shards[at].position for at in self._columns.shards_of(id)]
            commits += [at for at, ids in lost if id in ids]
            if not any(commit > position for commit in commits):
                out[id] = record
        return out

    def _lost_commits(self, gathered: Gathered) -> list[tuple[Position, frozenset[str]]]:
        """The shards that do not count any more: where they were recorded, and what they held."""
        out, first = [], 0
        for shard in gathered.shards:
            end = first + ID_BYTES * shard.samples
            if shard.name in self.removed and gathered.counts(shard.position):
                out.append((shard.position, frozenset(split_ids(gathered.ids[first:end].hex()))))
            first = end
        return out


def file_sizes(folder: Path) -> dict[str, int]:
    """Name -> bytes of the files in a folder; nothing if there is no such folder."""
    if not folder.is_dir():
        return {}
    return {entry.name: entry.stat().st_size for entry in folder.iterdir() if entry.is_file()}


Removal = Tombstone | Replace | Retired


def _removed(gathered: Gathered) -> dict[str, Removal]:
    """Shards that do not count: removed, and not adopted again afterwards."""
    recorded: dict[str, tuple[str, int]] = {}
    for shard in gathered.shards:
        if gathered.counts(shard.position):
            recorded[shard.name] = max(recorded.get(shard.name, ("", 0)), shard.position)
    out: dict[str, Removal] = {}
    for position, removal in _sorted(gathered.removals):
        if gathered.counts(position) and position > recorded.get(removal.shard, ("", 0)):
            out[removal.shard] = removal
    return out


def _sorted(records: list[tuple[tuple[str, int], T]]) -> list[tuple[tuple[str, int], T]]:
    return sorted(records, key=lambda record: record[0])


def read_commit(ledger: Path, offset: int, length: int) -> Commit:
    """A commit or adopt line again. StoreDamaged if it has changed since the index was loaded."""
    try:
        record = read_record(ledger, offset, length)
    except (OSError, ValueError) as why:
        raise StoreDamaged(f"{ledger}: the line at {offset} cannot be read: {why}", "run `wellhead verify`") from why
    if not isinstance(record, Commit):
        raise StoreDamaged(f"{ledger}: the line at {offset} is no commit any more", "run `wellhead verify`")
    return record


@functools.lru_cache(maxsize=_LINES_KEPT)
def _line(ledger: Path, offset: int, length: int) -> Commit:
    return read_commit(ledger, offset, length)


__all__ = ["LedgerProblem", "Location", "ShardInfo", "StoreIndex"]
