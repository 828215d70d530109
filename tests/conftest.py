"""Fixtures for every test: a clean environment, the command line as a user runs it, a small disk, the demo's model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

IN_CI = bool(os.environ.get("CI"))

# Buffering is part of what is tested; a debug traceback, colours or an update check would change outputs.
UNSET = ("PYTHONUNBUFFERED", "WELLHEAD_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONWARNINGS")


def _lacking(reason: str) -> NoReturn:
    if IN_CI:
        pytest.fail(f"needed in CI: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def lacking() -> Callable[[str], NoReturn]:
    """`lacking(reason)` skips a test for what this machine cannot offer; where CI is set it fails instead."""
    return _lacking


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    """The environment for child processes: ours, without what would change their behaviour."""
    return {
        **{name: value for name, value in os.environ.items() if name not in UNSET},
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
    }


@dataclass(frozen=True)
class Finished:
    """A `wellhead` process that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object of standard output, which must hold nothing else."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value


class Cli:
    """Runs `python -m wellhead` in a process of its own."""

    def __init__(self, env: Mapping[str, str], cwd: Path) -> None:
        self.env = dict(env)
        self.cwd = cwd

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "wellhead", *map(str, arguments)]

    def __call__(self, *arguments: object, timeout_s: float = 120, **env: str) -> Finished:
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.cwd,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: object, **env: str) -> subprocess.Popen[str]:
        """The process, running, with its output on pipes. In a session of its own, so that signals reach only it."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.cwd,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def cli(env: dict[str, str], tmp_path: Path) -> Cli:
    return Cli(env, tmp_path)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`tmpfs("16m")` gives a folder on a file system of that size. Needs the right to mount."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"tmpfs-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            _lacking("no `mount` program")
        if done.returncode != 0:
            _lacking(f"a tmpfs of {size} cannot be mounted: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        _run(["umount", "--lazy", str(folder)])


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the demo's model, as `make model` leaves it."""
    cache = os.environ.get("WELLHEAD_CACHE")
    folder = (Path(cache) if cache else Path.home() / ".cache" / "wellhead") / "models" / "smollm2-demo"
    if not (folder / "model.safetensors").is_file():
        _lacking(f"no model in {folder}: `make model` makes it")
    return folder


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """A test that uses the real model is marked so."""
    for item in items:
        if "real_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
