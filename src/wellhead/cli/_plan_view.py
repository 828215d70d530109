"""What `wellhead plan` shows to people: the forecast, the rejected rows, a look at the mask, progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wellhead.dataset.reasons import REASONS
from wellhead.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.text import Text

    from wellhead.extrapolate import Extrapolation
    from wellhead.plan import Plan
    from wellhead.plan_build import PlanProgress
    from wellhead.predict import Prediction

PLAIN_EVERY_S = 10.0
PREVIEW_ROWS = 3
_FIRST_LINES = 3
_PREVIEW_CHARS = 160
_VISIBLE = {**{code: 0x2400 + code for code in range(32)}, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
"""Control characters as pictures: what stands in a data file must not steer a terminal."""


def table(rows: Sequence[tuple[str, str | list[str]]]) -> str:
    """Aligned lines; an entry may have several, an empty one is left out."""
    lines = []
    for name, value in rows:
        for text in filter(None, [value] if isinstance(value, str) else value):
            lines.append(f"  {name:<11} {text}")
            name = ""  # once
    return "\n".join(lines)


def forecast(prediction: Prediction, codec: str, layers: list[str]) -> list[tuple[str, str | list[str]]]:
    """The rows of the table that follow from lengths alone."""
    p = prediction
    reserved = f", {format_bytes(p.reserve_bytes)} of them reserved" if p.reserve_bytes else ""
    done = "" if p.needed_bytes >= p.stored_bytes else f"; {format_bytes(p.needed_bytes)} are still to be written"
    return [
        ("layers", layers),
        ("raw", f"{format_bytes(p.raw_bytes)} exactly ({p.raw_bytes:,} bytes; {p.bytes_per_token:,} a token)"),
        ("stored", f"about {format_bytes(p.stored_bytes)} ({codec}, ratio {p.ratio:.2f}){done}"),
        ("worst case", f"{format_bytes(p.worst_case_bytes)} raw, if every row had {p.longest_tokens:,} tokens"),
        ("files", f"up to {p.inodes:,}"),
        ("staging", f"{format_bytes(p.staging_bytes)} at least for a server; the embedded engine needs none"),
        ("free", f"{format_bytes(p.free_bytes)}{reserved}"),
        ("time", f"{format_duration(p.seconds[0])} to {format_duration(p.seconds[1])}" if p.seconds else ""),
        ("verdict", _verdict(p)),
    ]


def contents(plan: Plan, prediction: Prediction) -> list[tuple[str, str | list[str]]]:
    """The rows of the table that say what is in the file."""
    p = prediction
    cut = int((plan.column("full_tokens") > plan.column("tokens")).sum())
    kept = f"{plan.rows:,} = {p.samples:,} kept + {plan.rows - p.samples:,} rejected"
    supervised = p.supervised_tokens or 0
    share = f"{supervised / p.tokens:.1%}" if p.tokens else "none"
    return [
        ("rows", kept),
        ("rejected", _rejected(plan)),
        ("duplicates", f"{p.duplicates:,}: equal token ids, stored once" if p.duplicates else ""),
        ("truncated", f"{cut:,} rows, to {plan.overlay.max_length:,} tokens" if cut else ""),
        ("tokens", f"{p.tokens:,} in {p.samples - p.duplicates:,} distinct samples; longest {p.longest_tokens:,}"),
        ("supervised", f"{supervised:,} ({share}), {plan.overlay.mask}"),
    ]


def observation(found: Extrapolation) -> list[tuple[str, str | list[str]]]:
    """What an extrapolation from files on disk is worth."""
    low, high = map(format_bytes, found.interval_bytes)
    up, down = map(format_bytes, found.sorted_bytes)
    first = "what" if found.consistent_with_first_rows else "not what"
    fits = "consistent with the lengths" if found.consistent_with_random_order else "NOT consistent with the lengths"
    return [
        (
            "observed",
            [
                f"{found.observed} gives {format_bytes(found.extrapolated_bytes)}; {low} to {high} with sampling, "
                "rounding, and GB or GiB, if the order is random",
                f"the lengths say {format_bytes(found.exact_bytes)} exactly: {fits} in random order "
                f"({found.z:+.1f} standard errors)",
                f"the first {found.samples:,} rows take {format_bytes(found.first_rows_bytes)}: {first} was seen",
                f"not in random order it is worth little: sorted by length, the same sum says {up} to {down}",
            ],
        )
    ]


def previews(plan: Plan, model_dir: Path, console: Console) -> Text:
    """The first rows with their supervised text marked: coloured on a terminal, in ⟦brackets⟧ elsewhere."""
    from rich.text import Text
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    how = "green" if console.is_terminal and not console.no_color else "in ⟦brackets⟧"
    out = Text(f"  supervised text is {how}:")
    for position in range(min(PREVIEW_ROWS, len(plan))):
        sample = plan.sample_at(position)
        out.append(f"\n  line {plan.row(int(plan.kept[position])).line}: ")
        ends = [0, *(np.flatnonzero(np.diff(sample.loss_mask)) + 1).tolist(), sample.tokens]
        for begin, end in pairwise(ends):
            text = _short(tokenizer.decode(sample.input_ids[begin:end].tolist(), skip_special_tokens=False))
            if not sample.loss_mask[begin]:
                out.append(text)
            elif how == "green":
                out.append(text, style="green")
            else:
                out.append(f"⟦{text}⟧")
    return out


@contextmanager
def progress(console: Console, quiet: bool) -> Iterator[Callable[[PlanProgress], None]]:
    """A bar on a terminal; elsewhere a line at once and every ten seconds."""
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        from rich.progress import Progress

        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("tokenising", total=None)
            yield lambda now: bar.update(task, total=now.bytes_total, completed=now.bytes_done, description=_line(now))
    else:
        yield _Plain(console)


class _Plain:
    def __init__(self, console: Console) -> None:
        self._console, self._last, self._began = console, float("-inf"), time.monotonic()

    def __call__(self, now: PlanProgress) -> None:
        clock = time.monotonic()
        if clock - self._last >= PLAIN_EVERY_S:
            self._last = clock
            elapsed = clock - self._began
            rate = f", {now.tokens / elapsed:,.0f} tok/s" if elapsed > 1 else ""
            done = now.bytes_done / max(now.bytes_total, 1)
            self._console.print(f"{time.strftime('%H:%M:%S')} {_line(now)}, {done:.0%}{rate}", soft_wrap=True)


def _line(now: PlanProgress) -> str:
    return f"tokenising: {now.rows:,} rows, {now.tokens:,} tokens"


def _verdict(p: Prediction) -> str:
    if not p.fits:
        return p.refusal
    spare = format_bytes(p.free_bytes - p.reserve_bytes - p.needed_bytes)
    surely = p.raw_bytes <= p.free_bytes - p.reserve_bytes
    return f"fits, {spare} to spare" + ("" if surely else "; only with the codec: raw bytes alone would not fit")


def _rejected(plan: Plan) -> list[str]:
    if not plan.rejected:
        return []
    first: dict[str, list[str]] = {reason: [] for reason in plan.rejected}
    for line, reason, _ in plan.rejects():
        if len(first[reason]) < _FIRST_LINES:
            first[reason].append(str(line))
    return [
        f"{count:,} {reason} (line {', '.join(first[reason])}{', …' if count > _FIRST_LINES else ''}): "
        f"{REASONS.get(reason, 'unknown')}"
        for reason, count in plan.rejected.items()
    ]


def _short(text: str) -> str:
    visible = text.replace("\n", "⏎").translate(_VISIBLE)
    if len(visible) <= _PREVIEW_CHARS:
        return visible
    half = _PREVIEW_CHARS // 2
    return f"{visible[:half]} … {visible[-half:]}"


def as_json(prediction: Prediction, layers: list[str], extra: dict[str, Any]) -> dict[str, Any]:
    """The object of `--json`."""
    return {**prediction.to_json(), "layers": layers, **extra}
