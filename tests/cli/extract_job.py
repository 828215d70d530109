"""A data file, a tiny model and a run folder, and `wellhead extract` over them: shared by the tests of the verb."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from wellhead.testing.models import make_tiny_model
from wellhead.testing.runs import conversation, conversations, write_rows

row, rows = conversation, conversations


class Job:
    """A data file, a tiny model and a run folder, and the command over them."""

    def __init__(self, cli: Any, folder: Path) -> None:
        self.cli = cli
        self.model = make_tiny_model(folder / "model")
        self.data = folder / "data.jsonl"
        self.run = folder / "run"

    def write(self, content: list[Any]) -> None:
        write_rows(self.data, content)

    def arguments(self, *more: object) -> list[object]:
        layers = [] if "--layers" in more else ["--layers", "1,3"]
        return ["extract", self.data, "--model", self.model, "--out", self.run, "--engine", "stub", *layers, *more]

    def __call__(self, *more: object, code: int = 0, **env: str) -> dict[str, Any]:
        done = self.cli("--json", *self.arguments(*more), **env)
        assert done.code == code, done.stderr
        result: dict[str, Any] = done.json
        if "kept" in result:
            account = sum(result["rejected"].values()) + result["kept"] + result["quarantined"] + result["pending"]
            assert account == result["rows"]
            assert list(self.run.rglob(".wh-*")) == []
        return result

    def lives(self) -> list[Path]:
        return sorted((self.run / "writers").iterdir())


def wait_for(condition: Any, seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def committed(run: Path) -> bool:
    return any(
        b'"kind":"commit"' in path.read_bytes() for path in run.glob("writers/*/ledger.jsonl") if path.stat().st_size
    )
