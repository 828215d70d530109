"""An engine without a model: states that are a pure function of the token ids. For rehearsals and fault tests.

What it returns has the shape, the size and about the compressibility of real states, costs next to nothing and needs
no torch. Row t of r_k depends on the token ids up to t, on k and on the seed, and on nothing else, as in a causal
model; but two different layers are unrelated, so the neighbouring layer is always far off.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from wellhead.core import FINAL, Provenance, Sample, layer_name, layer_number
from wellhead.engines.base import EngineInfo, Failure, Payload
from wellhead.errors import PreflightRefused
from wellhead.hashes import mix
from wellhead.preflight import prove_capture
from wellhead.testing.faults import BEHAVIOURS, DAMAGES, Fault, FaultScript, damage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.core import Bits

VERSION = "1"
"""Changes whenever `stub_state` gives other values, so that a run of the old ones is not resumed with new ones."""

_TABLE = 1 << 16
_QUANTILES = 1 << 12
_MANTISSA = np.uint16(0x007F)
_FINAL_SALT = 1 << 20


def stub_state(
    input_ids: NDArray[np.int32], k: int | Literal["final"], hidden_size: int, blocks: int, seed: int = 0
) -> Bits:
    """The bits [T, H] of r_k, or of the final state after the norm, for token ids [T].

    Each row is a window of a table of Gaussian signs and exponents, joined with one of a table of random mantissas;
    a hash of all ids up to the row, of k and of the seed picks both windows. A scale a channel is added, and a scale
    that grows with k, so that exponents are spread as they are in real states.
    """
    salt = _FINAL_SALT if k == "final" else k
    scale = 0 if k == "final" else 4 * k // max(1, blocks)
    picks = mix(_prefix_hashes(input_ids, seed) ^ mix(np.array([salt], np.uint64)))
    exponents, mantissas = _tables(seed, hidden_size)
    bits: Bits = exponents[(picks % _TABLE).astype(np.intp)]
    bits |= mantissas[((picks >> np.uint64(32)) % _TABLE).astype(np.intp)]
    bits += _channel_scale(salt, scale, hidden_size, seed)
    return bits


class StubEngine:
    """Answers from `stub_state`, one sample after the other, except where its fault script says otherwise.

    `layers` are the r_k that a run will ask for (what `preflight` asks for). The fault `slow` imitates an engine that
    computes. Single-threaded; everything happens in the event loop.
    """

    def __init__(
        self,
        blocks: int,
        hidden_size: int,
        layers: Sequence[int],
        *,
        seed: int = 0,
        faults: FaultScript = FaultScript(),  # noqa: B008 - frozen
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """`info` overrides fields of `EngineInfo`: `max_tokens`, `batch_tokens`, `batch_samples`, `final`.
        PreflightRefused for a layer beyond the model."""
        beyond = [k for k in layers if not 0 <= k <= blocks]
        if beyond:
            raise PreflightRefused(f"the stub has {blocks} blocks: no r_{beyond[0]}", f"layers go from 0 to {blocks}")
        self._tensors = (*(layer_name(k) for k in sorted(layers)), FINAL)
        self._faults = faults
        self._fired = [0] * len(faults.faults)
        self._seen = 0
        self._seed = seed
        base = EngineInfo(
            provenance=Provenance("stub", VERSION, {"seed": seed}),
            blocks=blocks,
            hidden_size=hidden_size,
            final="post_norm",
            max_tokens=1 << 20,
            batch_tokens=8192,
            batch_samples=16,
            capture_points={name: f"stub_state({name})" for name in self._tensors},
        )
        self._info: EngineInfo = replace(base, **(info or {}))
        self._final: int | Literal["final"] = "final" if self._info.final == "post_norm" else blocks

    def describe(self) -> EngineInfo:
        return self._info

    async def preflight(self) -> None:
        """Runs the shared proof, with the faults that hit every sample, and compares with `stub_state`."""
        always = FaultScript(tuple(f for f in self._faults.faults if f.always and f.kind not in BEHAVIOURS))
        probe = StubEngine(
            self._info.blocks, self._info.hidden_size, (), seed=self._seed, faults=always,
            info={"final": self._info.final},
        )  # fmt: skip
        for capture in await prove_capture(probe, self._tensors, vocab_size=1000):
            for name, bits in capture.states.items():
                if not np.array_equal(bits, self._state(capture.input_ids, name)):
                    raise PreflightRefused(
                        f"the stub returns another state for {name} than the one asked for", "see --fault"
                    )

    async def capture(self, samples: Sequence[Sample], tensors: Sequence[str]) -> AsyncIterator[Payload | Failure]:
        for sample in samples:
            faults = self._firing(sample.id)
            failure = self._refused(sample) or await self._behave(faults, sample.id, alone=len(samples) == 1)
            yield failure or self._payload(sample, tensors, faults)
            await asyncio.sleep(0)

    def release(self, payload: Payload) -> None:
        """Nothing is staged."""

    async def drain(self) -> None:
        """Nothing is ever in flight outside `capture`."""

    async def aclose(self) -> None:
        """Nothing to free."""

    def _firing(self, sample_id: str) -> list[Fault]:
        ordinal, self._seen = self._seen, self._seen + 1
        firing = []
        for at, fault in enumerate(self._faults.faults):
            if fault.fires(ordinal, sample_id, self._fired[at]):
                self._fired[at] += 1
                firing.append(fault)
        return firing

    def _refused(self, sample: Sample) -> Failure | None:
        if 0 < sample.tokens <= self._info.max_tokens:
            return None
        detail = f"{sample.tokens} tokens; the stub takes 1 to {self._info.max_tokens}"
        return Failure(sample.id, "bad_length", detail, retryable=False)

    async def _behave(self, faults: Sequence[Fault], sample_id: str, alone: bool) -> Failure | None:
        for fault in faults:
            if fault.kind == "slow":
                await asyncio.sleep(fault.seconds)
            elif fault.kind == "silence":
                await asyncio.Event().wait()
            elif fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "dies":
                raise RuntimeError(f"the stub engine died at sample {sample_id}, as its fault script says")
            elif fault.kind == "fail":
                return Failure(sample_id, "engine_error", "as the fault script says", retryable=False)
            elif fault.kind == "oom" and not alone:
                return Failure(sample_id, "out_of_memory", "as the fault script says", retryable=True)
        return None

    def _payload(self, sample: Sample, tensors: Sequence[str], faults: Sequence[Fault]) -> Payload:
        ids = np.array(sample.input_ids, np.int32)
        kinds = {fault.kind for fault in faults}
        source = _another_request(ids) if kinds & {"other_ids", "other_states"} else ids
        states = {name: self._state(source, self._mistaken(name, tensors, faults)) for name in tensors}
        for fault in faults:
            if fault.kind in DAMAGES:
                states = damage(fault, states)
        return Payload(sample.id, source if "other_ids" in kinds else ids, states, self._info.provenance)

    def _mistaken(self, name: str, tensors: Sequence[str], faults: Sequence[Fault]) -> str:
        """The tensor that is returned under `name`."""
        for fault in faults:
            if fault.kind == "pre_norm" and name == FINAL:
                return layer_name(self._info.blocks)
            if fault.kind == "shift" and name == (fault.layer or tensors[0]) and name != FINAL:
                return layer_name(min(layer_number(name) + 1, self._info.blocks))
        return name

    def _state(self, ids: NDArray[np.int32], name: str) -> Bits:
        k: int | Literal["final"] = self._final if name == FINAL else layer_number(name)
        if k != "final" and k > self._info.blocks:
            raise PreflightRefused(f"{name} does not exist: the stub has {self._info.blocks} blocks", "ask for less")
        return stub_state(ids, k, self._info.hidden_size, self._info.blocks, self._seed)


def _another_request(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Ids of the same length that differ everywhere."""
    return np.where(ids > 0, ids - 1, ids + 1).astype(np.int32)


def _prefix_hashes(ids: NDArray[np.int32], seed: int) -> NDArray[np.uint64]:
    """uint64 [T]: entry t depends on all ids up to t and on their positions."""
    places = np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    salted = ids.astype(np.uint64) + np.uint64(seed % 2**32 << 32)
    return mix(np.cumsum(mix(places ^ mix(salted + np.uint64(1))), dtype=np.uint64))


@lru_cache(maxsize=8)
def _tables(seed: int, width: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Two views [_TABLE, width]: the window of signs and exponents, and of mantissas, that starts at each entry."""
    values = np.array([NormalDist().inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)], np.float32)
    exponents_of = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16) & ~_MANTISSA
    noise = mix(np.arange(_TABLE, dtype=np.uint64) + np.uint64((seed % 2**32 << 32) + 1))
    exponents = exponents_of[(noise % _QUANTILES).astype(np.intp)]
    mantissas = (noise >> np.uint64(40)).astype(np.uint16) & _MANTISSA
    around = np.arange(_TABLE + width - 1) % _TABLE
    return sliding_window_view(exponents[around], width), sliding_window_view(mantissas[around], width)


@lru_cache(maxsize=512)
def _channel_scale(salt: int, scale: int, width: int, seed: int) -> NDArray[np.uint16]:
    """uint16 [H] to add to the bits: powers of two between 1/4 and 2 a channel, times 2**scale for the layer."""
    noise = mix(np.arange(width, dtype=np.uint64) + np.uint64(salt << 32 | seed % 2**32))
    shifts = (noise % np.uint64(4)).astype(np.int64) - 2 + scale
    return (shifts * 128 % 65536).astype(np.uint16)
