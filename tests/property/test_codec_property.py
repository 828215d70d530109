"""The codec on inputs that nobody chose: any bits come back, any damage is refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wellhead.errors import StoreDamaged
from wellhead.store import codec

ANY_BITS = hnp.arrays(np.uint16, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40))


def encoded(bits: npt.NDArray[np.uint16], bias: npt.NDArray[np.uint8]) -> bytes:
    return b"".join(bytes(piece) for piece in codec.encode(bits, bias))


@given(bits=ANY_BITS, data=st.data())
def test_any_bits_under_any_bias_come_back(bits: npt.NDArray[np.uint16], data: st.DataObject) -> None:
    bias = data.draw(hnp.arrays(np.uint8, bits.shape[1]))
    np.testing.assert_array_equal(codec.decode(encoded(bits, bias), bias), bits)
    own = codec.bias_table(bits)
    np.testing.assert_array_equal(codec.decode(encoded(bits, own), own), bits)


@settings(max_examples=20)
@given(tokens=st.integers(1, 3100), hidden=st.integers(1, 33), seed=st.integers(0, 1 << 32))
def test_any_length_comes_back(tokens: int, hidden: int, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 16, (tokens, hidden), dtype=np.uint16)
    bias = codec.bias_table(bits)
    data = encoded(bits, bias)
    assert len(data) <= codec.max_encoded_bytes(tokens, hidden)
    np.testing.assert_array_equal(codec.decode(data, bias), bits)


@given(bits=ANY_BITS, data=st.data())
def test_damage_is_refused_and_never_a_crash(bits: npt.NDArray[np.uint16], data: st.DataObject) -> None:
    bias = codec.bias_table(bits)
    whole = bytearray(encoded(bits, bias))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    whole[start:stop] = data.draw(st.binary(max_size=40))
    try:
        result = codec.decode(whole, bias)
    except StoreDamaged:
        return
    np.testing.assert_array_equal(result, bits)


@given(noise=st.binary(max_size=200), width=st.integers(0, 50))
def test_noise_is_refused(noise: bytes, width: int) -> None:
    for data in (noise, codec.MAGIC + noise):
        try:
            codec.decode(data, np.zeros(width, np.uint8))
        except StoreDamaged:
            continue
        raise AssertionError("noise decoded")
