"""The head of a shard: what it says, its text, and a reader that believes nothing. See docs/format.md.

A shard is an ordinary safetensors file: 8 bytes of length, a JSON header padded with spaces, then the tensors without
holes. Its `__metadata__` holds the XXH3-64 of every tensor, so a shard can be proven from itself alone.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

import numpy as np
import xxhash

from wellhead.core import BYTES_PER_VALUE, FINAL, INPUT_IDS, SCHEMA_VERSION, Codec, layer_number
from wellhead.errors import StoreDamaged

CODECS: tuple[Codec, ...] = get_args(Codec)

MAX_HEAD_BYTES = 16 << 20
"""The longest head, prefix included, that is written or read."""

LENGTH = struct.Struct("<Q")
_TABLE_OWNER = "bias"
_ID = re.compile(r"[0-9a-f]{32}")
_ITEM_BYTES = {"U8": 1, "BF16": BYTES_PER_VALUE, "I32": 4}
_HINT = "the shard is not what was written; `wellhead verify` names what it held, and `extract` captures it again"


class Extent(NamedTuple):
    """Where bytes lie in a shard: absolute offset, size, XXH3-64 of them as stored."""

    offset: int
    size: int
    xxh3: int


class Entry(NamedTuple):
    """A tensor of the header. `start` and `end` count from the end of the head, as in safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    xxh3: int

    @property
    def text(self) -> str:
        """Its item of the header's JSON object."""
        fields = {"dtype": self.dtype, "shape": self.shape, "data_offsets": (self.start, self.end)}
        return f'"{self.name}":{json.dumps(fields, separators=(",", ":"))}'

    @property
    def owner_and_tensor(self) -> tuple[str, str]:
        owner, _, tensor = self.name.partition(".")
        return owner, tensor


@dataclass(frozen=True, slots=True)
class Member:
    """A sample in a shard. `sizes` has `input_ids` and the states that it has of the shard's tensors."""

    id: str
    tokens: int
    sizes: Mapping[str, Extent]


@dataclass(frozen=True, slots=True)
class SealedShard:
    """A whole shard: what the ledger records of it, and what its own head says.

    `head_size` counts prefix, header and padding; `head_xxh3` is the XXH3-64 of these. `tensors` are all that any
    member has: states in stored order, `input_ids` last. `tables` maps a state tensor to its bias table (empty with
    the codec `raw`). `raw_bytes` counts the states alone, as bf16. `metadata` is the `__metadata__` of the header
    without `xxh3`.
    """

    name: str
    size: int
    head_size: int
    head_xxh3: int
    codec: str
    tensors: tuple[str, ...]
    tables: Mapping[str, Extent]
    members: Sequence[Member]
    raw_bytes: int
    metadata: Mapping[str, str]


def table_name(tensor: str) -> str:
    """The name of the bias table of a state tensor."""
    return f"{_TABLE_OWNER}.{tensor}"


def is_sample_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def in_stored_order(tensors: Sequence[str]) -> tuple[str, ...]:
    """Layers ascending, then `final`, then `input_ids`. ValueError for any other name."""
    last = {FINAL: 1, INPUT_IDS: 2}
    return tuple(sorted(tensors, key=lambda name: (last[name], 0) if name in last else (0, layer_number(name))))


def full_metadata(metadata: Mapping[str, str], codec: Codec) -> dict[str, str]:
    """What a shard says of itself besides its hashes. ValueError if `metadata` uses a name that is the shard's own."""
    own = {"schema": str(SCHEMA_VERSION), "codec": codec}
    if taken := metadata.keys() & {*own, "xxh3"}:
        raise ValueError(f"metadata may not have {', '.join(sorted(taken))}")
    return {**own, **metadata}


def head_text(metadata: Mapping[str, str], entries: Sequence[Entry]) -> bytes:
    """The header's JSON, not padded."""
    hashes = base64.b64encode(np.array([entry.xxh3 for entry in entries], "<u8").tobytes()).decode()
    items = [f'"__metadata__":{json.dumps({**metadata, "xxh3": hashes}, separators=(",", ":"))}']
    return ("{" + ",".join(items + [entry.text for entry in entries]) + "}").encode()


def text_bytes(metadata: Mapping[str, str], entries: int, entries_text: int) -> int:
    """Length of `head_text` without building it; `entries_text` = sum of the lengths of the entries' texts."""
    hashes = 4 * -(-8 * entries // 3)
    return len(head_text(metadata, ())) + hashes + entries + entries_text


def describe(name: str, head: bytes, metadata: Mapping[str, str], entries: Sequence[Entry]) -> SealedShard:
    """The shard that a head and its entries, in file order, make. ValueError if they are no shard of ours."""
    codec = metadata.get("codec", "")
    if codec not in CODECS:
        raise ValueError(f"its codec is {codec!r}, not one of {', '.join(CODECS)}")
    tables: dict[str, Extent] = {}
    found: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        owner, tensor = entry.owner_and_tensor
        if owner == _TABLE_OWNER and codec != "raw" and tensor != INPUT_IDS:
            _expect(entry, "U8", 1)
            tables[tensor] = _extent(entry, len(head))
        elif is_sample_id(owner):
            found.setdefault(owner, {})[tensor] = entry
        else:
            raise ValueError(f"{entry.name!r} is no name of a tensor")
    members = [_member(sample, group, len(head), tables, codec) for sample, group in found.items()]
    names = {tensor for member in members for tensor in member.sizes}
    raw_bytes = 0
    for member in members:
        for tensor, extent in member.sizes.items():
            if tensor != INPUT_IDS:
                wide = extent.size if codec == "raw" else member.tokens * tables[tensor].size * BYTES_PER_VALUE
                raw_bytes += wide
    return SealedShard(
        name=name,
        size=len(head) + (entries[-1].end if entries else 0),
        head_size=len(head),
        head_xxh3=xxhash.xxh3_64_intdigest(head),
        codec=codec,
        tensors=in_stored_order([*names, *(tables.keys() - names)]),
        tables=tables,
        members=members,
        raw_bytes=raw_bytes,
        metadata=metadata,
    )


def read_head(path: Path) -> SealedShard:
    """What a shard says of itself, from its head alone: tensors are not read, so their hashes are not checked here.

    StoreDamaged, in words, for anything but a whole shard: a file that is cut off or too long, a header that is no
    JSON, names, types or offsets that are wrong. Reads at most 16 MiB. Damage to the padding or to a number that
    still makes sense shows only in `head_xxh3`, which the ledger has too.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH.size)
            length = LENGTH.unpack(prefix)[0] if len(prefix) == LENGTH.size else 0
            if not 2 <= length <= min(MAX_HEAD_BYTES, size) - LENGTH.size:
                raise ValueError(f"it claims a header of {length} bytes, the file has {size}")
            head = prefix + file.read(length)
        metadata, entries = _parse(head[LENGTH.size :], size - LENGTH.size - length)
        return describe(path.name, head, metadata, entries)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path}: there is no such shard", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{path}: {error}", _HINT) from error


def _parse(text: bytes, data_size: int) -> tuple[dict[str, str], list[Entry]]:
    value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    metadata = value.pop("__metadata__", None) if isinstance(value, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(item, str) for item in metadata.values()):
        raise ValueError("its header has no __metadata__ of texts")
    if metadata.get("schema") != str(SCHEMA_VERSION):
        raise ValueError(f"its schema is {metadata.get('schema')!r}, this version reads {SCHEMA_VERSION}")
    hashes = np.frombuffer(base64.b64decode(metadata.pop("xxh3", ""), validate=True), "<u8").tolist()
    entries = sorted((_entry(name, fields) for name, fields in value.items()), key=lambda entry: entry.start)
    if len(hashes) != len(entries):
        raise ValueError(f"its header has {len(hashes)} hashes for {len(entries)} tensors")
    end = 0
    for entry in entries:
        if entry.start != end:
            raise ValueError(f"{entry.name} starts at {entry.start}, the tensor before it ends at {end}")
        end = entry.end
    if end != data_size:
        raise ValueError(f"its tensors take {end} bytes, the file has {data_size} for them")
    return metadata, [entry._replace(xxh3=xxh3) for entry, xxh3 in zip(entries, hashes, strict=True)]


def _entry(name: str, fields: Any) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not (_is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{name!r} has the shape {shape!r} and the offsets {offsets!r}")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ValueError(f"{name!r} has the dtype {dtype!r}, not one of {', '.join(_ITEM_BYTES)}")
    if not 0 < math.prod(shape) * _ITEM_BYTES[dtype] == offsets[1] - offsets[0]:
        raise ValueError(f"{name!r} takes {offsets[1] - offsets[0]} bytes, which is not {dtype} {shape}")
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1], 0)


def _member(
    sample: str, group: Mapping[str, Entry], head_size: int, tables: Mapping[str, Extent], codec: str
) -> Member:
    ids = group.get(INPUT_IDS)
    if ids is None:
        raise ValueError(f"{sample} has no {INPUT_IDS}")
    _expect(ids, "I32", 1)
    for tensor in in_stored_order(list(group)):
        entry = group[tensor]
        if tensor == INPUT_IDS:
            continue
        if codec == "raw":
            _expect(entry, "BF16", 2)
        else:
            _expect(entry, "U8", 1)
        if codec == "raw" and entry.shape[0] != ids.shape[0]:
            raise ValueError(f"{entry.name} has {entry.shape[0]} rows for {ids.shape[0]} tokens")
        if codec != "raw" and tensor not in tables:
            raise ValueError(f"{entry.name} has no bias table")
    return Member(sample, ids.shape[0], {tensor: _extent(entry, head_size) for tensor, entry in group.items()})


def _extent(entry: Entry, head_size: int) -> Extent:
    return Extent(head_size + entry.start, entry.end - entry.start, entry.xxh3)


def _expect(entry: Entry, dtype: str, dimensions: int) -> None:
    if entry.dtype != dtype or len(entry.shape) != dimensions:
        raise ValueError(f"{entry.name} is {entry.dtype} {list(entry.shape)}, not {dtype} of {dimensions} dimensions")


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header names something twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"its header contains {constant}")
