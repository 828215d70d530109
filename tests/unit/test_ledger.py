"""Ledger lines prove themselves, and a scan survives everything that a crash or a bad disk makes of them."""

from __future__ import annotations

import json
import zlib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import xxhash

from wellhead.core import Provenance
from wellhead.store.ledger import (
    Adopt,
    Attempt,
    Commit,
    Ledger,
    Opened,
    Quarantine,
    Record,
    Recover,
    Replace,
    Retired,
    Tombstone,
    encode_line,
    parse,
    read_record,
    scan,
)
from wellhead.store.life import Life
from wellhead.store.records import record_from_json, shard_life, shard_name
from wellhead.testing.disk import FullDisk

LIFE = Life.this_process()
SHARD = shard_name(LIFE.id, 7)
IDS = tuple(f"{n:032x}" for n in (1, 2**64, 2**127))


def commit(cls: type[Commit] = Commit) -> Commit:
    sizes = np.array([[5, 0, 4], [6, 7, 8], [9, 10, 12]], dtype="<u8")
    return cls(
        shard=SHARD,
        size=4321,
        head_size=1024,
        head_xxh3=2**64 - 1,
        codec="planes-zstd",
        tensors=("r3", "final", "input_ids"),
        tables={"r3": (1024, 16, 2**63), "final": (1040, 16, 5)},
        ids=IDS,
        tokens=(1, 2, 3),
        offsets=sizes + 2000,
        sizes=sizes,
        xxh3=sizes + np.uint64(2**64 - 100),
        raw_bytes=99,
        provenance=Provenance("stub", "1", {"offsets": "x", "n": [1, 2]}),
    )


RECORDS: list[Record] = [
    Opened(LIFE, "ab" * 16),
    commit(),
    commit(Adopt),
    Recover(LIFE.id, 17, 2**64 - 1),
    Attempt(IDS),
    Quarantine(IDS[0], "not_finite", 'row 3 of r2: "NaN"\n'),
    Tombstone(SHARD, "missing"),
    Replace(SHARD, shard_name(LIFE.id, 8)),
    Retired(SHARD, "trained"),
]


def same(one: Record, other: Record) -> bool:
    values = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
    return type(one) is type(other) and all(np.array_equal(a, b) if hasattr(a, "dtype") else a == b for a, b in values)


def lines_of(*records: Record) -> list[bytes]:
    return [encode_line(record) for record in records]


def found_in(path: Path, limit: int | None = None) -> tuple[list[int], int, int, list[int]]:
    lines = scan(path, limit)
    offsets = [offset for offset, _ in lines]
    return offsets, lines.valid_bytes, lines.torn, [offset for offset, _ in lines.damaged]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_a_line_is_json_with_kind_first_and_the_crc_of_its_text_last(record: Record) -> None:
    line = encode_line(record)
    assert line.count(b"\n") == 1
    value = json.loads(line)
    assert [next(iter(value)), next(reversed(value))] == ["kind", "crc"]
    assert value["kind"] == record.kind
    text = line[: line.index(b',"crc":"')]
    assert int(value["crc"], 16) == zlib.crc32(text)
    assert same(parse(line), record)


def test_columns_are_little_endian_u64_member_by_member() -> None:
    import base64

    value = json.loads(encode_line(commit()))
    assert np.frombuffer(base64.b64decode(value["sizes"]), "<u8").tolist() == [5, 0, 4, 6, 7, 8, 9, 10, 12]
    assert value["absent"] == [1]
    assert value["ids"] == "".join(IDS)
    assert value["head_xxh3"] == "f" * 16


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        (1, {"kind": "party"}, "unknown kind 'party'"),
        (1, {"shard": "../../etc/passwd"}, "no name of a shard"),
        (1, {"tokens": [1, 2]}, "token counts"),
        (1, {"absent": []}, "absent"),
        (1, {"sizes": "AAAA"}, "impossible value"),
        (1, {"size": -1}, "size is no count"),
        (3, {"valid_bytes": "x"}, "no count"),
        (4, {"ids": "AB" * 16}, "lower-case hex"),
        (5, {"id": IDS[0] + IDS[1]}, "impossible value"),
        (0, {"life": {}}, "proper id"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(kind: int, change: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        record_from_json(json.loads(encode_line(RECORDS[kind])) | change)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_every_missing_field_is_a_value_error_that_names_it(record: Record) -> None:
    value = json.loads(encode_line(record))
    for name in value.keys() - {"kind", "crc"}:
        with pytest.raises(ValueError, match=name):
            record_from_json({key: item for key, item in value.items() if key != name})


def test_shard_names() -> None:
    assert shard_life(SHARD) == LIFE.id
    assert SHARD.endswith("-000007.safetensors")
    for bad in ("x.safetensors", f".{SHARD}", f"{SHARD}.tmp", "wh-../x-000001.safetensors", "wh-a-1.safetensors"):
        assert shard_life(bad) is None


def test_append_reads_back_with_offsets(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.open(path, LIFE, "ab" * 16)
    for record in RECORDS[1:]:
        ledger.append(record)
    ledger.close()
    lines = scan(path)
    read = list(lines.records())
    assert all(same(one, other) for (_, one), other in zip(read, RECORDS, strict=True))
    expected = np.cumsum([0, *map(len, lines_of(*RECORDS[:-1]))]).tolist()
    assert [offset for offset, _ in read] == expected
    data = path.read_bytes()
    assert (lines.valid_bytes, lines.torn, lines.damaged) == (len(data), 0, [])
    assert lines.xxh3 == xxhash.xxh3_64_intdigest(data)
    for at, (offset, _) in enumerate(read):
        assert same(read_record(path, offset, len(encode_line(RECORDS[at]))), RECORDS[at])
    with pytest.raises(ValueError, match="no whole line"):
        read_record(path, expected[1] + 1, 50)


def test_a_ledger_is_never_opened_twice(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "l", LIFE, "ab" * 16).close()
    with pytest.raises(FileExistsError):
        Ledger.open(tmp_path / "l", LIFE, "ab" * 16)


GOOD = lines_of(*RECORDS[:2], *RECORDS[3:6])
GARBAGE = bytes(range(256)) * 9


@pytest.mark.parametrize(
    "tail",
    [b"", b"\0" * 5000, GOOD[1][:-1], GOOD[1][:700], GARBAGE, b"\n\n\n", b"\0\n" + GARBAGE, GOOD[1][1:], b"{}\n"],
    ids=["none", "zeros", "no newline", "half", "garbage", "newlines", "zero line", "beheaded", "no crc"],
)
def test_any_tail_is_torn_and_not_damage(tmp_path: Path, tail: bytes) -> None:
    data = b"".join(GOOD)
    (tmp_path / "l").write_bytes(data + tail)
    offsets, valid, torn, damaged = found_in(tmp_path / "l")
    assert (len(offsets), valid, torn, damaged) == (5, len(data), len(tail), [])


def test_a_damaged_line_in_the_middle_is_named_and_later_ones_count(tmp_path: Path) -> None:
    for bad in range(1, 3):
        for where in (0, len(GOOD[bad]) // 2, len(GOOD[bad]) - 4, len(GOOD[bad]) - 1):
            lines = [bytearray(line) for line in GOOD]
            lines[bad][where] ^= 4
            data = b"".join(lines)
            (tmp_path / "l").write_bytes(data)
            offsets, valid, torn, damaged = found_in(tmp_path / "l")
            starts = np.cumsum([0, *map(len, GOOD)]).tolist()
            hurt = {bad, bad + 1} if where == len(GOOD[bad]) - 1 else {bad}  # a lost newline joins two lines
            assert offsets == [start for at, start in enumerate(starts[:-1]) if at not in hurt]
            assert damaged == [starts[bad]]
            assert (valid, torn) == (len(data), 0)


def test_every_single_flipped_bit_is_seen(tmp_path: Path) -> None:
    data = bytearray(b"".join(lines_of(RECORDS[0], RECORDS[3], RECORDS[6])))
    whole = xxhash.xxh3_64_intdigest(bytes(data))
    for bit in range(0, 8 * len(data), 7):
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "l").write_bytes(data)
        lines = scan(tmp_path / "l", limit=len(data))
        count = len(list(lines))
        assert count < 3
        assert lines.damaged
        assert lines.xxh3 == xxhash.xxh3_64_intdigest(bytes(data)) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_with_a_limit_only_that_part_is_judged(tmp_path: Path) -> None:
    data = b"".join(GOOD)
    (tmp_path / "l").write_bytes(data + b"torn")
    limit = len(GOOD[0] + GOOD[1])
    assert found_in(tmp_path / "l", limit) == ([0, len(GOOD[0])], limit, len(data) + 4 - limit, [])
    (tmp_path / "l").write_bytes(data[: limit - 1])
    assert found_in(tmp_path / "l", limit) == ([0], limit - 1, 0, [len(GOOD[0])])


def test_lines_longer_than_a_block_are_read_whole(tmp_path: Path) -> None:
    many = Attempt(tuple(f"{n:032x}" for n in range(200_000)))
    (tmp_path / "l").write_bytes(b"".join(lines_of(RECORDS[0], many, RECORDS[3])))
    read = [record for _, record in scan(tmp_path / "l").records()]
    assert same(read[1], many)
    assert same(read[2], RECORDS[3])


def test_a_line_that_proves_itself_and_makes_no_sense_is_damage(tmp_path: Path) -> None:
    text = b'{"kind":"party","n":1'
    (tmp_path / "l").write_bytes(GOOD[0] + b'%b,"crc":"%08x"}\n' % (text, zlib.crc32(text)) + GOOD[2])
    lines = scan(tmp_path / "l")
    assert [record.kind for _, record in lines.records()] == ["opened", "recover"]
    assert lines.damaged == [(len(GOOD[0]), "a line of unknown kind 'party'")]


def test_no_room_cuts_the_half_line_off_and_the_ledger_stays_usable(tmp_path: Path) -> None:
    disk = FullDisk(1 << 20)
    ledger = Ledger.open(tmp_path / "l", LIFE, "ab" * 16, disk)
    before = (tmp_path / "l").read_bytes()
    disk.room = 100
    with pytest.raises(OSError, match="No space"):
        ledger.append(commit())
    assert (tmp_path / "l").read_bytes() == before
    disk.room = 1 << 20
    ledger.append(Recover("x", 1, 2))
    assert len(found_in(tmp_path / "l")[0]) == 2


def test_after_a_failed_sync_nothing_is_appended_any_more(tmp_path: Path) -> None:
    disk = FullDisk(1 << 20)
    ledger = Ledger.open(tmp_path / "l", LIFE, "ab" * 16, disk)
    disk.room = len(encode_line(Recover("x", 1, 2)))  # the line fits, its sync does not
    with pytest.raises(OSError, match="No space"):
        ledger.append(Recover("x", 1, 2))
    disk.room = 1 << 20
    with pytest.raises(OSError, match="earlier"):
        ledger.append(Recover("x", 1, 2))
