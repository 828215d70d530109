"""Reads, renders and tokenises a data file into a plan file, batch by batch: memory is flat in the file's size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wellhead.core import sample_id
from wellhead.dataset.read import BadRow, Row, rows
from wellhead.dataset.render import Rendered, Renderer
from wellhead.errors import RowRejected, UsageError
from wellhead.plan_file import KeptRow, PlanHead, PlanWriter, RejectedRow, SourceFile
from wellhead.plan_read import Plan
from wellhead.store.atomic import Disk

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BATCH_ROWS = 512
_BATCH_BYTES = 1 << 20
"""Rows are tokenised together up to either bound: enough work for every thread, little in memory."""


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """How far the reading of the source file is: bytes of it, rows, and tokens of the kept rows."""

    bytes_done: int
    bytes_total: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Source:
    """What is tokenised with what. `earlier` are the run's plans so far; `strict` refuses the first rejected row."""

    data: Path
    model_dir: Path
    earlier: Sequence[Plan]
    strict: bool


def build(
    source: Source, head: PlanHead, path: Path, disk: Disk, progress: Callable[[PlanProgress], None] | None
) -> None:
    """The plan file `path`, durable on return; on any error nothing is left of it.

    Raises RowRejected (`strict`), UsageError if the data file changes meanwhile, PreflightRefused, OSError.
    """
    writer = PlanWriter(path, head, disk)
    try:
        _fill(writer, source, head, progress)
        if not SourceFile.of(source.data).unchanged(head.source):
            raise UsageError(f"{source.data} changed while it was read", "plan again when nobody writes to it")
        writer.finish()
    except BaseException:  # Ctrl-C too: no temp file may stay behind
        writer.abandon()
        raise


def rejection(data: Path, line: int, reason: str, detail: str) -> RowRejected:
    """What `strict` says of a rejected row."""
    return RowRejected(
        f"{data}, line {line}: {reason}: {detail}", "mend or remove the line, or leave out --strict to go on without it"
    )


def _fill(writer: PlanWriter, source: Source, head: PlanHead, progress: Callable[[PlanProgress], None] | None) -> None:
    renderer, generations = Renderer(source.model_dir, head.overlay), _Generations(source.earlier, head.number)
    done = tokens = 0
    for batch in _batches(rows(source.data)):
        for row in renderer.render(batch):
            if isinstance(row, Rendered):
                writer.add(_kept(row, generations))
                tokens += len(row.input_ids)
            elif source.strict:
                raise rejection(source.data, row.line, row.reason, row.detail)
            else:
                writer.add(RejectedRow(row.line, row.reason, row.detail))
        done += len(batch)
        if progress is not None:
            progress(PlanProgress(batch[-1].end, head.source.size, done, tokens))


def _kept(row: Rendered, generations: _Generations) -> KeptRow:
    id = sample_id(row.input_ids.astype("<i4", copy=False).tobytes())
    return KeptRow(row.line, id, row.input_ids, row.loss_mask, row.full_tokens, generations.of(id))


def _batches(source: Iterable[Row | BadRow]) -> Iterator[list[Row | BadRow]]:
    batch: list[Row | BadRow] = []
    begin = 0
    for row in source:
        batch.append(row)
        if len(batch) == _BATCH_ROWS or row.end - begin >= _BATCH_BYTES:
            yield batch
            batch, begin = [], row.end
    if batch:
        yield batch


class _Generations:
    """Id -> number of the first plan that named it, from all earlier plans: 36 bytes an id."""

    def __init__(self, earlier: Sequence[Plan], number: int) -> None:
        self._number = number
        ids = np.array([id for plan in earlier for id in plan.ids()], "S32")
        generations = np.concatenate([[], *(plan.column("generation")[plan.kept] for plan in earlier)]).astype(np.int32)
        order = np.lexsort((generations, ids))
        self._ids, first = np.unique(ids[order], return_index=True)
        self._generations: NDArray[np.int32] = generations[order][first]

    def of(self, id: str) -> int:
        place = int(np.searchsorted(self._ids, id.encode()))
        known = place < len(self._ids) and self._ids[place] == id.encode()
        return int(self._generations[place]) if known else self._number
