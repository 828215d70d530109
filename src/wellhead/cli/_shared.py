"""How every verb speaks: results, remarks and errors, for people and for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from wellhead.errors import WellheadError

if TYPE_CHECKING:
    import typer
    from rich.console import Console, RenderableType


def output(context: typer.Context) -> Output:
    """The `Output` of this call, from a verb's `context: typer.Context` parameter."""
    return cast("Output", context.obj)


class Output:
    """Where a verb's words go.

    Without `--json`: the result on stdout, remarks and errors on stderr. With it: the result (and an error, under the
    key `error`) as one JSON object on stdout when the verb has ended, everything for people on stderr. `--quiet`
    leaves out remarks, and with `--json` the result's human form too.

    A verb that ends with an exit code other than 0 gives its `result` first, if it has one, and then raises.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self._result: dict[str, Any] | None = None

    @cached_property
    def stdout(self) -> Console:
        return _console(stderr=False)

    @cached_property
    def stderr(self) -> Console:
        return _console(stderr=True)

    def say(self, text: RenderableType) -> None:
        """A remark for people: progress, what is being done."""
        if not self.quiet:
            self.stderr.print(text, soft_wrap=True)

    def result(self, value: Mapping[str, Any], human: RenderableType) -> None:
        """The outcome: `value` for machines, `human` (text or anything that rich renders) for people. Once a call."""
        if self._result is not None:
            raise RuntimeError("a verb gives one result")
        self._result = dict(value)
        if not self.json:
            self.stdout.print(human, soft_wrap=True)
        elif not self.quiet:
            self.stderr.print(human, soft_wrap=True)

    def finish(self, error: WellheadError | None) -> None:
        """Called by the frame when the verb has ended: prints the error, and with `--json` the object."""
        if error is not None:
            self._print_error(error)
        if not self.json:
            return
        described = {"error": {"code": error.code, "message": error.message, "hint": error.hint}} if error else {}
        if self._result is not None or described:
            sys.stdout.write(_to_json({**(self._result or {}), **described}))

    def _print_error(self, error: WellheadError) -> None:
        from rich.text import Text

        self.stderr.print(
            Text(f"{error.label}: ", style="bold red" if error.label == "error" else "bold yellow")
            + Text(error.message, style=""),
            soft_wrap=True,
        )
        if error.hint:
            self.stderr.print(Text("  hint: ", style="bold") + Text(error.hint, style=""), soft_wrap=True)


def _console(*, stderr: bool) -> Console:
    """Colours on a terminal only, none under NO_COLOR (rich looks at both); text is printed as it is given."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            # Nobody reads the remarks: no reason to end the work. Nobody reads the result: the frame ends quietly.
            if not self.stderr:
                raise BrokenPipeError
            self.quiet = True

    return Ours(stderr=stderr, markup=False, highlight=False, emoji=False)


def _to_json(value: Mapping[str, Any]) -> str:
    """One line. NaN and infinities become null; paths and other objects their text."""
    import orjson

    # orjson knows neither integers beyond 64 bits nor text that is no UTF-8; the slow one writes both.
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    try:
        return orjson.dumps(dict(value), default=str, option=options).decode()
    except TypeError:
        return json.dumps(value, default=str) + "\n"
