"""The embedded engine against Transformers' own `output_hidden_states`, bit for bit: the right number, no other.

The comparison here is written out again, with nothing of `wellhead.reference` in it: same weights, same dtype, same
padded batch, whole model. If the engine were one block off anywhere, `torch.equal` would say so.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
import xxhash

from wellhead.compare import compare, mean_error, to_float32
from wellhead.core import FINAL, Capture, Dtype, Provenance, layer_name
from wellhead.engines.base import Failure, Payload
from wellhead.engines.decoder import find_decoder
from wellhead.engines.transformers import TransformersEngine
from wellhead.errors import PreflightRefused
from wellhead.preflight import make_sample, probe_ids
from wellhead.reference import Reference, load_model, prove_numbering
from wellhead.testing.engine_suite import capture_all, payloads
from wellhead.testing.models import make_tiny_model

if TYPE_CHECKING:
    from wellhead.core import Bits, Sample

auto: Any = transformers.AutoModelForCausalLM
families: Any = transformers

BLOCKS = 6
ALL = (*(layer_name(k) for k in range(BLOCKS + 1)), FINAL)
LENGTHS = (7, 1, 60, 33)
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), weights=True, blocks=BLOCKS)


def samples(vocab: int = 384, lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    return [make_sample(probe_ids(length, length, vocab)) for length in lengths]


def plain_run(folder: Path, dtype: Dtype, batch: Sequence[Sample]) -> tuple[list[list[Bits]], list[Bits]]:
    """([sample][hidden state], [sample] r_n): what `output_hidden_states` gives, and the last state before the norm."""
    model = auto.from_pretrained(str(folder), dtype=getattr(torch, dtype)).eval()
    ids = torch.zeros(len(batch), max(s.tokens for s in batch), dtype=torch.int64)
    for row, sample in enumerate(batch):
        ids[row, : sample.tokens] = torch.from_numpy(sample.input_ids.astype(np.int64))
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    rows = [[bits(h[i, : s.tokens]) for h in hidden] for i, s in enumerate(batch)]
    return rows, [bits(before_norm[0][i, : s.tokens]) for i, s in enumerate(batch)]


def bits(states: torch.Tensor) -> Bits:
    found: Bits = states.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layer_is_bit_equal_and_every_other_layer_is_not(tiny: Path, dtype: Dtype) -> None:
    batch = samples()
    found = payloads(TransformersEngine(tiny, range(BLOCKS + 1), dtype=dtype), batch, ALL)
    hidden, before_norm = plain_run(tiny, dtype, batch)
    for at, sample in enumerate(batch):
        states = found[sample.id].states
        assert np.array_equal(states[FINAL], hidden[at][BLOCKS])
        assert np.array_equal(states[layer_name(BLOCKS)], before_norm[at])
        for k in range(BLOCKS):
            for j in range(BLOCKS + 1):
                assert np.array_equal(states[layer_name(k)], hidden[at][j]) == (k == j), (k, j)


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_is_noise_and_a_layer_off_is_not(tiny: Path, dtype: Dtype) -> None:
    batch = samples()
    found = payloads(TransformersEngine(tiny, range(BLOCKS + 1), dtype=dtype), batch, ALL)
    reference = Reference(tiny, dtype)
    for sample in batch:
        truth = reference.states(sample.input_ids, ALL)
        for k in range(1, BLOCKS):
            name = layer_name(k)
            near = [truth[layer_name(k - 1)], truth[layer_name(k + 1)]]
            assert compare(found[sample.id].states[name], truth[name], near).same
            assert not compare(found[sample.id].states[name], near[1], [truth[name]]).same


def test_the_reference_is_the_plain_run(tiny: Path) -> None:
    batch = samples()
    states = Reference(tiny).batch_states([s.input_ids for s in batch], ALL)
    hidden, before_norm = plain_run(tiny, "bfloat16", batch)
    for at in range(len(batch)):
        assert np.array_equal(states[at][FINAL], hidden[at][BLOCKS])
        assert np.array_equal(states[at][layer_name(BLOCKS)], before_norm[at])
        for k in range(BLOCKS):
            assert np.array_equal(states[at][layer_name(k)], hidden[at][k])


def test_pre_norm_is_the_last_state_before_the_norm(tiny: Path) -> None:
    batch = samples()
    engine = TransformersEngine(tiny, (2,), final="pre_norm")
    asyncio.run(engine.preflight())
    found = payloads(engine, batch, ("r2", FINAL))
    hidden, before_norm = plain_run(tiny, "bfloat16", batch)
    for at, sample in enumerate(batch):
        assert np.array_equal(found[sample.id].states[FINAL], before_norm[at])
        assert mean_error(found[sample.id].states[FINAL], hidden[at][BLOCKS]) > 0.1


def test_another_process_with_other_threads_computes_the_same_bits(tiny: Path) -> None:
    program = (
        "import sys, pathlib, xxhash\n"
        "from wellhead.engines.transformers import TransformersEngine\n"
        "from wellhead.preflight import make_sample, probe_ids\n"
        "from wellhead.testing.engine_suite import payloads\n"
        "batch = [make_sample(probe_ids(n, n, 384)) for n in (7, 1, 60, 33)]\n"
        "found = payloads(TransformersEngine(pathlib.Path(sys.argv[1]), (2, 3)), batch, ('r2', 'r3', 'final'))\n"
        "print(xxhash.xxh3_64_hexdigest(b''.join(b.tobytes() for s in batch for b in found[s.id].states.values())))\n"
    )
    command = [sys.executable, "-c", program, str(tiny)]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    batch = samples()
    found = payloads(TransformersEngine(tiny, (2, 3)), batch, ("r2", "r3", FINAL))
    ours = b"".join(found[s.id].states[name].tobytes() for s in batch for name in ("r2", "r3", FINAL))
    assert said.stdout.strip() == xxhash.xxh3_64_hexdigest(ours)


@pytest.fixture
def blocks_run() -> Iterator[list[str]]:
    """Fills with the names of the modules that run, from torch's own global hook."""
    ran: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda m, _: ran.append(type(m).__name__))
    yield ran
    handle.remove()


def test_stops_below_the_norm_when_the_final_state_is_not_asked_for(tiny: Path, blocks_run: list[str]) -> None:
    engine = TransformersEngine(tiny, (1,))
    payloads(engine, samples(), ("r1", "r2"))
    assert blocks_run.count("LlamaDecoderLayer") == 2
    blocks_run.clear()
    payloads(engine, samples(), ("r1", FINAL))
    assert blocks_run.count("LlamaDecoderLayer") == BLOCKS
    assert blocks_run.count("LlamaModel") == 1
    assert "LlamaForCausalLM" not in blocks_run  # no logits


def test_a_bad_token_id_fails_alone(tiny: Path) -> None:
    bad, good = make_sample([5, 384, 3]), make_sample([5, 6])
    outcomes = {o.sample_id: o for o in capture_all(TransformersEngine(tiny, (1,)), [bad, good], ("r1",))}
    failure = outcomes[bad.id]
    assert isinstance(failure, Failure)
    assert failure.reason == "bad_token_id"
    assert "384" in failure.detail
    assert isinstance(outcomes[good.id], Payload)


def test_no_memory_is_a_retryable_failure_of_the_batch(tiny: Path) -> None:
    engine = TransformersEngine(tiny, (1,))

    def refuse(module: torch.nn.Module, _: Any) -> None:
        if type(module).__name__ == "LlamaMLP":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.80 GiB")

    handle = torch.nn.modules.module.register_module_forward_pre_hook(refuse)
    outcomes = capture_all(engine, samples(), ("r1", FINAL))
    handle.remove()
    assert len(outcomes) == len(LENGTHS)
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert (outcome.reason, outcome.retryable) == ("out_of_memory", True)
    assert all(isinstance(o, Payload) for o in capture_all(engine, samples(), ("r1",)))  # and nothing is left behind


@pytest.mark.parametrize(("name", "really", "says"), [
    ("r2", "r3", r"r2 differs .* closest to hidden state 3"),
    ("r4", "r3", r"r4 differs .* closest to hidden state 3"),
    ("final", "r6", r"final differs"),
    ("final", "r5", r"final differs .* closest to hidden state 5"),
])  # fmt: skip
def test_the_numbering_proof_refuses_another_place(tiny: Path, name: str, really: str, says: str) -> None:
    model, batch = load_model(tiny, "bfloat16", torch.device("cpu")), samples()
    truth = Reference(tiny).batch_states([s.input_ids for s in batch], ALL)
    by = Provenance("test", "1")

    def captures(source: str) -> list[Capture]:
        return [Capture(s.id, s.input_ids, {name: truth[at][source]}, by) for at, s in enumerate(batch)]

    assert prove_numbering(model, captures(name), "post_norm")[name].own == 0
    with pytest.raises(PreflightRefused, match=says):
        prove_numbering(model, captures(really), "post_norm")


def test_refuses_weights_that_are_not_there(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", weights=True, blocks=3)
    make_tiny_model(folder, blocks=4)  # config.json now speaks of a block that the weights do not hold
    with pytest.raises(PreflightRefused, match="does not hold"):
        TransformersEngine(folder, (1,))
    with pytest.raises(PreflightRefused, match="cannot load"):
        TransformersEngine(make_tiny_model(tmp_path / "empty"), (1,))


def test_refuses_what_is_no_causal_decoder(tiny: Path) -> None:
    model = auto.from_pretrained(str(tiny))
    config = model.config
    assert find_decoder(model, config).blocks_name == "model.layers"
    config.num_hidden_layers = 5
    with pytest.raises(PreflightRefused, match=r"0 lists of 5 blocks .*model\.layers.: 6"):
        find_decoder(model, config)
    config.use_bidirectional_attention = True
    with pytest.raises(PreflightRefused, match="not causal"):
        find_decoder(model, config)


@pytest.mark.parametrize("family", ["GPT2", "GPTNeoX", "OPT", "Qwen3", "Gemma2", "Mistral"])
def test_finds_the_decoder_of_other_families(family: str, tmp_path: Path) -> None:
    """By structure: other names, tuples as outputs, embeddings that are scaled before the first block."""
    folder = tmp_path / family
    auto.from_config(_config(family)).to(torch.float32).save_pretrained(str(folder))
    engine = TransformersEngine(folder, (0, 1, 2), dtype="float32")
    asyncio.run(engine.preflight())
    asyncio.run(engine.aclose())


def _config(family: str) -> Any:
    small = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    llama_like = small | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
    if family == "GPT2":
        return families.GPT2Config(vocab_size=128, n_embd=32, n_layer=4, n_head=4, initializer_range=0.2)
    if family == "GPTNeoX":
        return families.GPTNeoXConfig(**small, intermediate_size=64, initializer_range=0.2)
    if family == "OPT":
        return families.OPTConfig(**small, ffn_dim=64, word_embed_proj_dim=32, init_std=0.2)
    if family == "Qwen3":
        return families.Qwen3Config(**llama_like)
    if family == "Gemma2":
        return families.Gemma2Config(**llama_like, query_pre_attn_scalar=8)
    return families.MistralConfig(**llama_like, sliding_window=16)


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_model_bit_equal_and_noise_far_below_the_neighbour(real_model: Path, dtype: Dtype) -> None:
    layers = (2, 15, 27)
    names = (*map(layer_name, layers), FINAL)
    batch = samples(49152, (40, 9, 21))
    engine = TransformersEngine(real_model, layers, dtype=dtype)
    found = payloads(engine, batch, names)
    hidden, _ = plain_run(real_model, dtype, batch)
    for at, sample in enumerate(batch):
        for k, name in zip((*layers, 30), names, strict=True):
            assert np.array_equal(found[sample.id].states[name], hidden[at][k])
            assert not np.array_equal(found[sample.id].states[name], hidden[at][k - 1])
        alone = payloads(engine, [sample], names)[sample.id].states
        for k, name in zip((*layers, 30), names, strict=True):
            assert compare(found[sample.id].states[name], alone[name], [hidden[at][k - 1]]).same
    assert np.isfinite(to_float32(found[batch[0].id].states[FINAL])).all()
