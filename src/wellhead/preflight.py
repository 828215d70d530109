"""What every engine has to show before the first real sample: the proof that is common to all of them.

Whatever the engine, a sample must come back with its own ids, one row a token and the same values whether it was
computed alone or among others, and a shared prefix must neither shorten nor mix anything. What only an engine can
know (that its r_k is after k blocks, that its final state leads to the model's own next token) it proves itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wellhead.capture import Rejection, check
from wellhead.compare import NOISE_BOUND, compare, mean_error
from wellhead.core import Capture, Sample, sample_id
from wellhead.engines.base import Engine, Failure, Payload
from wellhead.errors import PreflightRefused

SHORT = (5, 23, 41, 12)
LONGER = 80
PREFIX, SUFFIX = 64, 8


def make_sample(input_ids: Sequence[int]) -> Sample:
    """A sample of these token ids, all of them supervised."""
    ids = np.array(input_ids, "<i4")
    return Sample(sample_id(ids.tobytes()), ids, np.ones(len(ids), np.uint8))


def probe_ids(length: int, salt: int, vocab_size: int) -> list[int]:
    """Token ids that look random and are always the same; none repeats its neighbour."""
    return [(salt * 7919 + 31 + i * 104729) % vocab_size for i in range(length)]


async def prove_capture(engine: Engine, tensors: Sequence[str], vocab_size: int) -> list[Capture]:
    """Sends short samples alone, together, a longer one, and two that share a prefix. Returns the ones captured
    together. Raises PreflightRefused saying which of these came back wrong and how."""
    width, limit = engine.describe().hidden_size, engine.describe().max_tokens
    short = [make_sample(probe_ids(min(n, limit), n, vocab_size)) for n in SHORT]
    alone = [(await _captured(engine, [sample], tensors, width))[0] for sample in short]
    together = await _captured(engine, short, tensors, width)
    for one, many in zip(alone, together, strict=True):
        _must_agree(one, many, "captured alone and in a batch")
    await _captured(engine, [make_sample(probe_ids(min(LONGER, limit), LONGER, vocab_size))], tensors, width)
    if limit >= PREFIX + SUFFIX:
        await _prove_prefix(engine, tensors, vocab_size, width)
    return together


async def _prove_prefix(engine: Engine, tensors: Sequence[str], vocab_size: int, width: int) -> None:
    """Two samples with one prefix, one after the other and then together: a cached prefix would come back short."""
    prefix = probe_ids(PREFIX, 1, vocab_size)
    pair = [make_sample(prefix + probe_ids(SUFFIX, salt, vocab_size)) for salt in (2, 3)]
    alone = [(await _captured(engine, [sample], tensors, width))[0] for sample in pair]
    together = await _captured(engine, pair, tensors, width)
    for one, many in zip(alone, together, strict=True):
        _must_agree(one, many, "sharing a prefix with another, captured alone and with it")
    for name in tensors:
        first, second = (capture.states[name][:PREFIX] for capture in alone)
        if mean_error(first, second) > NOISE_BOUND:
            raise PreflightRefused(
                f"{name}: the same {PREFIX} tokens at the start of two samples have different states",
                "the model is not causal, or states of different requests are mixed",
            )


async def _captured(engine: Engine, samples: Sequence[Sample], tensors: Sequence[str], width: int) -> list[Capture]:
    outcomes: dict[str, Payload | Failure] = {}
    async for outcome in engine.capture(samples, tensors):
        if outcome.sample_id in outcomes:
            raise PreflightRefused(f"the engine answered sample {outcome.sample_id} twice", "it mixes up requests")
        outcomes[outcome.sample_id] = outcome
    return [_judged(sample, outcomes.get(sample.id), tensors, width, len(samples)) for sample in samples]


def _judged(sample: Sample, outcome: Payload | Failure | None, tensors: Sequence[str], width: int, of: int) -> Capture:
    where = f"a sample of {sample.tokens} tokens in a batch of {of}"
    if outcome is None:
        raise PreflightRefused(f"{where} did not come back", "the engine loses requests")
    if isinstance(outcome, Failure):
        raise PreflightRefused(f"{where} failed: {outcome.reason}: {outcome.detail}", "see the engine's own message")
    verdict = check(sample, outcome, tensors, width)
    if isinstance(verdict, Rejection):
        raise PreflightRefused(f"{where}: {verdict.reason}: {verdict.detail}", "the engine does not capture properly")
    return verdict


def _must_agree(one: Capture, other: Capture, how: str) -> None:
    for name, bits in one.states.items():
        found = compare(bits, other.states[name], [b for tensor, b in other.states.items() if tensor != name])
        if not found.same:
            raise PreflightRefused(
                f"{name}: the same sample, {how}, differs by {found.own:.3g} (bound {NOISE_BOUND:g})",
                "states of different requests are mixed, or the engine's batches are not independent",
            )
