"""`wellhead extract`: the main job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wellhead.cli._options import (
    CodecName,
    Control,
    Date,
    Layers,
    Mask,
    MaxLength,
    Reserve,
    Strict,
    TemplateArg,
    size,
    template_args,
)
from wellhead.cli._shared import output
from wellhead.core import Dtype, FinalNorm
from wellhead.engines.base import EngineName
from wellhead.errors import CompleteWithRejects

if TYPE_CHECKING:
    from wellhead.plan_build import PlanProgress
    from wellhead.prepare import Request


def extract(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(help="JSONL file of conversations.")],
    model: Annotated[str, typer.Option("--model", "--model-path", help="Model folder, or smollm2-demo.")],
    out: Annotated[Path, typer.Option("--out", help="Run folder; resumes when it exists.")],
    layers: Layers = None,
    engine: Annotated[
        EngineName, typer.Option(help="transformers; stub: made-up states, for rehearsal.")
    ] = "transformers",
    dtype: Annotated[Dtype, typer.Option(help="What computes; stored is always bf16.")] = "bfloat16",
    final: Annotated[FinalNorm, typer.Option(help="The final state: after the final norm, or before.")] = "post_norm",
    mask: Mask = "all-assistant",
    max_length: MaxLength = None,
    template_arg: TemplateArg = None,
    date: Date = None,
    control_tokens: Control = "reject",
    codec: CodecName = "planes-zstd",
    shard_bytes: Annotated[str, typer.Option(help="Close a shard at this size.")] = "1GiB",
    shard_seconds: Annotated[
        float | None, typer.Option(help="Close a shard at this age, whatever its size. Default: 30 s and ≥ 64 MiB.")
    ] = None,
    reserve: Reserve = "0",
    disk_wait: Annotated[float, typer.Option(help="Seconds to wait for space before exit 13.")] = 600.0,
    max_failure_rate: Annotated[float, typer.Option(help="Give up (exit 12) above this share of failures.")] = 0.03,
    retry_quarantined: Annotated[bool, typer.Option(help="Try samples again that were quarantined.")] = False,
    mix_engines: Annotated[bool, typer.Option(help="Go on with another engine or version than before.")] = False,
    strict: Strict = False,
    fault: Annotated[
        str | None, typer.Option(help="Faults for the stub engine, such as nan:sample=3 (see wellhead.testing.faults).")
    ] = None,
) -> None:
    """Captures the states of every conversation into a run folder, and resumes one."""
    from wellhead.cli._plan_view import progress
    from wellhead.cli._progress import display
    from wellhead.cli._signals import stop_on_signals
    from wellhead.extract import extract as run_extract
    from wellhead.plan import PlanOptions
    from wellhead.prepare import Observer, Request

    request = Request(
        data=data,
        model=model,
        run_dir=out,
        layers=layers,
        engine=engine,
        dtype=dtype,
        final=final,
        plan=PlanOptions(mask, max_length, date, template_args(template_arg), control_tokens, strict),
        codec=codec,
        shard_bytes=size("--shard-bytes", shard_bytes),
        shard_seconds=shard_seconds,
        reserve_bytes=size("--reserve", reserve),
        disk_wait_s=disk_wait,
        max_failure_rate=max_failure_rate,
        retry_quarantined=retry_quarantined,
        mix_engines=mix_engines,
        fault=fault,
    )
    say = output(context)
    with display(say.stderr, say.quiet) as screen, stop_on_signals(screen.tell) as stop:

        @contextmanager
        def planning() -> Iterator[Callable[[PlanProgress], None]]:
            with progress(say.stderr, say.quiet) as tick, stop.interruptible():
                yield tick

        outcome = run_extract(request, Observer(say.say, screen.show, planning, stop))
    say.result(outcome.summary, _closing(request, outcome.summary))
    if outcome.error is not None:
        raise outcome.error
    if outcome.summary["state"] == "complete_with_rejects":
        rejected = sum(outcome.summary["rejected"].values())
        raise CompleteWithRejects(
            f"complete, but {rejected} rows were rejected and {outcome.summary['quarantined']} quarantined",
            f"`wellhead status {request.run_dir} --rejects` lists them, each with its reason",
        )


def _closing(request: Request, summary: dict[str, Any]) -> str:
    from wellhead.cli._progress import ratio
    from wellhead.units import count, format_bytes

    words = {
        "complete": "complete",
        "complete_with_rejects": "complete, with rejects",
        "stopped": "stopped; the same command goes on",
        "gave_up": "gave up",
        "disk": "stopped: no disk space; the same command goes on when there is room",
    }
    lines = [
        f"{request.run_dir}: {words[summary['state']]}",
        f"  {summary['kept']:,} rows kept, {summary['pending']:,} pending, {summary['quarantined']:,} quarantined, "
        f"{sum(summary['rejected'].values()):,} rejected; {count(summary['captured'], 'state')} captured by this call",
        f"  {summary['tokens']:,} tokens, {format_bytes(summary['raw_bytes'])} raw ({summary['raw_bytes']:,} bytes)"
        + (f", {ratio(summary)}" if summary["ratio"] else ""),
    ]
    if summary["state"] == "complete" and not summary["captured"]:
        lines.append("  nothing was left to do")
    return "\n".join(lines)
