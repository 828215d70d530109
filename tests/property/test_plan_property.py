"""Random conversations and lengths against slow, obvious computations."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from wellhead.dataset.overlay import MaskPolicy, Overlay
from wellhead.dataset.read import BadRow, Row, rows
from wellhead.dataset.reasons import REASONS
from wellhead.dataset.render import Rendered, Renderer
from wellhead.disk import Room
from wellhead.predict import Workload, predict
from wellhead.testing.models import make_tiny_model

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    [" the well", "\n\n", " ", "assistant\n", "a<|end|>", "<|start|>assistant\n", "🎉", "ﬁ\u0301"]
)


POLICIES: tuple[MaskPolicy, ...] = get_args(MaskPolicy)


@dataclass
class Model:
    tokenizer: Tokenizer
    renderers: dict[MaskPolicy, Renderer]
    after_turn: str
    """What the template writes after a turn's end."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Model]:
    made = {}
    for tagged in (False, True):
        folder = make_tiny_model(tmp_path_factory.mktemp("model"), generation_tags=tagged)
        renderers = {
            policy: Renderer(folder, Overlay(policy, 4096, "2026-12-01", "", "", control_tokens="keep"))
            for policy in POLICIES
        }
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        made[tagged] = Model(tokenizer, renderers, "" if tagged else "\n")
    return made


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(TEXT, TEXT.filter(lambda text: bool(text.strip()))), min_size=1, max_size=4),
    tagged=st.booleans(),
    policy=st.sampled_from(POLICIES),
)
@example(turns=[("q", " a "), ("q", "\n.")], tagged=False, policy="all-assistant")
def test_ids_and_mask_are_those_of_the_pieces(
    models: dict[bool, Model], turns: list[tuple[str, str]], tagged: bool, policy: MaskPolicy
) -> None:
    """A control token begins each turn, and no token reaches across one: every turn can be tokenised by itself."""
    model, header = models[tagged], "<|start|>assistant\n"
    messages: list[dict[str, Any]] = []
    ids: list[int] = []
    mask: list[int] = []
    for number, (question, answer) in enumerate(turns):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        asked = model.tokenizer.encode(f"<|start|>user\n{question}<|end|>{model.after_turn}")
        said = model.tokenizer.encode(f"{header}{answer}<|end|>{model.after_turn}")
        supervised = policy == "all-assistant" or number == len(turns) - 1
        end = len(header) + len(answer) + len("<|end|>")
        ids += asked.ids + said.ids
        mask += [0] * len(asked.ids)
        mask += [int(supervised and len(header) <= start < end) for start, _ in said.offsets]
    (found,) = model.renderers[policy].render([Row(1, 1, messages)])
    assert isinstance(found, Rendered), found
    assert found.input_ids.tolist() == ids
    assert found.loss_mask.tolist() == mask


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={"role": st.sampled_from(["user", "assistant", "system", "x"]) | JSON, "content": TEXT | JSON,
              "from": st.sampled_from(["human", "gpt"]), "value": TEXT, "extra": JSON},
)  # fmt: skip
LINE = (
    st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=4) | JSON}).map(json.dumps).map(str.encode)
    | JSON.map(json.dumps).map(str.encode)
    | st.binary(max_size=60)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lines=st.lists(LINE, max_size=6))
def test_any_bytes_become_rows_or_typed_rejections(models: dict[bool, Model], lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    if data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"PK\3\4")):
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_bytes(data)
        read = list(rows(file))
    blank = [not line.strip() for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    assert [row.line for row in read] == [number for number, empty in enumerate(blank, 1) if not empty]
    results = models[False].renderers["all-assistant"].render(read)
    assert [row.line for row in results] == [row.line for row in read]
    for row in results:
        if isinstance(row, BadRow):
            assert row.reason in REASONS
        else:
            assert len(row.input_ids) == len(row.loss_mask) > row.loss_mask.sum() > 0


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 50), max_size=12),
    repeats=st.lists(st.booleans(), min_size=12, max_size=12),
    usable=st.integers(0, 30_000),
    reserve=st.integers(0, 1000),
)
def test_largest_n_and_largest_length_by_trying_all(
    tokens: list[int], repeats: list[bool], usable: int, reserve: int
) -> None:
    lengths = np.array(tokens, np.int64)
    first = np.array([n == 0 or not repeats[n] for n in range(len(tokens))], np.bool_)
    found = predict(Workload(lengths, first), (1, 2), 16, Room(usable + reserve, None, reserve))

    def needed(values: list[int]) -> int:
        return sum(
            int(np.ceil(value * 3 * 32 * 0.67)) + 4 * value + 4 * 200
            for value, own in zip(values, first, strict=False)
            if own
        )

    assert found.needed_bytes == needed(tokens)
    assert found.fits == (needed(tokens) <= usable)
    assert found.largest_n_that_fits == max(n for n in range(len(tokens) + 1) if needed(tokens[:n]) <= usable)
    if not found.fits:
        lengths_that_fit = [m for m in range(51) if needed([min(m, value) for value in tokens]) <= usable]
        best = max(lengths_that_fit, default=0)
        assert found.largest_max_length_that_fits == min(best, max(tokens))
