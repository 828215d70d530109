"""`wellhead status`: one screen about a run, living or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from wellhead.cli._options import RunFolder
from wellhead.cli._shared import output


def status(
    context: typer.Context,
    run: RunFolder,
) -> None:
    """Where a run stands. Reads only."""
    from wellhead.status import read_status

    found = read_status(run)
    output(context).result(found, _screen(run, found))


def _screen(run: Path, found: dict[str, Any]) -> str:
    from wellhead.cli import _progress as words
    from wellhead.units import format_bytes

    holder = found["holder"]
    by_whom = f", process {holder['pid']} on {holder['host']} since {holder['started']}" if holder else ""
    head = f"{run}: {found['state'].replace('_', ' ')}{by_whom}"
    if "rows" not in found:
        return f"{head}\n  {found['doing']}"
    rejected = sum(found["rejected"].values())
    rows = [
        ("rows", f"{found['rows']:,} = {found['kept']:,} kept + {rejected:,} rejected + "
                 f"{found['quarantined']:,} quarantined + {found['pending']:,} pending"),
        ("rejected", _reasons(found["rejected"])),
        ("quarantined", _reasons(found.get("quarantine", {}))),
        ("tokens", f"{found['tokens']:,} of {found['plan_tokens']:,} committed, "
                   f"{found['uncommitted_tokens']:,} in hand"),
        ("bytes", f"{format_bytes(found['raw_bytes'])} raw ({found['raw_bytes']:,}), {words.ratio(found)}"),
        ("speed", words.speed(found) if holder else ""),
        ("left", words.left(found)),
        ("now", words.doing(found) if holder else ""),
        ("disk", f"{format_bytes(found['free_bytes'])} free"),
        ("model", found.get("model", "")),
        ("engine", " ".join(str(found["engine"].get(key, "")) for key in ("engine", "version")).strip()),
        ("layers", "\n              ".join(found.get("layers", []))),
        ("warnings", "; ".join(found.get("warnings", []))),
        ("ledgers", _problems(found.get("ledger_problems", 0))),
    ]  # fmt: skip
    return "\n".join([head, *(f"  {name:<11} {text}" for name, text in rows if text)])


def _problems(count: int) -> str:
    return f"{count:,} problems: `wellhead verify` tells" if count else ""


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
