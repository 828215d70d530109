"""`wellhead extract` as a user runs it, with the stub engine: resume, refusals, signals, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from extract_job import Job, committed, row, rows, wait_for

import wellhead
from wellhead.cli._keys import KEYS


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_template_that_never_ends_is_left_at_the_first_signal(job: Job, number: signal.Signals) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (job.model / "chat_template.jinja").write_text(endless)
    job.write(rows(3))
    process = job.cli.start("--json", *job.arguments())
    wait_for(lambda: list(job.run.glob("plan/.*.tmp")))
    time.sleep(0.5)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 11, stderr
    assert json.loads(stdout)["error"]["code"] == "stopped"
    assert list((job.run / "plan").iterdir()) == []
