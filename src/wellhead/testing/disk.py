"""Disks for tests of anything that writes through `store/atomic.py`: one that takes notes, one that runs full."""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellhead.store.atomic import POSIX, Disk, File, SyncError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_handles = itertools.count()


@dataclass(frozen=True, slots=True)
class Create:
    path: Path
    handle: int


@dataclass(frozen=True, slots=True)
class Write:
    handle: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    handle: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    handle: int


@dataclass(frozen=True, slots=True)
class SyncFile:
    path: Path


@dataclass(frozen=True, slots=True)
class Rename:
    old: Path
    new: Path


@dataclass(frozen=True, slots=True)
class Link:
    old: Path
    new: Path


@dataclass(frozen=True, slots=True)
class Remove:
    path: Path


@dataclass(frozen=True, slots=True)
class MakeDir:
    path: Path


@dataclass(frozen=True, slots=True)
class SyncDir:
    path: Path


@dataclass(frozen=True, slots=True)
class Mark:
    """Not an operation: something was promised to somebody at this point (`RecordingDisk.mark`)."""

    what: Any


Operation = Create | Write | Truncate | Sync | SyncFile | Rename | Link | Remove | MakeDir | SyncDir | Mark


class RecordingDisk:
    """Does everything through `disk` and notes it in `operations`, paths relative to `root`.

    Handles are unique over all recorders, so the notes of two lives on one folder can be put one after the other.
    Only what goes through this disk is noted: the folder must be empty, or made from a known state, at the start.
    """

    def __init__(self, root: Path, disk: Disk = POSIX) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._disk = disk

    def mark(self, what: Any) -> None:
        """Notes a promise: after a crash that comes later it must have been kept."""
        self.operations.append(Mark(what))

    def create(self, path: Path) -> File:
        file = _RecordingFile(self._disk.create(path), self.operations, next(_handles))
        self.operations.append(Create(self._name(path), file.handle))
        return file

    def publish(self, temp: Path, final: Path) -> None:
        self._disk.publish(temp, final)
        self.operations.append(Rename(self._name(temp), self._name(final)))

    def replace(self, temp: Path, final: Path) -> None:
        self._disk.replace(temp, final)
        self.operations.append(Rename(self._name(temp), self._name(final)))

    def link(self, source: Path, new: Path) -> None:
        self._disk.link(source, new)
        self.operations.append(Link(self._name(source), self._name(new)))

    def sync_file(self, path: Path) -> None:
        self._disk.sync_file(path)
        self.operations.append(SyncFile(self._name(path)))

    def sync_dir(self, path: Path) -> None:
        self._disk.sync_dir(path)
        self.operations.append(SyncDir(self._name(path)))

    def remove(self, path: Path) -> None:
        self._disk.remove(path)
        self.operations.append(Remove(self._name(path)))

    def make_dir(self, path: Path) -> None:
        """Notes each folder made, and the sync of its parent, as `Disk.make_dir` promises."""
        missing = [p for p in (path, *path.parents) if p.is_relative_to(self.root) and not p.is_dir()]
        self._disk.make_dir(path)
        for folder in reversed(missing):
            self.operations += [MakeDir(self._name(folder)), SyncDir(self._name(folder.parent))]

    def _name(self, path: Path) -> Path:
        return path.relative_to(self.root)


class _RecordingFile:
    def __init__(self, file: File, operations: list[Operation], handle: int) -> None:
        self.handle = handle
        self._file = file
        self._operations = operations
        self._end = 0

    @property
    def path(self) -> Path:
        return self._file.path

    def write(self, data: Buffer) -> None:
        self.pwrite(data, self._end)

    def pwrite(self, data: Buffer, offset: int) -> None:
        self._file.pwrite(data, offset)
        copy = bytes(data)
        if copy:
            self._operations.append(Write(self.handle, offset, copy))
            self._end = max(self._end, offset + len(copy))

    def truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._operations.append(Truncate(self.handle, size))
        self._end = size

    def sync(self) -> None:
        self._file.sync()
        self._operations.append(Sync(self.handle))

    def close(self) -> None:
        self._file.close()


class FullDisk:
    """Has room for `room` bytes, then answers ENOSPC, after writing what still fits.

    A name (file, folder, link, rename) costs a byte and so does a sync, as delayed allocation may find the disk full
    only then; removing and cutting files gives their bytes back. `room` may be set at any time.
    """

    def __init__(self, room: int, disk: Disk = POSIX) -> None:
        self.room = room
        self._disk = disk

    def take(self, size: int, path: Path) -> None:
        if size > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.room -= size

    def create(self, path: Path) -> File:
        self.take(1, path)
        return _FullFile(self._disk.create(path), self)

    def publish(self, temp: Path, final: Path) -> None:
        self.take(1, final)
        self._disk.publish(temp, final)

    def replace(self, temp: Path, final: Path) -> None:
        self.take(1, final)
        self._disk.replace(temp, final)

    def link(self, source: Path, new: Path) -> None:
        self.take(1, new)
        self._disk.link(source, new)

    def sync_file(self, path: Path) -> None:
        self._disk.sync_file(path)

    def sync_dir(self, path: Path) -> None:
        self._take_for_sync(path)
        self._disk.sync_dir(path)

    def remove(self, path: Path) -> None:
        size = path.stat().st_size
        self._disk.remove(path)
        self.room += size

    def make_dir(self, path: Path) -> None:
        if not path.is_dir():
            self.take(1, path)
        self._disk.make_dir(path)

    def _take_for_sync(self, path: Path) -> None:
        try:
            self.take(1, path)
        except OSError as error:
            raise SyncError(error.errno, error.strerror, str(path)) from None


class _FullFile:
    def __init__(self, file: File, disk: FullDisk) -> None:
        self._file = file
        self._disk = disk
        self._end = 0

    @property
    def path(self) -> Path:
        return self._file.path

    def write(self, data: Buffer) -> None:
        self.pwrite(data, self._end)

    def pwrite(self, data: Buffer, offset: int) -> None:
        copy = bytes(data)
        growth = max(0, offset + len(copy) - self._end)
        fits = len(copy) - max(0, growth - self._disk.room)
        self._file.pwrite(copy[: max(0, fits)], offset)
        self._disk.room -= min(growth, self._disk.room)
        self._end = max(self._end, offset + fits)
        if fits < len(copy):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._disk.room += max(0, self._end - size)
        self._end = size

    def sync(self) -> None:
        self._disk._take_for_sync(self.path)
        self._file.sync()

    def close(self) -> None:
        self._file.close()
