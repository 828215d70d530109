"""Heads that nobody of ours wrote: refused, in words, before anything is allocated for them."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wellhead.errors import StoreDamaged
from wellhead.store.head import in_stored_order, read_head

NAME = "wh-x-000001.safetensors"


def test_stored_order_is_by_number_then_final_then_ids() -> None:
    assert in_stored_order(["input_ids", "r10", "final", "r2"]) == ("r2", "r10", "final", "input_ids")
    with pytest.raises(ValueError, match="no layer name"):
        in_stored_order(["bias"])


def head_with(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def hostile() -> Iterator[tuple[str, bytes, str]]:
    sample = "0123456789abcdef" * 2
    ids = {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}
    state = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]}

    def shard(codec: str = "raw", schema: str = "0", hashes: int | None = None, **tensors: Any) -> bytes:
        count = len(tensors) if hashes is None else hashes
        xxh3 = base64.b64encode(bytes(8 * count)).decode()
        names = {name.replace("S_", f"{sample}.").replace("__", "."): value for name, value in tensors.items()}
        return head_with({"__metadata__": {"schema": schema, "codec": codec, "xxh3": xxh3}, **names}, bytes(20))

    yield "length", struct.pack("<Q", 1 << 62) + b"{}", "claims a header of 4611686018427387904"
    yield "long", struct.pack("<Q", 17 << 20) + bytes(18 << 20), "claims a header of"
    yield "not json", head_with(b"not json"), "Expecting value"
    yield "not utf-8", head_with(b'{"\xff": 1}'), "utf-8"
    yield "deep", head_with(b"[" * 200_000), "recursion"
    yield "list", head_with([]), "no __metadata__"
    yield "no metadata", head_with({}), "no __metadata__"
    yield "metadata of numbers", head_with({"__metadata__": {"schema": 0}}), "no __metadata__ of texts"
    yield "twice", head_with(b'{"__metadata__":{},"__metadata__":{}}'), "twice"
    yield "nan", head_with(b'{"__metadata__":NaN}'), "NaN"
    yield "schema", shard(schema="7", S_input_ids=ids, S_r2=state), "its schema is '7'"
    yield "codec", shard(codec="zip", S_input_ids=ids, S_r2=state), "its codec is 'zip'"
    yield "hashes", shard(hashes=1, S_input_ids=ids, S_r2=state), "1 hashes for 2 tensors"
    yield "fields", shard(S_input_ids=ids, S_r2={**state, "x": 1}), "is not described by"
    yield "no object", shard(S_input_ids=ids, S_r2=7), "is not described by"
    yield "dtype", shard(S_input_ids=ids, S_r2={**state, "dtype": "F64"}), "'F64'"
    yield "unhashable", shard(S_input_ids=ids, S_r2={**state, "dtype": []}), "the dtype"
    yield "shape", shard(S_input_ids=ids, S_r2={**state, "shape": [3, 3]}), "which is not BF16"
    yield "negative", shard(S_input_ids=ids, S_r2={**state, "shape": [-2, -3]}), "has the shape"
    yield "true", shard(S_input_ids=ids, S_r2={**state, "shape": [True, 6]}), "has the shape"
    yield "offsets", shard(S_input_ids=ids, S_r2={**state, "data_offsets": [8]}), "and the offsets"
    yield "reversed", shard(S_input_ids=ids, S_r2={**state, "data_offsets": [20, 8]}), "takes -12 bytes"
    yield "outside", shard(S_input_ids=ids, S_r2={**state, "shape": [2, 4], "data_offsets": [8, 24]}), "take 24 bytes"
    yield "hole", shard(S_input_ids=ids, S_r2={**state, "shape": [2, 2], "data_offsets": [12, 20]}), "starts at 12"
    yield "overlap", shard(S_input_ids=ids, S_r2={**state, "shape": [2, 4], "data_offsets": [4, 20]}), "starts at 4"
    yield "empty", shard(S_input_ids=ids, S_r2={**state, "shape": [0, 4], "data_offsets": [8, 8]}), "takes 0 bytes"
    yield "name", shard(S_input_ids=ids, other__r2=state), "'other.r2' is no name"
    yield "no dot", shard(S_input_ids=ids, r2=state), "'r2' is no name"
    yield "layer", shard(S_input_ids=ids, S_r02=state), "no layer name"
    yield "no ids", shard(S_final={**state, "shape": [2, 5], "data_offsets": [0, 20]}), "has no input_ids"
    yield "rows", shard(S_input_ids=ids, S_r2={**state, "shape": [3, 2]}), "3 rows for 2 tokens"
    yield "dimensions", shard(S_input_ids=ids, S_r2={**state, "shape": [6]}), "not BF16 of 2"
    yield "no table", shard("planes-zstd", S_input_ids=ids, S_r2={**state, "dtype": "U8", "shape": [12]}), "bias table"
    yield "table in raw", shard(S_input_ids=ids, bias__r2={**state, "dtype": "U8", "shape": [12]}), "is no name"


@pytest.mark.parametrize(("data", "words"), [pytest.param(d, w, id=name) for name, d, w in hostile()])
def test_hostile_heads_are_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / NAME
    path.write_bytes(data)
    with pytest.raises(StoreDamaged, match=words) as caught:
        read_head(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
