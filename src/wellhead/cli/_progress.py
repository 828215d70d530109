"""A running extraction on screen: a live view on a terminal, one plain line every ten seconds anywhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from wellhead.units import count, format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_EVERY_S = 10.0

Snapshot = dict[str, Any]


class Display(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...

    def tell(self, text: str) -> None:
        """An answer to a signal. Called from a signal handler, so it may not take a lock."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def display(console: Console, quiet: bool) -> Display:
    """The right display for where stderr goes."""
    if quiet:
        return Silent()
    return Live(console) if console.is_terminal else Plain(console)


class Silent:
    def show(self, snapshot: Snapshot) -> None:
        """Nothing: --quiet."""

    def tell(self, text: str) -> None:
        os.write(2, f"{text}\n".encode())

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Plain(Silent):
    """Lines that a log file can hold. The first comes at once, so that an empty log never means `wait and see`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = float("-inf")
        self._doing = ""

    def show(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if snapshot["state"] != "running":
            return  # the verb's result says how it ended
        changed = snapshot["doing"] != self._doing and snapshot["doing"] not in ("capturing", "committing")
        if changed or now - self._last >= PLAIN_EVERY_S:
            self._last, self._doing = now, snapshot["doing"]
            self._console.print(f"{time.strftime('%H:%M:%S')} {line(snapshot)}", soft_wrap=True)

    def __enter__(self) -> Plain:
        return self


class Live:
    """A few lines that are redrawn in place."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live as RichLive

        self._live = RichLive(console=console, auto_refresh=False, transient=True)
        self._told = ""

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(panel(snapshot, self._told), refresh=True)

    def tell(self, text: str) -> None:
        self._told = text  # writing into a view that is redrawn would tear it

    def __enter__(self) -> Live:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


@contextmanager
def share_bar(console: Console, quiet: bool, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (done, total) bytes that draws a bar on a terminal and a line every 10 s elsewhere."""
    if quiet or not console.is_terminal:
        last = time.monotonic()

        def plain(done: int, total: int) -> None:
            nonlocal last
            if not quiet and time.monotonic() - last >= PLAIN_EVERY_S:
                last = time.monotonic()
                console.print(f"{time.strftime('%H:%M:%S')} {what}: {format_bytes(done)} of {format_bytes(total)}")

        yield plain
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def line(snapshot: Snapshot) -> str:
    """Everything an operator asks at 3 a.m., in one line."""
    parts = [
        f"{snapshot['kept']:,} of {snapshot['rows']:,} rows",
        f"{snapshot['tokens']:,} tokens committed, {snapshot['uncommitted_tokens']:,} in hand",
        speed(snapshot),
        ratio(snapshot),
        f"{left(snapshot)} left" if snapshot["eta_s"] else "",
        f"{format_bytes(snapshot['free_bytes'])} free",
        _trouble(snapshot),
        doing(snapshot),
    ]
    return " · ".join(part for part in parts if part)


def panel(snapshot: Snapshot, told: str = "") -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    total, done = snapshot["plan_tokens"], snapshot["tokens"]
    bar = Table.grid(padding=(0, 1))
    share = f"{done / total:.1%}" if total else "100 %"
    bar.add_row(ProgressBar(total=max(total, 1), completed=done, width=32), Text(share, style="bold"))
    grid.add_row("committed", bar)
    grid.add_row("", f"{done:,} of {total:,} tokens, {snapshot['kept']:,} of {snapshot['rows']:,} rows")
    grid.add_row("in hand", f"{snapshot['uncommitted_tokens']:,} tokens, not yet durable")
    grid.add_row("speed", " · ".join(part for part in (speed(snapshot), ratio(snapshot)) if part) or "no figure yet")
    grid.add_row("left", left(snapshot) or "no forecast yet")
    grid.add_row("disk", f"{format_bytes(snapshot['free_bytes'])} free")
    grid.add_row("now", Text(doing(snapshot), style="yellow" if _trouble(snapshot) else ""))
    notices = [text for text in (_trouble(snapshot), told) if text]
    return Group(grid, *(Text(text, style="yellow") for text in notices))


def speed(snapshot: Snapshot) -> str:
    per_byte = snapshot["bytes_per_token"]
    if snapshot["rates"]:
        rate = snapshot["rates"][0]
        megabytes = rate["tokens_per_s"] * per_byte / 1e6
        return (
            f"{rate['tokens_per_s']:,.0f} tok/s ±{2 * rate['error']:.0%} over {format_duration(rate['window_s'])}, "
            f"{megabytes:,.1f} MB/s raw"
        )
    rate = snapshot["captured_tokens_per_s"]
    return f"{rate:,.0f} tok/s captured, {rate * per_byte / 1e6:,.1f} MB/s raw" if rate else ""


def ratio(snapshot: Snapshot) -> str:
    if not snapshot["ratio"]:
        return ""
    others = f", states of {snapshot['other_states']:,} rows of earlier plans among them"
    return (
        f"{format_bytes(snapshot['stored_bytes'])} stored, ratio {snapshot['ratio']:.3f}"
        f"{others if snapshot['other_states'] else ''}"
    )


def left(snapshot: Snapshot) -> str:
    if not snapshot["eta_s"]:
        return ""
    low, middle, high = (format_duration(seconds) for seconds in snapshot["eta_s"])
    return f"{middle} ({low} to {high})"


def doing(snapshot: Snapshot) -> str:
    oldest = snapshot["oldest_in_flight"]
    if not oldest:
        return str(snapshot["doing"])
    expected = f" (expected {format_duration(oldest['expected_s'])})" if oldest["expected_s"] else ""
    age = format_duration(oldest["age_s"])
    batch = f"{count(oldest['batch_samples'], 'sample')} of up to {oldest['tokens']:,} tokens"
    return f"{snapshot['doing']} {batch}, for {age}{expected}"


def _trouble(snapshot: Snapshot) -> str:
    words = []
    oldest = snapshot["oldest_in_flight"]
    if oldest and oldest["expected_s"] and oldest["age_s"] > max(3 * oldest["expected_s"], 10):
        words.append(f"nothing captured for {format_duration(snapshot['still_s'])}")
    if snapshot["quarantined"]:
        words.append(f"{snapshot['quarantined']:,} quarantined")
    return "; ".join([*words, *snapshot["warnings"]])
