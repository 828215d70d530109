"""`wellhead plan` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from wellhead.cli import run
from wellhead.cli._keys import KEYS
from wellhead.core import CaptureSpec
from wellhead.identity import model_identity
from wellhead.manifest import Manifest
from wellhead.paths import RunPaths
from wellhead.plan import Plan
from wellhead.store.life import Life
from wellhead.store.lock import RunLock
from wellhead.testing.models import make_tiny_model

WORDS = ["r_2 = after block 2 of 8", "r_4 = after block 4 of 8", "r_5 = after block 5 of 8",
         "final = after block 8 of 8, after the final norm"]  # fmt: skip


def talk(*texts: str) -> str:
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return json.dumps({"messages": turns})


LINES = [
    talk("What opens the valve?", "The gauge."),
    talk("What opens the valve?", "The gauge."),
    "{",
    talk("q\x1b[31m", "a\nb", "more", "and \u202e more"),
    "null",
    "nonsense",
    talk("x", "y" * 300),
]


@dataclass
class Done:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


Here = Callable[..., Done]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Here:
    """The command line inside this process: quicker than a process of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Done:
        code = run([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", blocks=8)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(LINES))
    return file


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """10,000 lengths: mean 2,103, longest 10,648."""
    counts = [1_248, 2_957] * 5_000  # mean 2,102.5
    counts[0], counts[2] = 10_648, counts[2]
    counts[4] += 21_030_000 - sum(counts) if sum(counts) < 21_030_000 else 0
    short = sum(counts) - 21_030_000
    for place in range(6, 6 + 2 * short, 2):
        counts[place] -= 1
    assert (sum(counts), max(counts), len(counts)) == (21_030_000, 10_648, 10_000)
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, counts)) + "\n")
    return file


KIMI = ("--hidden-size", 7168, "--blocks", 61, "--layers", "3,31,59")


def test_the_json_has_every_documented_key_and_nothing_is_left_behind(cli: Any, data: Path, model: Path) -> None:
    before = sorted(path.name for path in cli.cwd.iterdir())
    scratch = cli.cwd.parent / f"{cli.cwd.name}-tmp"
    scratch.mkdir()
    done = cli("plan", data, "--model", model, "--json", TMPDIR=str(scratch))
    assert done.code == 0, done.stderr
    found = done.json
    assert {key.strip("[]") for key in KEYS["plan"]} - {"observed"} <= set(found)
    assert found["samples"] == 4
    assert found["rejected"] == {"bad_json": 2, "not_object": 1}
    assert found["duplicates"] == 1
    assert found["bytes_per_token"] == 4 * 64 * 2
    assert found["raw_bytes"] == found["tokens"] * 4 * 64 * 2
    assert 0 < found["supervised_tokens"] < found["tokens"]
    assert found["fits"] is True
    assert found["largest_n_that_fits"] == 4
    assert found["seconds"] is None
    assert found["layers"] == WORDS
    assert (found["rows"], found["max_length"], found["truncated"]) == (7, 4096, 0)
    assert sorted(path.name for path in cli.cwd.iterdir()) == before
    assert list(scratch.iterdir()) == []


def test_people_see_the_layers_in_words_the_rejects_by_line_and_the_mask(cli: Any, data: Path, model: Path) -> None:
    done = cli("plan", data, "--model", model)
    assert done.code == 0, done.stderr
    assert all(words in done.stdout for words in WORDS)
    assert "7 = 4 kept + 3 rejected" in done.stdout
    assert "2 bad_json (line 3, 6)" in done.stdout
    assert "1 not_object (line 5)" in done.stdout
    assert "1: equal token ids" in done.stdout
    assert "<|start|>assistant⏎⟦The gauge.<|end|>⟧⏎" in done.stdout
    assert "line 4: " in done.stdout
    assert "\x1b" not in done.stdout
    assert "q␛[31m" in done.stdout
    assert "fits" in done.stdout
    assert "7 rows" in done.stderr  # progress: a line at once, not on a terminal


def test_quiet_says_only_the_result(here: Here, data: Path, model: Path) -> None:
    assert here("plan", data, "--model", model, "--quiet").stderr == ""
    assert here("plan", data, "--model", model, "--quiet", "--json").stderr == ""


def test_a_kept_plan_is_reused_and_truncation_is_shown(here: Here, data: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = here("plan", data, "--model", model, "--out", folder, "--max-length", 100)
    assert first.code == 0, first.stderr
    assert "1 rows, to 100 tokens" in first.stdout
    assert "plan 1 of" in first.stdout
    again = here("plan", data, "--model", model, "--out", folder, "--seq-length", 100)
    assert again.code == 0
    assert "tokenising" not in again.stderr
    assert again.stdout.splitlines()[1:9] == first.stdout.splitlines()[1:9]
    other = here("plan", data, "--model", model, "--out", folder, "--mask", "last-assistant", "--json")
    assert (other.json["plan"], other.json["truncated"], other.json["tokens"]) == (2, 0, Plan.current(folder).column(
        "tokens")[Plan.current(folder).kept][Plan.current(folder).distinct].sum())  # fmt: skip


def test_settings_give_options_too(cli: Any, data: Path, model: Path) -> None:
    done = cli("plan", data, f"plan.model={model}", "plan.layers=1", "--json")
    assert done.code == 0, done.stderr
    assert done.json["layers"][0] == "r_1 = after block 1 of 8"
    assert done.json["bytes_per_token"] == 2 * 64 * 2


def test_what_does_not_fit_is_exit_3_with_the_figures(here: Here, data: Path, model: Path) -> None:
    done = here("plan", data, "--model", model, "--free", "60kB", "--reserve", "20kB", "--json", "--codec", "raw")
    assert done.code == 3
    found = done.json
    assert found["error"]["code"] == "does_not_fit"
    assert (found["fits"], found["free_bytes"], found["reserve_bytes"]) == (False, 60_000, 20_000)
    assert found["largest_n_that_fits"] == 3  # the last row is the long one
    assert 0 < found["largest_max_length_that_fits"] < found["longest_tokens"]
    assert f"{found['largest_max_length_that_fits']:,} tokens" in found["error"]["message"]
    people = here("plan", data, "--model", model, "--free", "60kB", "--reserve", "20kB", "--codec", "raw")
    assert people.code == 3
    assert "too little" in people.stderr


def test_strict_is_exit_8_and_names_the_line(here: Here, data: Path, model: Path) -> None:
    done = here("plan", data, "--model", model, "--strict", "--json")
    assert done.code == 8
    assert "line 3: bad_json" in done.json["error"]["message"]


def test_a_model_without_a_tokenizer_is_exit_4(here: Here, data: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    done = here("plan", data, "--model", model)
    assert done.code == 4
    assert "tokenizer.json" in done.stderr
    assert "save_pretrained" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "DATA and --model"),
        (("DATA",), "DATA and --model"),
        (("DATA", "--model", "MODEL", "--layers", "8"), "last of 8 blocks"),
        (("DATA", "--model", "MODEL", "--mask", "all"), "--mask"),
        (("DATA", "--model", "MODEL", "--codec", "gzip"), "--codec"),
        (("DATA", "--model", "MODEL", "--reserve", "many"), "--reserve"),
        (("DATA", "--model", "MODEL", "--max-length", "5000"), "4096 positions"),
        (("DATA", "--model", "MODEL", "--date", "soon"), "no date"),
        (("DATA", "--model", "MODEL", "--template-arg", "x"), "NAME=VALUE"),
        (("DATA", "--model", "MODEL", "--template-arg", "messages=1"), "'messages'"),
        (("DATA", "--model", "MODEL", "--tokens-per-s", "0"), "no speed"),
        (("DATA", "--model", "MODEL", "--observed", "13GB/9"), "only 4 rows"),
        (("DATA", "--model", "gpt2"), "gpt2"),
        (("none.jsonl", "--model", "MODEL"), "none.jsonl"),
        (("DATA", "--lengths", "DATA"), "two sources"),
        (("--lengths", "DATA", "--hidden-size", "8", "--blocks", "9"), "cannot read lengths"),
        (("--lengths", "none.txt", "--hidden-size", "8", "--blocks", "9"), "none.txt"),
        (("--lengths", "DATA"), "model's size"),
    ],
)
def test_usage_errors_are_exit_2(here: Here, data: Path, model: Path, arguments: tuple[str, ...], words: str) -> None:
    given = [str({"DATA": data, "MODEL": model}.get(argument, argument)) for argument in arguments]
    done = here("plan", *given, "--json")
    assert done.code == 2, done.stderr
    assert words in done.json["error"]["message"] + done.json["error"]["hint"]


def test_the_founding_run_from_lengths_alone(here: Here, lengths: Path) -> None:
    done = here("plan", "--lengths", lengths, *KIMI, "--free", "2.7TB", "--observed", "13GB/121",
               "--tokens-per-s", "2000-4000", "--json")  # fmt: skip
    assert done.code == 0, done.stderr
    found = done.json
    assert found["raw_bytes"] == 1_205_944_320_000
    assert found["worst_case_bytes"] == 6_105_989_120_000
    assert found["bytes_per_token"] == 57_344
    assert found["free_bytes"] == 2_700_000_000_000
    assert found["supervised_tokens"] is None
    assert found["seconds"] == [21_030_000 / 4000, 21_030_000 / 2000]
    assert found["observed"]["exact_bytes"] == 1_205_944_320_000
    assert found["observed"]["extrapolated_bytes"] == round(13e9 / 121 * 10_000)
    people = here("plan", "--lengths", lengths, *KIMI, "--free", "2.7TB", "--observed", "13GB/121").stdout
    assert "1.206 TB exactly (1,205,944,320,000 bytes" in people
    assert "6.106 TB raw, if every row had 10,648 tokens" in people
    assert "r_31 = after block 31 of 61" in people
    assert "13GB/121 gives 1.074 TB" in people


def test_lengths_import_no_tokenizer(cli: Any, lengths: Path) -> None:
    code = (
        "import sys; from wellhead.cli import run\n"
        f"assert run(['plan', '--lengths', {str(lengths)!r}, '--hidden-size', '8', '--blocks', '9', '-q']) == 0\n"
        "assert not {'transformers', 'tokenizers', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=cli.env, timeout=60)


def test_lengths_as_a_json_list_cut_at_a_max_length(here: Here, tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text("[3, 500, 7]")
    done = here("plan", "--lengths", file, "--hidden-size", 8, "--blocks", 9, "--max-length", 10, "--json")
    assert done.code == 0, done.stderr
    assert (done.json["tokens"], done.json["longest_tokens"]) == (20, 10)
    for bad in ("[3, 0]", "[3, 1.5]", "[true]", "[]", "", "3\n-1\n", '["3"]', "[[3]]"):
        file.write_text(bad)
        assert here("plan", "--lengths", file, "--hidden-size", 8, "--blocks", 9).code == 2, bad


def test_another_model_s_run_and_a_held_one_are_left_alone(here: Here, data: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert here("plan", data, "--model", model, "--out", folder).code == 0
    held = RunLock.acquire(folder, Life.this_process())
    try:
        assert here("plan", data, "--model", model, "--out", folder).code == 7
    finally:
        held.release()
    identity = model_identity(make_tiny_model(tmp_path / "other", blocks=9))
    spec = CaptureSpec(identity, 9, 64)
    Manifest(spec, (2,), "other", "stub", "rows", "now", "0").write(RunPaths(folder))
    done = here("plan", data, "--model", model, "--out", folder, "--json")
    assert done.code == 5
    assert "another model" in done.json["error"]["message"]


def test_a_run_s_own_layers_and_what_it_holds_count(here: Here, data: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    spec = CaptureSpec(model_identity(model), 8, 64)
    Manifest(spec, (1, 3), "m", "stub", "rows", "now", "0").write(RunPaths(folder))
    done = here("plan", data, "--model", model, "--out", folder, "--json")
    assert done.code == 0, done.stderr
    found = done.json
    assert found["layers"][:2] == ["r_1 = after block 1 of 8", "r_3 = after block 3 of 8"]
    assert found["needed_bytes"] == found["stored_bytes"]
