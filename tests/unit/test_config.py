"""Settings files and overrides: what is read, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from wellhead.config import Setting, nearest, parse_override, read_file, resolve
from wellhead.errors import UsageError

SCHEMA = {
    "extract": {"shard_seconds": "shard_seconds", "model": "model", "model_path": "model"},
    "plan": {"reserve": "reserve"},
}


def written(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "extract:\n  shard-seconds: 2\n  model: m\nplan:\n")
    origin = f"file {path}"
    assert read_file(path) == [
        Setting("extract", "shard-seconds", 2, origin),
        Setting("extract", "model", "m", origin),
    ]
    assert read_file(written(tmp_path, "# nothing\n")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- extract\n", "not a mapping of sections"),
        ("extract: 2\n", "section extract"),
        ("extract: {a: 1\nb", "line 2"),
        ("extract: !!python/object/apply:os.getcwd []\n", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as refused:
        read_file(path)
    assert str(path) in refused.value.message
    assert message in refused.value.message
    assert refused.value.hint


def test_an_absent_or_binary_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(tmp_path / "absent.yaml")
    (tmp_path / "settings.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(tmp_path / "settings.yaml")


@pytest.mark.parametrize(
    ("text", "section", "field", "value"),
    [
        ("extract.shard_seconds=2", "extract", "shard_seconds", "2"),
        ("extract.model=a=b.c=d", "extract", "model", "a=b.c=d"),
        ("extract.model=", "extract", "model", ""),
    ],
)
def test_overrides_are_taken_apart_at_the_first_signs(text: str, section: str, field: str, value: str) -> None:
    assert parse_override(text) == Setting(section, field, value, f"setting {text}")


def test_the_last_setting_of_a_parameter_wins_under_any_spelling() -> None:
    settings = [parse_override(text) for text in ("extract.model-path=a", "extract.shard-seconds=1", "extract.model=b")]
    found = resolve(settings, SCHEMA)
    assert {name: setting.value for name, setting in found["extract"].items()} == {"model": "b", "shard_seconds": "1"}
    assert found.keys() == {"extract"}


@pytest.mark.parametrize(
    ("text", "named", "hint"),
    [
        ("extract.shard_second=1", "'extract.shard_second'", "did you mean 'extract.shard_seconds'?"),
        ("extrat.model=1", "'extrat'", "did you mean 'extract'?"),
        ("train.lr=1", "'train'", "sections: extract, plan"),
        ("plan.zzz=1", "'plan.zzz'", "`wellhead plan --help` lists its fields"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(text: str, named: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve([parse_override(text)], SCHEMA)
    assert named in refused.value.message
    assert refused.value.hint == hint


def test_nearest_says_nothing_when_nothing_is_near() -> None:
    assert nearest("zzz", SCHEMA) == ""
