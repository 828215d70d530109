"""A life: one run of one process, and the proof that it is over.

Every writer is one life. Its id is new at each start, so nobody ever appends to another life's file, and what a dead
life left behind is settled once by a later one (`store/recovery.py`). Death is proven, never guessed.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

HEARTBEAT_LIMIT_S = 300.0
"""A life on another machine counts as dead when its last sign is older; it beats every 2 s."""

_MOMENT = "%Y%m%dT%H%M%S.%fZ"
_PROC = Path("/proc")

_ended: set[str] = set()
"""Lives of this very process that are over although the process goes on."""


@dataclass(frozen=True, slots=True)
class Life:
    """One run of one process. Ids sort by the time of their start (microseconds, UTC).

    `start_time` is in clock ticks since boot on Linux (exact, and untouched by corrections of the clock), else in
    seconds since the epoch; it tells a process from a later one with the same pid.
    """

    id: str
    host: str
    pid: int
    start_time: float
    boot_id: str
    pid_namespace: str

    @classmethod
    def this_process(cls, after: Iterable[str] = ()) -> Life:
        """A new life, another one at each call. Its id sorts behind all those of `after`, whatever the clock says:
        the order of ids is the order of what lives recorded."""
        host, pid = socket.gethostname(), os.getpid()
        begun = datetime.now(UTC)
        newest = max((moment for id in after if (moment := _moment(id)) is not None), default=None)
        if newest is not None and newest >= begun:
            begun = newest + timedelta(microseconds=1)
        time_of_birth = begun.strftime(_MOMENT)
        name = re.sub(r"[^A-Za-z0-9]+", "-", host).strip("-")[:32] or "host"
        start = start_time_of(pid)
        return cls(
            f"{time_of_birth}-{name}-{pid}-{secrets.token_hex(2)}",
            host,
            pid,
            0.0 if start is None else start,
            boot_id(),
            pid_namespace(),
        )

    @property
    def started(self) -> str:
        """The UTC time in the id, for people."""
        moment = _moment(self.id)
        return "an unknown time" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Life:
        """ValueError in words if a field is missing or of the wrong kind."""
        kinds: dict[str, type | tuple[type, ...]] = {
            "id": str,
            "host": str,
            "pid": int,
            "start_time": (int, float),
            "boot_id": str,
            "pid_namespace": str,
        }
        for name, kind in kinds.items():
            if not isinstance(value.get(name), kind):
                raise ValueError(f"a life without a proper {name}")
        if value["pid"] <= 0 or not is_life_id(value["id"]):
            raise ValueError("a life with an impossible pid or id")
        return cls(**{name: value[name] for name in kinds})


def _moment(life_id: str) -> datetime | None:
    try:
        return datetime.strptime(life_id.split("-")[0], _MOMENT).replace(tzinfo=UTC)
    except ValueError:
        return None


def is_life_id(name: str) -> bool:
    """Whether a name can be a folder and a part of file names without leading anywhere else."""
    return re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.-]*", name) is not None


def is_dead(life: Life, *signs: Path, now: float | None = None) -> bool:
    """Whether the life is proven to be over.

    `signs` are files that it touches while it lives (the heartbeat first of all; missing ones say nothing). `now` is
    the time by the clock that stamps these files; default: this machine's.

    - same host, boot and pid namespace: its pid is gone, or belongs to a process that started at another time, or is
      this process and the life was ended by `mark_ended`;
    - same host, another boot: dead, unless a sign is younger than this boot, which means that it is another machine
      of the same name;
    - elsewhere: the last sign is older than 5 minutes. Without any sign nothing is proven.
    """
    if life.host == socket.gethostname() and life.boot_id == boot_id() and life.pid_namespace == pid_namespace():
        return life.id in _ended or not _runs(life.pid, life.start_time)
    last = max((time_ for path in signs if (time_ := _modified(path)) is not None), default=None)
    if life.host == socket.gethostname() and life.boot_id != boot_id() and (last is None or last < _booted_at()):
        return True
    return last is not None and (time.time() if now is None else now) - last > HEARTBEAT_LIMIT_S


def mark_ended(life: Life) -> None:
    """This process will do nothing more as that life."""
    _ended.add(life.id)


def start_time_of(pid: int) -> float | None:
    """When the process started (see `Life.start_time`); None if there is none, or only a zombie, which cannot write."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if (_PROC / "self" / "stat").exists() else _portable_start_time(pid)
    if fields[0] in "ZX" and not _has_living_thread(pid):
        return None
    return int(fields[19])  # field 22 of proc(5): starttime


@functools.cache
def boot_id() -> str:
    """Names this boot of this machine."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"booted-{round(_booted_at())}"


def pid_namespace() -> str:
    """Names the pid namespace on Linux, so that a pid is never looked up among another container's; else empty."""
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


def _runs(pid: int, start_time: float) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        found = start_time_of(pid)
        return found is None or found == start_time  # somebody else's and hidden: it may be the one
    return start_time_of(pid) == start_time


def _has_living_thread(pid: int) -> bool:
    """A killed process stays a zombie while one of its threads sits in a system call, which may still write."""
    for stat in (_PROC / str(pid) / "task").glob("*/stat"):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


def _portable_start_time(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


@functools.cache
def _booted_at() -> float:
    import psutil

    return float(psutil.boot_time())


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
