"""Shards against the safetensors library, against their own head, and on disks that refuse. Hostile heads are in
test_head.py."""

from __future__ import annotations

import errno
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy
import xxhash

from wellhead.core import Capture, Provenance, sample_id
from wellhead.errors import StoreDamaged
from wellhead.store import codec
from wellhead.store.atomic import POSIX, File
from wellhead.store.pread import PIECE_BYTES
from wellhead.store.shard import Codec, SealedShard, ShardWriter, damaged_tensors, estimate_head_room, read_head

if TYPE_CHECKING:
    from typing_extensions import Buffer

METADATA = {"fingerprint": "ab" * 16, "provenance": '{"engine":"stub","version":"1","details":{}}'}
NAME = "wh-x-000001.safetensors"
CODECS: tuple[Codec, ...] = ("planes-zstd", "raw")


def capture(seed: int, tokens: int, tensors: tuple[str, ...] = ("r2", "r10", "final"), hidden: int = 16) -> Capture:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, tokens, dtype=np.int32)
    states = {
        name: rng.standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16).view(np.uint16) for name in tensors
    }
    return Capture(sample_id(ids.tobytes()), ids, states, Provenance("stub", "1"))


def writer(path: Path, kind: Codec, head_room: int = 8192) -> tuple[File, ShardWriter]:
    file = POSIX.create(path)
    return file, ShardWriter(file, codec=kind, metadata=METADATA, head_room=head_room)


def write(path: Path, captures: list[Capture], kind: Codec, head_room: int = 8192) -> SealedShard:
    file, shard = writer(path, kind, head_room)
    for item in captures:
        shard.add(item)
    sealed = shard.seal(path.name)
    file.close()
    return sealed


def stored(path: Path, sealed: SealedShard, item: Capture, tensor: str) -> npt.NDArray[np.uint16]:
    """A state read back with nothing but the offsets, the file and the codec."""
    content = path.read_bytes()
    [member] = [member for member in sealed.members if member.id == item.id]
    offset, size, xxh3 = member.sizes[tensor]
    data = content[offset : offset + size]
    assert xxhash.xxh3_64_intdigest(data) == xxh3
    if sealed.codec == "raw":
        return np.frombuffer(data, np.uint16).reshape(member.tokens, -1)
    offset, size, xxh3 = sealed.tables[tensor]
    assert xxhash.xxh3_64_intdigest(content[offset : offset + size]) == xxh3
    return codec.decode(data, np.frombuffer(content[offset : offset + size], np.uint8))


SAMPLES = [capture(1, 5), capture(2, 1, ("r10",)), capture(3, 1025), capture(4, 7, ("r31", "final"))]


@pytest.mark.parametrize("kind", CODECS)
def test_what_was_added_is_in_the_file(tmp_path: Path, kind: Codec) -> None:
    path = tmp_path / NAME
    sealed = write(path, SAMPLES, kind)
    assert [(member.id, member.tokens) for member in sealed.members] == [(s.id, s.tokens) for s in SAMPLES]
    assert sealed.tensors == ("r2", "r10", "r31", "final", "input_ids")
    assert sealed.raw_bytes == sum(sample.raw_bytes for sample in SAMPLES)
    assert sealed.size == path.stat().st_size
    assert sealed.name == NAME
    assert set(sealed.tables) == (set() if kind == "raw" else {"r2", "r10", "r31", "final"})
    for sample, member in zip(SAMPLES, sealed.members, strict=True):
        assert set(member.sizes) == {*sample.states, "input_ids"}
        for tensor, bits in sample.states.items():
            np.testing.assert_array_equal(stored(path, sealed, sample, tensor), bits)
        offset, size, _ = member.sizes["input_ids"]
        assert path.read_bytes()[offset : offset + size] == sample.input_ids.astype("<i4").tobytes()


@pytest.mark.parametrize("kind", CODECS)
def test_the_head_alone_says_the_same(tmp_path: Path, kind: Codec) -> None:
    path = tmp_path / NAME
    sealed = write(path, SAMPLES, kind)
    assert read_head(path) == sealed
    assert sealed.metadata == {"schema": "0", "codec": kind, **METADATA}
    assert sealed.head_xxh3 == xxhash.xxh3_64_intdigest(path.read_bytes()[: sealed.head_size])
    assert damaged_tensors(path, sealed) == []


def test_a_raw_shard_is_plain_safetensors(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write(path, SAMPLES, "raw")
    arrays = safetensors.numpy.load_file(path)
    assert len(arrays) == 4 + sum(len(sample.states) for sample in SAMPLES)
    for sample in SAMPLES:
        np.testing.assert_array_equal(arrays[f"{sample.id}.input_ids"], sample.input_ids)
        for tensor, bits in sample.states.items():
            array = arrays[f"{sample.id}.{tensor}"]
            assert array.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(array.view(np.uint16), bits)


def test_a_raw_shard_opens_in_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    path = tmp_path / NAME
    write(path, SAMPLES, "raw")
    tensors = load_file(path)
    tensor = tensors[f"{SAMPLES[2].id}.final"]
    assert tensor.dtype == torch.bfloat16
    expected = SAMPLES[2].states["final"].view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(tensor.float().numpy(), expected)


def test_an_encoded_shard_is_safetensors_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write(path, SAMPLES, "planes-zstd")
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata()["codec"] == "planes-zstd"
        assert opened.metadata()["fingerprint"] == METADATA["fingerprint"]
        for sample in SAMPLES:
            np.testing.assert_array_equal(opened.get_tensor(f"{sample.id}.input_ids"), sample.input_ids)
            for tensor, bits in sample.states.items():
                data = opened.get_tensor(f"{sample.id}.{tensor}")
                np.testing.assert_array_equal(codec.decode(data.data, opened.get_tensor(f"bias.{tensor}")), bits)


@pytest.mark.parametrize("kind", CODECS)
def test_numbers_start_where_they_are_aligned(tmp_path: Path, kind: Codec) -> None:
    sealed = write(tmp_path / NAME, SAMPLES, kind)
    offsets = [extent.offset for member in sealed.members for extent in member.sizes.values()]
    assert all(offset % 4 == 0 for offset in offsets)


def test_the_head_room_left_over_is_under_half_a_percent(tmp_path: Path) -> None:
    small = write(tmp_path / "a", [capture(1, 300)], "planes-zstd", head_room=1 << 20)
    text = (tmp_path / "a").read_bytes()[8 : small.head_size]
    assert len(text) - len(text.rstrip()) < 8
    assert read_head(tmp_path / "a") == small
    np.testing.assert_array_equal(stored(tmp_path / "a", small, capture(1, 300), "r10"), capture(1, 300).states["r10"])

    big = [capture(seed, 1024, hidden=512) for seed in range(3)]
    kept = write(tmp_path / "b", big, "raw", head_room=40_000)  # 9.4 MB: left as it is
    assert kept.head_size == 40_000
    moved = write(tmp_path / "c", big, "raw", head_room=60_000)
    assert moved.head_size < 3000
    assert moved.size == (tmp_path / "c").stat().st_size == kept.size - kept.head_size + moved.head_size
    assert damaged_tensors(tmp_path / "c", moved) == []


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize(("tokens", "hidden"), [(20, 576), (300, 576), (2000, 64)])
def test_the_estimate_holds_64_mib_and_no_more_than_needed(kind: Codec, tokens: int, hidden: int) -> None:
    first = capture(0, tokens, hidden=hidden)
    room = estimate_head_room(first, kind, METADATA)
    assert room <= 16 << 20
    per_sample = (first.raw_bytes * (1 if kind == "raw" else 0.67)) + 4 * tokens
    needed = (64 << 20) / per_sample * (len(first.states) + 1) * 120
    assert room == pytest.approx(max(needed, 0.004 * (64 << 20)), rel=0.3)
    assert estimate_head_room(first, kind, METADATA, shard_bytes=1000) < 5000


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("shard_bytes", [1, 5000, 1 << 20, 1 << 30])
@pytest.mark.parametrize("tokens", [1, 99, 4000])
def test_the_first_sample_always_fits_its_estimate(tmp_path: Path, kind: Codec, shard_bytes: int, tokens: int) -> None:
    first = capture(0, tokens, ("r2", "final"))
    file, shard = writer(tmp_path / NAME, kind, estimate_head_room(first, kind, METADATA, shard_bytes))
    assert shard.fits(first)
    shard.add(first)
    assert shard.fits(capture(1, tokens, ("r2", "final")))
    file.close()


@pytest.mark.parametrize("kind", CODECS)
def test_fits_until_the_head_is_full_and_never_lies(tmp_path: Path, kind: Codec) -> None:
    file, shard = writer(tmp_path / NAME, kind, head_room=3000)
    added: list[Capture] = []
    for seed in range(100):
        item = capture(seed, 3 + seed)
        if not shard.fits(item):
            break
        shard.add(item)
        added.append(item)
    with pytest.raises(ValueError, match="no room"):
        shard.add(item)
    assert shard.members_count == len(added)
    assert shard.tokens == sum(item.tokens for item in added)
    assert shard.raw_bytes == sum(item.raw_bytes for item in added)
    sealed = shard.seal(NAME)
    assert read_head(tmp_path / NAME) == sealed
    text = (tmp_path / NAME).read_bytes()[8 : sealed.head_size].rstrip()
    assert 2300 < len(text) + 8 <= 3000
    file.close()


def test_a_sample_that_is_here_does_not_fit_again(tmp_path: Path) -> None:
    file, shard = writer(tmp_path / NAME, "raw")
    shard.add(SAMPLES[0])
    assert not shard.fits(SAMPLES[0])
    assert shard.fits(SAMPLES[1])
    file.close()


@pytest.mark.parametrize("kind", CODECS)
def test_mapped_samples_stream(tmp_path: Path, kind: Codec) -> None:
    item = capture(9, 3000, ("r2",))
    np.save(tmp_path / "x.npy", item.states["r2"])
    mapped = replace(item, states={"r2": np.load(tmp_path / "x.npy", mmap_mode="r")})
    sealed = write(tmp_path / NAME, [mapped], kind)
    np.testing.assert_array_equal(stored(tmp_path / NAME, sealed, item, "r2"), item.states["r2"])
    if kind == "planes-zstd":
        offset, size, _ = sealed.members[0].sizes["r2"]
        whole = b"".join(bytes(p) for p in codec.encode(item.states["r2"], codec.bias_table(item.states["r2"])))
        assert (tmp_path / NAME).read_bytes()[offset : offset + size] == whole


@pytest.mark.parametrize("kind", CODECS)
def test_a_long_sample_is_not_held_in_memory(tmp_path: Path, kind: Codec) -> None:
    tokens, hidden = 40_000, 64
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.integers(0, 1 << 16, (tokens, hidden), dtype=np.uint16))  # 5.1 MB
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    file, shard = writer(tmp_path / NAME, kind)
    shard.add(capture(1, 1100, ("r2",), hidden=hidden))  # fills the thread's scratch memory
    long = replace(capture(2, tokens, ("r2",), hidden=1), states={"r2": mapped})
    tracemalloc.start()
    shard.add(long)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file.close()
    chunk = 1024 * hidden * 2
    assert peak < 2 * PIECE_BYTES + 3 * chunk


class Budget:
    """A file on a disk that has room for `left` more bytes."""

    def __init__(self, file: File, left: int) -> None:
        self._file = file
        self.left = left

    @property
    def path(self) -> Path:
        return self._file.path

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._file.write(view[: self.left])
        written = min(self.left, view.nbytes)
        self.left -= written
        if written < view.nbytes:
            raise OSError(errno.ENOSPC, "No space left on device")

    def pwrite(self, data: Buffer, offset: int) -> None:
        self._file.pwrite(data, offset)

    def truncate(self, size: int) -> None:
        self.left += self.path.stat().st_size - size
        self._file.truncate(size)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("room", [0, 10, 200, 2000, 60_000, 130_000])
def test_a_full_disk_costs_only_the_sample_in_hand(tmp_path: Path, kind: Codec, room: int) -> None:
    file = Budget(POSIX.create(tmp_path / NAME), 1 << 30)
    shard = ShardWriter(file, codec=kind, metadata=METADATA, head_room=4096)
    shard.add(SAMPLES[1])
    before = shard.bytes_written
    file.left = room
    failing = capture(5, 6000)
    with pytest.raises(OSError, match="No space"):
        shard.add(failing)
    assert shard.bytes_written == before == (tmp_path / NAME).stat().st_size
    assert (shard.members_count, shard.tokens, shard.raw_bytes) == (1, 1, SAMPLES[1].raw_bytes)
    file.left = 1 << 30
    shard.add(SAMPLES[0])
    sealed = shard.seal(NAME)
    file.close()
    assert [member.id for member in sealed.members] == [SAMPLES[1].id, SAMPLES[0].id]
    assert read_head(tmp_path / NAME) == sealed
    assert damaged_tensors(tmp_path / NAME, sealed) == []
    for sample in (SAMPLES[1], SAMPLES[0]):
        for tensor, bits in sample.states.items():
            np.testing.assert_array_equal(stored(tmp_path / NAME, sealed, sample, tensor), bits)


def test_sealing_takes_no_space(tmp_path: Path) -> None:
    file = Budget(POSIX.create(tmp_path / NAME), 1 << 30)
    shard = ShardWriter(file, codec="raw", metadata=METADATA, head_room=4096)
    shard.add(SAMPLES[1])
    file.left = 0
    with pytest.raises(OSError, match="No space"):
        shard.add(SAMPLES[0])
    size = (tmp_path / NAME).stat().st_size
    sealed = shard.seal(NAME)
    assert sealed.size == size == sealed.head_size + 1 * 16 * 2 + 4
    assert sealed.head_size == 4096
    file.close()


@pytest.mark.parametrize(
    "broken",
    [
        lambda c: replace(c, id="r3"),
        lambda c: replace(c, states={}),
        lambda c: replace(c, states={"layer3": c.states["r2"]}),
        lambda c: replace(c, states={"r2": c.states["r2"][:-1]}),
        lambda c: replace(c, states={"r2": c.states["r2"].astype(np.int16)}),
        lambda c: replace(c, states={"r2": c.states["r2"][:, :8]}),
    ],
)
def test_what_is_no_sample_is_refused_and_leaves_nothing(tmp_path: Path, broken: Callable[[Capture], Capture]) -> None:
    file, shard = writer(tmp_path / NAME, "planes-zstd")
    shard.add(SAMPLES[0])
    before = shard.bytes_written
    with pytest.raises(ValueError):
        shard.add(broken(capture(8, 6)))
    assert shard.bytes_written == before == (tmp_path / NAME).stat().st_size
    assert shard.seal(NAME) == read_head(tmp_path / NAME)
    file.close()


def test_an_empty_shard_is_not_sealed_and_own_names_are_not_metadata(tmp_path: Path) -> None:
    file, shard = writer(tmp_path / NAME, "raw")
    with pytest.raises(ValueError, match="without samples"):
        shard.seal(NAME)
    file.close()
    for name in ("schema", "codec", "xxh3"):
        with pytest.raises(ValueError, match=name):
            ShardWriter(POSIX.create(tmp_path / name), codec="raw", metadata={name: ""}, head_room=100)


@pytest.mark.parametrize("kind", CODECS)
def test_flipped_bits_are_found(tmp_path: Path, kind: Codec) -> None:
    path = tmp_path / NAME
    sealed = write(path, SAMPLES[:2], kind)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    names = {m.id + "." + t: e for m in sealed.members for t, e in m.sizes.items()}
    names |= {f"bias.{t}": e for t, e in sealed.tables.items()}
    for name, (offset, size, _) in names.items():
        broken = bytearray(good)
        broken[offset + int(rng.integers(size))] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        assert damaged_tensors(path, sealed) == [name]
        assert read_head(path) == sealed  # the head does not look at data
    for position in [*range(10), *range(10, sealed.head_size, 7)]:
        broken = bytearray(good)
        broken[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        try:
            found = read_head(path).head_xxh3
        except StoreDamaged:
            continue
        assert found != sealed.head_xxh3


@pytest.mark.parametrize("kind", CODECS)
def test_a_file_cut_off_or_too_long_is_no_shard(tmp_path: Path, kind: Codec) -> None:
    path = tmp_path / NAME
    sealed = write(path, SAMPLES[:2], kind)
    good = path.read_bytes()
    for size in (0, 3, 8, 9, sealed.head_size - 1, sealed.head_size, sealed.size - 1):
        path.write_bytes(good[:size])
        with pytest.raises(StoreDamaged):
            read_head(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(StoreDamaged, match="its tensors take"):
        read_head(path)
    path.unlink()
    with pytest.raises(StoreDamaged, match="no such shard"):
        read_head(path)
