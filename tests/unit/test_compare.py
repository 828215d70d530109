"""Comparison of states, against the same arithmetic done the plain way."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

from wellhead.compare import Comparison, compare, from_float32, mean_error, row_errors, to_float32

RNG = np.random.default_rng(5)


def test_bits_are_bfloat16_both_ways() -> None:
    every = np.arange(65536, dtype=np.uint16)
    assert np.array_equal(to_float32(every), every.view(bfloat16).astype(np.float32), equal_nan=True)
    values = RNG.standard_normal(100_000).astype(np.float32) * np.float32(3)
    assert np.array_equal(from_float32(values), values.astype(bfloat16).view(np.uint16))
    halves = (np.arange(0x3F80, 0x4080, dtype=np.uint32) << 16 | 0x8000).view(np.float32)  # exactly between two
    assert np.array_equal(from_float32(halves), halves.astype(bfloat16).view(np.uint16))
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38], np.float32)
    assert np.isnan(to_float32(from_float32(odd)[:1])).all()
    assert np.array_equal(from_float32(odd)[1:], odd[1:].astype(bfloat16).view(np.uint16))


def test_row_errors_are_per_row_and_relative_to_the_reference() -> None:
    truth = RNG.standard_normal((5000, 8)).astype(np.float32)
    other = truth.copy()
    other[1] *= 2
    other[4500] = 0
    errors = row_errors(from_float32(other), from_float32(truth))
    plain = np.zeros(5000)
    plain[1], plain[4500] = 1.0, 1.0
    assert np.allclose(errors, plain, atol=1e-6)
    assert mean_error(from_float32(other), from_float32(truth)) == pytest.approx(2 / 5000, rel=1e-5)


def test_zero_rows_are_equal_to_zero_rows_only() -> None:
    zero, one = np.zeros((2, 4), np.uint16), np.full((2, 4), 0x3F80, np.uint16)
    assert list(row_errors(zero, zero)) == [0, 0]
    assert np.isinf(row_errors(one, zero)).all()
    with pytest.raises(ValueError, match="shapes"):
        row_errors(zero, zero[:1])


def test_the_same_state_is_near_and_farther_from_its_neighbours() -> None:
    truth = RNG.standard_normal((50, 64)).astype(np.float32)
    noisy = from_float32(truth * (1 + 0.004 * RNG.standard_normal(truth.shape).astype(np.float32)))
    near = from_float32(truth + 0.3 * RNG.standard_normal(truth.shape).astype(np.float32))
    found = compare(noisy, from_float32(truth), [from_float32(-truth), near])
    assert found.same
    assert found.neighbour == pytest.approx(0.29, abs=0.03)
    assert not compare(near, from_float32(truth), [from_float32(truth)]).same


@pytest.mark.parametrize(("own", "neighbour", "same"), [
    (0.0, 0.0, False),  # cannot be told from its neighbour
    (0.0, 0.3, True), (0.01, None, True), (0.06, None, False), (0.04, 0.1, False), (0.04, 0.13, True),
    (float("nan"), None, False), (float("inf"), 0.5, False),
])  # fmt: skip
def test_the_decision(own: float, neighbour: float | None, same: bool) -> None:
    assert Comparison(own, neighbour).same is same
