"""SIGKILL at random moments of a whole `wellhead extract`: nothing is lost, doubled, or different in a single bit."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import wellhead
from wellhead.store.index import StoreIndex
from wellhead.testing.models import make_tiny_model
from wellhead.testing.runs import conversations, run_stub, write_rows


def contents(run: Path) -> dict[str, bytes]:
    """Every readable sample's states, as one string of bytes each."""
    with wellhead.open(run) as opened:
        return {record.id: record.input_ids.tobytes() + record.hidden_states.tobytes() for record in opened}


def different(expected: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    """Samples that one of the two lacks or has with other bytes."""
    return [id for id in expected.keys() | found.keys() if expected.get(id) != found.get(id)]


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


def run_killed(cli, tmp_path: Path, arguments: list[object], kills_wanted: int, seed: int = 0) -> None:
    """Kills runs of `arguments` until `kills_wanted` kills have happened; each run must equal an undisturbed one."""
    began = time.monotonic()
    calm = cli(*arguments, "--out", tmp_path / "calm", timeout_s=600)
    assert calm.code == 0, calm.stderr
    longest_s = 1.1 * (time.monotonic() - began)
    expected = contents(tmp_path / "calm")
    require_exact(tmp_path / "calm")
    rng, kills, number = random.Random(seed), 0, 0
    while kills < kills_wanted:
        run = tmp_path / f"killed-{number}"
        number += 1
        done, _ = kill_until_done(
            lambda run=run: cli.start(*arguments, "--out", run), longest_s, rng, kills_wanted - kills
        )
        kills += done
        require_exact(run)
        assert different(expected, contents(run)) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])  # two halves of a hundred, side by side
def test_a_hundred_kills_of_the_stub(cli, tmp_path: Path, seed: int) -> None:
    model = make_tiny_model(tmp_path / "model")
    data = write_rows(tmp_path / "data.jsonl", conversations(60))
    arguments = ["extract", data, "--model", model, "--layers", "1,3", "--engine", "stub", "--shard-seconds", "0",
                 "--fault", "slow:seconds=0.02"]  # fmt: skip
    run_killed(cli, tmp_path, arguments, 50, seed)


@pytest.mark.timeout(900)
def test_ten_kills_of_the_embedded_engine(cli, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = make_tiny_model(tmp_path / "model", weights=True)
    data = write_rows(tmp_path / "data.jsonl", conversations(60))
    arguments = ["extract", data, "--model", model, "--layers", "1,3", "--shard-seconds", "0"]
    run_killed(cli, tmp_path, arguments, 10)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Another request's rows under the right ids: whole in every hash and check, and seen by what is compared here."""
    rows = conversations(6)
    run_stub(tmp_path / "calm", rows)
    run_stub(tmp_path / "wrong", rows, fault="other_states:sample=3")
    expected, found = contents(tmp_path / "calm" / "run"), contents(tmp_path / "wrong" / "run")
    (wrong,) = different(expected, found)
    del found[next(id for id in found if id != wrong)]
    assert len(different(expected, found)) == 2
