"""Conversations from JSON lines, one line in memory at a time. A bad line is a typed result and ends nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from wellhead.errors import UsageError

Message = dict[str, Any]
"""`role` (system, developer, user, assistant or tool), `content` (text), and whatever else the row says (tool calls,
a name), which is handed to the chat template as it is."""

MAX_LINE_BYTES = 16 << 20

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet", b"PK\x03\x04": "zip"}


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation that can be rendered. `line` counts from 1; `end` is the offset in the file after it, in bytes."""

    line: int
    end: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A rejected line. `reason` is a key of `reasons.REASONS`."""

    line: int
    end: int
    reason: str
    detail: str


class Rejected(Exception):
    """Inside the data set stage only: why the row at hand cannot be used."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def rows(path: Path) -> Iterator[Row | BadRow]:
    """Every line that is not blank, in file order. Memory is bounded by the longest allowed line.

    Takes `messages` or `conversations`, whose messages are role/content or from/value. Raises UsageError if the file
    cannot be opened or is no text at all.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file", "name a JSONL file")
    try:
        stream = path.open("rb", buffering=1 << 20)
    except OSError as error:
        raise UsageError(f"cannot read the data file {path}: {error.strerror}", "name a JSONL file") from error
    with stream:
        head = stream.read(4)
        _refuse_compressed(path, head)
        stream.seek(len(_BOM) if head.startswith(_BOM) else 0)
        for number, line, is_whole in _lines(stream):
            if line and not line.isspace():
                yield _row(number, stream.tell(), line, is_whole)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line without its newline, ended by a newline); a line too long comes cut to one byte over the limit."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while len(line) > MAX_LINE_BYTES and rest and not rest.endswith(b"\n"):
            rest = stream.readline(1 << 20)
        yield number, line.rstrip(b"\r\n"), rest.endswith(b"\n")


def _row(number: int, end: int, line: bytes, is_whole: bool) -> Row | BadRow:
    try:
        value = _parse(line, is_whole)
        messages = _messages(value)
        return Row(number, end, messages, _tools(value))
    except Rejected as why:
        return BadRow(number, end, why.reason, why.detail)


def _parse(line: bytes, is_whole: bool) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise Rejected("line_too_long", f"more than {MAX_LINE_BYTES >> 20} MiB")
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Rejected("not_utf8", f"byte {error.start} of the line: {error.reason}") from error
    except RecursionError as error:
        raise Rejected("too_deep", "nested more deeply than the parser goes") from error
    except ValueError as error:
        cut = "" if is_whole else "; it is the last line and has no newline: is the file cut off?"
        raise Rejected("bad_json", f"{error}{cut}") from error
    if not isinstance(value, dict):
        hint = "; for a file that is one JSON array: jq -c '.[]'" if isinstance(value, list) else ""
        raise Rejected("not_object", f"a JSON {type(value).__name__}{hint}")
    if _SURROGATE_ESCAPE.search(line):
        _refuse_lone_surrogates(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise Rejected("duplicate_key", f"{next(key for key in keys if keys.count(key) > 1)!r:.80}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_lone_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Rejected("lone_surrogate", f"{error.object[error.start]!a}") from error


def _messages(value: Mapping[str, Any]) -> list[Message]:
    turns = value.get("messages") if value.get("messages") is not None else value.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise Rejected("no_messages", f"the object has the keys {', '.join(sorted(value))[:120] or '(none)'}")
    messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise Rejected("no_assistant", f"the roles are {', '.join(roles)[:120]}")
    first = next(role for role in roles if role not in ("system", "developer"))
    if first != "user":
        raise Rejected("assistant_first", f"the first turn is the {first}'s")
    return messages


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise Rejected("bad_message", f"message {number} is a JSON {type(turn).__name__}")
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    role = turn.get(role_key)
    if not isinstance(role, str):
        raise Rejected("bad_message", f"message {number} has neither a `role` nor a `from` that is text")
    if role not in _ROLES:
        raise Rejected("unknown_role", f"message {number}: {role!r:.80}")
    message = {key: item for key, item in turn.items() if key not in (role_key, content_key) and item is not None}
    message["role"] = _ROLES[role]
    content = turn.get(content_key)
    speaks_otherwise = message["role"] == "assistant" and bool(message.get("tool_calls"))
    if content is None and not speaks_otherwise:
        raise Rejected("null_content", f"message {number} ({role})")
    if content is not None:
        message["content"] = _text(content, number)
        if message["role"] == "assistant" and not message["content"].strip() and not speaks_otherwise:
            raise Rejected("empty_assistant", f"message {number}")
    return message


def _text(content: Any, number: int) -> str:
    """Text as it is; the text parts of a list, joined without a separator as templates join them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Rejected("bad_content", f"message {number}: a JSON {type(content).__name__}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if _is_text_part(part) else None
        if not isinstance(text, str):
            kind = part.get("type", "an object") if isinstance(part, dict) else type(part).__name__
            raise Rejected("not_text", f"message {number}: a content part of type {kind!r:.80}")
        texts.append(text)
    return "".join(texts)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text"


def _tools(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = value.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("bad_tools", f"a JSON {type(tools).__name__}")
    return tools


def _refuse_compressed(path: Path, head: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise UsageError(f"{path} is a {name} file, not JSON lines", "unpack or convert it to JSONL first")
