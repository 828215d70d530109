"""The forecast, against the founding run's numbers and against sums made row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from wellhead.core import state_names
from wellhead.disk import Room, free_bytes, free_inodes, room
from wellhead.errors import UsageError
from wellhead.extrapolate import extrapolate, parse_observed
from wellhead.predict import LABEL_BYTES_PER_TENSOR, STORED_RATIO, Workload, predict

KIMI_LAYERS, KIMI_WIDTH = (3, 31, 59), 7168
TB = 10**12


def founding_lengths() -> NDArray[np.int64]:
    """10,000 lengths of mean 2,103 and maximum 10,648, spread like a chat file's (CV about 0.84)."""
    chance = np.random.default_rng(1)
    lengths = np.clip(chance.lognormal(7.35, 0.75, 10_000), 20, 10_000).astype(np.int64)
    lengths[5_000] = 10_648
    off = 21_030_000 - int(lengths.sum())
    step = np.sign(off)
    places = np.flatnonzero((lengths > 500) & (lengths < 9_000))[: abs(off) % 5_000]
    lengths[places] += step
    lengths[np.flatnonzero((lengths > 500) & (lengths < 9_000))[:5_000]] += step * (abs(off) // 5_000)
    assert (lengths.sum(), lengths.max(), len(lengths)) == (21_030_000, 10_648, 10_000)
    return lengths


def test_the_founding_run() -> None:
    found = predict(Workload.of_lengths(founding_lengths()), KIMI_LAYERS, KIMI_WIDTH, Room(27 * TB // 10), "raw")
    assert found.bytes_per_token == 57_344
    assert found.tokens == 21_030_000
    assert found.raw_bytes == 21_030_000 * 57_344 == 1_205_944_320_000
    assert found.worst_case_bytes == 10_000 * 10_648 * 57_344 == 6_105_989_120_000
    assert found.fits
    assert found.largest_n_that_fits == 10_000
    assert found.largest_max_length_that_fits is None
    assert found.refusal == ""
    # raw states, token ids, and a label for each of the four states and the token ids of a sample
    assert found.stored_bytes == 1_205_944_320_000 + 21_030_000 * 4 + 10_000 * 5 * LABEL_BYTES_PER_TENSOR
    assert found.seconds is None


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    lengths = founding_lengths()
    reserve, free = 400 * 10**9, 900 * 10**9
    found = predict(Workload.of_lengths(lengths), KIMI_LAYERS, KIMI_WIDTH, Room(free, None, reserve))
    assert not found.fits

    def stored(tokens: NDArray[np.int64]) -> int:
        total = 0
        for count in tokens.tolist():
            total += int(np.ceil(count * 57_344 * 0.67)) + 4 * count + 5 * LABEL_BYTES_PER_TENSOR
        return total

    assert found.needed_bytes == found.stored_bytes == stored(lengths)
    n, longest = found.largest_n_that_fits, found.largest_max_length_that_fits
    assert longest is not None
    assert stored(lengths[:n]) <= free - reserve < stored(lengths[: n + 1])
    assert stored(np.minimum(lengths, longest)) <= free - reserve < stored(np.minimum(lengths, longest + 1))
    assert f"first {n:,} of 10,000 rows" in found.refusal
    assert f"{longest:,} tokens" in found.refusal
    assert "308.1 GB too little" in found.refusal


def test_a_byte_decides() -> None:
    work = Workload.of_lengths(np.array([3, 5, 2]))
    needed = predict(work, (2,), 4, Room(10**9)).needed_bytes
    assert predict(work, (2,), 4, Room(needed)).fits
    tight = predict(work, (2,), 4, Room(needed - 1))
    assert (tight.fits, tight.largest_n_that_fits) == (False, 2)
    assert not predict(work, (2,), 4, Room(needed + 9, None, 10)).fits
    assert predict(work, (2,), 4, Room(needed + 10, None, 10)).fits


def test_nothing_at_all_fits() -> None:
    found = predict(Workload.of_lengths(np.array([3, 5])), (2,), 4, Room(10, None, 100))
    assert (found.fits, found.largest_n_that_fits, found.largest_max_length_that_fits) == (False, 0, 0)
    assert "max length" not in found.refusal


def test_inodes_are_counted() -> None:
    work = Workload.of_lengths(np.full(100, 1000))
    found = predict(work, (2,), 4096, Room(TB, 10), "raw")
    shards = -(-found.stored_bytes // (64 << 20))
    assert found.inodes == shards + 16
    assert not found.fits
    assert "10 inodes are free" in found.refusal
    assert predict(work, (2,), 4096, Room(TB, shards + 16), "raw").fits
    assert predict(work, (2,), 4096, Room(TB, None), "raw").fits


def test_duplicates_cost_nothing() -> None:
    work = Workload(np.array([7, 7, 9, 7]), np.array([True, False, True, False]), np.array([1, 2, 3, 4]), ["a", "b"])
    found = predict(work, (2, 3), 8, Room(TB), "raw")
    assert (found.samples, found.duplicates, found.tokens, found.supervised_tokens) == (4, 2, 16, 4)
    assert found.raw_bytes == 16 * 3 * 8 * 2
    assert found.staging_bytes == 16 * 3 * 8 * 2
    first = predict(Workload.of_lengths(np.array([7])), (2, 3), 8, Room(TB), "raw").needed_bytes
    assert predict(work, (2, 3), 8, Room(first), "raw").largest_n_that_fits == 2


def test_what_is_durable_is_not_needed_again() -> None:
    ids = ["a", "b", "c"]
    work = Workload(np.array([100, 200, 300]), np.ones(3, np.bool_), None, ids)
    tensors = state_names((2, 3))
    pending = {"b": tensors, "c": ("r3",)}  # a is whole, c lacks a layer that was added later
    found = predict(work, (2, 3), 8, Room(TB), "raw", pending)
    whole_b, layer_of_c = 200 * 3 * 16 + 200 * 4 + 4 * 200, 300 * 1 * 16 + 300 * 4 + 2 * 200
    assert found.needed_bytes == whole_b + layer_of_c
    assert found.stored_bytes == 600 * 3 * 16 + 600 * 4 + 3 * 4 * 200
    assert found.raw_bytes == 600 * 3 * 16
    assert predict(work, (2, 3), 8, Room(0), "raw", {}).fits
    assert predict(work, (2, 3), 8, Room(whole_b), "raw", pending).largest_n_that_fits == 2


def test_an_empty_plan_fits_anywhere() -> None:
    found = predict(Workload.of_lengths(np.array([], np.int64)), (2,), 8, Room(0))
    assert (found.samples, found.tokens, found.raw_bytes, found.fits, found.largest_n_that_fits) == (0, 0, 0, True, 0)


def test_the_codec_s_ratio_is_an_estimate_and_raw_is_not() -> None:
    assert STORED_RATIO["raw"] == 1.0
    assert 0.6 < STORED_RATIO["planes-zstd"] <= 0.68


def test_room_is_asked_of_the_nearest_folder_there_is(tmp_path: Path) -> None:
    deep = tmp_path / "not" / "yet" / "made"
    assert abs(free_bytes(deep) - free_bytes(tmp_path)) < 1 << 30
    assert (free_inodes(deep) is None) == (free_inodes(tmp_path) is None)
    asked = room(deep, 7)
    assert (asked.reserve_bytes, asked.usable_bytes) == (7, asked.free_bytes - 7)
    assert not deep.exists()


@pytest.mark.parametrize(
    ("text", "nominal", "low", "high"),
    [
        ("13GB/121", 13e9, 12.5e9, 13.5 * 2**30),
        ("13 G / 121", 13e9, 12.5e9, 13.5 * 2**30),
        ("13.0GB/121", 13e9, 12.95e9, 13.05 * 2**30),
        ("13GiB/121", 13 * 2**30, 12.5 * 2**30, 13.5 * 2**30),
        ("12979789824/121", 12979789824, 12979789824, 12979789824),
    ],
)
def test_what_an_observed_figure_can_mean(text: str, nominal: float, low: float, high: float) -> None:
    found = parse_observed(text)
    assert (found.samples, found.bytes, found.low, found.high) == (
        121,
        nominal,
        pytest.approx(low),
        pytest.approx(high),
    )


@pytest.mark.parametrize("text", ["13GB", "13GB/0", "GB/121", "13XB/121", "13GB/1.5", "-1GB/3", ""])
def test_what_is_no_observation(text: str) -> None:
    with pytest.raises(UsageError, match="SIZE/SAMPLES"):
        parse_observed(text)


def test_the_founding_extrapolation() -> None:
    lengths = founding_lengths()
    found = extrapolate(parse_observed("13GB/121"), lengths, 57_344)
    assert found.extrapolated_bytes == round(13e9 / 121 * 10_000)
    assert found.exact_bytes == 1_205_944_320_000
    spread = float(np.std(lengths, ddof=1)) / np.sqrt(121) * np.sqrt(1 - 121 / 10_000)
    assert found.z == pytest.approx((13e9 / 121 / 57_344 - 2_103) / spread)
    assert -2 < found.z < -1
    assert found.consistent_with_random_order
    low, high = found.interval_bytes
    assert low == pytest.approx((12.5e9 / 121 - 1.96 * spread * 57_344) * 10_000)
    assert high == pytest.approx((13.5 * 2**30 / 121 + 1.96 * spread * 57_344) * 10_000)
    assert low < found.exact_bytes < high
    assert found.first_rows_bytes == int(lengths[:121].sum()) * 57_344


def test_an_extrapolation_from_a_sorted_file_is_called_out() -> None:
    lengths = np.sort(founding_lengths())
    seen = int(lengths[:121].sum()) * 57_344
    found = extrapolate(parse_observed(f"{seen}/121"), lengths, 57_344)
    assert not found.consistent_with_random_order
    assert found.consistent_with_first_rows
    assert found.z < -5
    assert found.sorted_bytes[0] == pytest.approx(seen / 121 * 10_000)
    assert found.sorted_bytes[0] < found.exact_bytes / 5
    assert found.sorted_bytes[1] > found.exact_bytes * 3
    assert not extrapolate(parse_observed(f"{seen + 1}/121"), lengths, 57_344).consistent_with_first_rows


def test_all_samples_observed_leave_no_sampling_error() -> None:
    lengths = np.array([1, 2, 3])
    found = extrapolate(parse_observed("60/3"), lengths, 10)
    assert (found.interval_bytes, found.exact_bytes, found.z) == ((60, 60), 60, 0.0)
    with pytest.raises(UsageError, match="only 3 rows"):
        extrapolate(parse_observed("60/4"), lengths, 10)
