"""`wellhead verify`: read-only proof, with typed findings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wellhead.cli._options import RunFolder
from wellhead.cli._shared import output
from wellhead.errors import FindingsFound

if TYPE_CHECKING:
    from wellhead.verify import Report

SHOWN = 20


def verify(
    context: typer.Context,
    run: RunFolder,
    deep: Annotated[bool, typer.Option("--deep", help="Read, hash and decode every tensor.")] = False,
    recapture: Annotated[
        int, typer.Option(min=0, metavar="N", help="Compute N samples again, in other company, and compare.")
    ] = 0,
) -> None:
    """Proves that a run's bytes are what was recorded. Reads only; exit 6 if they are not."""
    from wellhead.cli._progress import share_bar
    from wellhead.units import count
    from wellhead.verify import verify as run_verify

    say = output(context)
    if recapture:
        say.say(f"will compute {count(recapture, 'sample')} again with the whole model: minutes on a CPU")
    with share_bar(say.stderr, say.quiet, "verifying") as progress:
        report = run_verify(run, deep=deep, recapture=recapture, progress=progress)
    say.result(report.to_json(), _words(run, report))
    if not report.ok:
        wrong = [finding for finding in report.findings if finding.kind != "suspect"]
        raise FindingsFound(
            f"{run}: {count(len(wrong), 'finding')}",
            "remove the shard files named and run extract again: it captures what they held once more"
            if any(finding.shard for finding in wrong)
            else "the states may be well: look at each finding",
        )


def _words(run: Path, report: Report) -> str:
    checked = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in report.checked.items())
    lines = [f"{run}: {'sound' if report.ok else 'NOT SOUND'} (looked at: {checked})"]
    wrong = [finding for finding in report.findings if finding.kind != "suspect"]
    for finding in wrong[:SHOWN]:
        where = " ".join(part for part in (finding.shard, finding.id) if part)
        lines.append(f"  {finding.kind:<8} {where + ': ' if where else ''}{finding.detail}")
    if len(wrong) > SHOWN:
        lines.append(f"  and {len(wrong) - SHOWN:,} more: --json lists them all")
    unusual = [finding.detail for finding in report.findings if finding.kind == "suspect"]
    if unusual:
        lines.append("  unusual, and usual in sound runs (the first token of a sample is a sink in most models):")
        lines += [f"    {detail}" for detail in unusual[:SHOWN]]
    if report.layers:
        lines.append("  computed again, alone, by an independent path (mean relative error of a row):")
        lines.append(f"    {'tensor':<8} {'own':>10} {'nearest neighbour':>20}")
        for layer in report.layers:
            neighbour = f"{layer['neighbour_error']:.3g} ({layer['neighbour']})"
            lines.append(f"    {layer['name']:<8} {layer['own_error']:>10.2g} {neighbour:>20}")
    return "\n".join(lines)
