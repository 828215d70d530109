"""Lives, the proof of death, and who holds a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from wellhead.errors import RunHeld, StoreDamaged
from wellhead.store.atomic import POSIX
from wellhead.store.life import Life, is_dead, is_life_id, start_time_of
from wellhead.store.lock import Holder, RunLock

CHILD = """
import sys, time
from pathlib import Path
from wellhead.store.life import Life
from wellhead.store.lock import RunLock
life = Life.this_process()
RunLock.acquire(Path(sys.argv[1]), life)
print(life.id, flush=True)
time.sleep(60)
"""


def other_life(**changes: object) -> Life:
    return replace(Life.this_process(), **changes)  # type: ignore[arg-type]


def dead_life() -> Life:
    return other_life(start_time=1.0)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def hold(run: Path, life: Life) -> None:
    run.mkdir(exist_ok=True)
    (run / "run.lock").write_bytes(Holder(life, "wellhead extract old").to_bytes())


def test_ids_are_new_each_time_sort_by_time_and_are_safe_names() -> None:
    lives = [Life.this_process() for _ in range(50)]
    ids = [life.id for life in lives]
    assert ids == sorted(set(ids))
    assert all(is_life_id(id) for id in ids)
    assert not is_life_id("../x")
    assert not is_life_id(".hidden")
    assert lives[0].pid == os.getpid()
    assert lives[0].host == socket.gethostname()


def test_json_round_trip_and_bad_json_in_words() -> None:
    life = Life.this_process()
    assert Life.from_json(life.to_json()) == life
    for change in ({"pid": "7"}, {"pid": 0}, {"id": "../../etc"}, {"host": None}):
        with pytest.raises(ValueError, match="a life with"):
            Life.from_json(life.to_json() | change)


def test_start_time_agrees_with_an_independent_reading() -> None:
    import psutil

    ticks = os.sysconf("SC_CLK_TCK")
    found = start_time_of(os.getpid())
    assert found is not None
    assert abs(psutil.boot_time() + found / ticks - psutil.Process().create_time()) < 2.0


def test_this_process_is_alive_and_another_start_time_is_not() -> None:
    life = Life.this_process()
    assert not is_dead(life)
    assert is_dead(replace(life, start_time=life.start_time - 1))


def test_a_killed_child_is_dead_even_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start = start_time_of(child.pid)
    assert start is not None
    life = other_life(pid=child.pid, start_time=start)
    assert not is_dead(life)
    child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not is_dead(life) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_dead(life)  # still a zombie
    child.wait()
    assert is_dead(life)


def test_elsewhere_the_last_sign_decides(tmp_path: Path) -> None:
    life = other_life(host="elsewhere")
    beat, lock = tmp_path / "status.json", tmp_path / "lock"
    assert not is_dead(life, beat, lock)  # no sign at all proves nothing
    for path, age in ((beat, 299), (lock, 1000)):
        path.touch()
        os.utime(path, (time.time() - age, time.time() - age))
    assert not is_dead(life, beat, lock)
    assert is_dead(life, beat, lock, now=time.time() + 10)
    os.utime(beat, (time.time() - 301, time.time() - 301))
    assert is_dead(life, beat, lock)


def test_another_pid_namespace_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "beat").touch()
    assert not is_dead(other_life(pid_namespace="pid:[1]", start_time=1.0), tmp_path / "beat")


def test_another_boot_of_this_host_is_dead_unless_it_beats_now(tmp_path: Path) -> None:
    life = other_life(boot_id="earlier")
    beat = tmp_path / "beat"
    assert is_dead(life, beat)
    beat.touch()
    assert not is_dead(life, beat)  # younger than our boot: another machine of the same name
    os.utime(beat, (1000.0, 1000.0))
    assert is_dead(life, beat)


def test_first_holder_then_refused_in_words_then_released(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = RunLock.acquire(run, Life.this_process())
    assert first.held()
    with pytest.raises(RunHeld) as refused:
        RunLock.acquire(run, Life.this_process())
    assert str(os.getpid()) in refused.value.message
    assert socket.gethostname() in refused.value.message
    assert refused.value.hint
    first.release()
    assert not first.held()
    second = RunLock.acquire(run, Life.this_process())
    first.release()  # no longer ours: must not free the other's
    assert second.held()
    assert names(run) == {"run.lock"}


def test_taken_over_at_once_after_sigkill(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    held_by = child.stdout.readline().strip()
    with pytest.raises(RunHeld, match=str(child.pid)):
        RunLock.acquire(tmp_path, Life.this_process())
    child.kill()
    child.wait()
    child.stdout.close()
    began = time.monotonic()
    lock = RunLock.acquire(tmp_path, Life.this_process())
    assert time.monotonic() - began < 1
    assert lock.held()
    assert held_by not in (tmp_path / "run.lock").read_text()
    assert names(tmp_path) == {"run.lock"}


def test_a_chain_of_claims_of_the_dead_is_followed(tmp_path: Path) -> None:
    first, second, third = dead_life(), dead_life(), dead_life()
    hold(tmp_path, first)
    (tmp_path / f".run.lock.after-{first.id}").write_bytes(Holder(second, "").to_bytes())
    (tmp_path / f".run.lock.after-{second.id}").write_bytes(Holder(third, "").to_bytes())
    assert RunLock.acquire(tmp_path, Life.this_process()).held()
    assert names(tmp_path) == {"run.lock"}


def test_a_claim_of_the_living_is_respected_and_kept(tmp_path: Path) -> None:
    first = dead_life()
    hold(tmp_path, first)
    claim = tmp_path / f".run.lock.after-{first.id}"
    claim.write_bytes(Holder(Life.this_process(), "").to_bytes())
    with pytest.raises(RunHeld):
        RunLock.acquire(tmp_path, Life.this_process())
    assert names(tmp_path) == {"run.lock", claim.name}


def test_a_stale_claim_of_a_former_holder_does_not_block(tmp_path: Path) -> None:
    first, second = dead_life(), dead_life()
    hold(tmp_path, second)  # second replaced run.lock and died before it removed its claim on first
    (tmp_path / f".run.lock.after-{first.id}").write_bytes(Holder(second, "").to_bytes())
    assert RunLock.acquire(tmp_path, Life.this_process()).held()


def test_whoever_reads_late_backs_off(tmp_path: Path) -> None:
    """The claim is free again, but run.lock no longer names the life that it would succeed."""
    stale = Holder(dead_life(), "")
    RunLock.acquire(tmp_path, Life.this_process())
    late = RunLock(tmp_path, Holder(Life.this_process(), ""), POSIX)
    (tmp_path / "temp").write_bytes(late._holder.to_bytes())
    assert late._succeed(stale, tmp_path / "temp", time.time()) is False
    assert not late.held()
    assert names(tmp_path) == {"run.lock", "temp"}


def test_a_damaged_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_bytes(b"\0" * 40)
    with pytest.raises(StoreDamaged, match=r"run\.lock"):
        RunLock.acquire(tmp_path, Life.this_process())
