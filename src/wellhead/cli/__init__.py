"""The command line: arguments → settings → a verb → its result or its error → an exit code.

A file of this folder without a leading underscore is a verb: it holds one function of the same name, whose annotated
parameters are at once the flags, the schema of `section.field=value`, and the rows of docs/cli.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import typer

from wellhead.cli._app import Verbs, build, shipped
from wellhead.cli._arguments import Arguments, split, valued_options
from wellhead.cli._settings import defaults, origin_of
from wellhead.cli._shared import Output
from wellhead.config import nearest
from wellhead.errors import DiskFull, UsageError, WellheadError, is_no_room

_CLICK_ERROR = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""The base of every complaint of the argument parser; typer does not export it under one name in all versions."""

_SIGINT_EXIT_CODE = 128 + signal.SIGINT
_SIGPIPE_EXIT_CODE = 128 + signal.SIGPIPE


def run(argv: Sequence[str], verbs: Verbs | None = None) -> int:
    """Runs `wellhead ARGV` and returns its exit code; errors of every kind end here.

    With `--json` standard output carries one JSON object and nothing else: whatever else is printed while the verb
    runs, by a library too, goes to standard error. `verbs` are the shipped ones, unless a test brings its own.
    """
    verbs = shipped() if verbs is None else verbs
    arguments = split(argv or ["--help"], partial(_valued, verbs))
    output = Output(json=arguments.json, quiet=arguments.quiet)
    garbled = [word for word in argv if not _is_text(word)]
    if garbled:
        word = garbled[0].encode(errors="backslashreplace").decode()
        refusal = UsageError(f"{word} is no UTF-8 text", "wellhead writes names into JSON files: rename it")
        output.finish(refusal)
        return refusal.exit_code
    try:
        with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
            code, error = _outcome(arguments, verbs, output)
        output.finish(error)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output went away. The interpreter flushes once more at exit: give it somewhere to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE_EXIT_CODE
    return code


def _valued(verbs: Verbs, verb: str) -> set[str]:
    return valued_options(build({verb: verbs[verb]}), verb) if verb in verbs else set()


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _outcome(arguments: Arguments, verbs: Verbs, output: Output) -> tuple[int, WellheadError | None]:
    try:
        return _invoke(arguments, verbs, output), None
    except (KeyboardInterrupt, typer.Abort):
        return _SIGINT_EXIT_CODE, None
    except WellheadError as error:
        return error.exit_code, error
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the last seam: whatever came up becomes a line of the error table
        if os.environ.get("WELLHEAD_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        translated = _translate(error)
        return translated.exit_code, translated


def _invoke(arguments: Arguments, verbs: Verbs, output: Output) -> int:
    verb = arguments.verb
    if verb is not None and verb not in verbs:
        raise UsageError(f"no such verb: {verb!r}", nearest(verb, verbs) or "`wellhead --help` lists the verbs")
    settings = defaults(arguments, verbs)
    app = build({verb: verbs[verb]} if verb else verbs)
    extra = {"obj": output, "default_map": settings.default_map}
    try:
        with app.make_context("wellhead", list(arguments.rest), **extra) as context:
            app.invoke(context)
    except typer.Exit as leaving:
        return int(leaving.exit_code)
    except _CLICK_ERROR as error:
        raise _usage_error(error, verb, settings.origins) from error
    return 0


def _usage_error(error: Any, verb: str | None, origins: dict[str, str]) -> UsageError:
    where = f"wellhead {verb}" if verb else "wellhead"
    message = error.format_message().rstrip(".")
    hint = origin_of(error, origins) or f"`{where} --help` lists what it takes"
    return UsageError(f"{where}: {message[:1].lower()}{message[1:]}", hint)


def _translate(error: Exception) -> WellheadError:
    if isinstance(error, OSError) and is_no_room(error):
        return DiskFull(str(error), "make room and give the same command again")
    kind = type(error).__name__
    hint = "set WELLHEAD_DEBUG=1 for the traceback, and please report it"
    return WellheadError(f"unexpected {kind}: {error}", hint)
