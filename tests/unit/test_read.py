"""Reading JSON lines: what is taken, what is rejected and why, and that neither ends the run nor fills the memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from wellhead.dataset.read import MAX_LINE_BYTES, BadRow, Row, rows
from wellhead.dataset.reasons import REASONS
from wellhead.errors import UsageError

GOOD = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'


def read(tmp_path: Path, data: bytes) -> list[Row | BadRow]:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data)
    return list(rows(file))


def one(tmp_path: Path, data: bytes) -> Row | BadRow:
    (row,) = read(tmp_path, data)
    return row


def chat(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"messages": list(messages), **more}).encode()


def said(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


Q, A = said("user", "q"), said("assistant", "a")

BAD = [
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not_utf8", "byte 43"),
    (GOOD.decode().encode("utf-16"), "not_utf8", ""),
    (b"{", "bad_json", "cut off"),
    (GOOD[:40], "bad_json", "cut off"),
    (GOOD[:40] + b"\n", "bad_json", ""),
    (b"\x00" * 64, "bad_json", ""),
    (b'{"messages": NaN}', "bad_json", "NaN"),
    (b'{"n": ' + b"9" * 5000 + b"}", "bad_json", ""),
    (b"[" * 100_000, "too_deep", ""),
    (b'{"a":' * 100_000, "too_deep", ""),
    (b"[1, 2]", "not_object", "jq"),
    (b'"text"', "not_object", "str"),
    (b'{"messages": [], "messages": 1}', "duplicate_key", "messages"),
    (b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "duplicate_key", "role"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}',
     "lone_surrogate", "ud800"),
    (b"{}", "no_messages", "(none)"),
    (b'{"prompt": "x"}', "no_messages", "prompt"),
    (b'{"messages": []}', "no_messages", ""),
    (b'{"messages": {"role": "user"}}', "no_messages", ""),
    (chat("hello", A), "bad_message", "message 1 is a JSON str"),
    (chat({"content": "q"}, A), "bad_message", "message 1"),
    (chat(said(3, "q"), A), "bad_message", ""),
    (chat(Q, said("narrator", "x"), A), "unknown_role", "'narrator'"),
    (chat(Q, said("assistant", None)), "null_content", "message 2"),
    (chat(Q, {"role": "assistant"}), "null_content", ""),
    (chat(said("user", 7), A), "bad_content", "int"),
    (chat(said("user", {"text": "q"}), A), "bad_content", "dict"),
    (chat(said("user", [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": "x"}]), A),
     "not_text", "image_url"),
    (chat(said("user", [3]), A), "not_text", "int"),
    (chat(said("user", [{"type": "text", "text": 3}]), A), "not_text", ""),
    (chat(Q, A, tools="search"), "bad_tools", "str"),
    (chat(Q, A, tools=["search"]), "bad_tools", ""),
    (chat(Q), "no_assistant", "user"),
    (chat(said("system", "s")), "no_assistant", "system"),
    (chat(A, Q), "assistant_first", ""),
    (chat(said("system", "s"), A, Q), "assistant_first", ""),
    (chat(Q, said("assistant", " \n")), "empty_assistant", "message 2"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "reason", "words"), BAD)
def test_bad_lines_are_typed_and_end_nothing(tmp_path: Path, line: bytes, reason: str, words: str) -> None:
    if line.endswith(b"\n") or reason == "bad_json":
        bad = one(tmp_path, line)
    else:
        good, bad, after = read(tmp_path, GOOD + b"\n" + line + b"\n" + GOOD)
        assert isinstance(good, Row)
        assert isinstance(after, Row)
        assert (good.line, bad.line, after.line) == (1, 2, 3)
    assert isinstance(bad, BadRow)
    assert bad.reason == reason
    assert words in bad.detail
    assert len(bad.detail) < 400


def test_every_reason_of_reading_is_in_the_table_and_tried() -> None:
    of_rendering = {"control_token", "template_error", "mask_not_prefix", "no_supervised_tokens", "all_supervised"}
    assert {reason for _, reason, _ in BAD} | {"line_too_long"} == set(REASONS) - of_rendering


def test_only_a_last_line_without_newline_is_called_cut_off(tmp_path: Path) -> None:
    cut, whole = one(tmp_path, GOOD[:40]), one(tmp_path, GOOD[:40] + b"\n")
    assert isinstance(cut, BadRow)
    assert isinstance(whole, BadRow)
    assert "cut off" in cut.detail
    assert "cut off" not in whole.detail


def test_both_formats_and_their_other_names_give_the_same_messages(tmp_path: Path) -> None:
    lines = [
        {"messages": [said("system", "s"), said("user", "q"), said("assistant", "a"), said("tool", "t")]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                           {"from": "gpt", "value": "a"}, {"from": "tool", "value": "t"}]},
        {"conversations": [said("system", "s"), said("human", "q"), said("gpt", "a"), said("function", "t")]},
        {"messages": None, "conversations": [said("system", "s"), Q, said("model", "a"), said("observation", "t")]},
    ]  # fmt: skip
    found = read(tmp_path, "\n".join(map(json.dumps, lines)).encode())
    expected = [said("system", "s"), said("user", "q"), said("assistant", "a"), said("tool", "t")]
    assert [row.messages for row in found if isinstance(row, Row)] == [expected] * 4


def test_text_parts_are_joined_and_other_keys_kept(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, " two", {"text": " three"}]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    row = one(tmp_path, chat(said("user", parts, name="ann", audio=None), said("assistant", None, tool_calls=[call]),
                             said("tool", ""), A, tools=[{"name": "f"}]))  # fmt: skip
    assert isinstance(row, Row)
    assert row.messages == [
        said("user", "one two three", name="ann"),
        {"role": "assistant", "tool_calls": [call]},
        said("tool", ""),
        said("assistant", "a"),
    ]
    assert row.tools == [{"name": "f"}]


def test_byte_order_mark_blank_lines_and_line_ends(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + GOOD + b"\r\n\n  \t\n" + GOOD
    found = read(tmp_path, data)
    assert [(type(row), row.line, row.end) for row in found] == [(Row, 1, len(GOOD) + 5), (Row, 4, len(data))]


def test_text_that_looks_odd_but_is_text(tmp_path: Path) -> None:
    text = "\x00 \u2028 𝄞 é " + "x" * 1000
    row = one(tmp_path, chat(said("user", text), A))
    assert isinstance(row, Row)
    assert row.messages[0]["content"] == text
    # A whole surrogate pair is a character.
    pair = b'{"messages": [{"role": "user", "content": "\\ud834\\udd1e"}, {"role": "assistant", "content": "a"}]}'
    row = one(tmp_path, pair)
    assert isinstance(row, Row)
    assert row.messages[0]["content"] == "𝄞"


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path, b"") == []
    assert read(tmp_path, b"\n\n") == []


@pytest.mark.parametrize(
    ("head", "word"),
    [(b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"PAR1", "parquet"), (b"PK\3\4", "zip")],
)
def test_packed_files_are_named(tmp_path: Path, head: bytes, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        read(tmp_path, head + b"rest")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        list(rows(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="no regular file"):
        list(rows(tmp_path))


def test_a_line_of_100_mb_is_rejected_in_little_memory_and_the_next_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    with file.open("wb") as out:
        for _ in range(100):
            out.write(b"x" * 1_000_000)
        out.write(b"\n" + GOOD + b"\n")
    tracemalloc.start()
    try:
        long, good = rows(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(long, BadRow)
    assert (long.line, long.reason, long.end) == (1, "line_too_long", 100_000_001)
    assert isinstance(good, Row)
    assert peak < 4 * MAX_LINE_BYTES


def test_the_longest_allowed_line_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    line = GOOD.replace(b'"q"', b'"' + b"q" * (MAX_LINE_BYTES - len(GOOD) + 1) + b'"')
    assert len(line) == MAX_LINE_BYTES
    assert isinstance(one(tmp_path, line), Row)
    bad = one(tmp_path, line.replace(b'"qq', b'"qqq'))
    assert isinstance(bad, BadRow)
    assert bad.reason == "line_too_long"


def test_memory_is_flat_in_the_number_of_rows(tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 20_000):
        file = tmp_path / f"{count}.jsonl"
        file.write_bytes((GOOD.replace(b'"q"', b'"' + b"q" * 200 + b'"') + b"\n") * count)
        tracemalloc.start()
        try:
            assert sum(1 for _ in rows(file)) == count
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.1
