"""Power cuts at every point of our own writer and of our own recovery: nothing false, nothing lost.

The real code runs on a `RecordingDisk`; every state that a disk may hold afterwards is written to a folder, a new life
takes it over with the real recovery, and everything that the index then claims is read and compared. The same check
must catch writers that leave out one step, or it proves nothing.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from wellhead.core import Capture, Provenance, sample_id
from wellhead.errors import StoreDamaged, WellheadError
from wellhead.store.atomic import Disk, File
from wellhead.store.index import StoreIndex
from wellhead.store.life import Life
from wellhead.store.lock import Holder, RunLock
from wellhead.store.reader import StateReader
from wellhead.store.recovery import recover
from wellhead.store.writer import StoreOptions, StoreWriter
from wellhead.testing.crash import CrashState, DiskModel, crash_points
from wellhead.testing.disk import Create, Mark, RecordingDisk, Sync, SyncDir, SyncFile

FINGERPRINT = "0123456789abcdef" * 2
HIDDEN = 8
SMALL = StoreOptions(shard_bytes=2000)
"""A shard reserves room for its head by its expected size: small shards, few blocks, few states."""


@dataclass(frozen=True)
class Stored:
    """A promise: this tensor of this sample is durable."""

    id: str
    tensor: str


@dataclass(frozen=True)
class Quarantined:
    id: str


def capture(seed: int, tensors: tuple[str, ...]) -> Capture:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, 20 + 11 * seed % 37, dtype=np.int32)
    states = {name: rng.integers(0x3F00, 0x4100, (len(ids), HIDDEN), dtype=np.uint16) for name in tensors}
    return Capture(sample_id(ids.astype("<i4").tobytes()), ids, states, Provenance("stub", "1"))


BOTH = ("r2", "final")
CAPTURES = [capture(seed, BOTH) for seed in range(8)]
TRUTH = {c.id: c for c in CAPTURES}
LATER = replace(CAPTURES[0], states={"r5": capture(0, ("r5",)).states["r5"]})
"""A layer added later to the first sample."""


def truth(id: str, tensor: str) -> np.ndarray:
    return LATER.states[tensor] if tensor == "r5" else TRUTH[id].states[tensor]


def dead_life() -> Life:
    """A life of this process that counts as dead from the start: nothing here waits for processes to die."""
    return replace(Life.this_process(), start_time=1.0)


def live(run: Path, disk: RecordingDisk, batches: list[list[Capture]], quarantined: str | None, inner: Disk) -> None:
    """One whole life. Marks every promise where it is made."""
    life = dead_life()
    lock = RunLock.acquire(run, life, inner)
    with StoreWriter(run, life, FINGERPRINT, SMALL, inner) as writer:
        recover(run, writer, inner)
        for batch in batches:
            writer.attempt([c.id for c in batch])
            for one in batch:
                writer.add(one)
            commit = writer.commit()
            assert commit is not None
            for one in batch:
                for tensor in one.states:
                    disk.mark(Stored(one.id, tensor))
        if quarantined:
            writer.quarantine(quarantined, "not_finite", "row 3 of r2")
            disk.mark(Quarantined(quarantined))
        writer.add(CAPTURES[7])
    lock.release()


def first_life(run: Path, disk: RecordingDisk, inner: Disk | None = None) -> None:
    live(run, disk, [CAPTURES[0:2], CAPTURES[2:3], [*CAPTURES[3:5], LATER]][:2], CAPTURES[6].id, inner or disk)


def second_life(run: Path, disk: RecordingDisk, inner: Disk | None = None) -> None:
    live(run, disk, [[CAPTURES[3], LATER]], None, inner or disk)


def faults(run: Path, state: CrashState) -> list[str]:
    """What is wrong once a new life has taken over."""
    try:
        life = Life.this_process()
        lock = RunLock.acquire(run, life)
        with StoreWriter(run, life, FINGERPRINT) as writer:
            recover(run, writer)
            again = recover(run, writer)
        lock.release()
        index = StoreIndex.load(run, FINGERPRINT)
    except WellheadError as error:
        return [f"stuck: {error}"]
    found = [f"damage reported: {problem}" for problem in index.problems]
    if again:
        found.append(f"recovery is not idempotent: {again}")
    found += false_claims(run, index)
    for promise in state.kept:
        if isinstance(promise, Stored) and promise.tensor not in index.tensors_of(promise.id):
            found.append(f"lost: {promise}")
        if isinstance(promise, Quarantined) and promise.id not in index.quarantined:
            found.append(f"lost: {promise}")
    recorded = {shard.name for shard in index.shards}
    found += [f"left over: {path.name}" for path in (run / "states").iterdir() if path.name not in recorded]
    found += [f"left over: {path.name}" for path in run.iterdir() if path.name.startswith(".") and not half_lock(path)]
    return found


def half_lock(path: Path) -> bool:
    """Whether this is a lock's temp file that may be somebody's who is writing it now: it goes after 5 minutes."""
    try:
        return path.name.startswith(".run.lock.") and Holder.read(path) is None
    except StoreDamaged:
        return True


def false_claims(run: Path, index: StoreIndex) -> list[str]:
    found = []
    reader = StateReader(run, index)
    for id in index.ids():
        for tensor in index.tensors_of(id):
            try:
                if not np.array_equal(reader.read(id, [tensor])[tensor], truth(id, tensor)):
                    found.append(f"false done: {id} {tensor}")
                if not np.array_equal(reader.read_input_ids(id), TRUTH[id].input_ids):
                    found.append(f"false done: {id} ids")
            except (WellheadError, OSError) as error:
                found.append(f"false done: {id} {tensor}: {error}")
    reader.close()
    return found


@pytest.fixture
def folders() -> Iterator[Callable[[], Path]]:
    """Fresh empty folders, in memory where that exists: real syncs would take most of the time."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None, prefix="wellhead-crash-"))
    numbers = itertools.count()

    def fresh() -> Path:
        folder = root / str(next(numbers))
        folder.mkdir()
        return folder

    yield fresh
    shutil.rmtree(root)


def check(state: CrashState, fresh: Callable[[], Path]) -> list[str]:
    folder = fresh()
    state.materialise(folder)
    found = faults(folder, state)
    shutil.rmtree(folder)
    return found


def record(life: Callable[[Path, RecordingDisk], None], fresh: Callable[[], Path]) -> RecordingDisk:
    folder = fresh()
    disk = RecordingDisk(folder)
    life(folder, disk)
    return disk


def assert_good(found: list[str], done: int, disk: RecordingDisk) -> None:
    assert not found, f"crash after operation {done} ({disk.operations[done - 1]}): {found}"


def one_life(fresh: Callable[[], Path], per_point: int) -> int:
    disk = record(first_life, fresh)
    random, tried = Random(1), 0
    for done, model in crash_points(disk.operations):
        for state in [model.killed(), *model.states(random, per_point)]:
            assert_good(check(state, fresh), done, disk)
            tried += 1
    return tried


def two_lives(fresh: Callable[[], Path], every: int, per_point: int) -> int:
    """Each `every`-th crash point of the first life: killed there or cut off there, then cut off anywhere in the
    second, which recovers and goes on."""
    first = record(first_life, fresh)
    random, tried = Random(2), 0
    for done, before in crash_points(first.operations):
        if done % every:
            continue
        for killed in (True, False):
            start = before.killed() if killed else random.choice(before.states(random, 20))
            folder = fresh()
            start.materialise(folder)
            second = RecordingDisk(folder)
            second_life(folder, second)
            model = _replayed(first, done) if killed else DiskModel(start)
            for also_done, operation in enumerate(second.operations, 1):
                model.apply(operation)
                for state in model.states(random, per_point):
                    assert_good(check(state, fresh), also_done, second)
                    tried += 1
    return tried


def _replayed(disk: RecordingDisk, done: int) -> DiskModel:
    model = DiskModel()
    for operation in disk.operations[:done]:
        model.apply(operation)
    return model


def test_no_power_cut_in_a_life_loses_or_invents_anything(folders: Callable[[], Path]) -> None:
    assert one_life(folders, per_point=3) > 250


def test_no_power_cut_in_a_recovery_loses_or_invents_anything(folders: Callable[[], Path]) -> None:
    assert two_lives(folders, every=40, per_point=1) > 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_states_of_one_life(folders: Callable[[], Path]) -> None:
    assert one_life(folders, per_point=300) > 5000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_states_of_two_lives(folders: Callable[[], Path]) -> None:
    assert two_lives(folders, every=1, per_point=4) > 5000


class Sloppy(RecordingDisk):
    """Our disk with one step left out: what it says it did is not what is noted."""

    def __init__(self, root: Path, forgets: Callable[[Sloppy, object], bool]) -> None:
        super().__init__(root)
        self.handles: dict[int, str] = {}
        self._forgets = forgets

    def noted(self) -> list[object]:
        kept = []
        for operation in self.operations:
            if isinstance(operation, Create):
                self.handles[operation.handle] = operation.path.name
            if not self._forgets(self, operation):
                kept.append(operation)
        return kept


def no_data_sync(disk: Sloppy, operation: object) -> bool:
    return isinstance(operation, Sync) and disk.handles[operation.handle].endswith(".safetensors.tmp")


def no_directory_sync(disk: Sloppy, operation: object) -> bool:
    return isinstance(operation, SyncDir) and operation.path == Path("states")


def no_ledger_sync(disk: Sloppy, operation: object) -> bool:
    return isinstance(operation, Sync) and disk.handles[operation.handle] == "ledger.jsonl"


def no_sync_of_the_ledgers_name(disk: Sloppy, operation: object) -> bool:
    return isinstance(operation, SyncDir) and len(operation.path.parts) == 2


@pytest.mark.parametrize(
    ("forgets", "consequence"),
    [
        (no_data_sync, "false done"),
        (no_directory_sync, "lost"),
        (no_ledger_sync, "lost"),
        (no_sync_of_the_ledgers_name, "lost"),
    ],
)
def test_a_step_left_out_is_caught(
    folders: Callable[[], Path], forgets: Callable[[Sloppy, object], bool], consequence: str
) -> None:
    folder = folders()
    disk = Sloppy(folder, forgets)
    first_life(folder, disk)
    assert finds(consequence, disk.noted(), folders)


def test_settling_a_killed_life_without_syncing_its_ledger_is_caught(folders: Callable[[], Path]) -> None:
    """Killed between the write and the sync of a commit's line: what a recovery then says of the ledger must survive a
    power cut, although nobody ever synced that line."""
    first = record(first_life, folders)
    promise = next(at for at, operation in enumerate(first.operations) if isinstance(operation, Mark))
    assert isinstance(first.operations[promise - 1], Sync)
    model = _replayed(first, promise - 1)
    folder = folders()
    model.killed().materialise(folder)
    second = RecordingDisk(folder)
    second_life(folder, second)
    for forget, faulty in ((SyncFile, True), (type(None), False)):
        model, random, found = _replayed(first, promise - 1), Random(4), False
        for operation in second.operations:
            if isinstance(operation, forget):
                continue
            model.apply(operation)
            if isinstance(operation, Sync | SyncDir):
                found |= any(check(state, folders) for state in model.states(random, 3))
        assert found is faulty


def test_recording_before_the_data_is_caught(folders: Callable[[], Path]) -> None:
    folder = folders()
    disk = RecordingDisk(folder)
    first_life(folder, disk, inner=LedgerFirst(disk))
    assert finds("false done", disk.operations, folders)


def finds(kind: str, operations: list, fresh: Callable[[], Path]) -> bool:  # type: ignore[type-arg]
    random = Random(3)
    return any(
        fault.startswith(kind)
        for _, model in crash_points(operations)
        for state in model.states(random, 6)
        for fault in check(state, fresh)
    )


class LedgerFirst:
    """Notes the sync of a shard's data only after the ledger's next sync: recorded, then durable."""

    def __init__(self, disk: RecordingDisk) -> None:
        self._disk = disk
        self._late: list[Sync] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    def create(self, path: Path) -> File:
        return _Reordered(self._disk.create(path), self._disk, self._late)  # type: ignore[return-value]


class _Reordered:
    def __init__(self, file: File, disk: RecordingDisk, late: list[Sync]) -> None:
        self._file, self._disk, self._late = file, disk, late

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def sync(self) -> None:
        self._file.sync()
        if self._file.path.name.endswith(".safetensors.tmp"):
            sync = self._disk.operations.pop()
            assert isinstance(sync, Sync)
            self._late.append(sync)
        else:
            self._disk.operations += self._late
            self._late.clear()
