"""`planes-zstd`: bf16 states without loss in about two thirds of their bytes. The bytes are defined in docs/format.md.

The mantissa of an activation is noise, its exponent is not: given the channel it carries about 2.6 of 8 bits. So the
sign is rotated into the mantissa's byte, a bias per channel is taken off the exponent byte, the exponent plane is
coded by zstd's Huffman stage alone (looking for matches costs speed and finds nothing) and the mantissa plane is
stored as it is. Bits are never changed, whatever they mean: NaN, infinity, -0 and subnormals come back as they were.

Every function may be called from several threads; each keeps its own zstd contexts and scratch memory (about one
chunk's exponent plane).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from wellhead.errors import StoreDamaged

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from wellhead.core import Bits

CHUNK_TOKENS = 1024
MAGIC = b"WHP0"

_HEADER = struct.Struct("<4sIII")
_ENTRY = struct.Struct("<QI")
_ALIGNMENT = 8
_EXPONENT_SHIFT = np.uint16(7)
_EXPONENT_STEP = np.uint16(1 << 7)
_MANTISSA = np.uint8(0x7F)
_SIGN = np.uint8(0x80)
_BIAS_ROWS = 48
_BLOCK_VALUES = 1 << 16
"""Values worked on at a time: their few scratch arrays fit into the second-level cache."""

# Strategy fast with target_length 0 keeps the Huffman stage on; a tiny hash table and long matches keep LZ from
# finding any. The window only sets zstd's block size: 128 KiB, the largest.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
)


class ChunkEntry(NamedTuple):
    """A row of the chunk table."""

    xxh3: int
    """XXH3-64 of the chunk's bf16 values, little-endian, in row order: of the raw bytes, not of the stored ones."""
    frame_bytes: int
    """Length of the zstd frame of the chunk's exponent plane; the mantissa plane follows it."""


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """What stands at the head of an encoded tensor."""

    tokens: int
    hidden_size: int
    chunk_tokens: int
    entries: list[ChunkEntry]

    def to_bytes(self) -> bytes:
        header = _HEADER.pack(MAGIC, self.tokens, self.hidden_size, self.chunk_tokens)
        return header + b"".join(_ENTRY.pack(*entry) for entry in self.entries)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the whole tensor, without the padding at its end."""
        frames = sum(entry.frame_bytes for entry in self.entries)
        return table_bytes(self.tokens, self.chunk_tokens) + frames + self.tokens * self.hidden_size


def table_bytes(tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Size of the chunk table of a tensor of that many tokens."""
    return _HEADER.size + -(-tokens // chunk_tokens) * _ENTRY.size


def max_encoded_bytes(tokens: int, hidden_size: int) -> int:
    """An upper bound of the encoded size, for any bits (zstd stores what it cannot compress)."""
    chunks = -(-tokens // CHUNK_TOKENS)
    frames = tokens * hidden_size + (tokens * hidden_size >> 8) + 64 * chunks
    return table_bytes(tokens) + frames + tokens * hidden_size + _ALIGNMENT


def padding(stored_bytes: int) -> bytes:
    """The zero bytes that end a tensor: its size is a multiple of 8, and what follows it stays aligned."""
    return bytes(-stored_bytes % _ALIGNMENT)


def bias_table(bits: Bits) -> NDArray[np.uint8]:
    """Per channel the median exponent of some 48 rows spread over the sample, less 128 (mod 256): uint8 [H].

    Any table is lossless; a good one brings each channel's exponents to the same few symbols. One table a layer and
    shard, from the shard's first sample, since computing it for each short sample would halve the speed.
    """
    rows = bits[:: max(1, len(bits) // _BIAS_ROWS)]
    exponents = (rows >> _EXPONENT_SHIFT).astype(np.uint8)
    middle = len(exponents) // 2
    median: NDArray[np.uint8] = np.partition(exponents, middle, axis=0)[middle]
    return median - np.uint8(128)


def encode(bits: Bits, bias: NDArray[np.uint8]) -> list[Buffer]:
    """Encodes [T, H] bf16 bits (T, H ≥ 1): the pieces, in order, of the tensor's bytes. Holds all of them.

    A long sample is better written chunk by chunk: `chunks`, `encode_chunk`, then the table in front.
    """
    entries: list[ChunkEntry] = []
    pieces: list[Buffer] = [b""]
    for chunk in chunks(bits):
        entry, *planes = encode_chunk(chunk, bias)
        entries.append(entry)
        pieces += planes
    table = ChunkTable(len(bits), bits.shape[1], CHUNK_TOKENS, entries)
    pieces[0] = table.to_bytes()
    return [*pieces, padding(table.stored_bytes)]


def chunks(bits: Bits) -> Iterator[Bits]:
    """The sample in pieces of `CHUNK_TOKENS` rows, the last one shorter, each C-contiguous."""
    if bits.size == 0:
        raise ValueError(f"a sample of shape {bits.shape} holds no values")
    for start in range(0, len(bits), CHUNK_TOKENS):
        yield np.ascontiguousarray(bits[start : start + CHUNK_TOKENS])


def encode_chunk(chunk: Bits, bias: NDArray[np.uint8]) -> tuple[ChunkEntry, bytes, Buffer]:
    """One chunk: its table row, the zstd frame of its exponent plane, its mantissa plane."""
    if chunk.dtype != np.uint16 or chunk.ndim != 2 or bias.shape != chunk.shape[1:] or chunk.size == 0:
        raise ValueError(f"cannot encode {chunk.dtype} {chunk.shape} with a bias table of shape {bias.shape}")
    exponents = _LOCAL.exponents(chunk.size).reshape(chunk.shape)
    mantissas = np.empty(chunk.shape, np.uint8)
    values = xxhash.xxh3_64()
    for rows in _row_blocks(chunk):
        values.update(chunk[rows].data)
        _split(chunk[rows], bias, exponents[rows], mantissas[rows])
    frame = _LOCAL.compressor.compress(exponents.data)
    return ChunkEntry(values.intdigest(), len(frame)), frame, mantissas.data


def read_table(data: Buffer) -> ChunkTable:
    """The chunk table of a whole encoded tensor. StoreDamaged unless it accounts for every byte of the tensor."""
    view = memoryview(data).cast("B")
    if view.nbytes < _HEADER.size:
        raise _damaged(f"{view.nbytes} bytes are too few for a chunk table")
    magic, tokens, hidden, chunk_tokens = _HEADER.unpack_from(view)
    if magic != MAGIC or not tokens or not hidden or not chunk_tokens:
        raise _damaged("the chunk table does not start as one")
    # The mantissa plane is stored as it is, so an honest table cannot claim more values than there are bytes: this
    # also bounds all that decoding allocates by twice the size of the input.
    head = table_bytes(tokens, chunk_tokens)
    if head + tokens * hidden > view.nbytes:
        raise _damaged(f"the chunk table claims {tokens} x {hidden} values in {view.nbytes} bytes")
    entries = [ChunkEntry(*row) for row in _ENTRY.iter_unpack(view[_HEADER.size : head])]
    table = ChunkTable(tokens, hidden, chunk_tokens, entries)
    end = padding(table.stored_bytes)
    if view.nbytes != table.stored_bytes + len(end) or view[table.stored_bytes :] != end:
        raise _damaged(f"the chunk table accounts for {table.stored_bytes} of {view.nbytes} bytes")
    return table


def decode(data: Buffer, bias: NDArray[np.uint8]) -> Bits:
    """Decodes a whole encoded tensor to bf16 bits [T, H], a new writable array.

    StoreDamaged if the table, a zstd frame or the hash of a chunk's values is wrong: what is returned is what was
    encoded. Allocates at most three times `data`, whatever it claims.
    """
    table = read_table(data)
    if bias.shape != (table.hidden_size,):
        raise _damaged(f"the tensor is {table.hidden_size} wide, its bias table {bias.size}")
    view = memoryview(data).cast("B")
    bits = np.empty((table.tokens, table.hidden_size), np.uint16)
    offset = table_bytes(table.tokens, table.chunk_tokens)
    for number, entry in enumerate(table.entries):
        chunk = bits[number * table.chunk_tokens : (number + 1) * table.chunk_tokens]
        end_of_frame = offset + entry.frame_bytes
        exponents = _decompress(view[offset:end_of_frame], chunk.size, number)
        mantissas = np.frombuffer(view, np.uint8, chunk.size, offset=end_of_frame)
        values = xxhash.xxh3_64()
        for rows in _row_blocks(chunk):
            _join(exponents.reshape(chunk.shape)[rows], mantissas.reshape(chunk.shape)[rows], bias, chunk[rows])
            values.update(chunk[rows].data)
        if values.intdigest() != entry.xxh3:
            raise _damaged(f"the values of chunk {number} do not have the hash in the chunk table")
        offset = end_of_frame + chunk.size
    return bits


# The two functions below are half of the codec's time. Their passes work on bytes where they can (half the traffic of
# 16 bits) and avoid what numpy does not vectorise: byte-strided copies and shifts of bytes to the left.


def _split(bits: Bits, bias: NDArray[np.uint8], exponents: NDArray[np.uint8], mantissas: NDArray[np.uint8]) -> None:
    wide, sign = _LOCAL.scratch(bits.shape)
    np.right_shift(bits, _EXPONENT_SHIFT, out=wide)
    np.copyto(exponents, wide, casting="unsafe")  # drops the sign
    np.subtract(exponents, bias, out=exponents)
    np.copyto(mantissas, bits, casting="unsafe")  # bit 7 is still the exponent's lowest
    np.bitwise_and(mantissas, _MANTISSA, out=mantissas)
    np.less(bits.view(np.int16), 0, out=sign.view(np.bool_))
    np.multiply(sign, _SIGN, out=sign)
    np.bitwise_or(mantissas, sign, out=mantissas)


def _join(exponents: NDArray[np.uint8], mantissas: NDArray[np.uint8], bias: NDArray[np.uint8], bits: Bits) -> None:
    wide, byte = _LOCAL.scratch(bits.shape)
    # A mantissa byte widened with its sign has the sign in all of bits 15 to 7. The exponent is xored with the sign
    # beforehand, so that one xor of the two puts it right and leaves the sign in bit 15.
    np.right_shift(mantissas.view(np.int8), 7, out=byte.view(np.int8))
    np.bitwise_xor(byte, np.add(exponents, bias, out=_LOCAL.more(bits.shape)), out=byte)
    np.copyto(wide, byte)
    np.multiply(wide, _EXPONENT_STEP, out=wide)
    np.copyto(bits.view(np.int16), mantissas.view(np.int8))
    np.bitwise_xor(bits, wide, out=bits)


def _decompress(frame: memoryview, size: int, number: int) -> NDArray[np.uint8]:
    try:
        if zstandard.frame_content_size(frame) != size:
            raise _damaged(f"the zstd frame of chunk {number} is not one of {size} bytes")
        plane = _LOCAL.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _damaged(f"the zstd frame of chunk {number} does not decode ({error})") from error
    if len(plane) != size:
        raise _damaged(f"the zstd frame of chunk {number} holds {len(plane)} bytes, not {size}")
    return np.frombuffer(plane, np.uint8)


def _row_blocks(chunk: Bits) -> Iterator[slice]:
    rows = max(1, _BLOCK_VALUES // chunk.shape[1])
    return (slice(start, start + rows) for start in range(0, len(chunk), rows))


def _damaged(why: str) -> StoreDamaged:
    return StoreDamaged(why, "run `wellhead verify --deep` on the run; what it names is captured again by `extract`")


class _Local(threading.local):
    """A thread's zstd contexts, which must not be shared, and its scratch arrays, which only grow."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()
        self._plane = np.empty(0, np.uint8)
        self._wide = np.empty(0, np.uint16)
        self._bytes = np.empty((2, 0), np.uint8)

    def exponents(self, size: int) -> NDArray[np.uint8]:
        if self._plane.size < size:
            self._plane = np.empty(size, np.uint8)
        return self._plane[:size]

    def scratch(self, shape: tuple[int, ...]) -> tuple[Bits, NDArray[np.uint8]]:
        size = shape[0] * shape[1]
        if self._wide.size < size:
            self._wide = np.empty(size, np.uint16)
            self._bytes = np.empty((2, size), np.uint8)
        return self._wide[:size].reshape(shape), self._bytes[0, :size].reshape(shape)

    def more(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        return self._bytes[1, : shape[0] * shape[1]].reshape(shape)


_LOCAL = _Local()
