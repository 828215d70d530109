"""Samples × tensors as numpy columns: membership of a million ids without a Python object each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wellhead.core import INPUT_IDS
from wellhead.store.gather import Gathered
from wellhead.store.records import ID_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]
    """[n]: one half of n ids, big-endian, so that they sort as their hex does."""
    Flags = NDArray[np.bool_]


class Lacking(NamedTuple):
    """`rows` [k] are positions in what was asked; `values` bool [k, tensors] say what is lacking there."""

    rows: NDArray[np.int64]
    values: Flags


@dataclass(frozen=True, slots=True)
class Columns:
    """An *entry* is a sample in a shard; entries are sorted by id, then by shard name. A *sample* is a group of them.

    `high`, `low` [samples] are the ids; `starts` [samples + 1] the first entry of each. `shard`, `row`, `tokens`
    [entries] say where an entry is; `entry_has` and `has` map a tensor to bool [entries] and bool [samples].
    """

    high: Words
    low: Words
    starts: NDArray[np.int64]
    shard: NDArray[np.int32]
    row: NDArray[np.int32]
    tokens: NDArray[np.int32]
    entry_has: dict[str, Flags]
    has: dict[str, Flags]
    has_state: Flags

    @classmethod
    def build(cls, gathered: Gathered, live: Sequence[int]) -> Columns:
        """`live` are the positions in `gathered.shards` of what counts, by shard name."""
        counts = np.array([shard.samples for shard in gathered.shards], dtype=np.int64)
        rank = np.full(len(counts), -1, dtype=np.int32)
        rank[list(live)] = np.arange(len(live), dtype=np.int32)
        shard = np.repeat(rank, counts)
        row = (np.arange(len(shard)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32)
        order = _by_shard(shard)
        high, low = split_words(gathered.ids)
        order = order[_by_id(high[order], low[order])]
        high, low = high[order], low[order]
        new = np.ones(len(order), dtype=np.bool_)
        new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        firsts = np.flatnonzero(new)
        presence = _presence(gathered, counts)
        entry_has = {name: presence.pop(name)[order] for name in list(presence)}
        has = {name: _any_by_group(flags, firsts) for name, flags in entry_has.items()}
        has_state = np.zeros(len(firsts), dtype=np.bool_)
        for name, flags in has.items():
            if name != INPUT_IDS:
                has_state |= flags
        return cls(
            high=high[firsts],
            low=low[firsts],
            starts=np.append(firsts, len(order)),
            shard=shard[order],
            row=row[order],
            tokens=np.array(gathered.tokens, dtype=np.int32)[order],
            entry_has=entry_has,
            has=has,
            has_state=has_state,
        )

    @property
    def sample_tokens(self) -> NDArray[np.int32]:
        """[samples]"""
        return self.tokens[self.starts[:-1]]

    def hex_ids(self, which: Flags) -> list[str]:
        words = np.stack([self.high[which], self.low[which]], axis=1).astype(">u8")
        text = words.tobytes().hex()
        return [text[at : at + 2 * ID_BYTES] for at in range(0, len(text), 2 * ID_BYTES)]

    def find(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The sample number of each id, -1 for an unknown one. ValueError for what is no id."""
        high, low = split_words(pack_ids(ids))
        out = np.full(len(high), -1, dtype=np.int64)
        order = np.argsort(high)  # a search in order stays in the cache
        at = np.empty(len(high), dtype=np.int64)
        at[order] = np.searchsorted(self.high, high[order])
        open_ = np.flatnonzero(at < len(self.high))
        while len(open_):  # more than one turn only where different ids share their first half
            here = at[open_]
            open_ = open_[self.high[here] == high[open_]]
            here = at[open_]
            hit = self.low[here] == low[open_]
            out[open_[hit]] = here[hit]
            open_ = open_[~hit]
            at[open_] += 1
            open_ = open_[at[open_] < len(self.high)]
        return out

    def lacking(self, ids: Sequence[str], tensors: Sequence[str]) -> Lacking:
        at = self.find(ids)
        known = at >= 0
        lacks = np.ones((len(at), len(tensors)), dtype=np.bool_)
        for column, name in enumerate(tensors):
            if name in self.has:
                lacks[known, column] = ~self.has[name][at[known]]
        rows = np.flatnonzero(lacks.any(axis=1))
        return Lacking(rows, lacks[rows])

    def entry(self, id: str, tensor: str) -> tuple[int, int, int] | None:
        """(shard, row in it, tokens) of the entry that has the tensor, in the shard with the lowest name."""
        [sample] = self.find([id])
        if sample < 0 or tensor not in self.entry_has:
            return None
        first, end = int(self.starts[sample]), int(self.starts[sample + 1])
        [hits] = np.nonzero(self.entry_has[tensor][first:end])
        if not len(hits):
            return None
        at = first + int(hits[0])
        return int(self.shard[at]), int(self.row[at]), int(self.tokens[at])

    def shards_of(self, id: str) -> list[int]:
        """The shards that hold something of a sample."""
        [sample] = self.find([id])
        return [] if sample < 0 else [int(s) for s in self.shard[self.starts[sample] : self.starts[sample + 1]]]

    def distinct_raw_bytes(self, shard_raw_bytes: Sequence[int]) -> int:
        """Raw bytes with each (sample, tensor) counted once. All states of a shard have the same bytes a token, so a
        shard whose states count in part counts by its share of tokens × tensors."""
        counted = np.zeros(len(shard_raw_bytes), dtype=np.int64)
        total = np.zeros(len(shard_raw_bytes), dtype=np.int64)
        group = np.repeat(np.arange(len(self.high)), np.diff(self.starts))
        for name, flags in self.entry_has.items():
            if name == INPUT_IDS:
                continue
            entries = np.flatnonzero(flags)
            first = np.ones(len(entries), dtype=np.bool_)
            first[1:] = group[entries[1:]] != group[entries[:-1]]
            np.add.at(total, self.shard[entries], self.tokens[entries])
            np.add.at(counted, self.shard[entries[first]], self.tokens[entries[first]])
        return sum(
            raw if part == whole else raw * int(part) // int(whole)
            for raw, part, whole in zip(shard_raw_bytes, counted, total, strict=True)
        )


def pack_ids(ids: Sequence[str]) -> bytes:
    """Ids as bytes, 16 each. ValueError for what is no id."""
    if not set(map(len, ids)) <= {2 * ID_BYTES}:
        raise ValueError(f"an id is {2 * ID_BYTES} hex digits")
    return bytes.fromhex("".join(ids))


def split_words(packed: bytes | bytearray) -> tuple[Words, Words]:
    """Both halves of packed ids."""
    pairs = np.frombuffer(packed, dtype=">u8").reshape(-1, 2)
    return pairs[:, 0].astype(np.uint64), pairs[:, 1].astype(np.uint64)


def distinct_rows(flags: Flags) -> tuple[Flags, NDArray[np.int64]]:
    """The distinct rows of bool [n, k], and for each row the number of its own among them."""
    kind = np.zeros(len(flags), dtype=np.int64)
    for eight in np.packbits(flags, axis=1).T:  # numbered anew each time, so they stay small
        _, kind = np.unique(256 * kind + eight, return_inverse=True)
    _, first = np.unique(kind, return_index=True)
    return flags[first], kind


def _by_shard(shard: NDArray[np.int32]) -> NDArray[np.int64]:
    """Entries of the shards that count, by shard. They are read almost in that order."""
    order = np.flatnonzero(shard >= 0)
    ranks = shard[order]
    if (ranks[1:] >= ranks[:-1]).all():
        return order
    return order[np.argsort(ranks, kind="stable")]


def _by_id(high: Words, low: Words) -> NDArray[np.int64]:
    """A stable order by id: the first half alone settles it, unless two ids share that."""
    order = np.argsort(high, kind="stable")
    first, second = high[order], low[order]
    if ((first[1:] == first[:-1]) & (second[1:] != second[:-1])).any():
        return np.lexsort((low, high))
    return order


def _presence(gathered: Gathered, counts: NDArray[np.int64]) -> dict[str, Flags]:
    """Tensor -> which entries have it, in the order of reading."""
    kinds = {shard.tensors for shard in gathered.shards}
    out: dict[str, Flags] = {}
    for name in sorted({name for tensors in kinds for name in tensors}):
        having = {tensors for tensors in kinds if name in tensors}
        out[name] = np.repeat(np.array([shard.tensors in having for shard in gathered.shards], dtype=np.bool_), counts)
        out[name][gathered.absent.get(name, [])] = False
    return out


def _any_by_group(flags: Flags, firsts: NDArray[np.int64]) -> Flags:
    if not len(firsts):
        return np.zeros(0, dtype=np.bool_)
    return np.logical_or.reduceat(flags, firsts)
