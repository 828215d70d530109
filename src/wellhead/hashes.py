"""Vectorised 64-bit hashes of rows and of token prefixes, for finding equal ones. Not for integrity: that is xxh3's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.core import Bits

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that spreads every bit. uint64 [...]."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def row_hashes(bits: Bits) -> NDArray[np.uint64]:
    """A hash of each row of [T, H] bf16 bits: uint64 [T]. It is a sum of values times fixed odd numbers."""
    weights = mix(np.arange(1, bits.shape[1] + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
    sums = np.empty(len(bits), np.uint64)
    for start in range(0, len(bits), 256):  # a block at a time: the products are four times the size of the bits
        sums[start : start + 256] = (bits[start : start + 256].astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    return mix(sums)


def prefix_hashes(input_ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """A hash of the ids up to and including each position: uint64 [T]."""
    places = mix(np.arange(1, len(input_ids) + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
    tokens = mix(input_ids.astype(np.uint64) + _GOLDEN)
    return mix(np.cumsum(tokens * places, dtype=np.uint64))
