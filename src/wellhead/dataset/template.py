"""The model's chat template: found in its folder, compiled in a sandbox, with the clock stopped.

The environment offers what templates expect (the conventions of Transformers): trimmed blocks, loop controls, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, and `{% generation %}` blocks, whose places in the text are
reported. Templates are untrusted: they see JSON values only, in Jinja's immutable sandbox.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wellhead.core import canonical_json
from wellhead.dataset.read import Message, Rejected
from wellhead.errors import PreflightRefused, UsageError
from wellhead.identity import read_json_object

Span = tuple[int, int]
"""[start, end) in characters of the rendered text."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_RESERVED = {"messages", "tools", "add_generation_prompt", "strftime_now"}
_tracked: ContextVar[tuple[list[str], list[tuple[int, str]]] | None] = ContextVar("generation blocks", default=None)


def find_templates(model_dir: Path) -> dict[str, str]:
    """Name -> template; `default` is always there, `tool_use` may be. Raises PreflightRefused if the model has none."""
    found: dict[str, str] = {}
    config = model_dir / "tokenizer_config.json"
    for file in (config, model_dir / "chat_template.json"):
        if file.is_file():
            found |= _named(read_json_object(file).get("chat_template"))
    for file in [model_dir / "chat_template.jinja", *sorted(model_dir.glob("additional_chat_templates/*.jinja"))]:
        if file.is_file():
            found["default" if file.parent == model_dir else file.stem] = _read(file)
    if "default" not in found:
        raise PreflightRefused(
            f"the model in {model_dir} has no chat template",
            "put the one that the server will use into chat_template.jinja beside config.json",
        )
    return found


def template_hash(templates: Mapping[str, str]) -> str:
    """BLAKE2b-128, in hex, of all templates by name."""
    return hashlib.blake2b(canonical_json(dict(templates)), digest_size=16).hexdigest()


class ChatTemplate:
    """Renders conversations. `variables` (special tokens, arguments) are what a template sees besides them.

    Deterministic: `strftime_now` formats `now`, whatever the clock says. Raises PreflightRefused if a template does not
    compile, UsageError for a variable that would hide the conversation. Rendering raises Rejected(`template_error`).
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any], now: datetime) -> None:
        hidden = _RESERVED & set(variables)
        if hidden:
            raise UsageError(f"the template argument {min(hidden)!r} is not yours to set", "the rows and --date set it")
        environment = _environment(now)
        try:
            compiled = {
                name: environment.from_string(text, globals=dict(variables)) for name, text in templates.items()
            }
        except jinja2.TemplateError as error:
            raise PreflightRefused(f"the chat template does not compile: {error}", "is the file whole?") from error
        self._plain = (compiled["default"], templates["default"])
        self._with_tools = (compiled["tool_use"], templates["tool_use"]) if "tool_use" in templates else self._plain

    def has_generation_blocks(self, tools: object) -> bool:
        """Whether the template itself marks what the model generates."""
        return _GENERATION.search(self._source(tools)) is not None

    def asks_for_generation_prompt(self, tools: object) -> bool:
        """Whether rendering "and now it is the assistant's turn" can differ from rendering what was said."""
        return "add_generation_prompt" in self._source(tools)

    def render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False) -> str:
        return self._render(messages, tools, add_generation_prompt)[0]

    def render_with_spans(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        """The text and where its generation blocks are. Raises Rejected(`mask_not_prefix`) if the template moves or
        changes a block's text after rendering it (in a macro, say), so that its place is not known."""
        text, blocks = self._render(messages, tools, False)
        spans = [(start, start + len(block)) for start, block in blocks]
        if any(text[start:end] != block for (start, end), (_, block) in zip(spans, blocks, strict=True)):
            raise Rejected("mask_not_prefix", "the template moves its generation blocks")
        return text, spans

    def _render(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool
    ) -> tuple[str, list[tuple[int, str]]]:
        template = (self._with_tools if tools else self._plain)[0]
        pieces: list[str] = []
        blocks: list[tuple[int, str]] = []
        token = _tracked.set((pieces, blocks))
        try:
            for piece in template.generate(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            ):
                pieces.append(piece)  # noqa: PERF402 - `_note` reads what is there so far
        except Exception as error:  # the template is a foreign program: whatever it raises is recorded
            raise Rejected("template_error", f"{type(error).__name__}: {error}"[:300]) from error
        finally:
            _tracked.reset(token)
        return "".join(pieces), blocks

    def _source(self, tools: object) -> str:
        return (self._with_tools if tools else self._plain)[1]


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}`: renders its body and notes where."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = str(caller())
        if (tracked := _tracked.get()) is not None:
            pieces, blocks = tracked
            blocks.append((sum(map(len, pieces)), text))
        return text


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _named(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {
            str(item["name"]): str(item["template"])
            for item in value
            if isinstance(item, dict) and {"name", "template"} <= item.keys()
        }
    return cast("dict[str, str]", dict(value)) if isinstance(value, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise PreflightRefused(f"cannot read {file}: {error}", "is the download complete?") from error
