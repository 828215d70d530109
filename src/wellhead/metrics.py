"""What a running extraction knows of itself: counts, rates with their error, and a forecast by tokens.

Progress is what is durably committed; what is only captured stands beside it. Rates are ratios of sums over at least
two commits, so a burst of small samples does not look like speed, and what a resume skipped never counts.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOWS_S = (60.0, 600.0, math.inf)


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens committed a second over a window, and the standard error of that figure as a fraction of it."""

    window_s: float
    tokens_per_s: float
    error: float

    def to_json(self) -> dict[str, float]:
        return {
            "window_s": round(self.window_s, 1),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "error": round(self.error, 3),
        }


@dataclass(frozen=True, slots=True)
class Commit:
    at: float
    tokens: int
    raw_bytes: int
    stored_bytes: int


def rate_over(commits: list[Commit], start: float, window_s: float) -> Rate | None:
    """The rate over the commits of the last `window_s` seconds; None with fewer than two commits.

    `start` is when the work behind the first commit began. The error is the standard error of a ratio estimator,
    sqrt(n/(n-1) · Σ(tokens_i − r·seconds_i)²) / Σ tokens (Cochran, Sampling Techniques, §6.3)."""
    if len(commits) < 2:
        return None
    edges = [start, *(commit.at for commit in commits)]
    pairs = [
        (commit.tokens, max(edges[i + 1] - edges[i], 1e-9))
        for i, commit in enumerate(commits)
        if edges[i] >= commits[-1].at - window_s or i >= len(commits) - 2
    ]
    tokens, seconds = sum(t for t, _ in pairs), sum(s for _, s in pairs)
    rate = tokens / seconds
    spread = math.sqrt(len(pairs) / (len(pairs) - 1) * sum((t - rate * s) ** 2 for t, s in pairs))
    return Rate(seconds, rate, spread / tokens if tokens else 1.0)


def ratio(stored: int, raw: int) -> float | None:
    """Stored bytes over the raw bytes of what they hold; None of nothing."""
    return round(stored / raw, 4) if raw else None


@dataclass(frozen=True, slots=True)
class InFlight:
    """The batch that is with the engine, by its longest sample."""

    id: str
    tokens: int
    samples: int
    since: float
    batch_tokens: int


@dataclass(slots=True)
class Progress:
    """Counts of one call of extract. Any thread may update it and take a snapshot.

    The `*_before` fields are what earlier lives had done; they never enter a rate."""

    rows: int
    rejected: Mapping[str, int]
    kept_before: int
    quarantine: dict[str, int]
    """Rows in quarantine by reason; grows."""
    tokens_before: int
    raw_before: int
    stored_before: int
    coded_before: int
    """Raw bytes of everything that `stored_before` holds, states of earlier plans included."""
    work_tokens: int
    """Tokens of the states that this call has to capture."""
    bytes_per_token: int
    clock: Callable[[], float] = time.monotonic
    captured: int = 0
    """Distinct states that this call committed."""
    kept_rows: int = 0
    quarantined_tokens: int = 0
    captured_tokens: int = 0
    """Tokens captured by this call, committed or not."""
    commits: list[Commit] = field(default_factory=list)
    in_flight: InFlight | None = None
    doing: str = "starting"
    warnings: list[str] = field(default_factory=list)
    state: str = "running"
    started: float = field(init=False)
    moved: float = field(init=False)
    """When something was last captured or committed: a stall is judged on this."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.started = self.moved = self.clock()

    def begin_work(self) -> None:
        """The engine is ready: rates count from here, not from the model's load."""
        self.started = self.moved = self.clock()

    def begin_batch(self, longest: tuple[str, int], samples: int, batch_tokens: int) -> None:
        with self._lock:
            self.in_flight = InFlight(*longest, samples, self.clock(), batch_tokens)

    def add_captured(self, tokens: int) -> None:
        with self._lock:
            self.captured_tokens += tokens
            self.moved = self.clock()

    def end_batch(self) -> None:
        with self._lock:
            self.in_flight = None

    def add_quarantined(self, reason: str, rows: int, tokens: int) -> None:
        with self._lock:
            self.quarantine[reason] = self.quarantine.get(reason, 0) + rows
            self.quarantined_tokens += tokens

    def add_commit(self, rows: int, states: int, tokens: int, raw_bytes: int, stored_bytes: int) -> None:
        with self._lock:
            self.kept_rows += rows
            self.captured += states
            self.moved = self.clock()
            self.commits.append(Commit(self.moved, tokens, raw_bytes, stored_bytes))

    @property
    def committed_tokens(self) -> int:
        return sum(commit.tokens for commit in self.commits)

    def pace(self) -> str:
        """The last commit's own figures, for the log: seconds since the one before, and what that makes."""
        last = self.commits[-1]
        before = self.commits[-2].at if len(self.commits) > 1 else self.started
        seconds = max(last.at - before, 1e-9)
        return f"{seconds:.2f} s, {last.tokens / seconds:.0f} tok/s, {last.raw_bytes / seconds / 1e6:.1f} MB/s raw"

    def snapshot(self) -> dict[str, Any]:
        """The JSON of `extract --json` and `status.json`, but for what only the disk and the engine know."""
        with self._lock:
            return self._snapshot(self.clock())

    def _snapshot(self, now: float) -> dict[str, Any]:
        committed = self.committed_tokens
        raw, stored = sum(c.raw_bytes for c in self.commits), sum(c.stored_bytes for c in self.commits)
        windows = [rate_over(self.commits, self.started, window) for window in WINDOWS_S]
        rates = list(dict.fromkeys(rate for rate in windows if rate))
        kept, quarantined = self.kept_before + self.kept_rows, sum(self.quarantine.values())
        return {
            "state": self.state,
            "doing": self.doing,
            "kept": kept,
            "captured": self.captured,
            "rejected": dict(self.rejected),
            "quarantined": quarantined,
            "quarantine": dict(self.quarantine),
            "pending": self.rows - sum(self.rejected.values()) - kept - quarantined,
            "tokens": self.tokens_before + committed,
            "uncommitted_tokens": self.captured_tokens - committed,
            "raw_bytes": self.raw_before + raw,
            "stored_bytes": self.stored_before + stored,
            "ratio": ratio(self.stored_before + stored, self.coded_before + raw),
            "tokens_per_s": rates[0].to_json()["tokens_per_s"] if rates else None,
            "captured_tokens_per_s": self._captured_rate(now),
            "rates": [rate.to_json() for rate in rates],
            "eta_s": self._eta(now, rates),
            "oldest_in_flight": self._oldest(now),
            "still_s": round(now - self.moved, 1),
            "commits": len(self.commits),
            "warnings": list(self.warnings),
        }

    def _captured_rate(self, now: float) -> float | None:
        elapsed = now - self.started
        return round(self.captured_tokens / elapsed, 1) if self.captured_tokens and elapsed > 0 else None

    def _eta(self, now: float, rates: list[Rate]) -> list[float] | None:
        """[low, mid, high] seconds: what is left over the rate, at ± 2 standard errors; None before any rate."""
        rate, error = (rates[0].tokens_per_s, rates[0].error) if rates else (self._captured_rate(now), 0.25)
        if self.state != "running" or not rate:
            return None
        left = max(self.work_tokens - self.captured_tokens - self.quarantined_tokens, 0)
        spread = min(2 * error, 0.9)
        return [round(left / (rate * factor), 1) for factor in (1 + spread, 1.0, 1 - spread)]

    def _oldest(self, now: float) -> dict[str, Any] | None:
        if not self.in_flight:
            return None
        rate = self._captured_rate(now)
        return {
            "id": self.in_flight.id,
            "tokens": self.in_flight.tokens,
            "batch_samples": self.in_flight.samples,
            "batch_tokens": self.in_flight.batch_tokens,
            "age_s": round(now - self.in_flight.since, 1),
            "expected_s": round(self.in_flight.batch_tokens / rate, 1) if rate else None,
        }
