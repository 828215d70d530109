"""The three watermarks, against free space that the test sets."""

from __future__ import annotations

from pathlib import Path

from wellhead.guard import LEDGER_ROOM, DiskGuard, Level, wait_until


def guard(free: int, reserve: int = 1000) -> DiskGuard:
    return DiskGuard(Path(), reserve, 0.5, lambda _: free + LEDGER_ROOM)


def test_levels_at_their_edges() -> None:
    # reserve 1000, next batch 100, left 400 raw = 200 stored
    assert guard(1200).level(100, 400) is Level.OK
    assert guard(1199).level(100, 400) is Level.WARN
    assert guard(1100).level(100, 400) is Level.WARN
    assert guard(1099).level(100, 400) is Level.HOLD


def test_a_batch_is_judged_raw_because_noise_does_not_shrink() -> None:
    assert guard(1099).level(100, 100) is Level.HOLD


def test_waiting_ends_when_there_is_space_when_time_is_over_and_when_asked() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 5.0, lambda: False, poll_s=0.001)
    assert not wait_until(lambda: False, 0.01, lambda: False, poll_s=0.001)
    assert not wait_until(lambda: False, 60.0, lambda: True, poll_s=0.001)
    assert wait_until(lambda: True, 0.0, lambda: True)
