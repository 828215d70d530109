"""A small run made on the spot, in this process, with the stub engine: for tests of whatever reads a run."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellhead.extract import Outcome, extract
from wellhead.prepare import Observer, Request
from wellhead.testing.models import make_tiny_model

WORDS = ("valve", "gauge", "flow", "pump", "well", "head", "stem", "bore", "drill", "mud", "casing", "packer", "choke")


def conversation(question: str, answer: str = "yes, it is the well head") -> dict[str, Any]:
    """A row of one turn."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def conversations(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Rows of different lengths, the same for the same seed, no two alike."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    return [
        conversation(
            f"{seed}.{n} {' '.join(rng.choices(WORDS, k=rng.randrange(2, 30)))}", " ".join(rng.choices(WORDS, k=8))
        )
        for n in range(count)
    ]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """A JSONL file; a row that is text is written as it is. A file that holds this already is left untouched."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def run_stub(folder: Path, rows: Sequence[Any], **changes: Any) -> Outcome:
    """Extracts `rows` into `folder`/run with the stub engine and a tiny model; resumes when called again.

    `changes` are fields of `Request`."""
    folder.mkdir(parents=True, exist_ok=True)
    request = Request(
        data=write_rows(folder / "data.jsonl", rows),
        model=str(make_tiny_model(folder / "model")),
        run_dir=folder / "run",
        layers="1,3",
        engine="stub",
    )
    return extract(replace(request, **changes), Observer(_ignore, _ignore, lambda: nullcontext(_ignore), lambda: False))


def _ignore(_: Any) -> None:
    return None
