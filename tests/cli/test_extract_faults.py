"""`wellhead extract` when something goes wrong: faults of the engine, the disk, and of people."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from extract_job import Job, committed, rows, wait_for

import wellhead


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


def test_lost_shards_show_in_the_status(job: Job) -> None:
    job.write(rows(4))
    job()
    (shard,) = (job.run / "states").iterdir()
    shard.unlink()
    assert job.cli("status", job.run, "--json").json["lost_shards"] == 1


def test_out_of_memory_in_a_batch_is_tried_sample_by_sample(job: Job) -> None:
    job.write(rows(20))
    assert job("--fault", "oom:every=3")["kept"] == 20


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
