"""Settings from files and from `section.field=value`: read, and matched against a schema.

The schema is the command line's own: a section is a verb, a field one of its parameters under any of its spellings.
Values are not interpreted here; the parser validates them exactly as it validates flags.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellhead.errors import UsageError

Schema = Mapping[str, Mapping[str, str]]
"""section -> spelling of a field, with underscores -> name of the parameter."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that somebody set, and where: `origin` is text for messages."""

    section: str
    field: str
    value: Any
    origin: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.field}"


def read_file(path: Path) -> list[Setting]:
    """The settings of a YAML file of sections with fields. Raises UsageError with the place of what is wrong."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"settings file {path} cannot be read: {error}", "give a YAML file to -c") from error
    except yaml.YAMLError as error:
        raise UsageError(f"settings file {path} is not YAML: {_one_line(error)}", "mend that line") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise UsageError(f"settings file {path} is not a mapping of sections", "write `extract:` and fields under it")
    settings = []
    for section, fields in content.items():
        if fields is not None and not isinstance(fields, dict):
            raise UsageError(f"section {section} of {path} is not a mapping", "write `field: value` lines under it")
        settings += [Setting(str(section), str(key), value, f"file {path}") for key, value in (fields or {}).items()]
    return settings


def parse_override(text: str) -> Setting:
    """A setting from `section.field=value`; the value stays text."""
    key, _, value = text.partition("=")
    section, _, field = key.partition(".")
    return Setting(section, field, value, f"setting {text}")


def resolve(settings: Iterable[Setting], schema: Schema) -> dict[str, dict[str, Setting]]:
    """section -> parameter name -> the last setting of it.

    Raises UsageError for a section or a field that the schema does not have, naming the nearest one it has."""
    found: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        if setting.section not in schema:
            raise UsageError(
                f"unknown section {setting.section!r} in {setting.origin}",
                nearest(setting.section, schema) or f"sections: {', '.join(schema)}",
            )
        fields = schema[setting.section]
        name = fields.get(setting.field.replace("-", "_"))
        if name is None:
            raise UsageError(
                f"unknown setting {setting.key!r} in {setting.origin}",
                nearest(setting.key, [f"{setting.section}.{field}" for field in fields])
                or f"`wellhead {setting.section} --help` lists its fields",
            )
        found.setdefault(setting.section, {})[name] = setting
    return found


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint that names the choice most like the word, or an empty text."""
    matches = difflib.get_close_matches(word, list(choices), n=1)
    return f"did you mean {matches[0]!r}?" if matches else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
