"""An opened plan: its columns, and the token ids of single samples."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wellhead.core import PlanItem, Sample
from wellhead.dataset.overlay import Overlay
from wellhead.errors import StoreDamaged, UsageError
from wellhead.paths import RunPaths
from wellhead.plan_file import PlanHead, SourceFile, iterate_rejects, open_parquet, read_head

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

_CACHED_GROUPS = 8
_POINTER = re.compile(r"(?P<number>[0-9]{1,9})\.parquet (?P<xxh3>[0-9a-f]{16})\n")
_ROW_COLUMNS = ["line", "id", "tokens", "full_tokens", "supervised_tokens", "generation", "reason"]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A row of the source file as planned. `id` is None and the numbers are 0 where it was rejected for `reason`."""

    line: int
    id: str | None
    tokens: int
    full_tokens: int
    supervised_tokens: int
    generation: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Pointer:
    """plan/current: which plan is in force, and the XXH3-64 of its file, which only `verify` computes again."""

    path: Path
    xxh3: int

    def to_bytes(self) -> bytes:
        return f"{self.path.name} {self.xxh3:016x}\n".encode()

    @classmethod
    def read(cls, paths: RunPaths) -> Pointer | None:
        """None if there is no plan yet. Raises StoreDamaged if the pointer leads nowhere."""
        try:
            text = paths.current_plan.read_text("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise StoreDamaged(f"cannot read {paths.current_plan}: {error}", "plan again") from error
        match = _POINTER.fullmatch(text)
        if match is None:
            raise StoreDamaged(f"{paths.current_plan} names no plan: {text[:80]!r}", "remove it and plan again")
        path = paths.plan(int(match["number"]))
        if not path.exists():
            raise StoreDamaged(f"{paths.current_plan} names {path.name}, which is gone", "remove it and plan again")
        return cls(path, int(match["xxh3"], 16))


class Plan:
    """A plan file, opened for reading.

    *Rows* are all rows of the source file, rejected ones too. *Positions* count kept rows, duplicates included, in file
    order: 0 … len(plan) - 1. Safe in several threads, after a fork and after pickling (it reopens its path). The file
    is immutable; nothing here writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._groups = _RowGroups(path)
        self._head = read_head(self._groups.file(), path)
        self._columns: dict[str, NDArray[np.int64]] = {}

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises StoreDamaged if `path` is missing or no plan of this schema version."""
        return cls(path)

    @classmethod
    def find(cls, run_dir: Path) -> Plan | None:
        """The plan in force, None if there is none yet. Raises StoreDamaged if the pointer leads nowhere."""
        pointer = Pointer.read(RunPaths(run_dir))
        return None if pointer is None else cls(pointer.path)

    @classmethod
    def current(cls, run_dir: Path) -> Plan:
        """The plan in force. Raises UsageError if the folder has none."""
        plan = cls.find(run_dir)
        if plan is None:
            raise UsageError(f"{run_dir} has no plan", "run `wellhead plan DATA --model M --out RUN` first")
        return plan

    @property
    def number(self) -> int:
        return self._head.number

    @property
    def overlay(self) -> Overlay:
        return self._head.overlay

    @property
    def source(self) -> SourceFile:
        return self._head.source

    @property
    def head(self) -> PlanHead:
        return self._head

    @property
    def rows(self) -> int:
        """Rows of the source file, rejected ones included, blank lines not."""
        return int(self._groups.file().metadata.num_rows)

    def __len__(self) -> int:
        return len(self.kept)

    @cached_property
    def kept(self) -> NDArray[np.int64]:
        """Position -> row number (from 0), int64 [len(plan)]."""
        return np.flatnonzero(self.column("tokens") > 0)

    @cached_property
    def distinct(self) -> NDArray[np.int64]:
        """Positions of the first row of each distinct state, ascending: int64 [distinct states]."""
        return np.sort(np.fromiter(self._first_position.values(), np.int64, len(self._first_position)))

    def column(self, name: str) -> NDArray[np.int64]:
        """One of line, tokens, full_tokens, supervised_tokens, generation for all rows: int64, 0 where null."""
        if name not in self._columns:
            self._columns[name] = self._read(name).fill_null(0).to_numpy().astype(np.int64)
        return self._columns[name]

    @cached_property
    def rejected(self) -> dict[str, int]:
        """Reason -> rejected rows, most frequent first."""
        counts = self._read("reason").drop_null().value_counts().to_pylist()
        return {item["values"]: item["counts"] for item in sorted(counts, key=lambda i: (-i["counts"], i["values"]))}

    def rejects(self) -> Iterator[tuple[int, str, str]]:
        """(line, reason, detail) of every rejected row, in file order; reads a row group at a time."""
        return iterate_rejects(open_parquet(self.path))

    def ids(self) -> list[str]:
        """Sample ids of the kept rows in plan order; equal rows repeat their id."""
        return self._ids.copy()

    def items(self) -> list[PlanItem]:
        """The distinct states, in the order of their first rows."""
        return self._items.copy()

    def row(self, number: int) -> PlanRow:
        """Row `number` (from 0) of the source file, rejected or not."""
        if not 0 <= number < self.rows:
            raise IndexError(f"row {number} of a plan of {self.rows} rows")
        return self._groups.row(number)

    def sample_at(self, position: int) -> Sample:
        """The kept row at `position`, with its own mask."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a plan of {len(self)} kept rows")
        return self._groups.sample(int(self.kept[position]))

    def samples(self, ids: Sequence[str]) -> list[Sample]:
        """Token ids and mask for each id, in the order asked for; the first row's mask where several rows share an id.

        Raises KeyError for an id that the plan does not name."""
        rows = [int(self.kept[self._first_position[id]]) for id in ids]
        # Ascending rows read each row group once, however few groups are cached.
        found = {row: self._groups.sample(row) for row in sorted(set(rows))}
        return [found[row] for row in rows]

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]

    def _read(self, name: str) -> pa.ChunkedArray:
        import pyarrow as pa

        try:
            return self._groups.file().read(columns=[name], use_threads=False)[name]
        except (OSError, ValueError, pa.ArrowException) as error:
            raise StoreDamaged(f"{self.path}: column {name} is damaged: {error}", "remove it and plan again") from error

    @cached_property
    def _ids(self) -> list[str]:
        ids: list[str] = self._read("id").drop_null().to_numpy().tolist()
        return ids

    @cached_property
    def _first_position(self) -> dict[str, int]:
        # Backwards, so that the first of equal ids is what stays.
        return dict(zip(reversed(self._ids), range(len(self._ids) - 1, -1, -1), strict=True))

    @cached_property
    def _items(self) -> list[PlanItem]:
        positions = self.distinct
        rows, ids = self.kept[positions], self._ids
        tokens, generations = self.column("tokens")[rows].tolist(), self.column("generation")[rows].tolist()
        was_enabled = gc.isenabled()
        gc.disable()  # a million new objects, none of them garbage: looking for some takes half of the time
        try:
            return list(map(PlanItem, [ids[position] for position in positions.tolist()], tokens, generations))
        finally:
            if was_enabled:
                gc.enable()


@dataclass(frozen=True, slots=True)
class _Group:
    """A decoded row group: the flat token ids and masks with the offsets of its rows."""

    ids: list[str | None]
    offsets: NDArray[np.int32]
    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]


class _RowGroups:
    """Row groups read on demand, a few kept. A forked child starts over with a file, a lock and a cache of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = -1
        self._start_over()

    def file(self) -> pq.ParquetFile:
        if self._pid != os.getpid():
            self._start_over()
        return self._file

    def row(self, row: int) -> PlanRow:
        file = self.file()
        group = self._group_of(row)
        table = file.read_row_group(group, columns=_ROW_COLUMNS, use_threads=False)
        (values,) = table.slice(row - int(self._starts[group]), 1).to_pylist()
        absent: dict[str, Any] = {"id": None, "reason": None}
        return PlanRow(**{name: absent.get(name, 0) if value is None else value for name, value in values.items()})

    def sample(self, row: int) -> Sample:
        file = self.file()
        group_number = self._group_of(row)
        with self._lock:
            group = self._cache.get(group_number) or _read_group(file, group_number, self._path)
            self._cache[group_number] = group
            self._cache.move_to_end(group_number)
            if len(self._cache) > _CACHED_GROUPS:
                self._cache.popitem(last=False)
        place = row - int(self._starts[group_number])
        begin, end = group.offsets[place], group.offsets[place + 1]
        id = group.ids[place]
        if id is None:
            raise KeyError(f"row {row} of {self._path} was rejected")
        # Copies: a view would keep the whole row group alive.
        return Sample(id, group.tokens[begin:end].copy(), group.mask[begin:end].copy())

    def _group_of(self, row: int) -> int:
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def _start_over(self) -> None:
        self._file = open_parquet(self._path)
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, _Group] = OrderedDict()
        metadata = self._file.metadata
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])[: max(len(sizes), 1)]
        self._pid = os.getpid()


def _read_group(file: pq.ParquetFile, number: int, path: Path) -> _Group:
    import pyarrow as pa

    try:
        # Not in Arrow's thread pool, which does not survive a fork.
        table = file.read_row_group(number, columns=["id", "input_ids", "loss_mask"], use_threads=False)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StoreDamaged(f"row group {number} of {path} is damaged: {error}", "plan again") from error
    tokens: Any = table["input_ids"].combine_chunks()
    mask: Any = table["loss_mask"].combine_chunks()
    return _Group(
        table["id"].to_pylist(),
        tokens.offsets.to_numpy(),
        tokens.values.to_numpy(),
        mask.values.to_numpy(),
    )
