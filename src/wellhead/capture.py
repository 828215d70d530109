"""Payload in, Capture or a typed refusal out: nothing reaches the store without passing here.

The same functions judge a payload before it is committed and a stored sample years later (`verify --deep`). They run
on every byte, so they work on the bit patterns: for a row, the largest pattern read as signed and the largest read as
unsigned number tell whether it is finite, all zero or constant, without a temporary array and without a conversion.

What they cannot see: a state of the right shape that belongs elsewhere (another sample's rows under the right token
ids, the neighbouring layer, the state before the norm for the one after it). The engine's preflight looks for those
before a run, `verify --recapture` after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wellhead.compare import to_float32
from wellhead.core import Capture, Sample, sample_id
from wellhead.engines.base import Payload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.core import Bits

REASONS = {
    "ids_differ": "the engine saw other token ids than those sent: another request's states, or a second tokenizer",
    "layer_missing": "a tensor that was asked for did not come back",
    "wrong_dtype": "a tensor is not [rows, hidden size] of bf16 bit patterns",
    "rows_differ": "a tensor has not one row a token: a cached prefix, a lost chunk, or padding",
    "wrong_width": "a row is not as wide as the model's hidden size",
    "not_finite": "a value is infinite or not a number",
    "zero_rows": "whole rows are zero",
    "zero_tail": "every row from some point on is zero: a block of the engine's buffer was never written",
    "constant_rows": "every value of a row is the same",
    "layers_equal": "two layers hold the same bits: one place was captured twice",
}
"""Every reason `check` gives, in words."""

OUTLIER_FACTOR = 20.0
"""A row whose norm is this many times the median is marked suspect; the first token of SmolLM2 has 174 times."""

_SIGN = np.uint16(0x8000)
_INF = 0x7F80
_EMBEDDING = "r0"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a payload may not be stored. `reason` is a key of `REASONS`; `detail` names the tensor and its rows."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Suspect:
    """Something unusual that is often normal: never a reason to refuse."""

    reason: str
    detail: str


def check(
    sample: Sample, payload: Payload, tensors: Sequence[str], hidden_size: int | None = None
) -> Capture | Rejection:
    """Judges a payload against the sample that was sent. Thread-safe; keeps the payload's arrays, never changes them.

    The Capture holds exactly `tensors`, in that order; others in the payload are left out. Without `hidden_size` the
    tensors only have to be equally wide.
    """
    wrong = _check_ids(sample, payload)
    if wrong:
        return wrong
    missing = [name for name in tensors if name not in payload.states]
    if missing:
        came = len(tensors) - len(missing)
        return Rejection("layer_missing", f"{came} of {len(tensors)} tensors came back; missing: {', '.join(missing)}")
    states = {name: payload.states[name] for name in tensors}
    wrong = check_states(states, sample.tokens, hidden_size)
    if wrong:
        return wrong
    whole = {name: np.ascontiguousarray(bits) for name, bits in states.items()}
    return Capture(sample.id, payload.input_ids, whole, payload.provenance)


def check_states(states: Mapping[str, Bits], tokens: int, hidden_size: int | None = None) -> Rejection | None:
    """Judges the tensors of one sample of `tokens` tokens; None if nothing is wrong with them."""
    for name, bits in states.items():
        width = next(iter(states.values())).shape[-1] if hidden_size is None else hidden_size
        wrong = _check_shape(name, bits, tokens, width) or _check_values(name, bits)
        if wrong:
            return wrong
    return _check_distinct(states)


def suspects(capture: Capture) -> list[Suspect]:
    """Norm outliers, and equal rows at different positions. Marks for a reader's eye: sink tokens and repeated first
    tokens are normal. Slower than `check`; it is for `verify --deep`."""
    found: list[Suspect] = []
    for name, bits in capture.states.items():
        norms = np.linalg.norm(to_float32(bits), axis=1)
        outliers = norms > OUTLIER_FACTOR * np.median(norms)
        if outliers.any():
            times = float(norms.max() / max(float(np.median(norms)), 1e-30))
            found.append(Suspect("norm_outlier", f"{name} {_rows(outliers)}: up to {times:.0f} times the median norm"))
        equal = _repeated(bits) if name != _EMBEDDING else np.zeros(0, bool)
        if equal.any():
            found.append(Suspect("equal_rows", f"{name} {_rows(equal)}: the same bits as an earlier row"))
    return found


def _check_ids(sample: Sample, payload: Payload) -> Rejection | None:
    if payload.sample_id != sample.id:
        return Rejection("ids_differ", f"the payload is of sample {payload.sample_id}, not {sample.id}")
    ours, theirs = sample.input_ids, payload.input_ids
    if theirs.shape != ours.shape:
        return Rejection("ids_differ", f"{len(ours)} token ids sent, {theirs.size} echoed")
    if not np.array_equal(ours, theirs):
        at = int(np.flatnonzero(ours != theirs)[0])
        return Rejection("ids_differ", f"token {at}: {int(ours[at])} sent, {int(theirs[at])} echoed")
    if sample_id(np.ascontiguousarray(theirs, "<i4").tobytes()) != sample.id:
        return Rejection("ids_differ", f"the {len(ours)} token ids are not those that {sample.id} is the hash of")
    return None


def _check_shape(name: str, bits: Bits, tokens: int, width: int) -> Rejection | None:
    if bits.dtype != np.uint16 or bits.ndim != 2:
        return Rejection("wrong_dtype", f"{name}: {bits.ndim} dimensions of {bits.dtype}, expected 2 of uint16")
    if len(bits) != tokens:
        return Rejection("rows_differ", f"{name}: {len(bits)} rows for {tokens} tokens")
    if bits.shape[1] != width:
        return Rejection("wrong_width", f"{name}: rows of {bits.shape[1]} values, expected {width}")
    return None


def _check_values(name: str, bits: Bits) -> Rejection | None:
    if not bits.size:
        return None
    # A pattern is sign, 8 exponent bits, 7 mantissa bits, so patterns of one sign are ordered by magnitude: the largest
    # signed pattern is the largest positive value, the largest unsigned pattern the most negative one, if there is any.
    signed = bits.view(np.int16).max(axis=1)
    unsigned = bits.max(axis=1)
    bad = (signed >= _INF) | (unsigned >= _INF + int(_SIGN))
    if bad.any():
        return Rejection("not_finite", f"{name} {_rows(bad)} of {len(bits)}")
    if name == _EMBEDDING:
        return None  # embeddings of unused tokens may well be zero
    zero = (signed <= 0) & (unsigned <= _SIGN)
    if zero.any():
        return _zero(name, zero)
    # Both maxima equal the first value in every constant row, and in hardly any other: only those are looked at again.
    first = bits[:, 0]
    maybe = np.flatnonzero((signed.view(np.uint16) == first) & (unsigned == first))
    constant = maybe[(bits[maybe] == first[maybe, None]).all(axis=1)] if len(maybe) and bits.shape[1] > 1 else maybe[:0]
    if len(constant):
        marks = np.zeros(len(bits), bool)
        marks[constant] = True
        return Rejection("constant_rows", f"{name} {_rows(marks)} of {len(bits)}")
    return None


def _zero(name: str, zero: NDArray[np.bool_]) -> Rejection:
    first = int(np.argmax(zero))
    tail = first > 0 and bool(zero[first:].all())
    return Rejection("zero_tail" if tail else "zero_rows", f"{name} {_rows(zero)} of {len(zero)}")


def _check_distinct(states: Mapping[str, Bits]) -> Rejection | None:
    names = list(states)
    for i, one in enumerate(names):
        for two in names[i + 1 :]:
            # The last rows differ in all honest cases, so this costs nothing.
            a, b = states[one], states[two]
            if len(a) and np.array_equal(a[-1], b[-1]) and np.array_equal(a, b):
                return Rejection("layers_equal", f"{one} and {two} hold the same bits in all {len(a)} rows")
    return None


def _repeated(bits: Bits) -> NDArray[np.bool_]:
    """Which rows have the bits of an earlier row."""
    rows = np.ascontiguousarray(bits).view(np.dtype((np.void, bits.shape[1] * bits.itemsize))).ravel()
    _, first = np.unique(rows, return_index=True)
    marks = np.ones(len(bits), bool)
    marks[first] = False
    return marks


def _rows(marks: NDArray[np.bool_]) -> str:
    """The marked rows in words: "row 5", "rows 128-511", "rows 3-500 (17 of them)"."""
    where = np.flatnonzero(marks)
    first, last, count = int(where[0]), int(where[-1]), len(where)
    if first == last:
        return f"row {first}"
    gaps = "" if last - first + 1 == count else f" ({count} of them)"
    return f"rows {first}-{last}{gaps}"
