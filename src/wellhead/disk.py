"""How much room a folder has, and how much of it a run may take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from wellhead.errors import DiskFull


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes and inodes where a run will be, and the bytes that must stay free.

    `free_inodes` is None where the file system makes inodes as it needs them.
    """

    free_bytes: int
    free_inodes: int | None = None
    reserve_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        return max(self.free_bytes - self.reserve_bytes, 0)

    def fits(self, needed_bytes: int, needed_inodes: int = 0) -> bool:
        enough_inodes = self.free_inodes is None or needed_inodes <= self.free_inodes
        return needed_bytes <= self.free_bytes - self.reserve_bytes and enough_inodes


def room(path: Path, reserve_bytes: int = 0) -> Room:
    """The room at `path`, which need not exist yet. Raises DiskFull if nothing can be learned about it."""
    return Room(free_bytes(path), free_inodes(path), reserve_bytes)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` is or will be (without the blocks kept for root)."""
    stats = _statvfs(path)
    return stats.f_bavail * stats.f_frsize


def free_inodes(path: Path) -> int | None:
    """Files that may still be made there; None where the file system has no fixed number (btrfs, some network ones)."""
    stats = _statvfs(path)
    return stats.f_favail if stats.f_files else None


def _statvfs(path: Path) -> os.statvfs_result:
    """Of the nearest folder that exists: a run folder is planned before it is made."""
    folder = path.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return os.statvfs(folder)
    except OSError as error:
        raise DiskFull(
            f"cannot ask how much room {folder} has: {error}", "is the disk mounted and readable?"
        ) from error
