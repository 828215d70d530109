"""What a ledger line says, as types. The text of a line is `store/ledger.py`'s business."""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from wellhead.core import SCHEMA_VERSION, Provenance
from wellhead.store.head import Extent, SealedShard
from wellhead.store.life import Life

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.uint64]
    """[members, tensors]"""

ID_BYTES = 16
Json = dict[str, Any]

_SHARD = re.compile(r"wh-(?P<life>[0-9A-Za-z][0-9A-Za-z.-]*)-[0-9]{6,}\.safetensors")


def shard_name(life_id: str, number: int) -> str:
    """The file name of the `number`-th shard of a life; names sort by life, then number."""
    return f"wh-{life_id}-{number:06d}.safetensors"


def shard_life(name: str) -> str | None:
    """The id of the life that wrote a shard; None if this is no name of a shard."""
    match = _SHARD.fullmatch(name)
    return match["life"] if match else None


@dataclass(frozen=True, slots=True)
class Opened:
    """The first line of every ledger."""

    kind: ClassVar = "opened"
    life: Life
    fingerprint: str
    schema: int = SCHEMA_VERSION

    def to_json(self) -> Json:
        return {"schema": self.schema, "fingerprint": self.fingerprint, "life": self.life.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Opened:
        return cls(Life.from_json(value["life"]), _text(value, "fingerprint"), _number(value, "schema"))


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """A shard is durable and these are its members.

    In a line `absent` (positions in `sizes`, row by row, that are 0) repeats what an index needs of the wide columns,
    so that opening a run need not decode them.

    `ids` and `tokens` have an entry a member; `offsets` (absolute in the file), `sizes` (bytes; 0: the member lacks
    the tensor) and `xxh3` (of the stored bytes) are uint64 [members, tensors] in the order of `tensors`. `tables`
    maps a tensor to (offset, size, xxh3) of its bias table. `raw_bytes` counts the states alone, before the codec.
    """

    kind: ClassVar[str] = "commit"
    shard: str
    size: int
    head_size: int
    head_xxh3: int
    codec: str
    tensors: tuple[str, ...]
    tables: Mapping[str, tuple[int, int, int]]
    ids: tuple[str, ...]
    tokens: tuple[int, ...]
    offsets: Column
    sizes: Column
    xxh3: Column
    raw_bytes: int
    provenance: Provenance

    def to_json(self) -> Json:
        return {
            "shard": self.shard,
            "size": self.size,
            "head_size": self.head_size,
            "head_xxh3": hex64(self.head_xxh3),
            "codec": self.codec,
            "raw_bytes": self.raw_bytes,
            "tensors": list(self.tensors),
            "tables": {name: [offset, size, hex64(xxh3)] for name, (offset, size, xxh3) in self.tables.items()},
            "tokens": list(self.tokens),
            "absent": np.flatnonzero(self.sizes == 0).tolist(),
            "ids": "".join(self.ids),
            "provenance": self.provenance.to_json(),
            "offsets": _pack(self.offsets),
            "sizes": _pack(self.sizes),
            "xxh3": _pack(self.xxh3),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        tensors = tuple(value["tensors"])
        ids = split_ids(_text(value, "ids"))
        tokens = tuple(value["tokens"])
        if len(tokens) != len(ids):
            raise ValueError(f"{len(tokens)} token counts for {len(ids)} members")
        shape = (len(ids), len(tensors))
        sizes = unpack(value["sizes"], shape)
        if np.flatnonzero(sizes == 0).tolist() != value["absent"]:
            raise ValueError("absent is not what the sizes say")
        return cls(
            shard=checked_shard_name(value),
            size=_number(value, "size"),
            head_size=_number(value, "head_size"),
            head_xxh3=int(value["head_xxh3"], 16),
            codec=_text(value, "codec"),
            tensors=tensors,
            tables={name: (offset, size, int(xxh3, 16)) for name, (offset, size, xxh3) in value["tables"].items()},
            ids=ids,
            tokens=tokens,
            offsets=unpack(value["offsets"], shape),
            sizes=sizes,
            xxh3=unpack(value["xxh3"], shape),
            raw_bytes=_number(value, "raw_bytes"),
            provenance=Provenance.from_json(value["provenance"]),
        )

    @classmethod
    def of(cls, sealed: SealedShard, provenance: Provenance) -> Self:
        """The record of a sealed shard."""
        nowhere = Extent(0, 0, 0)
        extents = [[member.sizes.get(name, nowhere) for name in sealed.tensors] for member in sealed.members]
        columns = np.array(extents, dtype="<u8").reshape(len(sealed.members), len(sealed.tensors), 3)
        return cls(
            shard=sealed.name,
            size=sealed.size,
            head_size=sealed.head_size,
            head_xxh3=sealed.head_xxh3,
            codec=sealed.codec,
            tensors=sealed.tensors,
            tables={name: (e.offset, e.size, e.xxh3) for name, e in sealed.tables.items()},
            ids=tuple(member.id for member in sealed.members),
            tokens=tuple(member.tokens for member in sealed.members),
            offsets=columns[:, :, 0],
            sizes=columns[:, :, 1],
            xxh3=columns[:, :, 2],
            raw_bytes=sealed.raw_bytes,
            provenance=provenance,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Adopt(Commit):
    """The same of a shard that a dead life published and could not record any more."""

    kind: ClassVar[str] = "adopt"


@dataclass(frozen=True, slots=True)
class Recover:
    """A dead life is settled: the first `valid_bytes` of its ledger, whose xxh3 is given, are all that counts.

    Later bytes are a torn tail; if the hash differs, a bit has flipped since."""

    kind: ClassVar = "recover"
    life: str
    valid_bytes: int
    xxh3: int

    def to_json(self) -> Json:
        return {"life": self.life, "valid_bytes": self.valid_bytes, "xxh3": hex64(self.xxh3)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Recover:
        return cls(_text(value, "life"), _number(value, "valid_bytes"), int(value["xxh3"], 16))


@dataclass(frozen=True, slots=True)
class Attempt:
    """These samples are about to be worked on. Only a warning comes of it: what was in hand when a process died."""

    kind: ClassVar = "attempt"
    ids: tuple[str, ...]

    def to_json(self) -> Json:
        return {"ids": "".join(self.ids)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Attempt:
        return cls(split_ids(_text(value, "ids")))


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A sample could not be captured properly. `reason` is a short code, `detail` for people. Counts until a later
    commit of the same id."""

    kind: ClassVar = "quarantine"
    id: str
    reason: str
    detail: str

    def to_json(self) -> Json:
        return {"id": self.id, "reason": self.reason, "detail": self.detail}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Quarantine:
        [id] = split_ids(_text(value, "id"))
        return cls(id, _text(value, "reason"), _text(value, "detail"))


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A recorded shard is lost; its members count as not captured until a later `adopt` of the same shard."""

    kind: ClassVar = "tombstone"
    shard: str
    reason: str

    def to_json(self) -> Json:
        return {"shard": self.shard, "reason": self.reason}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Tombstone:
        return cls(checked_shard_name(value), _text(value, "reason"))


@dataclass(frozen=True, slots=True)
class Replace:
    """The members of `shard` are in another shard now, `by`, which has a line of its own."""

    kind: ClassVar = "replace"
    shard: str
    by: str

    def to_json(self) -> Json:
        return {"shard": self.shard, "by": self.by}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Replace:
        return cls(checked_shard_name(value), checked_shard_name(value, "by"))


@dataclass(frozen=True, slots=True)
class Retired:
    """A shard has been used and may go; its members do not count any more."""

    kind: ClassVar = "retired"
    shard: str
    reason: str

    def to_json(self) -> Json:
        return {"shard": self.shard, "reason": self.reason}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Retired:
        return cls(checked_shard_name(value), _text(value, "reason"))


Record = Opened | Commit | Recover | Attempt | Quarantine | Tombstone | Replace | Retired

_KINDS: dict[str, type[Record]] = {
    cls.kind: cls for cls in (Opened, Commit, Adopt, Recover, Attempt, Quarantine, Tombstone, Replace, Retired)
}


def record_from_json(value: Mapping[str, Any]) -> Record:
    """ValueError in words for an unknown kind or missing or impossible fields."""
    kind = value.get("kind")
    if kind not in _KINDS:
        raise ValueError(f"a line of unknown kind {kind!r}")
    try:
        return _KINDS[kind].from_json(value)
    except KeyError as error:
        raise ValueError(f"a {kind} line without {error}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"a {kind} line with an impossible value: {error}") from None


def hex64(value: int) -> str:
    """A 64-bit hash as text: not every JSON reader keeps integers beyond 2^53."""
    return f"{value:016x}"


def split_ids(joined: str) -> tuple[str, ...]:
    """Ids from their concatenated hex."""
    width = 2 * ID_BYTES
    if len(joined) % width or not set(joined) <= set("0123456789abcdef"):
        raise ValueError("ids that are not lower-case hex of 16 bytes each")
    return tuple(joined[at : at + width] for at in range(0, len(joined), width))


def unpack(text: str, shape: tuple[int, int]) -> Column:
    """A column from base64 of little-endian uint64; ValueError if it does not have this shape."""
    return np.frombuffer(binascii.a2b_base64(text, strict_mode=True), dtype="<u8").reshape(shape)


def checked_shard_name(value: Mapping[str, Any], key: str = "shard") -> str:
    name = _text(value, key)
    if shard_life(name) is None:
        raise ValueError(f"{name!r} is no name of a shard")
    return name


def _pack(column: Column) -> str:
    return binascii.b2a_base64(np.ascontiguousarray(column, dtype="<u8").tobytes(), newline=False).decode()


def _text(value: Mapping[str, Any], key: str) -> str:
    if not isinstance(value[key], str):
        raise ValueError(f"{key} is no text")
    return value[key]  # type: ignore[no-any-return]


def _number(value: Mapping[str, Any], key: str) -> int:
    if not isinstance(value[key], int) or value[key] < 0:
        raise ValueError(f"{key} is no count")
    return value[key]  # type: ignore[no-any-return]
