"""Writes a shard as the samples come, and checks one from its own bytes. The format is in docs/format.md.

Data is streamed behind room that is reserved for the head; the head is written last. Nothing here makes a name
durable: `seal` syncs the file's content, and the writer (store/writer.py) renames it and records it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from wellhead.core import INPUT_IDS, Capture, Codec
from wellhead.store import codec as planes
from wellhead.store.head import (
    LENGTH,
    MAX_HEAD_BYTES,
    Entry,
    Extent,
    Member,
    SealedShard,
    describe,
    full_metadata,
    head_text,
    in_stored_order,
    is_sample_id,
    read_head,
    table_name,
    text_bytes,
)
from wellhead.store.pread import read_pieces

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from wellhead.core import Bits
    from wellhead.store.atomic import File

__all__ = [
    "Extent",
    "Member",
    "SealedShard",
    "ShardWriter",
    "damaged_tensors",
    "estimate_head_room",
    "read_head",
]

MAX_WASTE = 0.005
"""The part of a shard that may be reserved head that was not needed."""

_SMALL_SHARD = 64 << 20
"""Shards of at least this size are the rule: the reserve is counted so that they waste little."""

_ALIGNMENT = 8
_TYPICAL_RATIO = 0.68


class _Mark(NamedTuple):
    """The state to return to when a sample could not be added."""

    end: int
    entries: int
    tables: frozenset[str]


class ShardWriter:
    """A shard being written, at the start of an empty `file`. One thread at a time.

    The head takes up to `head_room` bytes (see `estimate_head_room`), which are written at once, so that sealing
    needs no space that may be gone by then. `metadata` goes into the header; `schema`, `codec` and `xxh3` are added.
    Holds at most one chunk of encoded data. Raises OSError if the reserve cannot be written.
    """

    def __init__(self, file: File, *, codec: Codec, metadata: Mapping[str, str], head_room: int) -> None:
        self._file = file
        self._codec: Codec = codec
        self._metadata = full_metadata(metadata, codec)
        self._room = min(_aligned(head_room), MAX_HEAD_BYTES)
        self._end = 0
        self._hash = xxhash.xxh3_64()
        self._entries: list[Entry] = []
        self._entries_text = 0
        self._tables: dict[str, NDArray[np.uint8]] = {}
        self._ids: dict[str, int] = {}
        self._raw_bytes = 0
        self._ragged = False
        self._refused = False
        file.write(b" " * self._room)

    @property
    def bytes_written(self) -> int:
        """Size of the file now, the reserved head included."""
        return self._room + self._end

    @property
    def raw_bytes(self) -> int:
        """Bytes of the states added, as bf16."""
        return self._raw_bytes

    @property
    def members_count(self) -> int:
        return len(self._ids)

    @property
    def tokens(self) -> int:
        return sum(self._ids.values())

    def fits(self, capture: Capture) -> bool:
        """Whether the head has room for this sample too. A sample that is here already never fits."""
        if capture.id in self._ids:
            return False
        texts = [entry.text for entry in self._expected_entries(capture)]
        count = len(self._entries) + len(texts)
        text = self._entries_text + sum(map(len, texts))
        return LENGTH.size + text_bytes(self._metadata, count, text) <= self._room

    def add(self, capture: Capture) -> None:
        """Appends a sample. Not durable.

        On any error, OSError included, the shard is as it was before and may be sealed or added to. ValueError if
        the sample does not fit the head (`fits`) or its arrays are not [tokens, hidden size] uint16.
        """
        self._check(capture)
        self._trim()
        mark = _Mark(self._end, len(self._entries), frozenset(self._tables))
        try:
            for tensor in in_stored_order(list(capture.states)):
                self._put_state(capture.id, tensor, capture.states[tensor])
            ids = np.ascontiguousarray(capture.input_ids, "<i4")
            self._put(f"{capture.id}.{INPUT_IDS}", "I32", ids.shape, iter([ids.data]))
        except BaseException as error:
            self._refused |= isinstance(error, OSError)
            self._return_to(mark)
            raise
        self._ids[capture.id] = capture.tokens
        self._raw_bytes += capture.raw_bytes

    def seal(self, name: str) -> SealedShard:
        """Writes the head and syncs the content; the shard is durable once its name is. `name` is what it will get.

        Raises OSError, after which this shard may only be thrown away; ValueError if it is empty.
        """
        if not self._ids:
            raise ValueError("a shard without samples cannot be sealed")
        self._trim()
        text = head_text(self._metadata, self._entries)
        needed = _aligned(LENGTH.size + len(text))
        # Less than expected came. Moving the data down is cheap for the small shards that this concerns, but not on
        # a disk that was full just now: some file systems need fresh space to overwrite.
        if self._room - needed > MAX_WASTE * (needed + self._end) and not self._refused:
            self._move_down(needed)
        length = self._room - LENGTH.size
        head = LENGTH.pack(length) + text.ljust(length)
        self._file.pwrite(head, 0)
        self._file.sync()
        return describe(name, head, self._metadata, self._entries)

    def _check(self, capture: Capture) -> None:
        if not is_sample_id(capture.id) or not capture.states or not capture.tokens:
            raise ValueError(f"{capture.id!r} with {capture.tokens} tokens of {list(capture.states)} cannot be stored")
        for tensor, bits in capture.states.items():
            width = self._tables[tensor].size if tensor in self._tables else bits.shape[-1]
            if bits.dtype != np.uint16 or bits.shape != (capture.tokens, width) or not bits.size:
                expected = (capture.tokens, width)
                raise ValueError(f"{capture.id}.{tensor} is {bits.dtype} {bits.shape}, not uint16 {expected}")
        if not self.fits(capture):
            raise ValueError(f"the shard has no room for {capture.id}: seal it")

    def _expected_entries(self, capture: Capture) -> Iterator[Entry]:
        """Entries whose texts are at least as long as those that `add` will make."""
        end = self._end
        for tensor, bits in capture.states.items():
            tokens, hidden = bits.shape
            if self._codec == "raw":
                yield Entry(f"{capture.id}.{tensor}", "BF16", bits.shape, end, end := end + bits.nbytes, 0)
                continue
            if tensor not in self._tables:
                yield Entry(table_name(tensor), "U8", (hidden,), end, end := end + hidden, 0)
            size = planes.max_encoded_bytes(tokens, hidden)
            yield Entry(f"{capture.id}.{tensor}", "U8", (size,), end, end := end + size, 0)
        yield Entry(f"{capture.id}.{INPUT_IDS}", "I32", (capture.tokens,), end, end + 4 * capture.tokens, 0)

    def _put_state(self, sample: str, tensor: str, bits: Bits) -> None:
        if self._codec == "raw":
            self._put(f"{sample}.{tensor}", "BF16", bits.shape, (chunk.data for chunk in planes.chunks(bits)))
            return
        if tensor not in self._tables:
            table = planes.bias_table(bits)
            self._put(table_name(tensor), "U8", table.shape, iter([table.data]))
            self._tables[tensor] = table
        bias, start = self._tables[tensor], self._end
        if len(bits) <= planes.CHUNK_TOKENS:
            self._put(f"{sample}.{tensor}", "U8", None, iter(planes.encode(bits, bias)))
        else:
            entries: list[planes.ChunkEntry] = []
            self._put(f"{sample}.{tensor}", "U8", None, _encode_long(bits, bias, entries))
            table_of_chunks = planes.ChunkTable(len(bits), bits.shape[1], planes.CHUNK_TOKENS, entries)
            self._file.pwrite(table_of_chunks.to_bytes(), self._room + start)
            self._replace_last_hash(start)

    def _put(self, name: str, dtype: str, shape: tuple[int, ...] | None, pieces: Iterator[Buffer]) -> None:
        """Appends a tensor; `shape` None is a row of the bytes that there turn out to be."""
        start, digest = self._end, xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
            self._file.write(piece)
            self._end += memoryview(piece).nbytes
        entry = Entry(name, dtype, shape or (self._end - start,), start, self._end, digest.intdigest())
        self._entries.append(entry)
        self._entries_text += len(entry.text)

    def _replace_last_hash(self, start: int) -> None:
        """The chunk table stands first but is known last, so a long tensor is hashed by reading it back (from the
        page cache): the alternative would be to hold all of it."""
        digest = xxhash.xxh3_64()
        for piece in read_pieces(self._file.path, self._room + start, self._end - start):
            digest.update(piece)
        self._entries[-1] = self._entries[-1]._replace(xxh3=digest.intdigest())

    def _return_to(self, mark: _Mark) -> None:
        for entry in self._entries[mark.entries :]:
            self._entries_text -= len(entry.text)
        del self._entries[mark.entries :]
        self._tables = {tensor: table for tensor, table in self._tables.items() if tensor in mark.tables}
        self._end = mark.end
        self._ragged = True
        with contextlib.suppress(OSError):  # the next add or seal tries again
            self._trim()

    def _trim(self) -> None:
        if self._ragged:
            self._file.truncate(self._room + self._end)
            self._ragged = False

    def _move_down(self, new_room: int) -> None:
        position = new_room
        for piece in read_pieces(self._file.path, self._room, self._end):
            self._file.pwrite(piece, position)
            position += len(piece)
        self._file.truncate(position)
        self._room = new_room


def estimate_head_room(first: Capture, codec: Codec, metadata: Mapping[str, str], shard_bytes: int = 1 << 30) -> int:
    """How much to reserve for the head of a shard that starts with `first` and closes at `shard_bytes`.

    Enough for 64 MiB of samples like the first, and for more where that costs at most 0.4 % of 64 MiB: a shard of
    that size or above then wastes at most `MAX_WASTE`. Smaller ones are compacted when they are sealed.
    """
    last_offset = 10 * max(shard_bytes, first.raw_bytes)  # as many digits as any will have
    text = count = 0
    for tensor in first.states:
        entry = Entry(f"{first.id}.{tensor}", "BF16", first.states[tensor].shape, last_offset, last_offset, 0)
        text, count = text + len(entry.text), count + 1
    text += len(Entry(f"{first.id}.{INPUT_IDS}", "I32", (first.tokens,), last_offset, last_offset, 0).text)
    empty = LENGTH.size + text_bytes(full_metadata(metadata, codec), 0, 0)
    tables = count * (text // count + 12)
    sample = text + 13 * (count + 1)
    stored = (first.raw_bytes if codec == "raw" else first.raw_bytes * _TYPICAL_RATIO) + 4 * first.tokens
    usual = min(_SMALL_SHARD, shard_bytes) / stored
    affordable = 0.8 * MAX_WASTE * _SMALL_SHARD / sample
    samples = 2 + int(min(max(usual, affordable), shard_bytes / stored))
    return min(_aligned(empty + tables + samples * sample), MAX_HEAD_BYTES)


def damaged_tensors(path: Path, shard: SealedShard) -> list[str]:
    """Names (`<id>.r3`, `bias.r3`) of the tensors whose stored bytes do not have their hash. Reads the whole file.

    `shard` is what the ledger or `read_head` says. Raises OSError where the file cannot be read; bytes that are not
    there are damaged.
    """
    extents = [(table_name(tensor), extent) for tensor, extent in shard.tables.items()]
    extents += [(f"{member.id}.{tensor}", e) for member in shard.members for tensor, e in member.sizes.items()]
    damaged = []
    for name, extent in sorted(extents, key=lambda item: item[1].offset):
        digest = xxhash.xxh3_64()
        for piece in read_pieces(path, extent.offset, extent.size):
            digest.update(piece)
        if digest.intdigest() != extent.xxh3:
            damaged.append(name)
    return damaged


def _encode_long(bits: Bits, bias: NDArray[np.uint8], entries: list[planes.ChunkEntry]) -> Iterator[Buffer]:
    """A tensor with zeros where its chunk table goes; fills `entries` with the table's rows."""
    yield bytes(planes.table_bytes(len(bits)))
    for chunk in planes.chunks(bits):
        entry, frame, mantissas = planes.encode_chunk(chunk, bias)
        entries.append(entry)
        yield frame
        yield mantissas
    yield planes.padding(planes.ChunkTable(len(bits), bits.shape[1], planes.CHUNK_TOKENS, entries).stored_bytes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
