"""Recovery: what a dead life left behind is settled once, and nothing that was recorded is removed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from wellhead.core import Capture, Provenance, sample_id
from wellhead.errors import DiskFull
from wellhead.store.index import StoreIndex
from wellhead.store.ledger import Adopt, Commit, Recover, Retired, scan
from wellhead.store.life import Life
from wellhead.store.lock import Holder
from wellhead.store.reader import StateReader
from wellhead.store.recovery import RecoveryReport, recover
from wellhead.store.writer import StoreWriter
from wellhead.testing.disk import FullDisk

FINGERPRINT = "0123456789abcdef" * 2


def capture(seed: int) -> Capture:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, 24, dtype=np.int32)
    states = {name: rng.integers(0x3F00, 0x4100, (24, 16), dtype=np.uint16) for name in ("r2", "final")}
    return Capture(sample_id(ids.astype("<i4").tobytes()), ids, states, Provenance("stub", "1", {"flags": ["x"]}))


def dead_life() -> Life:
    return replace(Life.this_process(), start_time=1.0)


def committed(run: Path, captures: list[Capture], life: Life | None = None, fingerprint: str = FINGERPRINT) -> Commit:
    with StoreWriter(run, life or dead_life(), fingerprint) as writer:
        for one in captures:
            writer.add(one)
        commit = writer.commit()
    assert commit is not None
    return commit


def orphaned(run: Path, captures: list[Capture], life: Life | None = None, fingerprint: str = FINGERPRINT) -> Path:
    """Published, and its line lost: the last line of the ledger is cut off."""
    commit = committed(run, captures, life, fingerprint)
    ledger = run / "writers" / commit.shard[3:-19] / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    return run / "states" / commit.shard


def run_recovery(run: Path) -> RecoveryReport:
    with StoreWriter(run, dead_life(), FINGERPRINT) as writer:
        return recover(run, writer)


def records(run: Path, kind: type) -> list:  # type: ignore[type-arg]
    ledgers = sorted((run / "writers").glob("*/ledger.jsonl"))
    return [record for ledger in ledgers for _, record in scan(ledger).records() if type(record) is kind]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_first_life_finds_nothing(tmp_path: Path) -> None:
    report = run_recovery(tmp_path)
    assert not report
    assert report == RecoveryReport()


def test_a_dead_life_is_settled_once_with_the_hash_of_what_counts(tmp_path: Path) -> None:
    life = dead_life()
    committed(tmp_path, [capture(1)], life)
    ledger = tmp_path / "writers" / life.id / "ledger.jsonl"
    good = ledger.read_bytes()
    ledger.write_bytes(good + b'{"kind":"half')
    assert run_recovery(tmp_path).recovered == [life.id]
    assert records(tmp_path, Recover) == [Recover(life.id, len(good), xxhash.xxh3_64_intdigest(good))]
    assert life.id not in run_recovery(tmp_path).recovered
    assert StoreIndex.load(tmp_path).problems == []


def test_an_orphan_that_verifies_is_adopted_whole(tmp_path: Path) -> None:
    captures = [capture(1), capture(2)]
    path = orphaned(tmp_path, captures)
    assert StoreIndex.load(tmp_path).samples == 0
    assert run_recovery(tmp_path).adopted == [path.name]
    [record] = records(tmp_path, Adopt)
    assert record.provenance == captures[0].provenance
    index = StoreIndex.load(tmp_path)
    assert (index.samples, index.tokens, index.raw_bytes) == (2, 48, 2 * 2 * 24 * 16 * 2)
    reader = StateReader(tmp_path, index)
    for one in captures:
        for name, bits in reader.read(one.id, ["r2", "final"]).items():
            np.testing.assert_array_equal(bits, one.states[name])
    reader.close()
    assert run_recovery(tmp_path).adopted == []


def test_the_adopted_record_is_what_the_writer_would_have_recorded(tmp_path: Path) -> None:
    life, number = dead_life(), 3
    original = committed(tmp_path, [capture(n) for n in range(number)], life)
    ledger = tmp_path / "writers" / life.id / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    run_recovery(tmp_path)
    [adopted] = records(tmp_path, Adopt)
    assert adopted.to_json() == original.to_json()


@pytest.mark.parametrize("where", [9, 700, -100, -1])
def test_an_orphan_that_does_not_verify_is_discarded(tmp_path: Path, where: int) -> None:
    path = orphaned(tmp_path, [capture(1)])
    flip(path, where)
    assert run_recovery(tmp_path).discarded == [path.name]
    assert not path.exists()
    assert StoreIndex.load(tmp_path).samples == 0


def test_a_cut_off_orphan_is_discarded(tmp_path: Path) -> None:
    path = orphaned(tmp_path, [capture(1)])
    path.write_bytes(path.read_bytes()[:-1])
    assert run_recovery(tmp_path).discarded == [path.name]


def test_an_orphan_of_another_spec_is_left_alone(tmp_path: Path) -> None:
    path = orphaned(tmp_path, [capture(1)], fingerprint="e" * 32)
    assert run_recovery(tmp_path).left == [path.name]
    assert path.exists()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    committed(tmp_path, [capture(1)])
    names = ["notes.txt", ".nfs0001", "x.safetensors", ".hidden.tmp"]
    for name in names:
        (tmp_path / "states" / name).write_bytes(b"mine")
    run_recovery(tmp_path)
    assert all((tmp_path / "states" / name).read_bytes() == b"mine" for name in names)


def test_a_life_that_is_alive_is_left_alone(tmp_path: Path) -> None:
    life = Life.this_process()
    with StoreWriter(tmp_path, life, FINGERPRINT) as living:
        living.add(capture(1))
        [temp] = (tmp_path / "states").iterdir()
        report = run_recovery(tmp_path)
        assert (report.living, report.recovered, report.swept) == ([life.id], [], [])
        assert temp.exists()
        assert living.commit() is not None
    assert run_recovery(tmp_path).recovered[0] == life.id  # closed: over, although the process goes on


def test_a_life_elsewhere_is_settled_5_minutes_after_its_last_sign(tmp_path: Path) -> None:
    life = replace(Life.this_process(), host="elsewhere")
    path = orphaned(tmp_path, [capture(1)], life)
    report = run_recovery(tmp_path)
    assert (report.living, report.left, report.recovered) == ([life.id], [path.name], [])
    old = time.time() - 400
    for file in (path, tmp_path / "writers" / life.id / "ledger.jsonl"):
        os.utime(file, (old, old))
    report = run_recovery(tmp_path)
    assert life.id in report.recovered
    assert report.adopted == [path.name]


def test_a_missing_shard_is_buried_and_adopted_when_it_comes_back(tmp_path: Path) -> None:
    commit = committed(tmp_path, [capture(1)])
    path = tmp_path / "states" / commit.shard
    path.rename(tmp_path / "elsewhere")
    report = run_recovery(tmp_path)
    assert (report.tombstoned, report.index) == ([commit.shard], None)
    index = StoreIndex.load(tmp_path)
    assert (index.samples, list(index.removed)) == (0, [commit.shard])
    assert not run_recovery(tmp_path).tombstoned
    (tmp_path / "elsewhere").rename(path)
    assert run_recovery(tmp_path).adopted == [commit.shard]
    assert StoreIndex.load(tmp_path).ids() == [capture(1).id]
    report = run_recovery(tmp_path)
    assert not report.adopted
    assert report.index is not None
    assert report.index.ids() == [capture(1).id]


@pytest.mark.parametrize("change", [-1, 5])
def test_a_shard_of_another_size_is_buried_and_its_file_kept(tmp_path: Path, change: int) -> None:
    commit = committed(tmp_path, [capture(1)])
    path = tmp_path / "states" / commit.shard
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"x" * change)
    report = run_recovery(tmp_path)
    assert report.tombstoned == [commit.shard]
    assert StoreIndex.load(tmp_path).samples == 0
    report = run_recovery(tmp_path)
    assert (report.tombstoned, report.left, report.discarded) == ([], [commit.shard], [])
    assert path.exists()


def test_a_retired_shard_that_is_still_there_is_not_adopted(tmp_path: Path) -> None:
    commit = committed(tmp_path, [capture(1)])
    with StoreWriter(tmp_path, dead_life(), FINGERPRINT) as writer:
        writer.record(Retired(commit.shard, "trained"))
    assert run_recovery(tmp_path).left == [commit.shard]


def test_a_damaged_commit_line_makes_an_orphan_that_is_adopted(tmp_path: Path) -> None:
    life = dead_life()
    commit = committed(tmp_path, [capture(1)], life)
    run_recovery(tmp_path)
    flip(tmp_path / "writers" / life.id / "ledger.jsonl", -100)
    assert StoreIndex.load(tmp_path).samples == 0
    assert run_recovery(tmp_path).adopted == [commit.shard]
    index = StoreIndex.load(tmp_path)
    assert index.samples == 1
    assert {problem.kind for problem in index.problems} == {"damaged_line", "hash_differs"}  # still told


def test_temp_files_of_the_dead_are_swept(tmp_path: Path) -> None:
    life = dead_life()
    committed(tmp_path, [capture(1)], life)
    (tmp_path / "plan").mkdir()
    temps = [
        tmp_path / "states" / f".wh-{life.id}-000002.safetensors.tmp",
        tmp_path / "writers" / life.id / ".status.json.1-ab.tmp",
        tmp_path / "plan" / ".1.parquet.1-ab.tmp",
        tmp_path / ".run.json.1-ab.tmp",
        tmp_path / ".run.lock.1-ab.tmp",
        tmp_path / ".run.lock.after-gone",
    ]
    for temp in temps:
        temp.write_bytes(Holder(life, "").to_bytes())
    living = tmp_path / ".run.lock.2-ab.tmp"
    living.write_bytes(Holder(Life.this_process(), "").to_bytes())
    writing = tmp_path / ".run.lock.3-ab.tmp"
    writing.touch()
    assert sorted(run_recovery(tmp_path).swept) == sorted(temp.name for temp in temps)
    assert not any(temp.exists() for temp in temps)
    assert living.exists()
    assert writing.exists()


def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    orphaned(tmp_path, [capture(1)])
    disk = FullDisk(1 << 20)
    with StoreWriter(tmp_path, dead_life(), FINGERPRINT, disk=disk) as writer:
        disk.room = 10
        with pytest.raises(DiskFull):
            recover(tmp_path, writer, disk)
    assert len(run_recovery(tmp_path).adopted) == 1
