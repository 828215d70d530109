"""Who holds a run: `run.lock`, without flock or byte-range locks, which hang or lie on network file systems.

run.lock holds the life of the holder as JSON and is never removed. To succeed a holder W that is dead or has released
the run, a process hard-links its own life to `.run.lock.after-<id of W>`. A life id is never used twice, so at most
one process can ever hold that claim while run.lock names W; it replaces run.lock and then removes the claim. A claim
whose owner died on the way is succeeded by the same rule, through `.run.lock.after-<id of that owner>`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from wellhead.errors import RunHeld, StoreDamaged, UsageError
from wellhead.paths import RunPaths
from wellhead.store.atomic import POSIX, Disk, temp_path, write_atomic
from wellhead.store.life import HEARTBEAT_LIMIT_S, Life, is_dead, mark_ended

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP}
_ROUNDS = 1000
"""Each round that does not settle the matter means that somebody else has just moved; this many is a fault."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of run.lock and of a claim."""

    life: Life
    command: str
    released: bool = False

    def to_bytes(self) -> bytes:
        value = {
            "life": self.life.to_json(),
            "command": self.command.encode(errors="backslashreplace").decode(),
            "released": self.released,
        }
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """None if there is no such file, StoreDamaged if it is not what was written."""
        try:
            value = orjson.loads(path.read_bytes())
            return cls(Life.from_json(value["life"]), str(value["command"]), value["released"] is True)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreDamaged(
                f"{path} cannot be read: {error}",
                "if no wellhead process works on this run, remove this file and start again",
            ) from None

    def is_gone(self, run_dir: Path, path: Path, now: float) -> bool:
        return self.released or is_dead(self.life, RunPaths(run_dir).writer(self.life.id).status, path, now=now)


class RunLock:
    """Holding a run. One holder at any time, however many processes try and whenever they are killed."""

    def __init__(self, run_dir: Path, holder: Holder, disk: Disk) -> None:
        self._run_dir = run_dir
        self._path = RunPaths(run_dir).lock
        self._holder = holder
        self._disk = disk

    @classmethod
    def acquire(cls, run_dir: Path, life: Life, disk: Disk = POSIX) -> RunLock:
        """Takes the run or raises RunHeld saying by whom it is held. Durable on return; makes the folder."""
        disk.make_dir(run_dir)
        lock = cls(run_dir, Holder(life, shlex.join(sys.argv)), disk)
        for _ in range(_ROUNDS):
            temp = temp_path(lock._path)
            try:
                now = lock._write(temp)
                if lock._try_once(temp, now):
                    return lock
            finally:
                _remove(disk, temp)
        raise RunHeld(f"{run_dir} changed hands {_ROUNDS} times while this process tried to take it", "try again")

    def release(self) -> None:
        """Ends the life and lets the next one in at once. Touches nothing if the run is no longer ours."""
        mark_ended(self._holder.life)
        if self.held():
            write_atomic(self._path, Holder(self._holder.life, self._holder.command, True).to_bytes(), self._disk)

    def held(self) -> bool:
        """Whether run.lock still names this life: False once another machine has taken the run from a life that
        showed no sign for 5 minutes (a suspended process, say)."""
        found = Holder.read(self._path)
        return found is not None and found.life.id == self._holder.life.id and not found.released

    @contextlib.contextmanager
    def beating(self, period_s: float = 30.0) -> Iterator[None]:
        """While it lasts, a thread shows that the holder lives, and at the end the run is released. For everything
        that may take minutes before the holder's own status.json does so: planning, loading a model."""
        end = threading.Event()

        def beat() -> None:
            while not end.wait(period_s):
                with contextlib.suppress(OSError):  # one missed beat of ten proves nothing
                    if self.held():
                        os.utime(self._path)

        thread = threading.Thread(target=beat, name="wellhead-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            with contextlib.suppress(OSError):  # on a full disk: the death of this process frees the run as well
                self.release()

    def _write(self, temp: Path) -> float:
        """Our life in a durable file, to be linked; returns the time by the clock of the file system."""
        file = self._disk.create(temp)
        try:
            file.write(self._holder.to_bytes())
            file.sync()
        finally:
            file.close()
        return temp.stat().st_mtime

    def _try_once(self, temp: Path, now: float) -> bool:
        found = Holder.read(self._path)
        if found is not None:
            return self._succeed(found, temp, now)
        if not _link(self._disk, temp, self._path):
            return False
        self._disk.sync_dir(self._run_dir)
        return True

    def _succeed(self, holder: Holder, temp: Path, now: float) -> bool:
        """Takes over from `holder`; False if somebody else moved meanwhile."""
        passed: list[Path] = []
        last, last_path = holder, self._path
        while True:
            if not last.is_gone(self._run_dir, last_path, now):
                raise _held(self._run_dir, last)
            claim = self._run_dir / f".{self._path.name}.after-{last.life.id}"
            if _link(self._disk, temp, claim):
                break
            owner = Holder.read(claim)
            if owner is None:
                return False
            passed.append(claim)
            last, last_path = owner, claim
        # From here nobody else can succeed `holder`, if it still is the holder: while run.lock names it, the claims
        # that led here cannot go away, since their owners are dead and only a successor removes them.
        try:
            found = Holder.read(self._path)
            current = found is not None and found.life.id == holder.life.id
            if current:
                self._disk.replace(temp, self._path)
                self._disk.sync_dir(self._run_dir)
        finally:
            for path in (*passed, claim) if self.held() else (claim,):
                _remove(self._disk, path)
        return current


def _link(disk: Disk, temp: Path, new: Path) -> bool:
    try:
        disk.link(temp, new)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise UsageError(
            f"{new.parent} is on a file system without hard links ({error.strerror})",
            "put the run on a local disk, NFS or Lustre",
        ) from None
    return True


def _remove(disk: Disk, path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        disk.remove(path)


def _held(run_dir: Path, holder: Holder) -> RunHeld:
    life = holder.life
    return RunHeld(
        f"{run_dir} is held by process {life.pid} on {life.host} since {life.started}: {holder.command}",
        "wait for it or stop it (one SIGINT: it commits and drains); if that machine is gone, the run is free "
        f"{HEARTBEAT_LIMIT_S / 60:.0f} minutes after its last heartbeat",
    )
