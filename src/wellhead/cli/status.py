"""`wellhead status`: one screen about a run, living or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from wellhead.cli._options import RunFolder
from wellhead.cli._shared import output


def status(
    context: typer.Context,
    run: RunFolder,
    rejects: Annotated[bool, typer.Option("--rejects", help="List every rejected row and quarantined sample.")] = False,
) -> None:
    """Where a run stands. Reads only."""
    from wellhead import status as look

    found = look.read_status(run)
    screen = _screen(run, found)
    if rejects:
        found |= look.rejects(run)
        screen += _listed(found)
    output(context).result(found, screen)


def _screen(run: Path, found: dict[str, Any]) -> str:
    from wellhead.cli import _progress as words
    from wellhead.units import format_bytes

    holder = found["holder"]
    by_whom = f", process {holder['pid']} on {holder['host']} since {holder['started']}" if holder else ""
    head = f"{run}: {found['state'].replace('_', ' ')}{by_whom}"
    if "tokens" not in found:
        counts = ""
        if "rows" in found:
            counts = f"\n  {found['pending']:,} of {found['rows']:,} rows of {found['data']} can be captured"
        return f"{head}\n  {found['doing']}{counts}"
    rejected = sum(found["rejected"].values())
    rows = [
        ("rows", f"{found['rows']:,} = {found['kept']:,} kept + {rejected:,} rejected + "
                 f"{found['quarantined']:,} quarantined + {found['pending']:,} pending"),
        ("rejected", _reasons(found["rejected"])),
        ("quarantined", _reasons(found.get("quarantine", {}))),
        ("tokens", f"{found['tokens']:,} of {found['plan_tokens']:,} committed, "
                   f"{found['uncommitted_tokens']:,} in hand"),
        ("bytes", ", ".join(filter(None, [f"{format_bytes(found['raw_bytes'])} raw ({found['raw_bytes']:,})",
                                          words.ratio(found)]))),
        ("speed", words.speed(found) if holder else ""),
        ("left", words.left(found)),
        ("now", words.doing(found)),
        ("plan", f"{found['plan']} of {found['data']}: {found['mask']}, max length {found['max_length']:,}"),
        ("disk", f"{format_bytes(found['free_bytes'])} free"),
        ("model", found.get("model", "")),
        ("engine", " ".join(str(found["engine"].get(key, "")) for key in ("engine", "version")).strip()),
        ("layers", "\n              ".join(found.get("layers", []))),
        ("warnings", "; ".join(found.get("warnings", []))),
        ("ledgers", _problems(found["ledger_problems"], "problem")),
        ("LOST", _problems(found["lost_shards"], "recorded shard")),
    ]  # fmt: skip
    return "\n".join([head, *(f"  {name:<11} {text}" for name, text in rows if text)])


def _problems(number: int | None, noun: str) -> str:
    from wellhead.units import count

    return f"{count(number, noun)}: `wellhead verify` tells which" if number else ""


def _listed(found: dict[str, Any]) -> str:
    rows = [f"  line {r['line']}: {r['reason']}: {r['detail']}" for r in found["rejected_rows"]]
    samples = [f"  sample {s['id']}: {s['reason']}: {s['detail']}" for s in found["quarantined_samples"]]
    return "\n".join(["", *rows, *samples])


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
