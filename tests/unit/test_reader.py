"""Reading states back: threads, fork, pickles, few descriptors, damage; and the reader that docs/format.md shows."""

from __future__ import annotations

import os
import pickle
import re
import threading
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from wellhead.core import Capture, Provenance, sample_id
from wellhead.errors import StoreDamaged
from wellhead.store.atomic import POSIX
from wellhead.store.index import Location
from wellhead.store.pread import ShardFiles
from wellhead.store.reader import StateReader, decode_tensor
from wellhead.store.shard import Codec, SealedShard, ShardWriter

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
CODECS: tuple[Codec, ...] = ("planes-zstd", "raw")
TENSORS = ("r2", "r10", "final")


def capture(seed: int, tokens: int, tensors: tuple[str, ...] = TENSORS) -> Capture:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, tokens, dtype=np.int32)
    states = {name: rng.standard_normal((tokens, 24)).astype(ml_dtypes.bfloat16).view(np.uint16) for name in tensors}
    return Capture(sample_id(ids.tobytes()), ids, states, Provenance("stub", "1"))


class DictIndex:
    """The locations of a list of shards, in a dict."""

    def __init__(self, shards: list[SealedShard]) -> None:
        self.places: dict[tuple[str, str], Location] = {}
        for shard in shards:
            for member in shard.members:
                for tensor, extent in member.sizes.items():
                    place = Location(shard.name, *extent, member.tokens, shard.codec, shard.tables.get(tensor))
                    self.places.setdefault((member.id, tensor), place)

    def locate(self, id: str, tensor: str) -> Location:
        return self.places[id, tensor]


class Run:
    """A run folder of shards, one a list of samples."""

    def __init__(self, root: Path, groups: list[list[Capture]], kind: Codec) -> None:
        self.root, self.samples = root, [sample for group in groups for sample in group]
        states = root / "states"
        states.mkdir()
        self.shards = []
        for number, group in enumerate(groups):
            name = f"wh-x-{number:06d}.safetensors"
            file = POSIX.create(states / name)
            shard = ShardWriter(file, codec=kind, metadata={}, head_room=4096)
            for sample in group:
                shard.add(sample)
            self.shards.append(shard.seal(name))
            file.close()
        self.index = DictIndex(self.shards)
        self.paths = [states / shard.name for shard in self.shards]

    def check(self, reader: StateReader) -> None:
        for sample in self.samples:
            states = reader.read(sample.id, list(sample.states))
            assert list(states) == list(sample.states)
            for tensor, bits in sample.states.items():
                np.testing.assert_array_equal(states[tensor], bits)
            np.testing.assert_array_equal(reader.read_input_ids(sample.id), sample.input_ids)


def groups(count: int) -> list[list[Capture]]:
    return [[capture(10 * at, 3 + at), capture(10 * at + 1, 40)] for at in range(count)]


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("verify", [None, True, False])
def test_every_sample_comes_back(tmp_path: Path, kind: Codec, verify: bool | None) -> None:
    run = Run(tmp_path, [*groups(3), [capture(99, 1025)]], kind)
    run.check(StateReader(tmp_path, run.index, verify=verify))


@pytest.mark.parametrize("kind", CODECS)
def test_arrays_are_the_callers_and_in_the_order_asked_for(tmp_path: Path, kind: Codec) -> None:
    run = Run(tmp_path, groups(1), kind)
    reader = StateReader(tmp_path, run.index)
    sample = run.samples[1]
    states = reader.read(sample.id, ["final", "r2"])
    assert list(states) == ["final", "r2"]
    states["r2"][:] = 0
    np.testing.assert_array_equal(reader.read(sample.id, ["r2"])["r2"], sample.states["r2"])
    ids = reader.read_input_ids(sample.id)
    assert ids.dtype == np.int32
    ids[:] = 0
    assert reader.read(sample.id, []) == {}


def test_a_sample_may_lie_in_two_shards(tmp_path: Path) -> None:
    first, later = capture(1, 9, ("r2", "final")), capture(1, 9, ("r2", "final", "r5"))
    added = Capture(first.id, first.input_ids, {"r5": later.states["r5"]}, first.provenance)
    run = Run(tmp_path, [[first], [added]], "planes-zstd")
    states = StateReader(tmp_path, run.index).read(first.id, ["r5", "r2", "final"])
    np.testing.assert_array_equal(states["r5"], later.states["r5"])
    np.testing.assert_array_equal(states["r2"], first.states["r2"])
    np.testing.assert_array_equal(states["final"], first.states["final"])


def test_what_is_not_stored_is_a_key_error(tmp_path: Path) -> None:
    run = Run(tmp_path, groups(1), "raw")
    with pytest.raises(KeyError):
        StateReader(tmp_path, run.index).read(run.samples[0].id, ["r3"])


def open_descriptors(folder: Path) -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(str(folder) in str(link.readlink()) for link in links if link.is_symlink())


def test_few_files_stay_open_and_close_closes_them(tmp_path: Path) -> None:
    run = Run(tmp_path, groups(7), "planes-zstd")
    reader = StateReader(tmp_path, run.index, open_files=2)
    for _ in range(2):
        run.check(reader)
        assert open_descriptors(tmp_path / "states") == 2
    reader.close()
    assert open_descriptors(tmp_path / "states") == 0
    run.check(reader)
    del reader
    assert open_descriptors(tmp_path / "states") == 0


@pytest.mark.parametrize("kind", CODECS)
def test_threads_share_a_reader(tmp_path: Path, kind: Codec) -> None:
    run = Run(tmp_path, groups(5), kind)
    reader = StateReader(tmp_path, run.index, open_files=1)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(8):
                run.check(reader)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert open_descriptors(tmp_path / "states") <= 1


def test_a_reader_survives_pickling(tmp_path: Path) -> None:
    run = Run(tmp_path, groups(2), "planes-zstd")
    reader = StateReader(tmp_path, run.index)
    run.check(reader)
    copy = pickle.loads(pickle.dumps(reader))
    run.check(copy)
    run.check(reader)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_reads_even_when_a_thread_held_the_lock(tmp_path: Path) -> None:
    run = Run(tmp_path, groups(3), "raw")
    reader = StateReader(tmp_path, run.index, open_files=2)
    run.check(reader)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            run.check(reader)

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                try:
                    run.check(reader)
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    run.check(reader)


@pytest.mark.parametrize("kind", CODECS)
def test_damage_is_named(tmp_path: Path, kind: Codec) -> None:
    run = Run(tmp_path, groups(1), kind)
    good = run.paths[0].read_bytes()
    sample = run.samples[0]
    place = run.index.locate(sample.id, "r10")
    broken = bytearray(good)
    broken[place.offset + place.size // 2] ^= 4
    run.paths[0].write_bytes(broken)
    reader = StateReader(tmp_path, run.index)
    with pytest.raises(StoreDamaged, match=rf"wh-x-000000.safetensors: {sample.id}\.r10: ") as caught:
        reader.read(sample.id, ["r2", "r10"])
    assert "verify" in caught.value.hint
    np.testing.assert_array_equal(reader.read(sample.id, ["r2"])["r2"], sample.states["r2"])
    ids = run.index.locate(sample.id, "input_ids")
    broken[ids.offset] ^= 1
    run.paths[0].write_bytes(broken)
    with pytest.raises(StoreDamaged, match="input_ids: the 12 bytes"):
        reader.read_input_ids(sample.id)


def test_a_damaged_bias_table_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, groups(1), "planes-zstd")
    broken = bytearray(run.paths[0].read_bytes())
    broken[run.shards[0].tables["r2"][0] + 3] ^= 1
    run.paths[0].write_bytes(broken)
    with pytest.raises(StoreDamaged, match="bias table"):
        StateReader(tmp_path, run.index).read(run.samples[1].id, ["r2"])


def test_a_file_that_is_cut_off_or_gone_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, groups(1), "raw")
    os.truncate(run.paths[0], run.shards[0].size - 5)
    with pytest.raises(StoreDamaged, match=f"ends at {run.shards[0].size - 5}"):
        StateReader(tmp_path, run.index).read_input_ids(run.samples[1].id)
    run.paths[0].unlink()
    with pytest.raises(StoreDamaged, match="is missing"):
        StateReader(tmp_path, run.index).read(run.samples[0].id, ["r2"])


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        ShardFiles().read(tmp_path / "folder", 0, 1)
    with pytest.raises(ValueError, match="limit is 0"):
        ShardFiles(0)


def test_reads_many_extents_in_any_order(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8).tobytes()
    (tmp_path / "x").write_bytes(content)
    extents = [(0, 10), (10, 0), (10, 20), (500, 3), (30, 40), (70, 9930), (3, 4)]
    files = ShardFiles()
    found = files.read_many(tmp_path / "x", extents)
    assert [bytes(view) for view in found] == [content[at : at + size] for at, size in extents]
    ones = [(at, 1) for at in range(2000)]
    assert b"".join(files.read_many(tmp_path / "x", ones)) == content[:2000]
    with pytest.raises(StoreDamaged, match="ends at 10000"):
        files.read(tmp_path / "x", 9_990, 11)


@pytest.mark.parametrize(
    ("data", "codec", "tokens", "words"),
    [
        (bytes(12), "raw", 5, "12 bytes are not 5 rows"),
        (bytes(12), "raw", 0, "not 0 rows"),
        (bytes(12), "zip", 2, "'zip' is unknown"),
        (bytes(12), "planes-zstd", 2, "no bias table"),
    ],
)
def test_impossible_tensors_are_refused(data: bytes, codec: str, tokens: int, words: str) -> None:
    with pytest.raises(StoreDamaged, match=words):
        decode_tensor(memoryview(data), codec, tokens, None)


def test_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, groups(1), "planes-zstd")
    sample = run.samples[0]
    place = run.index.places[sample.id, "r2"]
    run.index.places[sample.id, "r2"] = Location(
        place.shard, place.offset, place.size, place.xxh3, place.tokens + 1, place.codec, place.table
    )
    with pytest.raises(StoreDamaged, match="3 rows for 4 tokens"):
        StateReader(tmp_path, run.index).read(sample.id, ["r2"])


def documented_reader() -> types.ModuleType:
    [source] = re.findall(r"```python\n(# A reader.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    module = types.ModuleType("documented")
    exec(compile(source, str(DOCUMENT), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("kind", CODECS)
def test_the_reader_in_the_document_reads_our_shards(tmp_path: Path, kind: Codec) -> None:
    samples = [capture(1, 5), capture(2, 2049), capture(3, 1, ("r10",))]
    run = Run(tmp_path, [samples], kind)
    found: dict[str, dict[str, npt.NDArray[np.generic]]] = documented_reader().read_shard(run.paths[0])
    assert found.keys() == {sample.id for sample in samples}
    for sample in samples:
        assert found[sample.id].keys() == {*sample.states, "input_ids"}
        np.testing.assert_array_equal(found[sample.id]["input_ids"], sample.input_ids)
        for tensor, bits in sample.states.items():
            np.testing.assert_array_equal(found[sample.id][tensor], bits)


def test_the_reader_in_the_document_finds_damage(tmp_path: Path) -> None:
    run = Run(tmp_path, [[capture(1, 5)]], "planes-zstd")
    broken = bytearray(run.paths[0].read_bytes())
    broken[-1] ^= 1
    run.paths[0].write_bytes(broken)
    with pytest.raises(ValueError, match="input_ids"):
        documented_reader().read_shard(run.paths[0])
