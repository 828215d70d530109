"""Global options and settings may stand anywhere on the line: here they are taken out of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SETTING = re.compile(r"[A-Za-z_][\w-]*\.[A-Za-z_][\w-]*=")
"""`section.field=`. A file of such a name is given as ./section.field=…, or after `--`."""

_CONFIG = ("-c", "--config")
_CONFIG_ATTACHED = re.compile(r"(?:-c|--config=)(.+)")


@dataclass(slots=True)
class Arguments:
    """A command line, taken apart. `rest` is what the parser gets: the verb and its own arguments."""

    json: bool = False
    quiet: bool = False
    config_files: list[Path] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    verb: str | None = None
    rest: list[str] = field(default_factory=list)


def split(argv: Sequence[str], valued: Callable[[str], AbstractSet[str]]) -> Arguments:
    """Takes the command line apart; never complains, the parser does that.

    `valued(verb)` are that verb's options which take a value: the word after such an option is never ours, nor is
    anything after `--`.
    """
    found = Arguments()
    takes_value: AbstractSet[str] = frozenset()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            found.rest += [word, *words]
            break
        if word == "--json":
            found.json = True
        elif word in ("--quiet", "-q"):
            found.quiet = True
        elif word in _CONFIG and words:
            found.config_files.append(Path(words.pop(0)))
        elif attached := _CONFIG_ATTACHED.fullmatch(word):
            found.config_files.append(Path(attached[1]))
        elif word.startswith("-") and word != "-":
            found.rest.append(word)
            if word in takes_value and words:
                found.rest.append(words.pop(0))
        elif _SETTING.match(word):
            found.overrides.append(word)
        else:
            found.rest.append(word)
            if found.verb is None:
                found.verb = word
                takes_value = valued(word)
    return found


def valued_options(app: Any, verb: str) -> set[str]:
    """The spellings of the options of a verb that take a value."""
    return {
        spelling
        for parameter in app.commands[verb].params
        if parameter.param_type_name == "option" and not parameter.is_flag and not parameter.count
        for spelling in parameter.opts
    }
