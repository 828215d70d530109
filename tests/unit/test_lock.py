"""The holder shows that it lives, also before it has a status.json to show."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from wellhead.errors import RunHeld
from wellhead.store.life import Life
from wellhead.store.lock import RunLock


def test_a_beating_lock_stays_fresh_and_is_released(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path, Life.this_process())
    path = tmp_path / "run.lock"
    with lock.beating(period_s=0.02):
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime < 1000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - path.stat().st_mtime < 60
        with pytest.raises(RunHeld):
            RunLock.acquire(tmp_path, Life.this_process())
    assert not lock.held()
    RunLock.acquire(tmp_path, Life.this_process()).release()


def test_the_former_holder_does_not_keep_its_successor_alive(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path, Life.this_process())
    path = tmp_path / "run.lock"
    with lock.beating(period_s=0.02):
        lock.release()
        RunLock.acquire(tmp_path, Life.this_process())
        os.utime(path, (1, 1))
        time.sleep(0.2)
        assert path.stat().st_mtime == 1
