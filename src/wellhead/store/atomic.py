"""The only module that renames, replaces, links, deletes or syncs files.

Everything durable goes through a `Disk`, so that the order of these operations can be recorded and every state that a
power cut may leave behind can be tried (`wellhead.testing.disk`, `wellhead.testing.crash`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

TEMP_PREFIX = "."
"""Names that start with it are never read as data; the temp files of dead lives are swept."""

_NO_DIRECTORY_SYNC = {errno.EBADF, errno.EINVAL}
"""What file systems that cannot sync a directory answer (some network and FUSE ones)."""


class SyncError(OSError):
    """An fsync failed. The kernel may have dropped the pages: the same file must never be synced again and trusted."""


class File(Protocol):
    """A file open for writing. One thread at a time; nothing is durable before `sync` has returned."""

    @property
    def path(self) -> Path: ...

    def write(self, data: Buffer) -> None:
        """Appends all of `data` or raises OSError, after which a part of it may be there (see `truncate`)."""

    def pwrite(self, data: Buffer, offset: int) -> None:
        """Writes all of `data` at `offset`; the place where `write` appends moves only if the file grows."""

    def truncate(self, size: int) -> None:
        """Cuts or extends to `size` bytes; `write` appends there."""

    def sync(self) -> None:
        """Makes the content durable, not the name. Raises SyncError, and from then on always."""

    def close(self) -> None:
        """Safe to call twice. Makes nothing durable."""


class Disk(Protocol):
    """File operations as the store sees them. Errors are OSErrors; a name is durable once `sync_dir` has returned."""

    def create(self, path: Path) -> File:
        """A new empty file; FileExistsError if the name is taken."""

    def publish(self, temp: Path, final: Path) -> None:
        """Renames; FileExistsError if `final` is there. Only one life may ever use the name `final`."""

    def replace(self, temp: Path, final: Path) -> None:
        """Renames over whatever `final` is, atomically."""

    def link(self, source: Path, new: Path) -> None:
        """A second name for a file; FileExistsError if `new` is there, whoever made it: at most one caller wins."""

    def sync_file(self, path: Path) -> None:
        """Makes the content of a file durable that a killed process may have left unsynced. Raises SyncError."""

    def sync_dir(self, path: Path) -> None:
        """Makes the names in a directory durable: creations, renames, links and removals. Raises SyncError."""

    def remove(self, path: Path) -> None:
        """Removes a name; FileNotFoundError if it is not there."""

    def make_dir(self, path: Path) -> None:
        """Makes a directory and its parents where they are missing, each durable in its parent."""


class PosixFile:
    """A `File` on a descriptor. Keeps its own position: O_APPEND would make Linux ignore the offset of pwrite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._end = 0
        self._sync_failed = False

    @property
    def path(self) -> Path:
        return self._path

    def write(self, data: Buffer) -> None:
        self.pwrite(data, self._end)

    def pwrite(self, data: Buffer, offset: int) -> None:
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        while view:
            written = os.pwrite(self._fd, view, offset)
            offset += written
            self._end = max(self._end, offset)
            view = view[written:]

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._end = size

    def sync(self) -> None:
        if self._sync_failed:
            raise SyncError(errno.EIO, "an earlier sync of this file failed", str(self._path))
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._sync_failed = True
            raise SyncError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class PosixDisk:
    """The real thing. Stateless: any thread, any process."""

    def create(self, path: Path) -> File:
        return PosixFile(path)

    def publish(self, temp: Path, final: Path) -> None:
        if os.path.lexists(final):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        temp.rename(final)

    def replace(self, temp: Path, final: Path) -> None:
        temp.replace(final)

    def link(self, source: Path, new: Path) -> None:
        new.hardlink_to(source)

    def sync_file(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise SyncError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(fd)

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise SyncError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        path.unlink()

    def make_dir(self, path: Path) -> None:
        if path.is_dir():
            return
        self.make_dir(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        self.sync_dir(path.parent)


POSIX: Disk = PosixDisk()


def temp_path(final: Path) -> Path:
    """A fresh hidden name beside `final`: on the same file system, so that it can be renamed."""
    return final.with_name(f"{TEMP_PREFIX}{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def write_atomic(path: Path, data: bytes, disk: Disk = POSIX, durable: bool = True) -> None:
    """Writes a whole file under its name, or leaves what was there. `durable`: it survives a power cut on return.

    Without `durable` a reader still sees the old or the new content while the machine lives. Raises OSError; the
    temp file is removed then.
    """
    temp = temp_path(path)
    file = disk.create(temp)
    try:
        try:
            file.write(data)
            if durable:
                file.sync()
        finally:
            file.close()
        disk.replace(temp, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove(temp)
        raise
    if durable:
        disk.sync_dir(path.parent)
