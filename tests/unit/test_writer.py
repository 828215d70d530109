"""The writer: what is promised when, when a shard is due, and what a full or failing disk leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wellhead.core import Capture, Provenance, sample_id
from wellhead.errors import DiskFailed, DiskFull
from wellhead.store.atomic import File, PosixDisk, SyncError
from wellhead.store.index import StoreIndex
from wellhead.store.ledger import Attempt, Quarantine, Tombstone, scan
from wellhead.store.life import Life, is_dead
from wellhead.store.reader import StateReader
from wellhead.store.recovery import recover
from wellhead.store.writer import StoreOptions, StoreWriter
from wellhead.testing.disk import FullDisk, RecordingDisk, Rename, Sync, SyncDir

FINGERPRINT = "0123456789abcdef" * 2


def capture(seed: int, tokens: int = 24, hidden: int = 16, engine: str = "stub") -> Capture:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, tokens, dtype=np.int32)
    states = {name: rng.integers(0x3F00, 0x4100, (tokens, hidden), dtype=np.uint16) for name in ("r2", "final")}
    return Capture(sample_id(ids.astype("<i4").tobytes()), ids, states, Provenance(engine, "1"))


def dead_life() -> Life:
    return replace(Life.this_process(), start_time=1.0)


def files(run: Path) -> set[str]:
    return {path.name for path in (run / "states").iterdir()}


def assert_holds(run: Path, captures: list[Capture]) -> None:
    index = StoreIndex.load(run, FINGERPRINT)
    assert set(index.ids()) >= {c.id for c in captures}
    reader = StateReader(run, index)
    for one in captures:
        found = reader.read(one.id, list(one.states))
        for name, bits in one.states.items():
            np.testing.assert_array_equal(found[name], bits)
        np.testing.assert_array_equal(reader.read_input_ids(one.id), one.input_ids)
    reader.close()


@pytest.mark.parametrize("codec", ["planes-zstd", "raw"])
def test_committed_samples_read_back_and_uncommitted_ones_leave_no_trace(tmp_path: Path, codec: str) -> None:
    captures = [capture(seed) for seed in range(5)]
    with StoreWriter(tmp_path, Life.this_process(), FINGERPRINT, StoreOptions(codec=codec)) as writer:  # type: ignore[arg-type]
        for one in captures[:3]:
            assert writer.add(one) is None
        assert StoreIndex.load(tmp_path).samples == 0
        commit = writer.commit()
        assert commit is not None
        assert list(commit.ids) == [c.id for c in captures[:3]]
        assert (sum(commit.tokens), commit.raw_bytes) == (3 * 24, 3 * 2 * 24 * 16 * 2)
        assert commit.size == (tmp_path / "states" / commit.shard).stat().st_size
        assert writer.commit() is None
        writer.add(captures[3])
        assert len(files(tmp_path)) == 2
    assert files(tmp_path) == {commit.shard}
    assert_holds(tmp_path, captures[:3])
    assert StoreIndex.load(tmp_path).samples == 3


def test_durable_then_recorded(tmp_path: Path) -> None:
    """Data sync, rename, directory sync, ledger sync: in this order, nothing between that matters."""
    disk = RecordingDisk(tmp_path)
    with StoreWriter(tmp_path, Life.this_process(), FINGERPRINT, disk=disk) as writer:
        writer.add(capture(1))
        before = len(disk.operations)
        commit = writer.commit()
        assert commit is not None
        kinds = [type(operation) for operation in disk.operations[before:]]
        order = [kind for kind in kinds if kind in (Sync, Rename, SyncDir)]
        assert order == [Sync, Rename, SyncDir, Sync]
        assert kinds[-1] is Sync
        rename = next(operation for operation in disk.operations if isinstance(operation, Rename))
        assert rename.new == Path("states") / commit.shard


def test_records_are_in_the_ledger_in_order(tmp_path: Path) -> None:
    life = Life.this_process()
    with StoreWriter(tmp_path, life, FINGERPRINT) as writer:
        one = capture(1)
        writer.attempt([])
        writer.attempt([one.id])
        writer.quarantine(one.id, "not_finite", "row 3")
        writer.add(one)
        commit = writer.commit()
        assert commit is not None
        writer.tombstone(commit.shard, "bad")
    records = [record for _, record in scan(tmp_path / "writers" / life.id / "ledger.jsonl").records()]
    assert [record.kind for record in records] == ["opened", "attempt", "quarantine", "commit", "tombstone"]
    assert records[1] == Attempt((one.id,))
    assert records[2] == Quarantine(one.id, "not_finite", "row 3")
    assert records[4] == Tombstone(commit.shard, "bad")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("options", "age", "due"),
    [
        (StoreOptions(shard_bytes=1), 0.0, True),
        (StoreOptions(), 29.9, False),
        (StoreOptions(), 30.1, False),  # less than 64 MiB
        (StoreOptions(), 299.9, False),
        (StoreOptions(), 300.0, True),
        (StoreOptions(shard_seconds=2.0), 1.9, False),
        (StoreOptions(shard_seconds=2.0), 2.0, True),
        (StoreOptions(shard_seconds=600.0), 599.0, False),
        (StoreOptions(shard_seconds=0.0), 0.0, True),
    ],
)
def test_when_a_shard_is_due(tmp_path: Path, options: StoreOptions, age: float, due: bool) -> None:
    clock = Clock()
    with StoreWriter(tmp_path, Life.this_process(), FINGERPRINT, options, clock=clock) as writer:
        assert not writer.due()
        writer.add(capture(1))
        clock.now += age
        assert writer.due() is due
        writer.commit()
        assert not writer.due()


def test_64_mib_are_due_after_30_seconds(tmp_path: Path) -> None:
    clock = Clock()
    with StoreWriter(tmp_path, Life.this_process(), FINGERPRINT, StoreOptions(codec="raw"), clock=clock) as writer:
        writer.add(capture(1, tokens=4096, hidden=4096 + 8))
        clock.now += 29.9
        assert not writer.due()
        clock.now += 0.2
        assert writer.due()


def test_what_is_uncommitted(tmp_path: Path) -> None:
    clock = Clock()
    with StoreWriter(tmp_path, Life.this_process(), FINGERPRINT, clock=clock) as writer:
        assert (writer.uncommitted_samples, writer.uncommitted_tokens, writer.uncommitted_bytes) == (0, 0, 0)
        assert (writer.oldest_age_s, writer.open_since) == (0.0, None)
        writer.add(capture(1, tokens=5))
        clock.now += 7
        writer.add(capture(2, tokens=6))
        assert (writer.uncommitted_samples, writer.uncommitted_tokens) == (2, 11)
        [temp] = (tmp_path / "states").iterdir()
        assert writer.uncommitted_bytes == temp.stat().st_size
        assert writer.oldest_age_s == 7
        writer.commit()
        assert (writer.uncommitted_samples, writer.uncommitted_tokens, writer.oldest_age_s) == (0, 0, 0.0)


def test_what_the_open_shard_cannot_take_closes_it_first(tmp_path: Path) -> None:
    captures = [capture(0), capture(0), capture(1, engine="other")]  # the same sample again, another provenance
    with StoreWriter(tmp_path, Life.this_process(), FINGERPRINT) as writer:
        early = [writer.add(one) for one in captures]
        assert early[0] is None
        assert [list(commit.ids) for commit in early[1:] if commit] == [[captures[0].id]] * 2
        writer.commit()
    index = StoreIndex.load(tmp_path)
    assert [shard.samples for shard in index.shards] == [1, 1, 1]
    assert (index.samples, index.tokens) == (2, 48)
    assert index.engines() == {("stub", "1"), ("other", "1")}


def test_the_head_runs_out_of_room(tmp_path: Path) -> None:
    """Small shards reserve little: no sample is lost or refused when the reserve is used up."""
    captures = [capture(seed, tokens=1 + seed % 3 if seed else 200) for seed in range(60)]
    with StoreWriter(tmp_path, Life.this_process(), FINGERPRINT, StoreOptions(shard_bytes=3000)) as writer:
        early = [commit for one in captures if (commit := writer.add(one))]
        last = writer.commit()
    assert early
    assert last is not None
    assert sum(len(commit.ids) for commit in [*early, last]) == 60
    assert_holds(tmp_path, captures)


def test_closing_ends_the_life_and_may_be_repeated(tmp_path: Path) -> None:
    life = Life.this_process()
    writer = StoreWriter(tmp_path, life, FINGERPRINT)
    assert not is_dead(life)
    writer.close()
    writer.close()
    assert is_dead(life)


def fill(run: Path, disk: FullDisk, captures: list[Capture]) -> tuple[list[Capture], bool]:
    """Writes until the disk is full, then commits what was added. Returns what was acknowledged, and whether the disk
    was ever full."""
    acknowledged: list[Capture] = []
    open_: list[Capture] = []
    full = False
    writer = None
    try:
        writer = StoreWriter(run, dead_life(), FINGERPRINT, StoreOptions(shard_bytes=1000), disk)
        for number, one in enumerate(captures, 1):
            writer.attempt([one.id])
            if writer.add(one):
                acknowledged, open_ = acknowledged + open_, []
            open_.append(one)
            if number % 2 == 0:
                writer.commit()
                acknowledged, open_ = acknowledged + open_, []
    except DiskFull:
        full = True
        try:
            if writer is not None and writer.commit():
                acknowledged += open_
        except DiskFull:
            pass
    if writer is not None:
        writer.close()
    return acknowledged, full


@pytest.mark.parametrize(
    ("stride", "fine"),
    [(499, 47), pytest.param(13, 1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["some", "all"],
)
def test_no_room_at_any_byte_loses_nothing_acknowledged(tmp_path: Path, stride: int, fine: int) -> None:
    captures = [capture(seed, tokens=3 + seed) for seed in range(4)]
    probe = FullDisk(1 << 30)
    acknowledged, full = fill(tmp_path / "probe", probe, captures)
    assert (len(acknowledged), full) == (4, False)
    needed = (1 << 30) - probe.room
    # Every byte of the last kilobyte (the last shard's end, its name, its record), and a stride before.
    rooms = [*range(0, needed - 900, stride), *range(needed - 900, needed - 5, fine), *range(needed - 5, needed)]
    for room in rooms:
        run = tmp_path / str(room)
        acknowledged, full = fill(run, FullDisk(room), captures)
        assert full, room
        assert_holds(run, acknowledged)
        with StoreWriter(run, dead_life(), FINGERPRINT) as writer:
            recover(run, writer)
            missing = StoreIndex.load(run).missing([c.id for c in captures], ("r2", "final"))
            assert not missing.keys() & {c.id for c in acknowledged}, room
            for one in captures:
                if one.id in missing:
                    writer.add(one)
            writer.commit()
        assert_holds(run, captures)
        index = StoreIndex.load(run)
        assert (index.samples, index.problems) == (4, [])
        assert files(run) == {shard.name for shard in index.shards}


def test_samples_before_the_full_disk_are_still_committable(tmp_path: Path) -> None:
    disk = FullDisk(1 << 26)
    captures = [capture(1), capture(2, tokens=5000)]
    with StoreWriter(tmp_path, dead_life(), FINGERPRINT, disk=disk) as writer:
        writer.add(captures[0])
        disk.room = 3000
        with pytest.raises(DiskFull) as refused:
            writer.add(captures[1])
        assert refused.value.hint
        assert (writer.uncommitted_samples, writer.uncommitted_tokens) == (1, 24)
        assert writer.commit() is not None
    assert_holds(tmp_path, captures[:1])
    assert StoreIndex.load(tmp_path).samples == 1


class FailingSync(PosixDisk):
    """Syncs of shards fail with an I/O error, once; what comes after would succeed."""

    failed = 0

    def create(self, path: Path) -> File:
        file = super().create(path)
        if path.name.endswith(".safetensors.tmp") and not self.failed:
            self.failed += 1

            def sync() -> None:
                raise SyncError(5, "Input/output error", str(path))

            file.sync = sync  # type: ignore[method-assign]
        return file


def test_a_failed_sync_ends_the_life(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, dead_life(), FINGERPRINT, disk=FailingSync()) as writer:
        writer.add(capture(1))
        with pytest.raises(DiskFailed, match="sealing a shard"):
            writer.commit()
        for call in (writer.commit, lambda: writer.add(capture(2)), lambda: writer.attempt([capture(2).id])):
            with pytest.raises(DiskFailed, match="sealing a shard"):
                call()
    assert files(tmp_path) == set()
    assert StoreIndex.load(tmp_path).samples == 0


class NoRoomForTheRecord(FullDisk):
    """Runs full right after a shard was published."""

    def publish(self, temp: Path, final: Path) -> None:
        super().publish(temp, final)
        self.room = 1


def test_a_shard_that_could_not_be_recorded_is_adopted_by_the_next_life(tmp_path: Path) -> None:
    one = capture(1)
    with StoreWriter(tmp_path, dead_life(), FINGERPRINT, disk=NoRoomForTheRecord(1 << 26)) as writer:
        writer.add(one)
        with pytest.raises(DiskFull, match="recording"):
            writer.commit()
        with pytest.raises(DiskFull, match="recording"):
            writer.commit()
    assert StoreIndex.load(tmp_path).samples == 0
    with StoreWriter(tmp_path, Life.this_process(), FINGERPRINT) as writer:
        assert len(recover(tmp_path, writer).adopted) == 1
    assert_holds(tmp_path, [one])
