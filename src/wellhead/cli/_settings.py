"""Settings become the defaults of the parser, so flags win over them and one set of types validates both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wellhead.cli._app import Verbs, build
from wellhead.cli._arguments import Arguments
from wellhead.config import Setting, parse_override, read_file, resolve
from wellhead.errors import UsageError


@dataclass(frozen=True, slots=True)
class Defaults:
    """`default_map` is click's: verb -> parameter -> value. `origins` says where each parameter's value came from."""

    default_map: dict[str, dict[str, Any]]
    origins: dict[str, str]


def defaults(arguments: Arguments, verbs: Verbs) -> Defaults:
    """The settings of files and overrides for the verb asked for.

    Raises UsageError for a section or field that no verb has (in a file, of any verb), and for an override of another
    verb, which would have no effect."""
    verb = arguments.verb
    overrides = [parse_override(text) for text in arguments.overrides]
    settings = [setting for path in arguments.config_files for setting in read_file(path)] + overrides
    if not settings:
        return Defaults({}, {})
    app = build(verbs)
    found = resolve(settings, {name: _spellings(command) for name, command in app.commands.items()})
    for setting in overrides:
        if setting.section != verb:
            raise UsageError(
                f"{setting.origin} has no effect on {f'wellhead {verb}' if verb else 'wellhead'}",
                f"a section is a verb: settings of this one start with {verb}." if verb else "name a verb",
            )
    if verb is None:
        return Defaults({}, {})
    parameters = {parameter.name: parameter for parameter in app.commands[verb].params}
    chosen = found.get(verb, {})
    values = {name: _value(setting, parameters[name]) for name, setting in chosen.items()}
    return Defaults({verb: values}, {name: setting.origin for name, setting in chosen.items()})


def origin_of(error: Any, origins: dict[str, str]) -> str:
    """Where the value that the parser complains about was set, if that was not a flag."""
    origin = origins.get(getattr(getattr(error, "param", None), "name", None) or "")
    return f"the value comes from {origin}" if origin else ""


def _spellings(command: Any) -> dict[str, str]:
    """Every spelling under which a setting may name a parameter -> the parameter's name."""
    spellings = {}
    for parameter in command.params:
        for option in (parameter.name, *parameter.opts):
            spellings[option.lstrip("-").replace("-", "_")] = parameter.name
    return spellings


def _value(setting: Setting, parameter: Any) -> Any:
    """The value as the parser takes it from a flag: text, a list of texts, or a truth value for a switch."""
    value = setting.value
    if isinstance(value, dict):
        raise UsageError(f"{setting.key} in {setting.origin} is a mapping", "give one value")
    many = getattr(parameter, "multiple", False) or parameter.nargs != 1
    if many:
        items = value if isinstance(value, list) else [value]
        return [str(item) for item in items]
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return value if value is None or isinstance(value, bool) else str(value)
