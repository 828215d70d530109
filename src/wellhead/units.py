"""Sizes, durations and rates, read from and written for people. Decimal: 1 TB = 10^12 bytes."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from wellhead.errors import UsageError

_DECIMAL = "kMGTPE"
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kKmMgGtTpPeE])(i?))?[bB]?\s*")
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|m|h|d)?\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str | int) -> int:
    """Bytes from "400GB", "1.5 TB", "64MiB", "64M" (decimal) or a plain number. Raises UsageError."""
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise UsageError(f"{text!r} is not a size", "write a number and a unit, such as 400GB or 64MiB")
    number, prefix, binary = match.groups()
    power = _DECIMAL.lower().index(prefix.lower()) + 1 if prefix else 0
    base = 1024 if binary else 1000
    # Exact: a float would round sizes beyond 2^53.
    return int(Decimal(number) * int(base**power))


def parse_duration(text: str | float) -> float:
    """Seconds from "90", "90s", "2min", "1.5h". Raises UsageError."""
    match = _DURATION.fullmatch(str(text))
    if match is None:
        raise UsageError(f"{text!r} is not a duration", "write a number and s, min, h or d, such as 30s")
    number, unit = match.groups()
    return float(number) * _SECONDS[unit or "s"]


def format_bytes(count: float) -> str:
    """Four significant digits: "1.206 TB", "57.34 kB", "512 B"."""
    if abs(count) < 1000:
        return f"{count:.0f} B"
    power = min(int(math.log10(abs(count)) // 3), len(_DECIMAL))
    if round(abs(count) / 1000**power, 3) >= 1000 and power < len(_DECIMAL):
        power += 1
    return f"{_digits(count / 1000**power)} {_DECIMAL[power - 1]}B"


def format_count(count: int) -> str:
    """Thousands separated: "21,030,000"."""
    return f"{count:,}"


def format_duration(seconds: float) -> str:
    """The two largest units: "0.4 s", "42 s", "3 min 20 s", "2 h 48 min", "3 d 4 h"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            # Rounded to the smaller unit first, so that 59 min 59.7 s is an hour.
            total = round(whole / part)
            per = size // part
            return f"{total // per} {unit} {total % per} {small}" if total % per else f"{total // per} {unit}"
    return f"{whole} s"


def format_rate(per_second: float, unit: str = "tok") -> str:
    """ "883 tok/s", "12.4 tok/s"; for bytes use `format_bytes` and "/s"."""
    if not math.isfinite(per_second):
        return f"unknown {unit}/s"
    return f"{per_second:,.0f} {unit}/s" if per_second >= 100 else f"{per_second:.1f} {unit}/s"


def _digits(value: float) -> str:
    """Four significant digits of a number from 1 to 1000."""
    decimals = 3 if abs(value) < 9.9995 else 2 if abs(value) < 99.995 else 1
    return f"{value:.{decimals}f}"
