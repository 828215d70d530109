"""The frame of the command line, with verbs made for the purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer

import wellhead
from wellhead.cli import run
from wellhead.cli._app import ORDER, Verbs, shipped
from wellhead.cli._arguments import split
from wellhead.cli._shared import output
from wellhead.errors import CompleteWithRejects, FindingsFound, all_errors

BOIL_OPTIONS = {"--seconds", "--codec", "--model", "--model-path", "--layers", "--tag"}


def boil(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(metavar="DATA")],
    seconds: Annotated[float, typer.Option(min=0)] = 30.0,
    codec: Annotated[Literal["planes", "raw"], typer.Option()] = "planes",
    model: Annotated[str | None, typer.Option("--model", "--model-path")] = None,
    layers: Annotated[str | None, typer.Option()] = None,
    tag: Annotated[list[str] | None, typer.Option()] = None,
    strict: Annotated[bool, typer.Option()] = False,
) -> None:
    """Says what it was given."""
    say = output(context)
    say.say("boiling")
    print("a library prints")
    say.result(
        {
            "data": data,
            "seconds": seconds,
            "codec": codec,
            "model": model,
            "layers": layers,
            "tag": tag or [],
            "strict": strict,
        },
        f"boiled {data}",
    )


def spill(context: typer.Context, how: str) -> None:
    """Fails in the way asked for."""
    failures: dict[str, Callable[[], BaseException]] = {
        "typed": lambda: FindingsFound("2 shards are not whole", "see --deep"),
        "bug": lambda: KeyError("nine"),
        "full": lambda: OSError(28, "No space left on device", "/run/x"),
        "interrupt": KeyboardInterrupt,
    }
    if how == "rejects":
        output(context).result({"kept": 3}, "kept 3")
        raise CompleteWithRejects("complete, 1 row rejected", "see status")
    raise failures[how]()


VERBS: Verbs = {"boil": lambda: boil, "spill": lambda: spill}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.delenv("WELLHEAD_DEBUG", raising=False)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = run(argv, VERBS)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return _call


Call = Callable[..., tuple[int, str, str]]


def values(call: Call, *argv: str) -> dict[str, Any]:
    code, out, err = call(*argv, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def error_of(call: Call, *argv: str) -> tuple[int, dict[str, str]]:
    code, out, _ = call("--json", *argv)
    return code, json.loads(out)["error"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--json", "--quiet", "boil", "d", "--seconds", "2"],
        ["boil", "--json", "d", "--seconds", "2", "--quiet"],
        ["boil", "d", "--seconds", "2", "-q", "--json"],
    ],
)
def test_global_options_stand_anywhere(argv: list[str]) -> None:
    found = split(argv, lambda verb: BOIL_OPTIONS)
    assert (found.json, found.quiet, found.verb) == (True, True, "boil")
    assert found.rest == ["boil", "d", "--seconds", "2"]


def test_what_follows_a_double_dash_or_an_option_is_not_ours() -> None:
    found = split(
        ["boil", "--model", "--json", "--layers", "a.b=c", "--", "--quiet", "x.y=z"], lambda verb: BOIL_OPTIONS
    )
    assert (found.json, found.quiet, found.overrides) == (False, False, [])
    assert found.rest == ["boil", "--model", "--json", "--layers", "a.b=c", "--", "--quiet", "x.y=z"]


def test_an_option_with_its_value_attached_does_not_eat_the_next_word() -> None:
    found = split(
        ["boil", "--model=m", "--json", "-cone.yaml", "-c", "two.yaml", "--config=three.yaml"], lambda _: BOIL_OPTIONS
    )
    assert found.json
    assert found.rest == ["boil", "--model=m"]
    assert [str(path) for path in found.config_files] == ["one.yaml", "two.yaml", "three.yaml"]


def test_settings_are_told_from_paths() -> None:
    found = split(
        ["boil.seconds=1", "boil", "./boil.seconds=2", "boil.max-length=", "a=b", "1.x=2"], lambda _: BOIL_OPTIONS
    )
    assert found.overrides == ["boil.seconds=1", "boil.max-length="]
    assert found.rest == ["boil", "./boil.seconds=2", "a=b", "1.x=2"]


def test_without_json_the_result_is_on_stdout_and_remarks_on_stderr(call: Call) -> None:
    assert call("boil", "d") == (0, "a library prints\nboiled d\n", "boiling\n")
    assert call("boil", "d", "--quiet") == (0, "a library prints\nboiled d\n", "")


def test_json_has_stdout_to_itself(call: Call) -> None:
    code, out, err = call("boil", "d", "--json")
    assert code == 0
    assert json.loads(out)["data"] == "d"
    assert out.count("\n") == 1
    assert err == "boiling\na library prints\nboiled d\n"
    assert call("--json", "boil", "-q", "d")[2] == "a library prints\n"


def test_a_typed_error_has_its_code_message_and_hint(call: Call) -> None:
    assert call("spill", "typed") == (6, "", "error: 2 shards are not whole\n  hint: see --deep\n")
    code, out, err = call("spill", "typed", "--json")
    assert code == 6
    assert json.loads(out) == {"error": {"code": "findings", "message": "2 shards are not whole", "hint": "see --deep"}}
    assert err == "error: 2 shards are not whole\n  hint: see --deep\n"


def test_a_result_and_an_error_are_one_object(call: Call) -> None:
    code, out, _ = call("--json", "spill", "rejects")
    assert code == 10
    assert json.loads(out) == {
        "kept": 3,
        "error": {"code": "complete_with_rejects", "message": "complete, 1 row rejected", "hint": "see status"},
    }


def test_a_bug_is_exit_1_in_one_line_and_a_traceback_on_demand(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = call("spill", "bug")
    assert (code, out) == (1, "")
    assert err.startswith("error: unexpected KeyError: 'nine'\n  hint: ")
    assert "Traceback" not in err
    monkeypatch.setenv("WELLHEAD_DEBUG", "1")
    assert "Traceback" in call("spill", "bug")[2]


def test_a_full_disk_is_exit_13_wherever_it_shows(call: Call) -> None:
    code, error = error_of(call, "spill", "full")
    assert (code, error["code"]) == (13, "disk")
    assert "/run/x" in error["message"]


def test_an_interrupt_is_exit_130_without_a_word(call: Call) -> None:
    assert call("spill", "interrupt") == (130, "", "")


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["boi", "d"], "no such verb: 'boi'", "did you mean 'boil'?"),
        (["boil"], "wellhead boil: missing argument 'DATA'", "`wellhead boil --help` lists what it takes"),
        (["boil", "d", "--second", "1"], "--second", "`wellhead boil --help`"),
        (["boil", "d", "--seconds", "soon"], "--seconds", "`wellhead boil --help`"),
        (["boil", "d", "--seconds", "-1"], "--seconds", "`wellhead boil --help`"),
        (["boil", "d", "--codec", "gzip"], "--codec", "`wellhead boil --help`"),
        ([], "missing command", "`wellhead --help`"),
        (["boil", "d", "-c"], "-c", "`wellhead boil --help`"),
    ],
)
def test_usage_errors_are_exit_2_also_for_machines(call: Call, argv: list[str], message: str, hint: str) -> None:
    code, error = error_of(call, *argv)
    assert (code, error["code"]) == (2, "usage")
    assert message in error["message"]
    assert hint in error["hint"]


def test_precedence_is_flag_override_file_default(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "boil:\n  seconds: 2\n  codec: raw\n  layers: [3, 31, 59]\n  tag: [a, b]\n  model_path: m\n  strict: yes\n"
    )
    unset: dict[str, object] = {"codec": "planes", "model": None, "layers": None, "tag": [], "strict": False}
    in_file = {"codec": "raw", "model": "m", "layers": "3,31,59", "tag": ["a", "b"], "strict": True}
    assert values(call, "boil", "d") == {"data": "d", "seconds": 30.0} | unset
    assert values(call, "boil", "d", "-c", str(file)) == {"data": "d", "seconds": 2.0} | in_file
    assert values(call, "-c", str(file), "boil", "d", "boil.seconds=3")["seconds"] == 3.0
    assert values(call, "boil", "d", "-c", str(file), "boil.seconds=3", "--seconds", "4")["seconds"] == 4.0
    assert values(call, "boil", "d", "-c", str(file), "boil.strict=false")["strict"] is False
    assert values(call, "boil", "boil.data=e")["data"] == "e"


def test_the_last_of_two_files_wins(call: Call, tmp_path: Path) -> None:
    for name, seconds in (("one", 1), ("two", 2)):
        (tmp_path / name).write_text(f"boil: {{seconds: {seconds}}}\n")
    assert values(call, "boil", "d", "-c", str(tmp_path / "one"), "-c", str(tmp_path / "two"))["seconds"] == 2.0


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("boil.second=1", "unknown setting 'boil.second'", "did you mean 'boil.seconds'?"),
        ("boik.seconds=1", "unknown section 'boik'", "did you mean 'boil'?"),
        ("boil.seconds=soon", "--seconds", "the value comes from setting boil.seconds=soon"),
        ("boil.codec=gzip", "--codec", "the value comes from setting boil.codec=gzip"),
        ("spill.how=typed", "has no effect on wellhead boil", "boil."),
    ],
)
def test_bad_settings_are_refused_by_name(call: Call, setting: str, message: str, hint: str) -> None:
    code, error = error_of(call, "boil", "d", setting)
    assert (code, error["code"]) == (2, "usage")
    assert message in error["message"]
    assert hint in error["hint"]


def test_a_file_is_checked_also_in_the_sections_of_other_verbs(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("spill:\n  hwo: typed\n")
    code, error = error_of(call, "boil", "d", "-c", str(file))
    assert code == 2
    assert "'spill.hwo'" in error["message"]
    assert str(file) in error["message"]
    assert error["hint"] == "did you mean 'spill.how'?"


def test_the_word_after_a_config_option_is_its_value(call: Call, tmp_path: Path) -> None:
    code, error = error_of(call, "boil", "d", "-c", str(tmp_path / "absent.yaml"))
    assert code == 2
    assert "absent.yaml" in error["message"]


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_the_verbs(call: Call, argv: list[str]) -> None:
    code, out, err = call(*argv)
    assert (code, err) == (0, "")
    assert "Says what it was given." in out
    assert "Fails in the way asked for." in out


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"wellhead {wellhead.__version__}\n", "")


def test_every_verb_has_its_place() -> None:
    folder = Path(wellhead.__file__).parent / "cli"
    assert set(shipped()) == {path.stem for path in folder.glob("[!_]*.py")} <= set(ORDER)


def test_every_exit_code_is_of_the_table(call: Call) -> None:
    codes = {error.exit_code for error in all_errors()}
    assert {call("spill", how)[0] for how in ("typed", "bug", "full", "rejects")} <= codes


def test_a_reader_that_goes_away_is_no_news(env: dict[str, str]) -> None:
    script = (
        "import sys, time\n"
        "from wellhead.cli import run\n"
        "from wellhead.cli._shared import output\n"
        "import typer\n"
        "def pour(context: typer.Context) -> None:\n"
        "    output(context).result({}, 'drop\\n' * 20_000)\n"
        "sys.exit(run(['pour'], {'pour': lambda: pour}))\n"
    )
    pouring = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert pouring.stdout is not None
    assert os.read(pouring.stdout.fileno(), 4) == b"drop"
    pouring.stdout.close()
    assert pouring.stderr is not None
    assert pouring.stderr.read() == b""
    pouring.stderr.close()
    assert pouring.wait(timeout=30) == 141


def test_nobody_reading_the_remarks_does_not_end_the_work(env: dict[str, str]) -> None:
    script = (
        "import sys\n"
        "from wellhead.cli import run\n"
        "from wellhead.cli._shared import output\n"
        "import typer\n"
        "def mutter(context: typer.Context) -> None:\n"
        "    for _ in range(3): output(context).say('drop\\n' * 20_000)\n"
        "    output(context).result({}, 'done')\n"
        "sys.exit(run(['mutter'], {'mutter': lambda: mutter}))\n"
    )
    unread, ours = os.pipe()
    os.close(unread)
    done = subprocess.run([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=ours)
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_no_colours_but_on_a_terminal(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "wellhead", "nonsense"]
    done = subprocess.run(command, env=env, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: no such verb")
    assert b"\x1b[" not in done.stderr
    for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        ours, theirs = os.openpty()
        subprocess.run(command, env=env | {"TERM": "xterm-256color"} | extra, stdin=subprocess.DEVNULL, stderr=theirs)
        os.close(theirs)
        shown = os.read(ours, 4096)
        os.close(ours)
        assert (b"\x1b[1;31m" in shown or b"\x1b[31m" in shown) is coloured
