"""Rates, forecasts and counts against numbers worked out by hand."""

from __future__ import annotations

import pytest

from wellhead.metrics import Commit, Progress, rate_over


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, **changes: object) -> Progress:
    values: dict[str, object] = {
        "rows": 20, "rejected": {"no_assistant": 2}, "kept_before": 4, "quarantine": {"not_finite": 1},
        "tokens_before": 400,
        "raw_before": 4000, "stored_before": 2700, "coded_before": 4000,
        "work_tokens": 1000, "bytes_per_token": 10, "clock": clock,
    }  # fmt: skip
    return Progress(**(values | changes))  # type: ignore[arg-type]


def test_rate_needs_two_commits() -> None:
    assert rate_over([Commit(10.0, 100, 0, 0)], 0.0, 60.0) is None


def test_rate_is_a_ratio_of_sums_with_its_standard_error() -> None:
    # 100 tokens in 10 s, then 300 in 10 s: r = 400/20 = 20; residuals -100 and +100; sqrt(2/1 * 20000) / 400 = 0.5
    rate = rate_over([Commit(10.0, 100, 0, 0), Commit(20.0, 300, 0, 0)], 0.0, 60.0)
    assert rate is not None
    assert (rate.window_s, rate.tokens_per_s) == (20.0, 20.0)
    assert rate.error == pytest.approx(0.5)


def test_a_window_leaves_old_commits_out_but_keeps_two() -> None:
    commits = [Commit(10.0, 1000, 0, 0), Commit(100.0, 90, 0, 0), Commit(130.0, 30, 0, 0), Commit(160.0, 30, 0, 0)]
    short = rate_over(commits, 0.0, 60.0)
    tiny = rate_over(commits, 0.0, 1.0)
    whole = rate_over(commits, 0.0, float("inf"))
    assert short is not None
    assert tiny is not None
    assert whole is not None
    assert (short.window_s, short.tokens_per_s) == (60.0, 1.0)
    assert (tiny.window_s, tiny.tokens_per_s) == (60.0, 1.0)
    assert whole.tokens_per_s == pytest.approx(1150 / 160)


def test_the_account_always_adds_up() -> None:
    clock = Clock()
    progress = make(clock)
    for _ in range(2):
        snapshot = progress.snapshot()
        total = sum(snapshot["rejected"].values()) + snapshot["kept"] + snapshot["quarantined"] + snapshot["pending"]
        assert total == 20
        progress.add_commit(rows=2, states=1, tokens=100, raw_bytes=1000, stored_bytes=670)
        progress.add_quarantined("zero_rows", rows=1, tokens=50)
    snapshot = progress.snapshot()
    assert (snapshot["kept"], snapshot["quarantined"], snapshot["pending"], snapshot["captured"]) == (8, 3, 7, 2)
    assert snapshot["quarantine"] == {"not_finite": 1, "zero_rows": 2}
    assert (snapshot["tokens"], snapshot["raw_bytes"], snapshot["stored_bytes"]) == (600, 6000, 4040)


def test_what_a_resume_skipped_is_in_no_rate() -> None:
    clock = Clock()
    progress = make(clock, tokens_before=1_000_000)
    clock.now += 50  # the model loads
    progress.begin_work()
    for tokens in (100, 100):
        clock.now += 10
        progress.add_captured(tokens)
        progress.add_commit(1, 1, tokens, tokens * 10, tokens * 7)
    snapshot = progress.snapshot()
    assert snapshot["tokens_per_s"] == 10.0
    assert snapshot["captured_tokens_per_s"] == 10.0
    assert snapshot["eta_s"] == [80.0, 80.0, 80.0]  # 800 tokens left, no spread between two equal commits


def test_uncommitted_tokens_and_the_oldest_in_flight() -> None:
    clock = Clock()
    progress = make(clock)
    progress.begin_work()
    clock.now += 10
    progress.add_captured(200)
    progress.begin_batch(("ab" * 16, 70), 2, 140)
    clock.now += 5
    snapshot = progress.snapshot()
    assert snapshot["uncommitted_tokens"] == 200
    assert snapshot["oldest_in_flight"] == {
        "id": "ab" * 16, "tokens": 70, "batch_samples": 2, "batch_tokens": 140, "age_s": 5.0, "expected_s": 10.5,
    }  # fmt: skip
    assert snapshot["still_s"] == 5.0
    assert snapshot["tokens_per_s"] is None
    progress.end_batch()
    assert progress.snapshot()["oldest_in_flight"] is None
