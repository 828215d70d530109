"""The disk guard: three watermarks in bytes of work left, so that a run stops before the disk does.

warn   what is left to do would eat into the reserve
hold   the next batch would: commit, admit nothing, wait for space
stop   still so after `wait_s`: exit 13, with everything captured committed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from wellhead.disk import free_bytes

LEDGER_ROOM = 4 << 20
"""Bytes that ledgers, status and logs of a few more commits may take."""


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class DiskGuard:
    """Judges free space under the run. All sizes in bytes."""

    folder: Path
    reserve_bytes: int
    ratio: float
    """Stored bytes expected for a raw byte."""
    measure: Callable[[Path], int] = free_bytes

    def level(self, next_batch_raw: int, left_raw: int) -> Level:
        """`next_batch_raw` is what the next batch adds; `left_raw` all that is left, the batch included."""
        spare = self.measure(self.folder) - self.reserve_bytes - LEDGER_ROOM
        if spare < next_batch_raw:  # raw, not estimated: a batch of noise must not surprise the disk
            return Level.HOLD
        return Level.WARN if spare < left_raw * self.ratio else Level.OK

    def free(self) -> int:
        return self.measure(self.folder)


def wait_until(ready: Callable[[], bool], wait_s: float, give_up: Callable[[], bool], poll_s: float = 1.0) -> bool:
    """Polls `ready` for up to `wait_s` seconds; False when the time is over or `give_up` says so."""
    deadline = time.monotonic() + wait_s
    while not ready():
        if give_up() or time.monotonic() >= deadline:
            return False
        time.sleep(min(poll_s, max(deadline - time.monotonic(), 0.01)))
    return True
