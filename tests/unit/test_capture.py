"""What may reach the store: every fault that can be seen in one payload, by its reason, its tensor and its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellhead.capture import REASONS, Rejection, check, check_states, suspects
from wellhead.compare import from_float32, to_float32
from wellhead.core import Capture, Provenance
from wellhead.engines.base import Payload
from wellhead.preflight import make_sample
from wellhead.testing.faults import Fault, damage

if TYPE_CHECKING:
    from wellhead.core import Bits

TENSORS = ("r2", "r3", "final")
WIDTH = 32
SAMPLE = make_sample(range(100, 140))


def noise(rows: int = 40, width: int = WIDTH, seed: int = 0) -> Bits:
    return from_float32(np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32))


def payload(**changed: Bits) -> Payload:
    states = {name: noise(seed=i) for i, name in enumerate(TENSORS)} | changed
    return Payload(SAMPLE.id, SAMPLE.input_ids.copy(), states, Provenance("test", "1"))


def refusal(fault: str, **settings: object) -> Rejection:
    good = payload()
    bad = replace(good, states=damage(Fault(fault, **settings), good.states))  # type: ignore[arg-type]
    found = check(SAMPLE, bad, TENSORS, WIDTH)
    assert isinstance(found, Rejection)
    assert found.reason in REASONS
    return found


def test_a_good_payload_becomes_a_capture_of_the_tensors_asked_for() -> None:
    good = payload(r9=noise(seed=9))
    found = check(SAMPLE, good, TENSORS, WIDTH)
    assert isinstance(found, Capture)
    assert tuple(found.states) == TENSORS
    for name in TENSORS:
        assert found.states[name] is good.states[name]  # kept, not copied
    assert (found.id, found.tokens) == (SAMPLE.id, 40)


@pytest.mark.parametrize(("fault", "settings", "reason", "detail"), [
    ("zeros", {}, "zero_rows", "r2 rows 0-39 of 40"),
    ("zeros", {"layer": "r3"}, "zero_rows", "r3 rows 0-39 of 40"),
    ("zero_tail", {"layer": "final"}, "zero_tail", "final rows 20-39 of 40"),
    ("zero_tail", {"layer": "r3", "row": 39}, "zero_tail", "r3 row 39 of 40"),
    ("constant", {"layer": "r3", "row": 5}, "constant_rows", "r3 rows 5-39 of 40"),
    ("nan", {"layer": "r3", "row": 7}, "not_finite", "r3 row 7 of 40"),
    ("inf", {"layer": "final", "row": 39}, "not_finite", "final row 39 of 40"),
    ("missing", {"layer": "r3"}, "layer_missing", "2 of 3 tensors came back; missing: r3"),
    ("short", {"layer": "final", "rows": 16}, "rows_differ", "final: 24 rows for 40 tokens"),
    ("wide", {}, "wrong_width", "r2: rows of 64 values, expected 32"),
    ("equal", {"layer": "r3"}, "layers_equal", "r2 and r3 hold the same bits in all 40 rows"),
])  # fmt: skip
def test_every_damage_is_refused_in_words(fault: str, settings: dict[str, object], reason: str, detail: str) -> None:
    assert refusal(fault, **settings) == Rejection(reason, detail)


def test_other_ids_are_refused() -> None:
    good = payload()
    other = SAMPLE.input_ids.copy()
    other[7] = 5
    found = check(SAMPLE, replace(good, input_ids=other), TENSORS, WIDTH)
    assert found == Rejection("ids_differ", "token 7: 107 sent, 5 echoed")
    short = check(SAMPLE, replace(good, input_ids=other[:39]), TENSORS, WIDTH)
    assert short == Rejection("ids_differ", "40 token ids sent, 39 echoed")
    swapped = check(SAMPLE, replace(good, sample_id="0" * 32), TENSORS, WIDTH)
    assert isinstance(swapped, Rejection)
    assert swapped.reason == "ids_differ"


def test_without_a_width_the_tensors_must_agree_among_themselves() -> None:
    found = check(SAMPLE, payload(final=noise(width=64)), TENSORS)
    assert found == Rejection("wrong_width", "final: rows of 64 values, expected 32")


def test_a_wrong_dtype_is_refused() -> None:
    found = check(SAMPLE, payload(r3=to_float32(noise())), TENSORS, WIDTH)  # type: ignore[arg-type]
    assert isinstance(found, Rejection)
    assert found.reason == "wrong_dtype"


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF])
@pytest.mark.parametrize("column", [0, 5, WIDTH - 1])
def test_every_kind_of_not_finite_in_every_column(pattern: int, column: int) -> None:
    bits = noise()
    bits[11, column] = pattern
    assert check_states({"r3": bits}, 40, WIDTH) == Rejection("not_finite", "r3 row 11 of 40")


@pytest.mark.parametrize("pattern", [0x7F7F, 0xFF7F, 0x0001, 0x8001])
def test_the_largest_and_the_smallest_finite_values_pass(pattern: int) -> None:
    bits = noise()
    bits[11, 3] = pattern
    assert check_states({"r3": bits}, 40, WIDTH) is None


def test_zeros_of_both_signs_are_zero_and_scattered_rows_are_counted() -> None:
    bits = noise()
    bits[3], bits[9] = 0, 0x8000
    bits[20, ::2], bits[20, 1::2] = 0, 0x8000
    assert check_states({"r3": bits}, 40, WIDTH) == Rejection("zero_rows", "r3 rows 3-20 (3 of them) of 40")


@pytest.mark.parametrize("value", [0x3F80, 0xBF80, 0x0001, 0x8001])
def test_constant_rows_of_either_sign(value: int) -> None:
    bits = noise()
    bits[30] = value
    assert check_states({"r3": bits}, 40, WIDTH) == Rejection("constant_rows", "r3 row 30 of 40")
    bits[30, 4] ^= 1
    assert check_states({"r3": bits}, 40, WIDTH) is None


def test_the_embedding_may_be_zero_but_not_infinite() -> None:
    bits = noise()
    bits[3] = 0
    assert check_states({"r0": bits}, 40, WIDTH) is None
    bits[4, 4] = 0x7F80
    assert check_states({"r0": bits}, 40, WIDTH) == Rejection("not_finite", "r0 row 4 of 40")


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 9), st.sampled_from([0, 1, 2, 3]))
def test_agrees_with_the_plain_arithmetic(seed: int, rows: int, width: int, tame: int) -> None:
    """Any bit patterns, made rarely wild to often wild: the same verdict as isfinite, all zero, all equal in float."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 65536, (rows, width), dtype=np.uint16)
    if tame:
        bits &= np.uint16(0xBFFF)  # no exponent of all ones
    if tame > 1:
        bits[rng.random(rows) < 0.1] = 0
    if tame > 2:
        bits[:] = bits[:, :1]
    values = to_float32(bits)
    found = check_states({"r1": bits}, rows, width)
    if not np.isfinite(values).all():
        assert found is not None
        assert found.reason == "not_finite"
    elif (values == 0).all(axis=1).any():
        assert found is not None
        assert found.reason in ("zero_rows", "zero_tail")
    elif width > 1 and (bits == bits[:, :1]).all(axis=1).any():
        assert found is not None
        assert found.reason == "constant_rows"
    else:
        assert found is None


def test_arrays_that_are_not_contiguous_are_copied_into_the_capture() -> None:
    strided = np.zeros((40, 2 * WIDTH), np.uint16)[:, ::2]
    strided[:] = noise(seed=8)
    found = check(SAMPLE, payload(r3=strided), TENSORS, WIDTH)
    assert isinstance(found, Capture)
    assert found.states["r3"].flags.c_contiguous
    assert np.array_equal(found.states["r3"], noise(seed=8))


def test_suspects_are_marked_and_never_refused() -> None:
    bits = noise()
    bits[0] = from_float32(1000 * to_float32(bits[:1]))[0]
    bits[20] = bits[10]
    good = check(SAMPLE, payload(r3=bits), TENSORS, WIDTH)
    assert isinstance(good, Capture)
    found = {(s.reason, s.detail.split(":")[0]) for s in suspects(good)}
    assert found == {("norm_outlier", "r3 row 0"), ("equal_rows", "r3 row 20")}
