"""Many real processes race for a stale lock, some of them killed on the way: one wins, always one."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from wellhead.store.life import Life
from wellhead.store.lock import Holder

RACER = """
import os, sys, time
from pathlib import Path
from wellhead.errors import RunHeld
from wellhead.store.atomic import PosixDisk
from wellhead.store.life import Life
from wellhead.store.lock import RunLock

run, rounds, dies_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Dies(PosixDisk):
    operations = 0
    def link(self, source, new):
        super().link(source, new)
        self.step()
    def replace(self, temp, final):
        super().replace(temp, final)
        self.step()
    def step(self):
        self.operations += 1
        if self.operations == dies_at:
            os.kill(os.getpid(), 9)

disk = Dies()
for round in range(rounds):
    folder = run / str(round)
    print("ready", flush=True)
    sys.stdin.readline()
    life = Life.this_process()
    disk.operations = 0
    try:
        RunLock.acquire(folder, life, disk)
        print("won", life.id, flush=True)
    except RunHeld:
        print("held", flush=True)
sys.stdin.readline()
"""


def start(run: Path, rounds: int, dies_at: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RACER, str(run), str(rounds), str(dies_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def say(racers: list[subprocess.Popen[str]]) -> list[str]:
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = []
    for racer in racers:
        assert racer.stdout is not None
        answers.append(racer.stdout.readline().strip())
    return answers


def hear_ready(racers: list[subprocess.Popen[str]]) -> None:
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline().strip() == "ready"


def prepare(folder: Path, kind: int) -> None:
    """No lock at all, a dead holder, a released one, a dead holder with a chain of dead claims."""
    folder.mkdir(parents=True)
    lives = [replace(Life.this_process(), start_time=1.0) for _ in range(3)]
    if kind == 0:
        return
    (folder / "run.lock").write_bytes(Holder(lives[0], "", released=kind == 2).to_bytes())
    if kind == 3:
        (folder / f".run.lock.after-{lives[0].id}").write_bytes(Holder(lives[1], "").to_bytes())
        (folder / f".run.lock.after-{lives[1].id}").write_bytes(Holder(lives[2], "").to_bytes())


def holder(folder: Path) -> str:
    found = Holder.read(folder / "run.lock")
    assert found is not None
    return found.life.id


def end(racers: list[subprocess.Popen[str]]) -> None:
    for racer in racers:
        racer.kill()
        racer.communicate()


@pytest.mark.parametrize(("racers", "rounds"), [(8, 40), pytest.param(32, 200, marks=pytest.mark.slow)])
def test_exactly_one_of_many_wins(tmp_path: Path, racers: int, rounds: int) -> None:
    for round in range(rounds):
        prepare(tmp_path / str(round), round % 4)
    processes = [start(tmp_path, rounds, 0) for _ in range(racers)]
    try:
        for round in range(rounds):
            hear_ready(processes)
            answers = say(processes)
            winners = [answer.split()[1] for answer in answers if answer.startswith("won")]
            assert len(winners) == 1, (round, answers)
            assert holder(tmp_path / str(round)) == winners[0]
            left = {path.name for path in (tmp_path / str(round)).iterdir()}
            assert left == {"run.lock"}, (round, left)
    finally:
        end(processes)


@pytest.mark.parametrize("dies_at", [1, 2])
@pytest.mark.parametrize("kind", [1, 2, 3])
def test_after_a_claimant_was_killed_exactly_one_of_the_others_wins(tmp_path: Path, kind: int, dies_at: int) -> None:
    """`dies_at` 1: right after its claim; 2: right after it replaced run.lock."""
    prepare(tmp_path / "0", kind)
    victim = start(tmp_path, 1, dies_at)
    others = [start(tmp_path, 1, 0) for _ in range(6)]
    try:
        hear_ready([victim, *others])
        assert say([victim]) == [""]
        victim.wait()
        answers = say(others)
        winners = [answer.split()[1] for answer in answers if answer.startswith("won")]
        assert len(winners) == 1, answers
        assert holder(tmp_path / "0") == winners[0]
    finally:
        end([victim, *others])


def test_killed_in_the_middle_of_the_race_at_most_one_wins_and_the_next_gets_it(tmp_path: Path) -> None:
    prepare(tmp_path / "0", 1)
    racers = [start(tmp_path, 1, index % 3) for index in range(9)]
    try:
        hear_ready(racers)
        answers = say(racers)
        winners = [answer.split()[1] for answer in answers if answer.startswith("won")]
        assert len(winners) <= 1, answers
        if winners:
            assert holder(tmp_path / "0") == winners[0]
    finally:
        end(racers)
    time.sleep(0.05)
    last = start(tmp_path, 1, 0)
    try:
        hear_ready([last])
        assert say([last])[0].startswith("won")
    finally:
        end([last])
