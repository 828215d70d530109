"""`wellhead extract` as a user runs it, with the stub engine: resume, refusals, signals, faults, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import wellhead
from wellhead.cli._keys import KEYS
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


@pytest.fixture
def job(cli: Any, tmp_path: Path) -> Job:
    return Job(cli, tmp_path)


def test_a_run_from_nothing_to_complete(job: Job) -> None:
    job.write(rows(20))
    result = job()
    assert (result["state"], result["kept"], result["captured"], result["pending"]) == ("complete", 20, 20, 0)
    with wellhead.open(job.run) as run:
        assert len(run) == 20
        tokens = sum(len(record.input_ids) for record in run)
        assert run.layers == (1, 3)
    assert result["tokens"] == tokens
    assert result["raw_bytes"] == tokens * 3 * 64 * 2
    assert set(result) == set(KEYS["extract"])
    status = job.cli("status", job.run, "--json").json
    assert set(status) == {key for key in KEYS["status"] if not key.startswith("[")}
    assert {key: status[key] for key in ("kept", "tokens", "raw_bytes", "stored_bytes", "layers")} == {
        key: result[key] for key in ("kept", "tokens", "raw_bytes", "stored_bytes", "layers")
    }
    assert result["stored_bytes"] == sum(path.stat().st_size for path in (job.run / "states").iterdir())


def test_done_means_nothing_is_loaded(job: Job) -> None:
    job.write(rows(5))
    job()
    lives = job.lives()
    weights = job.model / "tokenizer.json"
    result = job()
    assert (result["state"], result["captured"], result["kept"]) == ("complete", 0, 5)
    assert job.lives() == lives  # not even a ledger is opened
    assert weights.exists()


def test_resume_by_content(job: Job) -> None:
    content = rows(12)
    job.write(content)
    assert job()["captured"] == 12
    job.write(list(reversed(content)))
    assert job()["captured"] == 0
    edited = [*content[:4], row("edited in place"), *content[5:]]
    job.write(edited)
    assert job()["captured"] == 1
    job.write([row("inserted on top"), *edited])
    assert job()["captured"] == 1
    job.write([row("inserted on top"), *edited, *rows(3, seed=9)])
    assert job()["captured"] == 3
    result = job("--mask", "last-assistant")
    assert (result["captured"], result["kept"]) == (0, 16)
    before = result["raw_bytes"]
    result = job("--layers", "2")
    assert (result["captured"], result["kept"]) == (16, 16)
    assert result["raw_bytes"] * 3 == before * 4
    assert job.cli("status", job.run, "--json").json["raw_bytes"] == result["raw_bytes"]
    with wellhead.open(job.run) as run:
        assert run.layers == (1, 2, 3)
        names = {name for shard in run.index.shards[-1:] for name in shard.tensors}
    assert names == {"r2", "input_ids"}  # only the new tensor was stored


def test_duplicates_share_one_state(job: Job) -> None:
    content = rows(3)
    job.write([*content, *content])
    result = job()
    assert (result["kept"], result["captured"], result["rows"]) == (6, 3, 6)
    with wellhead.open(job.run) as run:
        assert run.ids() == run.ids()[:3] * 2


def test_another_spec_is_refused_with_the_fields(job: Job) -> None:
    job.write(rows(3))
    job()
    error = job("--dtype", "float32", code=5)["error"]
    assert error["code"] == "other_spec"
    assert "compute_dtype" in error["message"]
    assert "bfloat16" in error["message"]
    assert "float32" in error["message"]


def test_rejected_rows_are_counted_and_strict_refuses(job: Job) -> None:
    job.write([*rows(3), "{not json", {"messages": []}, {"messages": [{"role": "user", "content": "alone"}]}])
    assert job("--strict", code=8)["error"]["code"] == "rejected"
    assert not (job.run / "run.json").exists()
    result = job(code=10)
    assert (result["state"], result["kept"], sum(result["rejected"].values())) == ("complete_with_rejects", 3, 3)
    assert job(code=10)["captured"] == 0


def test_a_bad_sample_is_quarantined_and_stays_so(job: Job) -> None:
    job.write(rows(30))
    result = job("--fault", "nan:sample=4", code=10)
    assert (result["kept"], result["quarantined"], result["state"]) == (29, 1, "complete_with_rejects")
    again = job(code=10)
    assert (again["captured"], again["quarantined"]) == (0, 1)
    status = job.cli("status", job.run, "--json").json
    assert status["quarantine"] == {"not_finite": 1}
    healed = job("--retry-quarantined")
    assert (healed["captured"], healed["quarantined"], healed["kept"]) == (1, 0, 30)


@pytest.mark.parametrize(
    "fault", ["zeros", "zero_tail", "constant", "nan", "inf", "missing", "short:rows=1", "wide", "other_ids", "equal"]
)
def test_every_visible_fault_is_caught_before_the_store(job: Job, fault: str) -> None:
    job.write(rows(12))
    result = job("--fault", f"{fault}{',' if ':' in fault else ':'}sample=2", code=10)
    assert (result["kept"], result["quarantined"]) == (11, 1)
    verified = job.cli("verify", job.run, "--deep", "--json")
    assert verified.code == 0, verified.stderr


@pytest.mark.parametrize("fault", ["zeros", "shift", "pre_norm", "other_states", "missing", "other_ids"])
def test_a_fault_that_is_always_there_is_refused_before_the_run(job: Job, fault: str) -> None:
    job.write(rows(3))
    assert job("--fault", fault, code=4)["error"]["code"] == "preflight"
    assert not (job.run / "run.json").exists()


def test_too_many_failures_end_the_run_and_it_can_go_on(job: Job) -> None:
    job.write(rows(60))
    result = job("--fault", "nan:every=2", code=12)
    assert result["state"] == "gave_up"
    assert result["error"]["code"] == "gave_up"
    assert result["kept"] > 0
    assert result["pending"] > 0
    healed = job("--retry-quarantined")
    assert (healed["state"], healed["kept"]) == ("complete", 60)
    assert healed["captured"] == 60 - result["kept"]


def test_an_engine_that_dies_costs_only_what_was_in_hand(job: Job) -> None:
    job.write(rows(40))
    result = job("--fault", "dies:sample=30", "--shard-seconds", "0", code=1)
    assert result["error"]["code"] == "engine"
    assert "RuntimeError" in result["error"]["message"]
    assert result["state"] == "stopped"
    kept = len(wellhead.open(job.run))
    assert kept > 0
    assert job()["captured"] == 40 - kept


def test_silence_is_told_while_nothing_moves(job: Job) -> None:
    job.write(rows(40))
    process = job.cli.start(*job.arguments("--fault", "silence:sample=20"))
    time.sleep(1)
    status = wait_for(lambda: (s := job.cli("status", job.run, "--json").json).get("still_s") and s)
    later = wait_for(lambda: (s := job.cli("status", job.run, "--json").json)["still_s"] > 10 and s)
    process.kill()
    _, stderr = process.communicate()
    assert later["oldest_in_flight"]["age_s"] > status["oldest_in_flight"]["age_s"]
    assert later["kept"] + later["pending"] == 40
    lines = [line for line in stderr.splitlines() if "rows" in line and "capturing" in line]
    assert len(lines) >= 1
    (events,) = job.run.glob("writers/*/events.jsonl")
    assert '"kind": "heartbeat"' in events.read_text()


def test_the_account_adds_up_with_duplicates_when_everything_fails(job: Job) -> None:
    content = rows(8)
    job.write([*content, *content[:3], "{broken"])
    result = job("--fault", "fail:after=0", code=12)
    assert (result["kept"], result["quarantined"], result["pending"]) == (0, 11, 0)
    assert sum(result["rejected"].values()) == 1
    status = job.cli("status", job.run, "--rejects", "--json").json
    assert (status["state"], status["quarantined"], status["plan_tokens"]) == ("gave_up", 11, result["plan_tokens"])
    assert {sample["reason"] for sample in status["quarantined_samples"]} == {"engine_error"}
    assert [row["line"] for row in status["rejected_rows"]] == [12]
    assert job(code=12)["captured"] == 0  # the same command does not call this complete
    assert job("--retry-quarantined", code=10)["kept"] == 11


def test_files_without_a_usable_row(job: Job) -> None:
    job.write([])
    assert job(code=2)["error"]["code"] == "usage"
    job.write(["{broken", {"messages": []}])
    result = job(code=10)
    assert (result["kept"], sum(result["rejected"].values()), result["pending"]) == (0, 2, 0)


def test_a_plan_that_takes_another_s_place_says_what_changes(job: Job) -> None:
    job.write(rows(5))
    job()
    job.write(rows(3))
    done = job.cli(*job.arguments("--mask", "last-assistant"))
    assert "plan 2 takes the place of plan 1: 3 rows instead of 5" in done.stderr
    assert "mask last-assistant instead of all-assistant" in done.stderr
    status = job.cli("status", job.run, "--json").json
    assert (status["rows"], status["other_states"], status["mask"]) == (3, 2, "last-assistant")
    assert status["ratio"] == pytest.approx(0.67, abs=0.05)


def test_a_planned_run_has_a_status(job: Job) -> None:
    job.write([*rows(4), "{broken"])
    planned = job.cli("plan", job.data, "--model", job.model, "--layers", "1,3", "--out", job.run)
    assert planned.code == 0, planned.stderr
    status = job.cli("status", job.run, "--json").json
    assert (status["state"], status["rows"], status["pending"], status["rejected"]) == (
        "planned",
        5,
        4,
        {"bad_json": 1},
    )


@pytest.mark.parametrize("what", ["writers", "states"])
def test_complete_is_not_said_of_what_was_taken_away_meanwhile(job: Job, what: str) -> None:
    job.write(rows(40))
    process = job.cli.start("--json", *job.arguments("--fault", "slow:seconds=0.1", "--shard-seconds", "0"))
    wait_for(lambda: committed(job.run))
    for path in sorted((job.run / what).rglob("*"), reverse=True):
        if path.is_file() and not path.name.startswith("."):
            path.unlink()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 6, stderr
    assert json.loads(stdout)["error"]["code"] == "damaged"
    assert job()["kept"] == 40


def test_a_status_file_that_a_power_cut_left_empty_is_no_obstacle(job: Job) -> None:
    job.write(rows(4))
    job()
    (status,) = job.run.glob("writers/*/status.json")
    status.write_bytes(b"")
    assert job.cli("status", job.run, "--json").json["state"] == "complete"


def test_words_that_are_no_text_and_numbers_that_are_no_size(job: Job) -> None:
    job.write(rows(1))
    for arguments in (["status", b"o\xff"], ["plan", b"bad\xff.jsonl", "--model", job.model]):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in arguments]
        done = subprocess.run(
            [*map(str.encode, job.cli.command("--json")), *words], env=job.cli.env, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert json.loads(done.stdout)["error"]["code"] == "usage"
    assert job("--reserve", "9999999999EB", code=2)["error"]["code"] == "usage"
    assert job("--shard-seconds", "nan", code=2)["error"]["code"] == "usage"


def test_lost_shards_show_in_the_status(job: Job) -> None:
    job.write(rows(4))
    job()
    (shard,) = (job.run / "states").iterdir()
    shard.unlink()
    assert job.cli("status", job.run, "--json").json["lost_shards"] == 1


def test_out_of_memory_in_a_batch_is_tried_sample_by_sample(job: Job) -> None:
    job.write(rows(20))
    assert job("--fault", "oom:every=3")["kept"] == 20


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_and_commits(job: Job, number: signal.Signals) -> None:
    job.write(rows(60))
    process = job.cli.start("--json", *job.arguments("--fault", "slow:seconds=0.1", "--shard-seconds", "0"))
    wait_for(lambda: committed(job.run))
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    result = json.loads(stdout)
    assert process.returncode == 11, stderr
    assert (result["state"], result["uncommitted_tokens"], result["error"]["code"]) == ("stopped", 0, "stopped")
    assert 0 < result["kept"] < 60
    status = job.cli("status", job.run, "--json").json
    assert (status["state"], status["kept"], status["holder"]) == ("stopped", result["kept"], None)
    done = job()
    assert (done["kept"], done["captured"]) == (60, 60 - result["kept"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_ends_at_once_and_loses_nothing_committed(
    job: Job, number: signal.Signals, code: int
) -> None:
    job.write(rows(60))
    process = job.cli.start(*job.arguments("--fault", "slow:seconds=0.3", "--shard-seconds", "0"))
    wait_for(lambda: committed(job.run))
    process.send_signal(number)
    time.sleep(0.3)
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == code
    before = len(wellhead.open(job.run))
    assert before > 0
    assert job()["captured"] == 60 - before


def test_a_held_run_is_refused_by_name_and_free_after_a_kill(job: Job) -> None:
    job.write(rows(40))
    process = job.cli.start(*job.arguments("--fault", "slow:seconds=0.2"))
    status = wait_for(lambda: (s := job.cli("status", job.run, "--json")).code == 0 and s.json)
    assert (status["state"], status["holder"]["pid"]) == ("running", process.pid)
    assert status["doing"] == "planning" or set(status) == {key for key in KEYS["status"] if not key.startswith("[")}
    error = job(code=7)["error"]
    assert str(process.pid) in error["message"]
    process.kill()
    process.communicate()
    assert job()["kept"] == 40


def test_it_does_not_fit_is_said_before_anything_is_loaded(job: Job) -> None:
    job.write(rows(5))
    error = job("--reserve", "900TB", code=3)["error"]
    assert error["code"] == "does_not_fit"
    assert not (job.run / "run.json").exists()


def test_a_full_disk_loses_nothing_committed(job: Job, tmpfs: Any) -> None:
    small = tmpfs("24m")
    job.run = small / "run"
    job.write(rows(400))
    ballast = small / "ballast"
    process = job.cli.start(
        "--json", *job.arguments("--fault", "slow:seconds=0.01", "--shard-seconds", "0", "--disk-wait", "0")
    )
    wait_for(lambda: committed(job.run))
    with ballast.open("wb") as file, pytest.raises(OSError, match="No space"):  # noqa: PT012
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 13, stderr
    result = json.loads(stdout)
    assert result["error"]["code"] == "disk"
    before = {record.id: record.hidden_states.tobytes() for record in wellhead.open(job.run)}
    assert 0 < len(before) < 400
    ballast.unlink()
    assert job()["kept"] == 400
    after = {record.id: record.hidden_states.tobytes() for record in wellhead.open(job.run)}
    assert all(after[id] == states for id, states in before.items())


@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_shard_that_is_damaged_later_is_captured_again(job: Job, damage: str) -> None:
    job.write(rows(10))
    job()
    before = {record.id: record.hidden_states.tobytes() for record in wellhead.open(job.run)}
    (shard,) = (job.run / "states").iterdir()
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shard.unlink()
    assert job.cli("verify", job.run).code == 6
    assert job()["captured"] == 10
    after = {record.id: record.hidden_states.tobytes() for record in wellhead.open(job.run)}
    assert after == before
