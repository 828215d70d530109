"""What "13GB/121" is worth: a total extrapolated from some files on disk, judged against the known token lengths."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wellhead.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OBSERVED = re.compile(r"\s*([0-9]+)(?:\.([0-9]+))?\s*([kMGTP]?)(i?)B?\s*/\s*([0-9]+)\s*")
_POWERS = "kMGTP"
_SIGMAS = 1.96
"""A 95 % interval of a normal mean."""


@dataclass(frozen=True, slots=True)
class Observed:
    """`low` to `high` bytes are what the text can mean: its last digit is rounded, and "GB" is often GiB."""

    text: str
    samples: int
    bytes: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """All in bytes. `extrapolated_bytes` = observed mean × rows; `interval_bytes` is its 95 % interval, from sampling
    (without replacement, spread of the true lengths), rounding and the unit, *if the order was random*.

    `z` is how many standard errors the observed mean lies from the true one. `first_rows_bytes` is what the first rows
    of the file take in fact. `sorted_bytes` are the totals that the same method would have given on a file sorted by
    length, up and down.
    """

    observed: str
    samples: int
    extrapolated_bytes: int
    interval_bytes: tuple[int, int]
    exact_bytes: int
    z: float
    consistent_with_random_order: bool
    first_rows_bytes: int
    consistent_with_first_rows: bool
    sorted_bytes: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_observed(text: str) -> Observed:
    """From "13GB/121": bytes on disk / samples. Raises UsageError."""
    match = _OBSERVED.fullmatch(text)
    if match is None or int(match[5]) == 0:
        raise UsageError(f"--observed {text!r} is not SIZE/SAMPLES", "write it like 13GB/121")
    whole, decimals, prefix, binary, samples = match.groups()
    power = _POWERS.index(prefix) + 1 if prefix else 0
    number = float(f"{whole}.{decimals or 0}")
    rounding = 0.5 * 10.0 ** -len(decimals or "") if prefix else 0.0
    unit = (1024 if binary else 1000) ** power
    return Observed(text.strip(), int(samples), number * unit, (number - rounding) * unit,
                    (number + rounding) * 1024**power)  # fmt: skip


def extrapolate(observed: Observed, lengths: NDArray[np.int64], bytes_per_token: int) -> Extrapolation:
    """Judges `observed` against all lengths, int64 [rows] in file order. Raises UsageError if it has more samples."""
    rows, n = len(lengths), observed.samples
    if n > rows:
        raise UsageError(f"--observed {observed.text!r} counts {n} samples, there are only {rows} rows", "which file?")
    sizes = lengths * bytes_per_token
    exact, mean = int(sizes.sum()), float(sizes.mean())
    # Of a mean of n out of N without replacement.
    error = float(sizes.std(ddof=1)) * math.sqrt((1 - n / rows) / n) if rows > 1 else 0.0
    low, high = observed.low / n, observed.high / n
    reach = _SIGMAS * error
    first, ordered = int(sizes[:n].sum()), np.sort(sizes)
    return Extrapolation(
        observed=observed.text,
        samples=n,
        extrapolated_bytes=round(observed.bytes / n * rows),
        interval_bytes=(round(max(low - reach, 0) * rows), round((high + reach) * rows)),
        exact_bytes=exact,
        z=(observed.bytes / n - mean) / error if error else 0.0,
        consistent_with_random_order=low - reach <= mean <= high + reach,
        first_rows_bytes=first,
        consistent_with_first_rows=observed.low <= first <= observed.high,
        sorted_bytes=(round(float(ordered[:n].mean()) * rows), round(float(ordered[-n:].mean()) * rows)),
    )
