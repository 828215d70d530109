"""The whole store against a dictionary: any sequence of adds, commits, kills, restarts and losses."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wellhead.core import Capture, Provenance, sample_id
from wellhead.store.index import StoreIndex
from wellhead.store.life import Life
from wellhead.store.lock import RunLock
from wellhead.store.reader import StateReader
from wellhead.store.recovery import recover
from wellhead.store.writer import StoreOptions, StoreWriter

FINGERPRINT = "0123456789abcdef" * 2
TENSORS = ("r2", "r5", "final")
SAMPLES = 6
HIDDEN = 8


def bits(sample: int, tensor: str) -> np.ndarray:
    rng = np.random.default_rng([sample, TENSORS.index(tensor)])
    return rng.integers(0x3F00, 0x4100, (3 + sample, HIDDEN), dtype=np.uint16)


def input_ids(sample: int) -> np.ndarray:
    return np.arange(sample, 2 * sample + 3, dtype=np.int32)


def id_of(sample: int) -> str:
    return sample_id(input_ids(sample).astype("<i4").tobytes())


class StoreMachine(RuleBasedStateMachine):
    """`held` is the model: (sample, tensor) -> the shards that hold it, as far as they were acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.run = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None, prefix="wellhead-machine-"))
        self.held: dict[tuple[int, str], set[str]] = {}
        self.open: list[tuple[int, str]] = []
        self.quarantined: dict[int, str] = {}

    @initialize(codec=st.sampled_from(["planes-zstd", "raw"]))
    def begin(self, codec: str) -> None:
        self.options = StoreOptions(codec=codec, shard_bytes=4000)  # type: ignore[arg-type]
        self.start()

    def start(self) -> None:
        life = replace(Life.this_process(), start_time=1.0)
        self.lock = RunLock.acquire(self.run, life)
        self.writer = StoreWriter(self.run, life, FINGERPRINT, self.options)
        self.report = recover(self.run, self.writer)

    def acknowledge(self, shard: str) -> None:
        for sample, tensor in self.open:
            self.held.setdefault((sample, tensor), set()).add(shard)
            self.quarantined.pop(sample, None)
        self.open = []

    @rule(sample=st.integers(0, SAMPLES - 1), tensors=st.sets(st.sampled_from(TENSORS), min_size=1))
    def add(self, sample: int, tensors: set[str]) -> None:
        states = {tensor: bits(sample, tensor) for tensor in sorted(tensors)}
        early = self.writer.add(Capture(id_of(sample), input_ids(sample), states, Provenance("stub", "1")))
        if early is not None:
            self.acknowledge(early.shard)
        self.open += [(sample, tensor) for tensor in tensors]

    @rule()
    def commit(self) -> None:
        commit = self.writer.commit()
        assert (commit is None) == (not self.open)
        if commit is not None:
            self.acknowledge(commit.shard)

    @rule(sample=st.integers(0, SAMPLES - 1))
    def quarantine(self, sample: int) -> None:
        self.writer.quarantine(id_of(sample), "zero_rows", f"sample {sample}")
        self.quarantined[sample] = f"sample {sample}"

    @rule()
    def stop_and_restart(self) -> None:
        self.writer.close()
        self.lock.release()
        self.open = []
        self.start()

    @rule()
    def kill_and_restart(self) -> None:
        """The process is gone, its temp file and its lock are still there."""
        self.open = []
        self.start()

    @rule()
    @precondition(lambda self: self.open)
    def kill_before_the_record_and_restart(self) -> None:
        """Published, and killed in the middle of the ledger's line: the next life adopts the shard."""
        commit = self.writer.commit()
        assert commit is not None
        ledger = self.run / "writers" / self.writer.life.id / "ledger.jsonl"
        data = ledger.read_bytes()
        last = data.splitlines(keepends=True)[-1]
        ledger.write_bytes(data[: len(data) - len(last) // 2])
        self.start()
        assert self.report.adopted == [commit.shard]
        self.acknowledge(commit.shard)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def lose_a_shard_and_restart(self, data: st.DataObject) -> None:
        shards = sorted(set().union(*self.held.values()))
        shard = data.draw(st.sampled_from(shards))
        (self.run / "states" / shard).unlink()
        self.kill_and_restart()
        assert self.report.tombstoned == [shard]
        self.held = {key: left for key, where in self.held.items() if (left := where - {shard})}

    @invariant()
    def the_index_says_what_the_model_says(self) -> None:
        index = StoreIndex.load(self.run, FINGERPRINT)
        assert index.problems == []
        samples = {sample for sample, _ in self.held}
        assert index.ids() == sorted(map(id_of, samples))
        assert index.samples == len(samples)
        assert index.tokens == sum(3 + sample for sample in samples)
        assert index.raw_bytes == sum((3 + sample) * HIDDEN * 2 for sample, _ in self.held)
        assert {shard.name for shard in index.shards} == set().union(*self.held.values())
        everything = [id_of(sample) for sample in range(SAMPLES)]
        lacking = {id_of(s): tuple(t for t in TENSORS if (s, t) not in self.held) for s in range(SAMPLES)}
        assert index.missing(everything, TENSORS) == {id: names for id, names in lacking.items() if names}
        reader = StateReader(self.run, index)
        for (sample, tensor), where in self.held.items():
            assert index.locate(id_of(sample), tensor).shard == min(where)
            np.testing.assert_array_equal(reader.read(id_of(sample), [tensor])[tensor], bits(sample, tensor))
        for sample in samples:
            np.testing.assert_array_equal(reader.read_input_ids(id_of(sample)), input_ids(sample))
        reader.close()

    @invariant()
    def quarantines_count_until_a_later_commit(self) -> None:
        found = StoreIndex.load(self.run).quarantined
        assert {id: record.detail for id, record in found.items()} == {
            id_of(sample): detail for sample, detail in self.quarantined.items()
        }

    @invariant()
    def nothing_is_left_over(self) -> None:
        temps = [path for path in (self.run / "states").iterdir() if path.name.startswith(".")]
        assert len(temps) == (1 if self.open else 0)
        assert not [path for path in self.run.iterdir() if path.name.startswith(".")]

    def teardown(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
