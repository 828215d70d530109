"""Sizes and durations, read from and written for people. Decimal: 1 TB = 10^12 bytes."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from wellhead.errors import UsageError

_DECIMAL = "kMGTPE"
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kKmMgGtTpPeE])(i?))?[bB]?\s*")


def parse_size(text: str | int) -> int:
    """Bytes from "400GB", "1.5 TB", "64MiB", "64M" (decimal) or a plain number. Raises UsageError."""
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise UsageError(f"{text!r} is not a size", "write a number and a unit, such as 400GB or 64MiB")
    number, prefix, binary = match.groups()
    power = _DECIMAL.lower().index(prefix.lower()) + 1 if prefix else 0
    base = 1024 if binary else 1000
    # Exact: a float would round sizes beyond 2^53.
    size = int(Decimal(number) * int(base**power))
    if size >= 1 << 63:
        raise UsageError(f"{text!r} is more than any disk holds", "write a number and a unit, such as 400GB")
    return size


def format_bytes(count: float) -> str:
    """Four significant digits: "1.206 TB", "57.34 kB", "512 B"."""
    if abs(count) < 1000:
        return f"{count:.0f} B"
    # The exponent is taken after rounding, so that 999,999 bytes are a megabyte.
    mantissa, exponent = f"{count:.3e}".split("e")
    power = min(int(exponent) // 3, len(_DECIMAL))
    beyond = int(exponent) - 3 * power
    return f"{float(mantissa) * 10**beyond:.{max(3 - beyond, 0)}f} {_DECIMAL[power - 1]}B"


def count(number: int, noun: str) -> str:
    """ "1 sample", "1,200 samples"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """The two largest units: "0.4 s", "42 s", "3 min 20 s", "2 h 48 min", "3 d 4 h"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    # Each row: the larger unit, the smaller one, how many of it make the larger, its seconds, where the row ends.
    for large, small, per, size, end in (
        ("min", "s", 60, 1, 60),
        ("h", "min", 60, 60, 24),
        ("d", "h", 24, 3600, math.inf),
    ):
        whole, rest = divmod(round(seconds / size), per)
        if whole < end:
            return " ".join(f"{n} {unit}" for n, unit in ((whole, large), (rest, small)) if n)
    raise AssertionError("the last row has no end")
