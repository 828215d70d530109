"""The stub: a pure function of the ids up to a row and of k; its fault script; the preflight that meets its faults."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from wellhead.capture import Rejection, check
from wellhead.compare import to_float32
from wellhead.core import FINAL, sample_id
from wellhead.engines.base import Failure, Payload
from wellhead.engines.registry import create
from wellhead.engines.stub import StubEngine, stub_state
from wellhead.errors import PreflightRefused, UsageError
from wellhead.preflight import make_sample, probe_ids
from wellhead.testing.engine_suite import capture_all
from wellhead.testing.faults import KINDS, Fault, FaultScript

if TYPE_CHECKING:
    from pathlib import Path

IDS = np.array(probe_ids(80, 3, 1000), np.int32)
TENSORS = ("r2", "r3", FINAL)


def engine(script: str = "") -> StubEngine:
    return StubEngine(6, 48, (2, 3), faults=FaultScript.parse(script))


def test_a_row_depends_on_all_ids_up_to_it_and_on_nothing_after() -> None:
    whole = stub_state(IDS, 3, 48, 6)
    for changed in (0, 1, 40, 79):
        other = IDS.copy()
        other[changed] += 1
        same = (stub_state(other, 3, 48, 6) == whole).all(axis=1)
        assert same[:changed].all()
        assert not same[changed:].any()
    assert np.array_equal(stub_state(IDS[:30], 3, 48, 6), whole[:30])
    swapped = IDS.copy()
    swapped[[4, 5]] = IDS[[5, 4]]
    assert not (stub_state(swapped, 3, 48, 6)[5:] == whole[5:]).all(axis=1).any()


def test_layers_and_seeds_are_unrelated() -> None:
    states = [stub_state(IDS, k, 48, 6, seed) for k in (0, 1, 2, 6, "final") for seed in (0, 1)]
    for at, one in enumerate(states):
        for other in states[at + 1 :]:
            a, b = to_float32(one), to_float32(other)
            assert not (one == other).all(axis=1).any()
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.2


def test_exponents_are_spread_as_in_real_states() -> None:
    bits = stub_state(np.arange(2000, dtype=np.int32), 3, 256, 6)
    exponents = (bits >> 7) & 0xFF
    centred = exponents.astype(int) - np.median(exponents, axis=0).astype(int)
    share = np.unique(centred, return_counts=True)[1] / centred.size
    entropy = -(share * np.log2(share)).sum()
    assert 2.2 < entropy < 3.0  # bits; the other 8 of 16 are noise, so a codec reaches about 0.65 to 0.68
    assert np.isfinite(to_float32(bits)).all()


def test_another_process_gives_the_same_states_without_torch() -> None:
    program = (
        "import sys, numpy as np\nfrom wellhead.engines.stub import stub_state\n"
        "print(stub_state(np.arange(9, dtype=np.int32), 3, 8, 6, 5).tobytes().hex(), 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert said == [stub_state(np.arange(9, dtype=np.int32), 3, 8, 6, 5).tobytes().hex(), "False"]


def test_script_language() -> None:
    script = FaultScript.parse(" nan:every=100; zeros:layer=r3,sample=5 ;slow:seconds=0.5,after=20;")
    assert script.faults == (
        Fault("nan", every=100), Fault("zeros", layer="r3", sample=5), Fault("slow", seconds=0.5, after=20),
    )  # fmt: skip
    assert FaultScript.parse("").faults == ()


@pytest.mark.parametrize(("text", "says"), [
    ("nothing", "unknown kind 'nothing'"), ("nan:often=1", "unknown setting 'often'"),
    ("nan:every=x", "every='x' is not a number"), ("nan:every=0", "every=0"), ("nan:kind=zeros", "unknown setting"),
])  # fmt: skip
def test_script_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        FaultScript.parse(text)


def test_selection_of_samples() -> None:
    ids = [sample_id(i.to_bytes(4, "little")) for i in range(1000)]

    def hit(script: str) -> list[int]:
        fault, fired, found = FaultScript.parse(script).faults[0], 0, []
        for ordinal, id in enumerate(ids):
            if fault.fires(ordinal, id, fired):
                fired += 1
                found.append(ordinal)
        return found

    assert hit("nan:sample=5") == [5]
    assert hit("nan:every=250") == [249, 499, 749, 999]
    assert hit("nan:after=990,times=3") == [990, 991, 992]
    assert hit(f"nan:id={ids[77][:12]}") == [77]
    assert 5 <= len(hit("nan:share=0.01")) <= 18
    assert len(hit("nan")) == 1000


@pytest.mark.parametrize(("fault", "reason"), [
    ("zeros", "zero_rows"), ("zero_tail", "zero_tail"), ("constant", "constant_rows"), ("nan", "not_finite"),
    ("inf", "not_finite"), ("missing", "layer_missing"), ("short", "rows_differ"), ("wide", "wrong_width"),
    ("equal", "layers_equal"), ("other_ids", "ids_differ"),
])  # fmt: skip
def test_faults_hit_the_samples_selected_and_are_refused(fault: str, reason: str) -> None:
    samples = [make_sample(probe_ids(20 + i, i, 1000)) for i in range(4)]
    verdicts = []
    for sample, outcome in zip(samples, capture_all(engine(f"{fault}:sample=2"), samples, TENSORS), strict=True):
        assert isinstance(outcome, Payload)
        verdict = check(sample, outcome, TENSORS, 48)
        verdicts.append(verdict.reason if isinstance(verdict, Rejection) else "")
    assert verdicts == ["", "", reason, ""]


@pytest.mark.parametrize("fault", ["other_states", "shift", "pre_norm"])
def test_mistakes_pass_every_check_and_only_other_values_tell(fault: str) -> None:
    sample = make_sample(probe_ids(20, 1, 1000))
    (good,), (bad,) = (capture_all(engine(script), [sample], ("r3", FINAL)) for script in ("", f"{fault}:every=1"))
    assert isinstance(good, Payload)
    assert isinstance(bad, Payload)
    assert not isinstance(check(sample, bad, ("r3", FINAL), 48), Rejection)
    wrong = {name for name, bits in bad.states.items() if not np.array_equal(bits, good.states[name])}
    assert wrong == {"other_states": {"r3", FINAL}, "shift": {"r3"}, "pre_norm": {FINAL}}[fault]


@pytest.mark.parametrize("fault", sorted(KINDS - {"slow", "silence", "fail", "oom", "dies", "kill"}))
def test_preflight_refuses_what_is_wrong_from_the_start(fault: str) -> None:
    with pytest.raises(PreflightRefused):
        asyncio.run(engine(fault).preflight())
    asyncio.run(engine(f"{fault}:after=3").preflight())  # not wrong yet: nothing to see


def test_failures_and_death() -> None:
    samples = [make_sample(probe_ids(5, i, 1000)) for i in range(3)]
    outcomes = capture_all(engine("fail:sample=1"), samples, TENSORS)
    assert [isinstance(o, Failure) for o in outcomes] == [False, True, False]
    many = capture_all(engine("oom"), samples, TENSORS)
    assert all(isinstance(o, Failure) and o.retryable for o in many)
    assert isinstance(capture_all(engine("oom"), samples[:1], TENSORS)[0], Payload)
    with pytest.raises(RuntimeError, match="died"):
        capture_all(engine("dies:sample=1"), samples, TENSORS)


def test_silence_never_answers() -> None:
    sample = make_sample(probe_ids(5, 1, 1000))

    async def wait() -> None:
        async with asyncio.timeout(0.05):
            async for _ in engine("silence").capture([sample], TENSORS):
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


def test_a_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(PreflightRefused, match="no r_7"):
        StubEngine(6, 48, (7,))


def test_registry(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4, "hidden_size": 32, "model_type": "llama"}')
    info = create("stub", tmp_path, (1, 2), final="pre_norm").describe()
    assert (info.blocks, info.hidden_size, info.final) == (4, 32, "pre_norm")
    with pytest.raises(UsageError, match="no engine"):
        create("steam", tmp_path, (1,))
    with pytest.raises(UsageError, match="--fault"):
        create("transformers", tmp_path, (1,), fault="nan")
