"""The wheel, installed as a user gets it: into an empty environment, with its base dependencies and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

import wellhead
from wellhead.cli._app import shipped
from wellhead.cli._keys import KEYS

ROOT = Path(__file__).parent.parent

# One environment serves all tests of this file, whatever the number of test processes.
pytestmark = [pytest.mark.xdist_group("wheel"), pytest.mark.timeout(600)]


def run(command: Sequence[object], env: dict[str, str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="module")
def wheel(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT], env)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(
    wheel: Path, env: dict[str, str], tmp_path_factory: pytest.TempPathFactory, lacking: Callable[[str], NoReturn]
) -> Path:
    """The `bin` of an environment that holds the wheel and what it depends on."""
    venv = tmp_path_factory.mktemp("venv")
    assert run([sys.executable, "-m", "venv", venv], env).returncode == 0
    pip = [venv / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = run([*pip, "install", "--no-compile", wheel], env, timeout_s=500)
    if "ConnectionError" in done.stderr or "Could not find a version" in done.stderr:
        lacking(f"the base dependencies cannot be had: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return venv / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folder = f"wellhead-{wellhead.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"wellhead", folder}
    sources = {file.relative_to(ROOT / "src").as_posix() for file in (ROOT / "src" / "wellhead").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert {"wellhead/py.typed", f"{folder}/licenses/LICENSE"} <= set(names)


def test_the_base_install_has_no_engine_library(bin_folder: Path, env: dict[str, str], tmp_path: Path) -> None:
    done = run([bin_folder / "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))"], env)
    assert done.stdout == "None\n"


def test_every_help_works(bin_folder: Path, env: dict[str, str]) -> None:
    for words in ([], *([verb] for verb in shipped())):
        done = run([bin_folder / "wellhead", *words, "--help"], env)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage: wellhead" in done.stdout
    assert run([bin_folder / "wellhead", "--version"], env).stdout == f"wellhead {wellhead.__version__}\n"


def test_a_plan_from_lengths_needs_no_model(bin_folder: Path, env: dict[str, str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n200\n300\n")
    words = ["plan", "--lengths", lengths, "--hidden-size", 7168, "--blocks", 61, "--layers", "3,31,59", "--json"]
    done = run([bin_folder / "wellhead", *words, "--free", "2.7TB"], env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["raw_bytes"] == 600 * 4 * 7168 * 2
    assert found["bytes_per_token"] == 57_344
    assert found["fits"] is True
    assert set(found) == {key for key in KEYS["plan"] if not key.startswith("[")}
