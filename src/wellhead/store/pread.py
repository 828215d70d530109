"""Reads at offsets, with a bounded number of open files. No mmap: reading cold, it is the slower way."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from wellhead.errors import StoreDamaged

PIECE_BYTES = 1 << 19
"""Read at a time where bytes are only looked at once: small enough to be hashed from the cache."""

_MAX_BUFFERS = 512
"""Buffers of one preadv; systems allow 1,024."""

_HINT = "run `wellhead verify` on the run: it names what is lost, and `extract` captures that again"


class ShardFiles:
    """At most `limit` open shards, the least recently used closed first.

    Any number of threads may read at once (a file in use is never closed under a reader, so more than `limit` are
    open only while more threads than that read). Usable in a child after fork, which reads the same files on, and
    picklable, which takes no files along.
    """

    def __init__(self, limit: int = 64) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit}, and at least one file must be open to read it")
        self._limit = limit
        self._reset()

    def read(self, path: Path, offset: int, size: int) -> memoryview:
        """`size` bytes at `offset`, in memory of the caller's own, writable.

        StoreDamaged if the file is not there, ends before, or its disk cannot read it; OSError for anything else.
        """
        return self.read_many(path, [(offset, size)])[0]

    def read_many(self, path: Path, extents: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several (offset, size) of one file; those that follow each other directly are read with one call."""
        buffers = [np.empty(size, np.uint8).data for _, size in extents]
        with self._translated(path), self._lent(path) as fd:
            for first, last in _runs(extents):
                _fill(fd, buffers[first:last], extents[first][0])
        return buffers

    def close(self) -> None:
        """Closes every file that nobody is reading. More may be read afterwards."""
        with self._lock:
            self._close_idle(0)

    @contextmanager
    def _lent(self, path: Path) -> Iterator[int]:
        with self._lock:
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            self._open.move_to_end(path)
            file.readers += 1
            self._close_idle(self._limit)
        try:
            yield file.fd
        finally:
            with self._lock:
                file.readers -= 1
                self._close_idle(self._limit)

    def _close_idle(self, keep: int) -> None:
        for path in [path for path, file in self._open.items() if not file.readers][: max(0, len(self._open) - keep)]:
            os.close(self._open.pop(path).fd)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, _OpenFile] = OrderedDict()
        _ALL.add(self)

    def after_fork(self) -> None:
        """In the child: a lock or a file may be in the hands of a thread that is not there. The descriptors stay
        good, since reading at an offset moves no position that the parent shares."""
        self._lock = threading.Lock()
        for file in self._open.values():
            file.readers = 0

    @contextmanager
    def _translated(self, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StoreDamaged(f"{path} is missing", _HINT) from error
        except EOFError as error:
            raise StoreDamaged(f"{path} {error}", _HINT) from error
        except OSError as error:
            if error.errno == errno.EIO:
                raise StoreDamaged(f"{path} cannot be read: {error.strerror}", _HINT) from error
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self._limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._limit = state["limit"]
        self._reset()

    def __del__(self) -> None:
        for file in getattr(self, "_open", {}).values():
            os.close(file.fd)


_ALL: weakref.WeakSet[ShardFiles] = weakref.WeakSet()


def _after_fork() -> None:
    for files in _ALL:
        files.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class _OpenFile:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.readers = 0


def read_pieces(path: Path, offset: int, size: int) -> Iterator[bytes]:
    """The bytes at `offset`, in pieces of up to `PIECE_BYTES`; fewer if the file ends before. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while size > 0 and (piece := os.pread(fd, min(size, PIECE_BYTES), offset)):
            yield piece
            offset += len(piece)
            size -= len(piece)
    finally:
        os.close(fd)


def _runs(extents: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Index ranges of extents that lie one behind the other."""
    first = 0
    for last in range(1, len(extents) + 1):
        offset, size = extents[last - 1]
        if last == len(extents) or extents[last][0] != offset + size or last - first == _MAX_BUFFERS:
            yield first, last
            first = last


def _fill(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        count = os.preadv(fd, pending, offset)
        if count == 0:
            raise EOFError(f"ends at {os.fstat(fd).st_size}, before the {sum(map(len, pending))} bytes at {offset}")
        offset += count
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]
