"""Options that several verbs share: one spelling, one help text, one type each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from wellhead.core import Codec
from wellhead.dataset.overlay import ControlTokens, MaskPolicy
from wellhead.errors import UsageError

Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        help="r_k numbers such as 3,31,59, or block-output:2,30,58. Default: the run's, else r_2, r_n/2, r_n-3.",
    ),
]
Mask = Annotated[MaskPolicy, typer.Option("--mask", help="Which turns are supervised.")]
MaxLength = Annotated[
    int | None,
    typer.Option("--max-length", "--seq-length", min=1, help="Cut rows at so many tokens. Default: the model's."),
]
TemplateArg = Annotated[
    list[str] | None,
    typer.Option("--template-arg", help="NAME=JSON for the chat template, such as enable_thinking=false."),
]
Date = Annotated[
    str | None,
    typer.Option("--date", help="The day or time that the template sees. Default: the run's first, else now."),
]
Control = Annotated[ControlTokens, typer.Option("--control-tokens", help="Rows whose text contains a control token.")]
CodecName = Annotated[Codec, typer.Option("--codec", help="planes-zstd is lossless; raw: plain safetensors.")]
Reserve = Annotated[str, typer.Option("--reserve", help="Disk space to leave free, such as 400GB.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit 8 at the first row that is rejected.")]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.")]


def size(option: str, text: str) -> int:
    """Bytes from a size; the complaint names the option."""
    from wellhead.units import parse_size

    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from error


def template_args(pairs: list[str] | None) -> dict[str, Any]:
    """The values of --template-arg; a value that is no JSON is text."""
    import json

    arguments: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--template-arg {pair!r} is not NAME=VALUE", "such as enable_thinking=false")
        try:
            arguments[name] = json.loads(text)
        except ValueError:
            arguments[name] = text  # plain words need no quotes
    return arguments
