"""What a run will take on disk, before any GPU work: exact raw bytes from token lengths, and whether that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from wellhead.core import raw_bytes
from wellhead.disk import Room
from wellhead.plan_read import Plan
from wellhead.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

STORED_RATIO: Mapping[str, float] = {"planes-zstd": 0.67, "raw": 1.0}
"""Stored over raw bytes to expect of a codec's state tensors; `raw` is exact, the other was measured on real states."""

INPUT_ID_BYTES = 4
LABEL_BYTES_PER_TENSOR = 200
"""Header and ledger entry of a tensor: name, shape, offsets and hashes."""

SMALLEST_SHARD_BYTES = 64 << 20
INODES_BESIDE_SHARDS = 16
"""run.json, the lock, plans, folders, and what a writer keeps about itself."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Token lengths, int64 [kept rows] in file order, and which rows are the first of their state, bool [kept rows].

    `ids` names the states of the first rows, in their order; None where only lengths are known.
    """

    tokens: NDArray[np.int64]
    is_first: NDArray[np.bool_]
    supervised: NDArray[np.int64] | None = None
    ids: Sequence[str] | None = None
    rejected: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_plan(cls, plan: Plan) -> Workload:
        is_first = np.zeros(len(plan), np.bool_)
        is_first[plan.distinct] = True
        tokens, supervised = plan.column("tokens")[plan.kept], plan.column("supervised_tokens")[plan.kept]
        return cls(tokens, is_first, supervised, [item.id for item in plan.items()], plan.rejected)

    @classmethod
    def of_lengths(cls, lengths: NDArray[np.int64]) -> Workload:
        """Where only lengths are known, every row counts as a state of its own."""
        return cls(lengths, np.ones(len(lengths), np.bool_))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes unless said otherwise. `raw_bytes` is exact; `stored_bytes` an estimate of the whole run's files,
    `needed_bytes` of what is not durable yet. Counts as everywhere: rows for samples, distinct states for tokens.

    `largest_n_that_fits` counts the first kept rows in file order. `largest_max_length_that_fits` is in tokens, None if
    everything fits as it is, 0 if no length does. `inodes` is an upper bound. `staging_bytes` is what the staging of a
    server must hold at least: the two longest samples; the embedded engine needs none. `seconds`: (low, high).
    """

    samples: int
    rejected: Mapping[str, int]
    duplicates: int
    tokens: int
    supervised_tokens: int | None
    longest_tokens: int
    bytes_per_token: int
    raw_bytes: int
    stored_bytes: int
    ratio: float
    needed_bytes: int
    worst_case_bytes: int
    reserve_bytes: int
    inodes: int
    free_inodes: int | None
    staging_bytes: int
    free_bytes: int
    fits: bool
    largest_n_that_fits: int
    largest_max_length_that_fits: int | None
    seconds: tuple[float, float] | None = None

    @property
    def refusal(self) -> str:
        """Why it does not fit, by how much, and what would; an empty text if it fits."""
        if self.fits:
            return ""
        room = f"{format_bytes(self.free_bytes)} are free"
        if self.reserve_bytes:
            room += f" and {format_bytes(self.reserve_bytes)} of them reserved"
        short = self.needed_bytes - (self.free_bytes - self.reserve_bytes)
        if short <= 0:
            return f"does not fit: up to {self.inodes:,} files are needed, {self.free_inodes:,} inodes are free"
        words = (
            f"does not fit: {format_bytes(self.needed_bytes)} are needed, {room}: {format_bytes(short)} too little. "
            f"The first {self.largest_n_that_fits:,} of {self.samples:,} rows would fit"
        )
        if self.largest_max_length_that_fits:
            words += f", or all of them at a max length of {self.largest_max_length_that_fits:,} tokens"
        return words

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rejected": dict(self.rejected)}


def predict(
    work: Plan | Workload,
    layers: Sequence[int],
    hidden_size: int,
    room: Room,
    codec: str = "planes-zstd",
    pending: Mapping[str, Sequence[str]] | None = None,
) -> Prediction:
    """Judges a plan, or mere lengths, against the room. `layers` excludes the final state, which is always counted.

    `pending` maps each state that is not wholly durable to the state tensors it lacks; None means that nothing is.
    """
    load = Workload.of_plan(work) if isinstance(work, Plan) else work
    states = load.tokens[load.is_first]
    all_tensors = len(layers) + 1
    lacking = _lacking(load, pending, all_tensors)
    cost = _Cost(hidden_size, STORED_RATIO[codec])
    needed = cost.of(states, lacking)
    per_row = np.zeros(len(load.tokens), np.int64)
    per_row[load.is_first] = needed
    needed_bytes, inodes = int(needed.sum()), _inodes(int(needed.sum()))
    bytes_per_token = raw_bytes(1, len(layers), hidden_size)
    longest = int(load.tokens.max(initial=0))
    fits = room.fits(needed_bytes, inodes)
    return Prediction(
        samples=len(load.tokens),
        rejected=load.rejected,
        duplicates=len(load.tokens) - len(states),
        tokens=int(states.sum()),
        supervised_tokens=None if load.supervised is None else int(load.supervised[load.is_first].sum()),
        longest_tokens=longest,
        bytes_per_token=bytes_per_token,
        raw_bytes=int(states.sum()) * bytes_per_token,
        stored_bytes=int(cost.of(states, np.full(len(states), all_tensors)).sum()),
        ratio=STORED_RATIO[codec],
        needed_bytes=needed_bytes,
        worst_case_bytes=len(load.tokens) * longest * bytes_per_token,
        reserve_bytes=room.reserve_bytes,
        inodes=inodes,
        free_inodes=room.free_inodes,
        staging_bytes=int(np.sort(states)[-2:].sum()) * bytes_per_token,
        free_bytes=room.free_bytes,
        fits=fits,
        largest_n_that_fits=int(np.searchsorted(np.cumsum(per_row), room.usable_bytes, side="right")),
        largest_max_length_that_fits=None if fits else _largest_length(cost, states, lacking, room.usable_bytes),
    )


@dataclass(frozen=True, slots=True)
class _Cost:
    hidden_size: int
    ratio: float

    def of(self, tokens: NDArray[np.int64], tensors: NDArray[np.int64]) -> NDArray[np.int64]:
        """Stored bytes of each state, for so many of its tensors; nothing where that is none."""
        states = np.ceil(tokens * tensors * (self.hidden_size * 2) * self.ratio).astype(np.int64)
        total = states + tokens * INPUT_ID_BYTES + (tensors + 1) * LABEL_BYTES_PER_TENSOR
        return np.where(tensors > 0, total, 0)


def _lacking(load: Workload, pending: Mapping[str, Sequence[str]] | None, all_tensors: int) -> NDArray[np.int64]:
    if pending is None or load.ids is None:
        return np.full(int(load.is_first.sum()), all_tensors)
    return np.array([len(pending.get(id, ())) for id in load.ids], np.int64)


def _largest_length(cost: _Cost, tokens: NDArray[np.int64], tensors: NDArray[np.int64], usable: int) -> int:
    """The greatest max length at which everything would fit, by bisection: cost grows with the length."""
    low, high = 0, int(tokens.max(initial=0))
    while low < high:
        middle = (low + high + 1) // 2
        if int(cost.of(np.minimum(tokens, middle), tensors).sum()) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def _inodes(stored: int) -> int:
    return -(-stored // SMALLEST_SHARD_BYTES) + INODES_BESIDE_SHARDS
