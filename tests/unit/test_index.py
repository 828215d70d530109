"""The index: what counts, once, and what is wrong with the ledgers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from wellhead.core import Provenance
from wellhead.errors import OtherSpec, StoreDamaged
from wellhead.paths import RunPaths
from wellhead.store.columns import Columns, pack_ids
from wellhead.store.gather import Gathered
from wellhead.store.index import StoreIndex
from wellhead.store.ledger import (
    Adopt,
    Attempt,
    Commit,
    Opened,
    Quarantine,
    Record,
    Recover,
    Replace,
    Retired,
    Tombstone,
    encode_line,
)
from wellhead.store.life import Life
from wellhead.store.records import shard_name

FINGERPRINT = "f" * 32
BYTES_A_TOKEN = 32
LIVES = sorted((replace(Life.this_process(), start_time=1.0) for _ in range(4)), key=lambda life: life.id)


def id_of(n: int) -> str:
    return f"{n * 0x9E3779B97F4A7C15 % 2**64:016x}{n:016x}"


def commit(
    life: int, number: int, members: dict[int, tuple[str, ...]], cls: type[Commit] = Commit, engine: str = "stub"
) -> Commit:
    """Members: sample number -> its state tensors. Sample n has n + 1 tokens. Offsets and hashes tell all apart."""
    states = sorted({tensor for tensors in members.values() for tensor in tensors})
    tensors = (*states, "input_ids")
    shape = (len(members), len(tensors))
    there = np.array([[name in (*has, "input_ids") for name in tensors] for has in members.values()])
    offsets = 1000 * number + np.arange(shape[0] * shape[1], dtype="<u8").reshape(shape)
    return cls(
        shard=shard_name(LIVES[life].id, number),
        size=10_000 + number,
        head_size=100,
        head_xxh3=number,
        codec="planes-zstd",
        tensors=tensors,
        tables={name: (100 + at, 16, at) for at, name in enumerate(states)},
        ids=tuple(map(id_of, members)),
        tokens=tuple(n + 1 for n in members),
        offsets=offsets * there,
        sizes=(offsets + 5) * there,
        xxh3=(offsets + 2**63) * there,
        raw_bytes=sum((n + 1) * len(has) * BYTES_A_TOKEN for n, has in members.items()),
        provenance=Provenance(engine, "1"),
    )


def write(run: Path, life: int, *records: Record, tail: bytes = b"", opened: Opened | None = None) -> Path:
    ledger = RunPaths(run).writer(LIVES[life].id).ledger
    ledger.parent.mkdir(parents=True)
    lines = [encode_line(record) for record in (opened or Opened(LIVES[life], FINGERPRINT), *records)]
    ledger.write_bytes(b"".join(lines) + tail)
    return ledger


def settle(life: int, ledger: Path) -> Recover:
    data = ledger.read_bytes()
    return Recover(LIVES[life].id, len(data), xxhash.xxh3_64_intdigest(data))


BOTH = ("r2", "final")


def test_an_empty_folder_is_an_empty_index(tmp_path: Path) -> None:
    index = StoreIndex.load(tmp_path)
    assert (index.samples, index.tokens, index.raw_bytes, index.stored_bytes) == (0, 0, 0, 0)
    assert (index.tensors, index.shards, index.problems, index.engines()) == ((), [], [], set())
    assert index.missing([id_of(1)], BOTH) == {id_of(1): BOTH}
    assert index.tensors_of(id_of(1)) == frozenset()
    with pytest.raises(KeyError):
        index.locate(id_of(1), "r2")


def test_locate_gives_the_columns_of_the_line(tmp_path: Path) -> None:
    record = commit(0, 3, {5: BOTH, 2: ("r2",), 9: BOTH})
    write(tmp_path, 0, record)
    index = StoreIndex.load(tmp_path)
    place = index.locate(id_of(9), "r2")
    column = record.tensors.index("r2")
    assert (place.offset, place.size, place.xxh3) == tuple(
        int(c[2, column]) for c in (record.offsets, record.sizes, record.xxh3)
    )
    assert (place.shard, place.tokens, place.codec) == (record.shard, 10, "planes-zstd")
    assert place.table == record.tables["r2"]
    assert index.locate(id_of(9), "input_ids").table is None
    with pytest.raises(KeyError):
        index.locate(id_of(2), "final")
    with pytest.raises(ValueError, match="32 hex digits"):
        index.locate("abc", "final")
    assert index.commit_of(index.shards[0]).ids == record.ids


def test_against_a_plain_dictionary(tmp_path: Path) -> None:
    """Random shards over three lives, with layers added later and the same tensor twice."""
    rng = np.random.default_rng(7)
    truth: dict[str, dict[str, str]] = {}
    raw, tokens, stored = 0, {}, 0
    for life in range(3):
        records = []
        for number in range(1, 6):
            samples = rng.choice(60, size=rng.integers(1, 12), replace=False).tolist()
            names = ("r2", "r7", "final")
            members = {n: tuple(t for t in names if rng.random() < 0.6) or ("r2",) for n in samples}
            record = commit(life, number, members)
            records.append(record)
            stored += record.size
            for n, has in members.items():
                tokens[n] = n + 1
                for tensor in has:
                    if tensor not in truth.setdefault(id_of(n), {}):
                        truth[id_of(n)][tensor] = record.shard
                        raw += (n + 1) * BYTES_A_TOKEN
        write(tmp_path, life, *records)
    index = pickle.loads(pickle.dumps(StoreIndex.load(tmp_path)))
    assert (index.samples, index.tokens, index.raw_bytes) == (len(truth), sum(tokens.values()), raw)
    assert index.stored_bytes == stored
    assert index.ids() == sorted(truth)
    assert index.tensors == ("r2", "r7", "final")
    for id, tensors in truth.items():
        assert index.tensors_of(id) == tensors.keys()
        assert {tensor: index.locate(id, tensor).shard for tensor in tensors} == tensors
    for tensor in (*index.tensors, "r99"):
        assert index.having(tensor) == {id for id, tensors in truth.items() if tensor in tensors}
    asked = [id_of(n) for n in (*range(80), 3, 3)]
    want = ("final", "r99", "r2")
    assert index.missing(asked, want) == {
        id: tuple(t for t in want if t not in truth.get(id, {})) for id in dict.fromkeys(asked)
    }
    assert index.missing(sorted(truth), ()) == {}


def test_ids_that_share_their_first_half(tmp_path: Path) -> None:
    ids = [f"{7:016x}{n:016x}" for n in (9, 1, 5, 3)]
    record = commit(0, 1, {0: BOTH, 1: ("r2",), 2: BOTH, 3: ("r2",)})
    write(tmp_path, 0, replace(record, ids=tuple(ids)))
    index = StoreIndex.load(tmp_path)
    assert index.ids() == sorted(ids)
    assert [index.locate(id, "r2").tokens for id in ids] == [1, 2, 3, 4]
    others = [f"{7:016x}{n:016x}" for n in (0, 2, 10)]
    assert index.missing([*ids, *others], BOTH) == {
        ids[1]: ("final",),
        ids[3]: ("final",),
        **dict.fromkeys(others, BOTH),
    }


def test_the_lowest_shard_name_wins_whatever_the_order_of_the_lines(tmp_path: Path) -> None:
    write(tmp_path, 1, commit(1, 2, {1: BOTH}), commit(1, 1, {1: BOTH, 2: BOTH}))
    index = StoreIndex.load(tmp_path)
    assert index.locate(id_of(1), "final").shard == shard_name(LIVES[1].id, 1)
    assert index.raw_bytes == (2 + 3) * 2 * BYTES_A_TOKEN
    assert index.samples == 2


def test_a_shard_adopted_by_two_lives_counts_once(tmp_path: Path) -> None:
    members = {1: BOTH, 2: BOTH}
    write(tmp_path, 0)
    write(tmp_path, 1, commit(0, 1, members, Adopt))
    write(tmp_path, 2, commit(0, 1, members, Adopt))
    index = StoreIndex.load(tmp_path)
    assert [shard.name for shard in index.shards] == [shard_name(LIVES[0].id, 1)]
    assert index.stored_bytes == 10_001
    assert index.raw_bytes == (2 + 3) * 2 * BYTES_A_TOKEN
    assert index.problems == []


def test_two_different_records_of_one_shard_are_a_conflict(tmp_path: Path) -> None:
    write(tmp_path, 0, commit(0, 1, {1: BOTH}))
    write(tmp_path, 1, replace(commit(0, 1, {1: BOTH}), size=9))
    index = StoreIndex.load(tmp_path)
    assert [problem.kind for problem in index.problems] == ["conflict"]
    assert [shard.size for shard in index.shards] == [10_001]


@pytest.mark.parametrize(
    "removal",
    [
        Tombstone(shard_name(LIVES[0].id, 1), "missing"),
        Retired(shard_name(LIVES[0].id, 1), "trained"),
        Replace(shard_name(LIVES[0].id, 1), shard_name(LIVES[0].id, 2)),
    ],
)
def test_removed_shards_do_not_count(tmp_path: Path, removal: Record) -> None:
    write(tmp_path, 0, commit(0, 1, {1: BOTH}), commit(0, 2, {2: BOTH}))
    write(tmp_path, 1, removal)
    index = StoreIndex.load(tmp_path)
    assert index.ids() == [id_of(2)]
    assert list(index.removed) == [shard_name(LIVES[0].id, 1)]
    assert index.missing([id_of(1), id_of(2)], BOTH) == {id_of(1): BOTH}
    assert index.stored_bytes == 10_002


def test_a_shard_adopted_after_its_tombstone_counts_again(tmp_path: Path) -> None:
    gone = Tombstone(shard_name(LIVES[0].id, 1), "missing")
    write(tmp_path, 0, commit(0, 1, {1: BOTH}))
    write(tmp_path, 1, gone)
    write(tmp_path, 2, commit(0, 1, {1: BOTH}, Adopt))
    assert StoreIndex.load(tmp_path).ids() == [id_of(1)]
    write(tmp_path, 3, gone)
    assert StoreIndex.load(tmp_path).ids() == []


def test_a_quarantine_counts_until_a_later_commit(tmp_path: Path) -> None:
    bad = [Quarantine(id_of(n), "not_finite", "") for n in range(3)]
    write(tmp_path, 0, bad[0], bad[1], commit(0, 1, {0: BOTH}))
    write(tmp_path, 1, commit(1, 1, {2: BOTH}), bad[2])
    index = StoreIndex.load(tmp_path)
    assert index.quarantined == {id_of(1): bad[1], id_of(2): bad[2]}


def test_a_quarantine_stays_ended_when_the_later_shard_is_lost(tmp_path: Path) -> None:
    bad = Quarantine(id_of(0), "not_finite", "")
    write(tmp_path, 0, bad, commit(0, 1, {5: BOTH}), commit(0, 2, {0: BOTH}))
    write(tmp_path, 1, Tombstone(shard_name(LIVES[0].id, 2), "missing"))
    index = StoreIndex.load(tmp_path)
    assert (index.ids(), index.quarantined) == ([id_of(5)], {})
    write(tmp_path, 2, bad)
    assert StoreIndex.load(tmp_path).quarantined == {id_of(0): bad}


def test_attempts_without_outcome_are_counted_by_life(tmp_path: Path) -> None:
    ids = [id_of(n) for n in range(5)]
    write(tmp_path, 0, Attempt(tuple(ids[:3])), commit(0, 1, {0: BOTH}))
    write(tmp_path, 1, Attempt((ids[1], ids[2])), Attempt((ids[1],)), Quarantine(ids[2], "x", ""))
    assert StoreIndex.load(tmp_path).attempts_lost(ids) == {ids[1]: 2}


def test_engines(tmp_path: Path) -> None:
    write(tmp_path, 0, commit(0, 1, {0: BOTH}), commit(0, 2, {1: BOTH}, engine="vllm"))
    assert StoreIndex.load(tmp_path).engines() == {("stub", "1"), ("vllm", "1")}


def test_a_torn_tail_is_a_problem_until_it_is_settled(tmp_path: Path) -> None:
    ledger = write(tmp_path, 0, commit(0, 1, {1: BOTH}))
    settled = settle(0, ledger)
    ledger.write_bytes(ledger.read_bytes() + encode_line(commit(0, 2, {2: BOTH}))[:-30])
    [problem] = StoreIndex.load(tmp_path).problems
    assert (problem.kind, problem.life, problem.offset) == ("torn_tail", LIVES[0].id, settled.valid_bytes)
    write(tmp_path, 1, settled)
    index = StoreIndex.load(tmp_path)
    assert index.problems == []
    assert index.settled == {LIVES[0].id}
    assert index.ids() == [id_of(1)]


def test_what_comes_after_a_life_was_settled_does_not_count(tmp_path: Path) -> None:
    ledger = write(tmp_path, 0, commit(0, 1, {1: BOTH}))
    settled = settle(0, ledger)
    later = [commit(0, 2, {2: BOTH}), Quarantine(id_of(9), "x", ""), Tombstone(shard_name(LIVES[0].id, 1), "x")]
    ledger.write_bytes(ledger.read_bytes() + b"".join(map(encode_line, later)))
    write(tmp_path, 1, settled)
    index = StoreIndex.load(tmp_path)
    assert (index.ids(), index.quarantined, index.removed, index.problems) == ([id_of(1)], {}, {}, [])


def test_a_bit_that_flips_after_a_life_was_settled_is_told_from_a_torn_tail(tmp_path: Path) -> None:
    ledger = write(tmp_path, 0, commit(0, 1, {1: BOTH}), commit(0, 2, {2: BOTH}))
    write(tmp_path, 1, settle(0, ledger))
    good = ledger.read_bytes()
    first = len(encode_line(Opened(LIVES[0], FINGERPRINT)))
    second = first + len(encode_line(commit(0, 1, {1: BOTH})))
    for at, offset, left in ((first + 50, first, [id_of(2)]), (second + 50, second, [id_of(1)])):
        data = bytearray(good)
        data[at] ^= 1
        ledger.write_bytes(data)
        index = StoreIndex.load(tmp_path)
        assert [(p.kind, p.offset) for p in index.problems] == [("damaged_line", offset), ("hash_differs", 0)]
        assert index.ids() == left
    ledger.write_bytes(good[:-7])
    assert [p.kind for p in StoreIndex.load(tmp_path).problems] == ["truncated"]


def test_a_damaged_first_line_is_named_and_the_rest_counts(tmp_path: Path) -> None:
    ledger = write(tmp_path, 0, commit(0, 1, {1: BOTH}))
    data = bytearray(ledger.read_bytes())
    data[20] ^= 1
    ledger.write_bytes(data)
    index = StoreIndex.load(tmp_path)
    assert {problem.kind for problem in index.problems} == {"damaged_line", "no_opening"}
    assert index.ids() == [id_of(1)]


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"kind":"ope'])
def test_a_life_that_never_opened_its_ledger_is_no_problem(tmp_path: Path, content: bytes) -> None:
    ledger = write(tmp_path, 0)
    ledger.write_bytes(content)
    assert StoreIndex.load(tmp_path).problems == []


def test_columns_of_different_lengths_are_damage(tmp_path: Path) -> None:
    record = commit(0, 1, {1: BOTH, 2: BOTH})
    broken = [replace(record, ids=record.ids[:1]), replace(record, tensors=("r2", "final", "x"))]
    write(tmp_path, 0, *broken, commit(0, 2, {3: BOTH}))
    index = StoreIndex.load(tmp_path)
    assert [problem.kind for problem in index.problems] == ["damaged_line"] * 2
    assert index.ids() == [id_of(3)]


def test_another_schema_version_is_refused_in_words(tmp_path: Path) -> None:
    write(tmp_path, 0, opened=Opened(LIVES[0], FINGERPRINT, schema=7))
    with pytest.raises(OtherSpec, match=r"schema version 7.*reads 0"):
        StoreIndex.load(tmp_path)


def test_a_ledger_of_another_spec_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 0, commit(0, 1, {1: BOTH}))
    write(tmp_path, 1, commit(1, 1, {2: BOTH}), opened=Opened(LIVES[1], "e" * 32))
    index = StoreIndex.load(tmp_path, FINGERPRINT)
    assert [(problem.kind, problem.life) for problem in index.problems] == [("foreign", LIVES[1].id)]
    assert index.ids() == [id_of(1)]


def test_a_line_that_changes_under_the_index_is_damage_in_words(tmp_path: Path) -> None:
    ledger = write(tmp_path, 0, commit(0, 1, {1: BOTH}))
    index = StoreIndex.load(tmp_path)
    data = bytearray(ledger.read_bytes())
    data[-40] ^= 1
    ledger.write_bytes(data)
    with pytest.raises(StoreDamaged, match="checksum"):
        index.locate(id_of(1), "r2")


def test_columns_of_nothing() -> None:
    columns = Columns.build(Gathered(Path(), None), [])
    assert columns.find([id_of(1)]).tolist() == [-1]
    assert pack_ids([]) == b""
