"""Every state that a disk may hold after a power cut, from the notes of a `RecordingDisk`.

The model is stricter than common file systems: of what was written and not synced, any subset of blocks may have
reached the disk, in any order, and a file's size may have grown before its data came (zeros). Of the changes to a
directory that were not synced, a prefix or any subset may have reached it; a rename is atomic. What was synced is
there. A killed process, on a machine that goes on, is the special case in which everything is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from wellhead.testing.disk import (
    Create,
    Link,
    MakeDir,
    Mark,
    Operation,
    Remove,
    Rename,
    Sync,
    SyncDir,
    SyncFile,
    Truncate,
    Write,
)

BLOCK = 512
"""Bytes that reach the disk together."""

_ALL_SUBSETS_UP_TO = 4


@dataclass(frozen=True, slots=True)
class CrashState:
    """What a disk holds: folders, and files with their content. `kept` are the promises made before the crash."""

    folders: frozenset[Path]
    files: Mapping[Path, bytes]
    kept: tuple[object, ...] = ()

    def materialise(self, root: Path) -> None:
        """Writes the state into an empty folder."""
        for folder in sorted(self.folders):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for path, data in self.files.items():
            (root / path).write_bytes(data)


@dataclass(slots=True)
class _Inode:
    """`pending` are block writes and cuts since the last sync; `size` and `now` are what the process sees."""

    durable: bytes = b""
    now: bytes = b""
    pending: list[Write | Truncate] = field(default_factory=list)


_Change = tuple[Path | None, Path | None, int | None]
"""(name that goes, name that comes, its inode; None: a folder)"""


class DiskModel:
    """Replays operations and says what may be on the disk now."""

    def __init__(self, start: CrashState | None = None) -> None:
        self._inodes: dict[int, _Inode] = {}
        self._names: dict[Path, int | None] = {Path(): None}
        self._kept: list[object] = []
        if start is not None:
            self._names |= dict.fromkeys(start.folders)
            for number, (path, data) in enumerate(start.files.items()):
                self._inodes[-1 - number] = _Inode(data, data)
                self._names[path] = -1 - number
            self._kept = list(start.kept)
        self._durable_names = dict(self._names)
        self._changes: dict[Path, list[_Change]] = {}

    def apply(self, operation: Operation) -> None:
        match operation:
            case Create(path, handle):
                self._inodes[handle] = _Inode()
                self._change(None, path, handle)
            case Write(handle, offset, data):
                self._write(self._inodes[handle], offset, data)
            case Truncate(handle, size):
                inode = self._inodes[handle]
                inode.now = inode.now[:size].ljust(size, b"\0")
                inode.pending.append(operation)
            case Sync(handle):
                self._sync(self._inodes[handle])
            case SyncFile(path):
                self._sync(self._inodes[self._file(path)])
            case Rename(old, new):
                self._change(old, new, self._file(old))
            case Link(old, new):
                self._change(None, new, self._file(old))
            case Remove(path):
                self._change(path, None, None)
            case MakeDir(path):
                self._change(None, path, None)
            case SyncDir(path):
                for change in self._changes.pop(path, []):
                    _rename(self._durable_names, change)
            case Mark(what):
                self._kept.append(what)

    def killed(self) -> CrashState:
        """What is there if only the process dies."""
        return self._state(self._names, {number: inode.now for number, inode in self._inodes.items()})

    def states(self, random: Random, limit: int) -> list[CrashState]:
        """Up to `limit` different states that a power cut may leave now; all of them if there are no more."""
        found: dict[object, CrashState] = {}
        settled = not any(self._changes.values()) and not any(inode.pending for inode in self._inodes.values())
        sources = itertools.chain(self._corners(), self._samples(random, 0 if settled else 4 * limit))
        for state in sources:
            found.setdefault((state.folders, tuple(sorted(state.files.items()))), state)
            if len(found) >= limit:
                break
        return list(found.values())

    def _corners(self) -> Iterator[CrashState]:
        """Everything or nothing of the names, everything or nothing of the data, and sizes without data."""
        pending = [change for changes in self._changes.values() for change in changes]
        for changes in (pending, []):
            names = dict(self._durable_names)
            for change in changes:
                _rename(names, change)
            for how in ("all", "none", "zeros"):
                yield self._state(names, {number: _corner(inode, how) for number, inode in self._inodes.items()})

    def _samples(self, random: Random, count: int) -> Iterator[CrashState]:
        choices = [_choices(changes, random) for changes in self._changes.values()]
        if len(choices) == 1:
            random.shuffle(choices[0])
            picks: Iterator[tuple[list[_Change], ...]] = itertools.cycle([(choice,) for choice in choices[0]])
        else:
            picks = (tuple(random.choice(choice) for choice in choices) for _ in itertools.count())
        for pick in itertools.islice(picks, count):
            names = dict(self._durable_names)
            for change in itertools.chain.from_iterable(pick):
                _rename(names, change)
            yield self._state(names, {number: _partial(inode, random) for number, inode in self._inodes.items()})

    def _state(self, names: Mapping[Path, int | None], content: Mapping[int, bytes]) -> CrashState:
        reachable = {path for path in names if all(parent in names for parent in path.parents)}
        return CrashState(
            frozenset(path for path in reachable if names[path] is None),
            {path: content[number] for path in sorted(reachable) if (number := names[path]) is not None},
            tuple(self._kept),
        )

    def _write(self, inode: _Inode, offset: int, data: bytes) -> None:
        inode.now = inode.now[:offset].ljust(offset, b"\0") + data + inode.now[offset + len(data) :]
        at = 0
        while at < len(data):
            end = min(len(data), at + BLOCK - (offset + at) % BLOCK)
            inode.pending.append(Write(0, offset + at, data[at:end]))
            at = end

    def _sync(self, inode: _Inode) -> None:
        inode.durable, inode.pending = inode.now, []

    def _file(self, path: Path) -> int:
        number = self._names[path]
        assert number is not None, f"{path} is a folder"
        return number

    def _change(self, gone: Path | None, come: Path | None, number: int | None) -> None:
        change = (gone, come, number)
        _rename(self._names, change)
        folder = (come or gone or Path()).parent
        self._changes.setdefault(folder, []).append(change)


def crash_points(operations: Sequence[Operation], start: CrashState | None = None) -> Iterator[tuple[int, DiskModel]]:
    """(operations done, the model then) for a crash before the first operation, after each one, and after the last.

    The model is one object that moves on: use it before asking for the next."""
    model = DiskModel(start)
    yield 0, model
    for done, operation in enumerate(operations, 1):
        model.apply(operation)
        yield done, model


def _rename(names: dict[Path, int | None], change: _Change) -> None:
    gone, come, number = change
    if gone is not None:
        names.pop(gone, None)
    if come is not None:
        names[come] = number


def _choices(changes: Sequence[_Change], random: Random) -> list[list[_Change]]:
    prefixes = [list(changes[:length]) for length in range(len(changes) + 1)]
    if len(changes) <= _ALL_SUBSETS_UP_TO:
        sizes = range(len(changes) + 1)
        return [list(subset) for size in sizes for subset in itertools.combinations(changes, size)]
    return prefixes + [[change for change in changes if random.random() < 0.5] for _ in range(16)]


def _corner(inode: _Inode, how: str) -> bytes:
    if how == "all":
        return inode.now
    if how == "zeros" and len(inode.now) > len(inode.durable):
        return inode.durable.ljust(len(inode.now), b"\0")
    return inode.durable


def _partial(inode: _Inode, random: Random) -> bytes:
    """Some of the pending blocks; half of the time the file has its full size all the same."""
    if not inode.pending:
        return inode.durable
    share = random.choice((0.1, 0.5, 0.9))
    data = bytearray(inode.durable)
    for change in inode.pending:
        if random.random() >= share:
            continue
        if isinstance(change, Write):
            _grow(data, change.offset)
            data[change.offset : change.offset + len(change.data)] = change.data
        else:
            del data[change.size :]
            _grow(data, change.size)
    if random.random() < 0.5:
        _grow(data, len(inode.now))
    return bytes(data)


def _grow(data: bytearray, size: int) -> None:
    data.extend(bytes(max(0, size - len(data))))
