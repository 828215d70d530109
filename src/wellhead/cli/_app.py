"""The parser: a command for each verb asked for. Only those verbs' files are imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from wellhead import __version__

ORDER = ("plan", "extract", "status", "verify")
"""The verbs in the order in which an engineer meets them."""

EPILOG = (
    "Global options (--json, --quiet, -c FILE.yaml) and settings (section.field=value) may stand before or after"
    " the verb. Precedence: flag, section.field=value, file, default."
)


Verbs = Mapping[str, Callable[[], Callable[..., None]]]
"""Name -> what imports the verb's file and gives its function, in the order of the help text."""


def shipped() -> Verbs:
    """The verbs of this folder. Imports none of them."""
    found = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}
    return {verb: partial(_load, verb) for verb in ORDER if verb in found}


def build(verbs: Verbs) -> Any:
    """A click group with these verbs' commands (typed Any: typer's click is private or public by version)."""
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(name="wellhead", add_completion=False, rich_markup_mode=None, context_settings=settings)
    app.callback(epilog="A setting is written section.field=value: `wellhead extract … extract.strict=true`.")(
        _wellhead
    )
    for name, load in verbs.items():
        app.command(name, epilog=EPILOG)(load())
    return typer.main.get_command(app)


def _load(verb: str) -> Callable[..., None]:
    return cast("Callable[..., None]", getattr(importlib.import_module(f"wellhead.cli.{verb}"), verb))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wellhead {__version__}")
        raise typer.Exit


def _wellhead(
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout; text goes to stderr.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors.")] = False,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config", "-c", metavar="FILE.yaml", help="Settings by section (a verb) and field (its option)."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hidden states you can trust, from a file of conversations."""
