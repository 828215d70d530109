"""Reads states back: location → bytes → bits. Nothing is returned that is not what was stored.

Encoded tensors prove themselves (each chunk has the hash of its values); raw ones are proven by the hash in the
ledger, which is why `verify` is on for them by default.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from wellhead.core import INPUT_IDS
from wellhead.errors import StoreDamaged
from wellhead.paths import RunPaths
from wellhead.store import codec as planes
from wellhead.store.pread import ShardFiles

if TYPE_CHECKING:
    from wellhead.core import Bits
    from wellhead.store.index import Location

_HINT = "run `wellhead verify --deep` on the run; what it names is captured again by `extract`"


class Locator(Protocol):
    """What reading needs of `StoreIndex`."""

    def locate(self, id: str, tensor: str) -> Location:
        """Where the tensor is; KeyError if the sample or the tensor is not stored."""


class StateReader:
    """Reads the samples of a run by id. See `ShardFiles` for threads, fork and pickling: all of it holds here.

    `verify`: check the stored bytes against the hash of the ledger. None checks what would else go unchecked (raw
    tensors and token ids); True also checks encoded tensors, whose values are checked in any case.
    """

    def __init__(self, run_dir: Path, index: Locator, *, open_files: int = 64, verify: bool | None = None) -> None:
        self._states = RunPaths(run_dir).states
        self._index = index
        self._files = ShardFiles(open_files)
        self._verify = verify
        self._tables = _Tables()

    def read(self, id: str, tensors: Sequence[str]) -> dict[str, Bits]:
        """State tensors (`r3`, `final`) as bf16 bits [T, H]: new writable arrays.

        KeyError if the sample or a tensor is not stored; StoreDamaged, naming file and tensor, if the bytes are not
        what was stored.
        """
        places = [self._index.locate(id, tensor) for tensor in tensors]
        stored = self._stored(id, tensors, places)
        return {
            tensor: self._decode(f"{id}.{tensor}", place, data)
            for tensor, place, data in zip(tensors, places, stored, strict=True)
        }

    def read_input_ids(self, id: str) -> NDArray[np.int32]:
        """The token ids that the states belong to: int32 [T]. Raises as `read` does."""
        place = self._index.locate(id, INPUT_IDS)
        [data] = self._stored(id, [INPUT_IDS], [place])
        self._check(f"{id}.{INPUT_IDS}", place, data, checked_later=False)
        if place.size != 4 * place.tokens:
            raise self._damaged(f"{id}.{INPUT_IDS}", place, f"{place.size} bytes are not {place.tokens} token ids")
        return np.frombuffer(data, "<i4").astype(np.int32, copy=False)

    def close(self) -> None:
        """Closes the files. The reader may be used again."""
        self._files.close()

    def _stored(self, id: str, tensors: Sequence[str], places: Sequence[Location]) -> list[memoryview]:
        found: dict[int, memoryview] = {}
        for shard in sorted({place.shard for place in places}):
            inside = sorted((p.offset, at) for at, p in enumerate(places) if p.shard == shard)
            extents = [(offset, places[at].size) for offset, at in inside]
            buffers = self._files.read_many(self._states / shard, extents)
            found.update(zip((at for _, at in inside), buffers, strict=True))
        return [found[at] for at in range(len(tensors))]

    def _decode(self, name: str, place: Location, data: memoryview) -> Bits:
        self._check(name, place, data, checked_later=place.codec != "raw")
        try:
            return decode_tensor(data, place.codec, place.tokens, self._table(name, place))
        except StoreDamaged as error:
            raise self._damaged(name, place, error.message) from error

    def _table(self, name: str, place: Location) -> NDArray[np.uint8] | None:
        if place.table is None:
            return None
        offset, size, xxh3 = place.table
        table = self._tables.get(place.shard, offset)
        if table is None:
            data = self._files.read(self._states / place.shard, offset, size)
            if xxhash.xxh3_64_intdigest(data) != xxh3:
                raise self._damaged(name, place, f"its bias table at {offset} does not have its hash")
            table = np.frombuffer(data, np.uint8)
            self._tables.put(place.shard, offset, table)
        return table

    def _check(self, name: str, place: Location, data: memoryview, checked_later: bool) -> None:
        wanted = not checked_later if self._verify is None else self._verify
        if wanted and xxhash.xxh3_64_intdigest(data) != place.xxh3:
            raise self._damaged(name, place, f"the {place.size} bytes at {place.offset} do not have their hash")

    def _damaged(self, name: str, place: Location, why: str) -> StoreDamaged:
        return StoreDamaged(f"{self._states / place.shard}: {name}: {why}", _HINT)


def decode_tensor(data: memoryview, codec: str, tokens: int, table: NDArray[np.uint8] | None) -> Bits:
    """The stored bytes of a state tensor as bf16 bits [tokens, H]. StoreDamaged if they are not that.

    With the codec `raw` the array shares the memory of `data`.
    """
    if codec == "planes-zstd":
        if table is None:
            raise StoreDamaged("it has no bias table", _HINT)
        bits = planes.decode(data, table)
    elif codec == "raw":
        if not tokens or data.nbytes % (2 * tokens):
            raise StoreDamaged(f"{data.nbytes} bytes are not {tokens} rows of bf16", _HINT)
        bits = np.frombuffer(data, "<u2").reshape(tokens, -1)
    else:
        raise StoreDamaged(f"its codec {codec!r} is unknown", "it was written by another version of wellhead")
    if len(bits) != tokens:
        raise StoreDamaged(f"it has {len(bits)} rows for {tokens} tokens", _HINT)
    return bits


class _Tables:
    """The bias tables of the shards used last: a few KiB each, wanted for every sample. Safe in threads."""

    _KEPT = 512

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, shard: str, offset: int) -> NDArray[np.uint8] | None:
        return self._kept.get((shard, offset))

    def put(self, shard: str, offset: int, table: NDArray[np.uint8]) -> None:
        with self._lock:
            self._kept[shard, offset] = table
            while len(self._kept) > self._KEPT:
                self._kept.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Tables, ())
