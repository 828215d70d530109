"""Log files are readable at any moment, whole line by whole line, and never end the work they tell of."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from wellhead.log import EventLog, RunLog


def test_a_line_is_in_the_file_when_the_call_returns(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.txt")
    log.line("shard 1\ncommitted")
    when, text = (tmp_path / "log.txt").read_text().split(" ", 1)
    assert text == "shard 1⏎committed\n"
    assert abs((datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()) < 60
    log.close()
    log.close()
    log.line("after the end")
    assert (tmp_path / "log.txt").read_text().endswith("shard 1⏎committed\n")


def test_events_are_json_lines_with_time_and_kind_first(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("commit", shard="wh-1", path=tmp_path, tokens=7)
        line = (tmp_path / "events.jsonl").read_text()
    assert list(json.loads(line)) == ["time", "kind", "shard", "path", "tokens"]
    assert json.loads(line)["path"] == str(tmp_path)


def test_lines_of_several_threads_stay_whole(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:

        def tell(number: int) -> None:
            for count in range(100):
                events.write("tick", thread=number, count=count, padding="x" * 500)

        threads = [threading.Thread(target=tell, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted((event["thread"], event["count"]) for event in told) == [(t, c) for t in range(4) for c in range(100)]


def test_a_full_disk_costs_lines_and_says_how_many(tmpfs: Callable[[str], Path]) -> None:
    folder = tmpfs("64k")
    (folder / "log.txt").touch()
    with RunLog(folder / "log.txt") as log:
        ballast = folder / "ballast"
        with contextlib.suppress(OSError):
            ballast.write_bytes(b"x" * 1_000_000)
        log.line("lost " * 1000)
        log.line("lost too " * 1000)
        ballast.unlink()
        log.line("room again")
    lines = (folder / "log.txt").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines[-2:]] == [
        "2 lines could not be written: No space left on device",
        "room again",
    ]
