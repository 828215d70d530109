"""Sizes and durations, against values worked out by hand."""

from __future__ import annotations

import pytest

from wellhead.errors import UsageError
from wellhead.units import format_bytes, format_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        (512, 512),
        ("512B", 512),
        ("400GB", 400_000_000_000),
        ("400 gb", 400_000_000_000),
        ("1.5T", 1_500_000_000_000),
        ("2.7TB", 2_700_000_000_000),
        ("1GiB", 1_073_741_824),
        ("64MiB", 67_108_864),
        ("64M", 64_000_000),
        (".5k", 500),
        ("1KiB", 1024),
        ("9007199254740993", 9_007_199_254_740_993),
        ("9007.199254740993TB", 9_007_199_254_740_993),
    ],
)
def test_sizes_are_read_exactly(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1GBs", "1 2", "1e9", "four", "1iB", "nan"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_size(text)
    assert repr(text) in refused.value.message
    assert "400GB" in refused.value.hint


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.000 kB"),
        (57_344, "57.34 kB"),
        (107_000_000, "107.0 MB"),
        (999_949, "999.9 kB"),
        (999_999, "1.000 MB"),
        (1_205_944_320_000, "1.206 TB"),
        (6_105_943_000_000, "6.106 TB"),
        (9_999_500_000, "10.00 GB"),
        (99_995_000_000, "100.0 GB"),
    ],
)
def test_bytes_have_four_digits_and_decimal_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.96, "10.0 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (200, "3 min 20 s"),
        (3599.7, "1 h"),
        (10_080, "2 h 48 min"),
        (86_400 * 3 + 4 * 3600, "3 d 4 h"),
        (86_400 - 1, "1 d"),
        (float("inf"), "unknown"),
        (float("nan"), "unknown"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
