"""Reads every ledger of a run into columns: the one pass behind `StoreIndex.load`.

A million samples must open in about a second, so a commit line is taken apart into packed columns at once, and what
only a read of that sample needs (offsets, sizes, hashes) is left in the ledger.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from wellhead.core import INPUT_IDS, SCHEMA_VERSION, Provenance
from wellhead.errors import OtherSpec
from wellhead.paths import RunPaths
from wellhead.store.ledger import json_of, scan
from wellhead.store.life import Life, is_life_id
from wellhead.store.records import (
    ID_BYTES,
    Attempt,
    Opened,
    Quarantine,
    Recover,
    Replace,
    Retired,
    Tombstone,
    checked_shard_name,
    record_from_json,
)

Position = tuple[str, int]
"""(life id, offset of the line): orders the records of a run by time, as life ids do."""


@dataclass(frozen=True, slots=True)
class LedgerProblem:
    """Something in a ledger that no crash explains, or a torn end that nobody has settled yet (`torn_tail`).

    Kinds: `torn_tail`, `damaged_line`, `hash_differs` (a bit flipped after the life was settled), `truncated`,
    `no_opening`, `foreign` (another fingerprint), `conflict` (two different records of one shard).
    """

    kind: str
    life: str
    offset: int
    detail: str


class ShardInfo(NamedTuple):
    """A recorded shard: what is known without reading its line again. `tokens` and `samples` count its members."""

    name: str
    size: int
    raw_bytes: int
    tokens: int
    samples: int
    codec: str
    tensors: tuple[str, ...]
    head_size: int
    head_xxh3: int
    provenance: Provenance
    position: Position
    line_length: int


@dataclass(frozen=True, slots=True)
class LedgerInfo:
    """A life's ledger as found. `valid_bytes` and `xxh3` are what a `recover` record of it would say."""

    life_id: str
    life: Life | None
    valid_bytes: int
    xxh3: int
    torn: int


@dataclass(slots=True)
class Gathered:
    """Everything that the ledgers say, in the order in which it was read; nothing is judged yet."""

    run_dir: Path
    fingerprint: str | None
    ledgers: dict[str, LedgerInfo] = field(default_factory=dict)
    damaged: list[LedgerProblem] = field(default_factory=list)
    problems: list[LedgerProblem] = field(default_factory=list)
    recovers: dict[str, tuple[Position, Recover]] = field(default_factory=dict)
    shards: list[ShardInfo] = field(default_factory=list)
    ids: bytearray = field(default_factory=bytearray)
    tokens: array[int] = field(default_factory=lambda: array("i"))
    absent: dict[str, list[int]] = field(default_factory=dict)
    """Tensor -> entries, in the order of reading, that lack it although others of their shard have it."""
    removals: list[tuple[Position, Tombstone | Replace | Retired]] = field(default_factory=list)
    quarantines: list[tuple[Position, Quarantine]] = field(default_factory=list)
    attempts: dict[str, bytearray] = field(default_factory=dict)
    _tensors: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    _provenances: dict[bytes, Provenance] = field(default_factory=dict)

    def counts(self, position: Position) -> bool:
        """Whether a line counts: it is not beyond what the `recover` record of its life settled."""
        settled = self.recovers.get(position[0])
        return settled is None or position[1] < settled[1].valid_bytes

    def add_ledger(self, path: Path, life_id: str) -> None:
        """Raises OtherSpec for a ledger of another schema version."""
        lines = scan(path)
        life: Life | None = None
        for offset, line in lines:
            try:
                value = json_of(line)
                if value.get("kind") == "opened":
                    opened = self._opened(path, value)
                    life = opened.life
                    if self.fingerprint is not None and opened.fingerprint != self.fingerprint:
                        self.problems.append(LedgerProblem("foreign", life_id, 0, f"of spec {opened.fingerprint}"))
                        return
                else:
                    self._add((life_id, offset), len(line), value)
            except (ValueError, KeyError, TypeError, OverflowError) as why:
                self.damaged.append(LedgerProblem("damaged_line", life_id, offset, f"makes no sense: {why}"))
        self.damaged += [LedgerProblem("damaged_line", life_id, offset, why) for offset, why in lines.damaged]
        self.ledgers[life_id] = LedgerInfo(life_id, life, lines.valid_bytes, lines.xxh3, lines.torn)

    def _opened(self, path: Path, value: dict[str, Any]) -> Opened:
        if value.get("schema") != SCHEMA_VERSION:
            raise OtherSpec(
                f"{path} has schema version {value.get('schema')}; this wellhead reads {SCHEMA_VERSION}",
                "use the wellhead version that made the run",
            )
        return Opened.from_json(value)

    def _add(self, position: Position, length: int, value: dict[str, Any]) -> None:
        kind = value.get("kind")
        if kind in ("commit", "adopt"):
            self._add_commit(position, length, value)
            return
        if kind == Attempt.kind:
            self.attempts.setdefault(position[0], bytearray()).extend(bytes.fromhex(value["ids"]))
            return
        record = record_from_json(value)
        if isinstance(record, Recover):
            self._add_recover(position, record)
        elif isinstance(record, Quarantine):
            self.quarantines.append((position, record))
        elif isinstance(record, Tombstone | Replace | Retired):
            self.removals.append((position, record))

    def _add_recover(self, position: Position, record: Recover) -> None:
        known = self.recovers.get(record.life)
        if record.life != position[0] and (known is None or position < known[0]):
            self.recovers[record.life] = (position, record)

    def _add_commit(self, position: Position, length: int, value: dict[str, Any]) -> None:
        ids = bytes.fromhex(value["ids"])
        counts = value["tokens"]
        tokens = array("i", counts)
        tensors = tuple(value["tensors"])
        absent = [divmod(flat, len(tensors)) for flat in value["absent"]]
        if len(ids) != len(tokens) * ID_BYTES or INPUT_IDS not in tensors or any(r >= len(tokens) for r, _ in absent):
            raise ValueError("columns of different lengths")
        shard = ShardInfo(
            name=checked_shard_name(value),
            size=int(value["size"]),
            raw_bytes=int(value["raw_bytes"]),
            tokens=sum(counts),
            samples=len(tokens),
            codec=value["codec"],
            tensors=self._tensors.setdefault(tensors, tensors),
            head_size=int(value["head_size"]),
            head_xxh3=int(value["head_xxh3"], 16),
            provenance=self._provenance(value["provenance"]),
            position=position,
            line_length=length,
        )
        first_entry = len(self.ids) // ID_BYTES
        for row, column in absent:
            self.absent.setdefault(tensors[column], []).append(first_entry + row)
        self.shards.append(shard)
        self.ids += ids
        self.tokens += tokens

    def _provenance(self, value: dict[str, Any]) -> Provenance:
        key = orjson.dumps(value)
        if key not in self._provenances:
            self._provenances[key] = Provenance.from_json(value)
        return self._provenances[key]


def gather(run_dir: Path, fingerprint: str | None) -> Gathered:
    """Reads all ledgers, then says what is wrong with them. With `fingerprint`, ledgers of another one do not count."""
    found = Gathered(run_dir, fingerprint)
    paths = RunPaths(run_dir)
    names = sorted(path.name for path in paths.writers.iterdir()) if paths.writers.is_dir() else []
    with _no_collections():
        for life_id in names:
            ledger = paths.writer(life_id).ledger
            if is_life_id(life_id) and ledger.is_file():
                found.add_ledger(ledger, life_id)
    # A recover record that lies beyond what a later life settled does not count itself; the latest lives judge first.
    for life_id in sorted(found.recovers, reverse=True):
        if not found.counts(found.recovers[life_id][0]):
            del found.recovers[life_id]
    for info in found.ledgers.values():
        found.problems += _judge(found, info)
    return found


@contextmanager
def _no_collections() -> Iterator[None]:
    """Tens of thousands of small objects come and all stay: looking for garbage among them again and again takes a
    quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _judge(found: Gathered, info: LedgerInfo) -> list[LedgerProblem]:
    life_id = info.life_id
    problems = [problem for problem in found.damaged if problem.life == life_id]
    if info.life is None and info.valid_bytes:
        problems.append(LedgerProblem("no_opening", life_id, 0, "its first line is missing or damaged"))
    settled = found.recovers.get(life_id)
    if settled is None:
        if info.torn and info.valid_bytes:  # a life that never got as far as its first line has recorded nothing
            problems.append(LedgerProblem("torn_tail", life_id, info.valid_bytes, f"{info.torn} bytes prove nothing"))
        return problems
    expected = settled[1]
    if info.valid_bytes == expected.valid_bytes and info.xxh3 == expected.xxh3:
        return problems
    lines = scan(RunPaths(found.run_dir).writer(life_id).ledger, limit=expected.valid_bytes)
    for _ in lines:
        pass
    if lines.valid_bytes < expected.valid_bytes:
        detail = f"{lines.valid_bytes} bytes left of {expected.valid_bytes}"
        return [*problems, LedgerProblem("truncated", life_id, lines.valid_bytes, detail)]
    if lines.xxh3 != expected.xxh3:
        known = {problem.offset for problem in problems}
        problems += [LedgerProblem("damaged_line", life_id, at, why) for at, why in lines.damaged if at not in known]
        detail = f"the first {expected.valid_bytes} bytes are not what {settled[0][0]} found"
        problems.append(LedgerProblem("hash_differs", life_id, 0, detail))
    return problems
