"""The conformance suite of an engine: what the core relies on, as tests. Inherit, say how to make yours, run pytest.

    class TestMyEngine(EngineSuite):
        tensors = ("r1", "r3", "final")
        vocab_size = 384

        def make_engine(self): ...
        def reference(self, input_ids, tensors): ...

`reference` must come to the states by another way than the engine does, or the values prove nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from wellhead.capture import check
from wellhead.compare import compare, mean_error
from wellhead.core import FINAL, Capture, Sample, layer_name, layer_number
from wellhead.engines.base import Engine, Failure, Payload
from wellhead.preflight import make_sample, probe_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.core import Bits


class EngineSuite:
    """Tests that any engine must pass. Class attributes say what to ask it for; none of the tests takes long."""

    tensors: Sequence[str] = ("r1", "r3", FINAL)
    vocab_size: int = 384
    lengths: Sequence[int] = (5, 1, 130, 64, 17)
    """Sample lengths of the batch that most tests send; none may be longer than the engine takes."""

    def make_engine(self) -> Engine:
        """A new engine, loaded."""
        raise NotImplementedError

    def reference(self, input_ids: NDArray[np.int32], tensors: Sequence[str]) -> Mapping[str, Bits]:
        """The same states by an independent way, computed alone."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        engine = cls().make_engine()
        yield engine
        asyncio.run(engine.aclose())

    def batch(self) -> list[Sample]:
        return [make_sample(probe_ids(length, length, self.vocab_size)) for length in self.lengths]

    def test_every_sample_comes_back_once_whole_and_as_sent(self, engine: Engine) -> None:
        samples, width = self.batch(), engine.describe().hidden_size
        outcomes = capture_all(engine, samples, self.tensors)
        assert sorted(o.sample_id for o in outcomes) == sorted(s.id for s in samples)
        for sample in samples:
            payload = next(o for o in outcomes if o.sample_id == sample.id)
            assert isinstance(payload, Payload), payload
            assert payload.input_ids.dtype == np.int32
            assert isinstance(check(sample, payload, self.tensors, width), Capture)

    def test_returns_the_tensors_asked_for_and_no_others(self, engine: Engine) -> None:
        sample = self.batch()[0]
        whole = payloads(engine, [sample], self.tensors)[sample.id].states
        for asked in (*((name,) for name in self.tensors), tuple(self.tensors[1:])):
            states = payloads(engine, [sample], asked)[sample.id].states
            assert set(states) == set(asked)
            for name in asked:
                assert np.array_equal(states[name], whole[name]), f"{name} depends on what else is asked for"

    def test_values_are_the_reference_and_the_neighbours_are_not(self, engine: Engine) -> None:
        samples, blocks = self.batch(), engine.describe().blocks
        states = payloads(engine, samples, self.tensors)
        for sample in samples:
            for name in self.tensors:
                near = _neighbours(name, blocks)
                truth = self.reference(sample.input_ids, [name, *near])
                bits = states[sample.id].states[name]
                found = compare(bits, truth[name], [truth[other] for other in near])
                assert found.same, f"{name} of {sample.tokens} tokens: {found}"

    def test_the_same_batch_gives_the_same_bits(self, engine: Engine) -> None:
        samples, other = self.batch(), self.make_engine()
        once, twice = payloads(engine, samples, self.tensors), payloads(engine, samples, self.tensors)
        elsewhere = payloads(other, samples, self.tensors)
        asyncio.run(other.aclose())
        for sample in samples:
            for name, bits in once[sample.id].states.items():
                assert np.array_equal(bits, twice[sample.id].states[name])
                assert np.array_equal(bits, elsewhere[sample.id].states[name])

    def test_company_changes_nothing_but_noise(self, engine: Engine) -> None:
        samples = self.batch()
        together, reversed_ = (payloads(engine, batch, self.tensors) for batch in (samples, samples[::-1]))
        for sample in samples:
            alone = payloads(engine, [sample], self.tensors)[sample.id].states
            for name, bits in alone.items():
                others = [alone[other] for other in self.tensors if other != name]
                for company in (together, reversed_):
                    found = compare(company[sample.id].states[name], bits, others)
                    assert found.same, f"{name} of {sample.tokens} tokens: {found}"

    def test_a_shared_prefix_neither_shortens_nor_mixes(self, engine: Engine) -> None:
        prefix = probe_ids(64, 1, self.vocab_size)
        one, two = (make_sample(prefix + probe_ids(9, salt, self.vocab_size)) for salt in (2, 3))
        together = payloads(engine, [one, two], self.tensors)
        for sample in (one, two, one):  # one after the other, as a cache would meet them
            states = payloads(engine, [sample], self.tensors)[sample.id].states
            for name, bits in states.items():
                assert len(bits) == sample.tokens
                assert mean_error(bits, together[sample.id].states[name]) < 0.05
        for name in self.tensors:
            first, second = (together[sample.id].states[name] for sample in (one, two))
            assert mean_error(first[:64], second[:64]) < 0.05
            assert mean_error(first[64:], second[64:]) > 0.1

    def test_a_payload_is_not_touched_again(self, engine: Engine) -> None:
        first, second = self.batch()[0], self.batch()[2]
        payload = payloads(engine, [first], self.tensors)[first.id]
        before = {name: bits.copy() for name, bits in payload.states.items()}
        payloads(engine, [second], self.tensors)
        for name, bits in payload.states.items():
            assert np.array_equal(bits, before[name])
        engine.release(payload)
        engine.release(payload)

    def test_a_sample_beyond_the_limit_fails_alone(self, engine: Engine) -> None:
        limit = engine.describe().max_tokens
        long, short = make_sample(probe_ids(limit + 1, 3, self.vocab_size)), self.batch()[0]
        outcomes = {o.sample_id: o for o in capture_all(engine, [long, short], self.tensors)}
        failure = outcomes[long.id]
        assert isinstance(failure, Failure)
        assert not failure.retryable
        assert isinstance(outcomes[short.id], Payload)

    def test_describe_is_true(self, engine: Engine) -> None:
        info, sample = engine.describe(), self.batch()[0]
        assert set(self.tensors) <= set(info.capture_points)
        assert len(set(info.capture_points.values())) == len(info.capture_points)
        assert info.batch_tokens >= 1
        assert info.batch_samples >= 1
        last = layer_name(info.blocks)
        states = payloads(engine, [sample], (last,))[sample.id]
        assert states.states[last].shape == (sample.tokens, info.hidden_size)
        assert states.provenance == info.provenance
        with pytest.raises(Exception, match=layer_name(info.blocks + 1)):
            capture_all(engine, [sample], (layer_name(info.blocks + 1),))

    def test_preflight_passes(self) -> None:
        engine = self.make_engine()
        asyncio.run(engine.preflight())
        asyncio.run(engine.aclose())

    def test_can_be_closed_twice(self) -> None:
        engine = self.make_engine()

        async def end() -> None:
            await engine.drain()
            await engine.drain()
            await engine.aclose()
            await engine.aclose()

        asyncio.run(end())


def capture_all(engine: Engine, samples: Sequence[Sample], tensors: Sequence[str]) -> list[Payload | Failure]:
    """Everything that one batch brings back, in an event loop of its own."""

    async def collect() -> list[Payload | Failure]:
        return [outcome async for outcome in engine.capture(samples, tensors)]

    return asyncio.run(collect())


def payloads(engine: Engine, samples: Sequence[Sample], tensors: Sequence[str]) -> dict[str, Payload]:
    """The payloads of one batch by sample id; AssertionError if any sample failed."""
    found = {}
    for outcome in capture_all(engine, samples, tensors):
        assert isinstance(outcome, Payload), outcome
        found[outcome.sample_id] = outcome
    return found


def _neighbours(name: str, blocks: int) -> list[str]:
    k = blocks if name == FINAL else layer_number(name)
    return [layer_name(j) for j in (k - 1, k + 1) if 0 <= j <= blocks]
