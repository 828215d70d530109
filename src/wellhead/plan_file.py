"""The plan's bytes: one parquet file, a row for every source row, written once and read by column or by row group.

Columns, in file order of the rows:

    line                int64    source line, from 1
    id                  string   sample id; null in a rejected row, as are the next six
    input_ids           list<int32>
    loss_mask           list<uint8>, as long as input_ids
    tokens              int32    len(input_ids)
    full_tokens         int32    tokens before truncation
    supervised_tokens   int32    sum(loss_mask)
    generation          int32    number of the first plan of this run that named the id
    reason, detail      string   why the row was rejected; null in a kept row

The key `wellhead` of the file's metadata is a JSON object: schema, number, overlay, source, model.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from wellhead.core import SCHEMA_VERSION
from wellhead.dataset.overlay import Overlay
from wellhead.errors import StoreDamaged
from wellhead.store.atomic import Disk, File, temp_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP_TOKENS = 1 << 19
GROUP_ROWS = 1 << 14
"""A row group ends at the first of the two. Reading one sample reads one group: a few milliseconds and megabytes."""

_PIECE_BYTES = 4 << 20

METADATA_KEY = b"wellhead"

SCHEMA = pa.schema(
    [
        ("line", pa.int64()),
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("tokens", pa.int32()),
        ("full_tokens", pa.int32()),
        ("supervised_tokens", pa.int32()),
        ("generation", pa.int32()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The file that was planned. Unchanged means equal size, mtime and inode; the path is for people."""

    path: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        stat = path.stat()
        return cls(str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ino)

    def unchanged(self, other: SourceFile) -> bool:
        return (self.size, self.mtime_ns, self.inode) == (other.size, other.mtime_ns, other.inode)


@dataclass(frozen=True, slots=True)
class PlanHead:
    """What a plan says of itself. `model` names the model folder whose tokenizer made the ids, for people."""

    number: int
    overlay: Overlay
    source: SourceFile
    model: str

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "number": self.number,
            "overlay": self.overlay.to_json(),
            "source": asdict(self.source),
            "model": self.model,
        }


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A row to write. `input_ids` int32 [T] and `loss_mask` uint8 [T], after truncation."""

    line: int
    id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    full_tokens: int
    generation: int


@dataclass(frozen=True, slots=True)
class RejectedRow:
    line: int
    reason: str
    detail: str


class PlanWriter:
    """Writes `<folder>/<number>.parquet` row group by row group; memory is bounded by one group.

    Nothing is visible before `finish` has returned, which makes it durable. Raises OSError; `abandon` removes the temp
    file. One thread.
    """

    def __init__(self, path: Path, head: PlanHead, disk: Disk) -> None:
        self._path, self._disk = path, disk
        self._temp = temp_path(path)
        self._file = disk.create(self._temp)
        metadata = {METADATA_KEY: json.dumps(head.to_json(), ensure_ascii=False).encode()}
        try:
            # Writes the first bytes at once.
            self._parquet = pq.ParquetWriter(
                _Sink(self._file), SCHEMA.with_metadata(metadata), compression="zstd", write_statistics=False
            )
        except OSError:
            self._remove()
            raise
        self._rows: list[KeptRow | RejectedRow] = []
        self._tokens = 0

    def add(self, row: KeptRow | RejectedRow) -> None:
        self._rows.append(row)
        if isinstance(row, KeptRow):
            self._tokens += len(row.input_ids)
        if self._tokens >= GROUP_TOKENS or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def finish(self) -> None:
        """Durable under its final name on return. FileExistsError if another process took the number."""
        self._flush()
        self._parquet.close()
        self._file.sync()
        self._file.close()
        self._disk.publish(self._temp, self._path)
        self._disk.sync_dir(self._path.parent)

    def abandon(self) -> None:
        """Removes the temp file; after an error, and safe whatever state the writer is in."""
        with suppress(OSError, pa.ArrowException):
            self._parquet.close()
        self._remove()

    def _remove(self) -> None:
        self._file.close()
        with suppress(OSError):
            self._disk.remove(self._temp)

    def _flush(self) -> None:
        if self._rows:
            self._parquet.write_table(_table(self._rows), row_group_size=GROUP_ROWS)
            self._rows, self._tokens = [], 0


def file_xxh3(path: Path) -> int:
    """XXH3-64 of a whole file. Raises OSError."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.intdigest()


def read_head(file: pq.ParquetFile, path: Path) -> PlanHead:
    """Raises StoreDamaged if the file is no plan, or a plan of another schema version."""
    try:
        value = json.loads((file.metadata.metadata or {})[METADATA_KEY])
        if value["schema"] != SCHEMA_VERSION:
            raise StoreDamaged(
                f"{path} has schema version {value['schema']}, this wellhead reads {SCHEMA_VERSION}",
                "read it with the wellhead that wrote it, or plan again into another folder",
            )
        return PlanHead(
            value["number"], Overlay.from_json(value["overlay"]), SourceFile(**value["source"]), value["model"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreDamaged(f"{path} is no plan of wellhead: {error!r}", "remove it and plan again") from error


def open_parquet(path: Path) -> pq.ParquetFile:
    """Raises StoreDamaged for a file that is missing, cut off or not parquet."""
    try:
        return pq.ParquetFile(path, memory_map=False)
    except (OSError, pa.ArrowException) as error:
        raise StoreDamaged(f"cannot read the plan {path}: {error}", "remove it and plan again") from error


def _table(rows: list[KeptRow | RejectedRow]) -> pa.Table:
    def column(name: str, kind: pa.DataType) -> pa.Array:
        return pa.array([getattr(row, name, None) for row in rows], kind)

    kept = [row if isinstance(row, KeptRow) else None for row in rows]
    lengths = np.array([len(row.input_ids) if row else 0 for row in kept], np.int32)
    return pa.table(
        [
            column("line", pa.int64()),
            column("id", pa.string()),
            _lists([row.input_ids if row else None for row in kept], np.int32),
            _lists([row.loss_mask if row else None for row in kept], np.uint8),
            pa.array(lengths, pa.int32(), mask=np.array([row is None for row in kept])),
            column("full_tokens", pa.int32()),
            pa.array([int(row.loss_mask.sum()) if row else None for row in kept], pa.int32()),
            column("generation", pa.int32()),
            column("reason", pa.string()),
            column("detail", pa.string()),
        ],
        schema=SCHEMA,
    )


def _lists(arrays: list[NDArray[Any] | None], dtype: type[np.generic]) -> pa.Array:
    """A list column without a Python object per token."""
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([0 if array is None else len(array) for array in arrays], out=offsets[1:])
    present = [array for array in arrays if array is not None]
    values = np.concatenate(present) if present else np.empty(0, dtype)
    missing = pa.array([array is None for array in arrays], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype, copy=False)), mask=missing)


class _Sink(io.RawIOBase):
    """A `File` as pyarrow wants it. Closing it leaves the file open: it is synced afterwards."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._end = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._file.write(data)
        self._end += size
        return size

    def tell(self) -> int:
        return self._end


def iterate_rejects(file: pq.ParquetFile) -> Iterator[tuple[int, str, str]]:
    """(line, reason, detail) of the rejected rows, a row group in memory at a time."""
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=["line", "reason", "detail"], use_threads=False)
        if table["reason"].null_count < len(table):
            rejected: Mapping[str, list[Any]] = table.filter(table["reason"].is_valid()).to_pydict()
            yield from zip(rejected["line"], rejected["reason"], rejected["detail"], strict=True)
