"""SIGKILL at random moments of a whole `wellhead extract`: nothing is lost, doubled, or different in a single bit."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import wellhead
from wellhead.store.index import StoreIndex
from wellhead.testing.models import make_tiny_model
from wellhead.testing.runs import conversations, write_rows


def contents(run: Path) -> dict[str, bytes]:
    """Every readable sample's states, as one string of bytes each."""
    with wellhead.open(run) as opened:
        return {record.id: record.input_ids.tobytes() + record.hidden_states.tobytes() for record in opened}


def require_exact(run: Path) -> None:
    """Each state recorded once; every file accounted for; no temp file anywhere."""
    index = StoreIndex.load(run)
    recorded = Counter(id for shard in index.shards for id in index.commit_of(shard).ids)
    assert set(recorded.values()) == {1}
    files = {path.name: path.stat().st_size for path in (run / "states").iterdir()}
    assert files == {shard.name: shard.size for shard in index.shards}
    assert [path for path in run.rglob(".*") if not path.name.startswith(".run.lock.")] == []
    assert not index.problems
    with wellhead.open(run) as opened:
        assert opened.findings() == []


def kill_until_done(
    start: Callable[[], subprocess.Popen[str]], longest_s: float, rng: random.Random, most: int
) -> tuple[int, int]:
    """Starts the command again and again, killing it after a random time, until it ends by itself.

    Returns (kills, exit code). After `most` kills it is left to finish."""
    kills = 0
    while True:
        process = start()
        try:
            process.wait(rng.uniform(0, longest_s) if kills < most else 600)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        _, complaints = process.communicate()
        assert process.returncode == 0, complaints
        return kills, process.returncode


def run_killed(cli, tmp_path: Path, arguments: list[object], kills_wanted: int, longest_s: float | None = None) -> None:
    """Kills runs of `arguments` until `kills_wanted` kills have happened; each run must equal an undisturbed one."""
    began = time.monotonic()
    calm = cli(*arguments, "--out", tmp_path / "calm", timeout_s=600)
    assert calm.code == 0, calm.stderr
    longest_s = longest_s or 1.1 * (time.monotonic() - began)
    expected = contents(tmp_path / "calm")
    require_exact(tmp_path / "calm")
    rng, kills, number = random.Random(20261201), 0, 0
    while kills < kills_wanted:
        run = tmp_path / f"killed-{number}"
        number += 1
        done, _ = kill_until_done(
            lambda run=run: cli.start(*arguments, "--out", run), longest_s, rng, kills_wanted - kills
        )
        kills += done
        require_exact(run)
        found = contents(run)
        assert found.keys() == expected.keys()
        assert [id for id in expected if expected[id] != found[id]] == []


@pytest.mark.timeout(900)
def test_a_hundred_kills_of_the_stub(cli, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    data = write_rows(tmp_path / "data.jsonl", conversations(60))
    arguments = ["extract", data, "--model", model, "--layers", "1,3", "--engine", "stub", "--shard-seconds", "0",
                 "--fault", "slow:seconds=0.02"]  # fmt: skip
    run_killed(cli, tmp_path, arguments, 100)


@pytest.mark.timeout(900)
def test_ten_kills_of_the_embedded_engine(cli, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = make_tiny_model(tmp_path / "model", weights=True)
    data = write_rows(tmp_path / "data.jsonl", conversations(60))
    arguments = ["extract", data, "--model", model, "--layers", "1,3", "--shard-seconds", "0"]
    run_killed(cli, tmp_path, arguments, 10)


def test_the_comparison_can_fail(tmp_path: Path, cli) -> None:
    """One flipped bit of one state, whole again in every hash, is seen by what the kill tests compare."""
    model = make_tiny_model(tmp_path / "model")
    data = write_rows(tmp_path / "data.jsonl", conversations(3))
    run = tmp_path / "run"
    done = cli("extract", data, "--model", model, "--layers", "1,3", "--engine", "stub", "--out", run)
    assert done.code == 0, done.stderr
    before = contents(run)
    id = next(iter(before))
    changed = np.frombuffer(before[id], np.uint8).copy()
    changed[-1] ^= 1
    assert changed.tobytes() != before[id]
