"""planes-zstd against a slow decoder that is written from docs/format.md and shares nothing with the fast one."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
import zstandard

from wellhead.errors import StoreDamaged
from wellhead.store import codec

SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80, 0xBF80, 0x7F7F], dtype=np.uint16
)

GOLDEN_BITS = np.array([[0x3F80, 0xBF81, 0x0000], [0x4049, 0x8000, 0x7FC0]], dtype=np.uint16)
GOLDEN_BIAS = np.array([0xFF, 0x00, 0x80], dtype=np.uint8)
GOLDEN = bytes.fromhex(
    "57485030020000000300000000040000"  # "WHP0", 2 tokens, 3 wide, chunks of 1,024 tokens
    "bb75b71c59eb4edb0f000000"  # xxh3 of the values, 15 bytes of zstd frame
    "28b52ffd2006310000807f8081007f"  # the frame: exponents less bias, stored
    "008100498040"  # sign and mantissa
    "00000000000000"  # padding to a multiple of 8
)


def gaussian(tokens: int, hidden: int, seed: int = 0) -> npt.NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, hidden)) * np.exp(rng.normal(0, 1, hidden))
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def slow_decode(data: bytes, bias: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Value by value, as the document says."""
    magic, tokens, hidden, chunk_tokens = struct.unpack_from("<4sIII", data)
    assert magic == b"WHP0"
    chunks = (tokens + chunk_tokens - 1) // chunk_tokens
    at = 16 + 12 * chunks
    rows: list[list[int]] = []
    for number in range(chunks):
        digest, frame_bytes = struct.unpack_from("<QI", data, 16 + 12 * number)
        count = min(chunk_tokens, tokens - number * chunk_tokens)
        exponents = zstandard.ZstdDecompressor().decompress(data[at : at + frame_bytes])
        mantissas = data[at + frame_bytes : at + frame_bytes + count * hidden]
        at += frame_bytes + count * hidden
        raw = b""
        for row in range(count):
            values = []
            for channel in range(hidden):
                low = mantissas[row * hidden + channel]
                exponent = (exponents[row * hidden + channel] + int(bias[channel])) % 256
                values.append((low >> 7) << 15 | exponent << 7 | low & 0x7F)
            rows.append(values)
            raw += struct.pack(f"<{hidden}H", *values)
        assert xxhash.xxh3_64_intdigest(raw) == digest
    assert not any(data[at:])
    assert len(data) == at + (-at % 8)
    return np.array(rows, dtype=np.uint16)


def encoded(bits: npt.NDArray[np.uint16], bias: npt.NDArray[np.uint8]) -> bytes:
    return b"".join(bytes(piece) for piece in codec.encode(bits, bias))


@pytest.mark.parametrize("tokens", [1, 2, 1023, 1024, 1025, 2049])
@pytest.mark.parametrize("hidden", [1, 7])
def test_what_is_encoded_is_what_the_document_says(tokens: int, hidden: int) -> None:
    bits = np.random.default_rng(tokens).integers(0, 1 << 16, (tokens, hidden), dtype=np.uint16)
    bias = codec.bias_table(bits)
    data = encoded(bits, bias)
    np.testing.assert_array_equal(slow_decode(data, bias), bits)
    np.testing.assert_array_equal(codec.decode(data, bias), bits)


@pytest.mark.parametrize("shape", [(1, 12), (3, 4), (12, 1), (1, 70_001), (130, 577)])
def test_special_values_come_back_bit_for_bit(shape: tuple[int, int]) -> None:
    bits = np.resize(SPECIAL, shape)
    for bias in (codec.bias_table(bits), np.zeros(shape[1], np.uint8), np.full(shape[1], 255, np.uint8)):
        np.testing.assert_array_equal(codec.decode(encoded(bits, bias), bias), bits)


def test_every_bit_pattern_there_is() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    bias = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(codec.decode(encoded(bits, bias), bias), bits)


def test_a_pinned_tensor_still_decodes() -> None:
    np.testing.assert_array_equal(slow_decode(GOLDEN, GOLDEN_BIAS), GOLDEN_BITS)
    np.testing.assert_array_equal(codec.decode(GOLDEN, GOLDEN_BIAS), GOLDEN_BITS)


def test_the_decoded_array_is_the_callers_own() -> None:
    bits = codec.decode(GOLDEN, GOLDEN_BIAS)
    assert bits.flags.writeable
    assert bits.flags.owndata
    assert bits.dtype == np.uint16


def test_the_input_is_not_changed_and_may_be_strided_or_mapped(tmp_path: Path) -> None:
    stacked = np.stack([gaussian(1100, 24), gaussian(1100, 24, seed=1)], axis=1)
    np.save(tmp_path / "x.npy", stacked)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")[:, 1]
    bias = codec.bias_table(mapped)
    np.testing.assert_array_equal(codec.decode(encoded(mapped, bias), bias), stacked[:, 1])


def test_bias_is_the_median_exponent_of_each_channel() -> None:
    bits = np.full((97, 3), 0x3F80, np.uint16)  # exponent 127
    bits[:, 1] = 0xC100  # -8.0: exponent 130
    bits[:, 2] = 0x0000
    bits[::10] = 0x7F80  # some rows far out
    np.testing.assert_array_equal(codec.bias_table(bits), np.array([127 - 128, 130 - 128, 0 - 128]) % 256)


def test_gaussian_states_take_two_thirds() -> None:
    states = gaussian(2000, 576)
    bits, later = states[:1024], states[1500:]
    bias = codec.bias_table(bits)
    assert len(encoded(bits, bias)) / bits.nbytes < 0.668
    assert len(encoded(later, bias)) / later.nbytes < 0.670


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1), (1, 64), (1025, 3), (300, 640)])
def test_the_bound_holds_for_noise_and_the_table_for_its_size(tokens: int, hidden: int) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 16, (tokens, hidden), dtype=np.uint16)
    data = encoded(bits, codec.bias_table(bits))
    assert len(data) <= codec.max_encoded_bytes(tokens, hidden)
    assert len(data) % 8 == 0
    table = codec.read_table(data)
    assert len(table.to_bytes()) == codec.table_bytes(tokens) == 16 + 12 * len(table.entries)
    assert data.startswith(table.to_bytes())


def test_any_flipped_bit_is_found() -> None:
    bits = gaussian(5, 16)
    bias = codec.bias_table(bits)
    data = encoded(bits, bias)
    for position in range(len(data) * 8):
        broken = bytearray(data)
        broken[position // 8] ^= 1 << position % 8
        try:
            result = codec.decode(broken, bias)
        except StoreDamaged:
            continue
        np.testing.assert_array_equal(result, bits)  # zstd's header has bits without a meaning


def test_a_wrong_bias_table_is_found() -> None:
    bits = gaussian(5, 16)
    bias = codec.bias_table(bits)
    other = bias.copy()
    other[3] += 1
    with pytest.raises(StoreDamaged, match="chunk 0 do not have the hash"):
        codec.decode(encoded(bits, bias), other)
    with pytest.raises(StoreDamaged, match="16 wide, its bias table 15"):
        codec.decode(encoded(bits, bias), bias[:15])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (b"WHP0" + b"\0" * 11, "too few"),
        (b"ELF0" + struct.pack("<III", 2, 3, 1024), "does not start"),
        (b"WHP0" + struct.pack("<III", 0, 3, 1024), "does not start"),
        (b"WHP0" + struct.pack("<III", 2, 3, 0), "does not start"),
        (b"WHP0" + struct.pack("<III", 2**32 - 1, 2**32 - 1, 1), "claims 4294967295 x 4294967295 values in 16 bytes"),
        (b"WHP0" + struct.pack("<III", 2**32 - 1, 1, 2**32 - 1), "claims"),
        (GOLDEN[:-1], "accounts for 49 of 55 bytes"),
        (GOLDEN + b"\0", "accounts for 49 of 57 bytes"),
        (GOLDEN[:-1] + b"\1", "accounts for"),
    ],
)
def test_hostile_tables_are_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(StoreDamaged, match=words):
        codec.decode(data, np.zeros(3, np.uint8))


def with_frame(frame: bytes) -> bytes:
    """A tensor of 1 x 64 zeros whose exponent plane is `frame`."""
    values = xxhash.xxh3_64_intdigest(bytes(128))
    data = b"WHP0" + struct.pack("<IIIQI", 1, 64, 1024, values, len(frame)) + frame + bytes(64)
    return data + bytes(-len(data) % 8)


def test_frames_that_claim_or_hold_something_else_are_refused() -> None:
    bias = np.zeros(64, np.uint8)
    good = zstandard.compress(bytes(64))
    np.testing.assert_array_equal(codec.decode(with_frame(good), bias), np.zeros((1, 64), np.uint16))
    bomb = zstandard.compress(bytes(1 << 26))
    for frame in (b"", b"\0", good[:-1], good + good, good + b"\0", bomb, zstandard.compress(bytes(63))):
        with pytest.raises(StoreDamaged, match="frame of chunk 0"):
            codec.decode(with_frame(frame), bias)
    no_size = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
    with pytest.raises(StoreDamaged, match="is not one of 64 bytes"):
        codec.decode(with_frame(no_size), bias)


@pytest.mark.parametrize(
    "bits",
    [np.zeros((0, 4), np.uint16), np.zeros((4, 3), np.uint16), np.zeros(4, np.uint16), np.zeros((4, 4), np.float32)],
)
def test_what_is_no_state_is_refused(bits: npt.NDArray[np.uint16]) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        encoded(bits, np.zeros(4, np.uint8))


def test_threads_do_not_share_contexts() -> None:
    samples = [gaussian(200 + 50 * seed, 576, seed) for seed in range(6)]
    failures: list[object] = []

    def work(bits: npt.NDArray[np.uint16]) -> None:
        bias = codec.bias_table(bits)
        results = (codec.decode(encoded(bits, bias), bias) for _ in range(20))
        failures.extend(bits.shape for result in results if not np.array_equal(result, bits))

    threads = [threading.Thread(target=work, args=(bits,)) for bits in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
