"""A tiny model folder made on the spot: no download, no fixture file. For tests, ours and other people's.

Random weights are enough wherever it matters that states are computed, stored and told apart, and not what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPECIALS = ("<|end|>", "<|start|>")
VOCAB_SIZE = 384

_ROLES = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_TAGGED = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_WORDS = (
    "the well gives oil and water and gas to those who open the valve slowly and watch the gauge",
    "a question and an answer make a conversation of two turns between a user and an assistant",
    "print the sum of all numbers from one to ten and return the result of the function",
)


def make_tiny_model(
    folder: Path,
    *,
    weights: bool = False,
    generation_tags: bool = False,
    blocks: int = 6,
    hidden_size: int = 64,
    **config: Any,
) -> Path:
    """Writes a small random Llama into `folder` and returns it: config.json, tokenizer.json (byte-level BPE), a chat
    template (with generation tags if asked for) and, with `weights`, random bf16 weights.

    `weights` needs torch; the rest needs only tokenizers. `seed` (0) in `config` seeds the weights, everything else
    there goes into config.json. The same arguments give the same files.
    """
    seed = config.pop("seed", 0)
    folder.mkdir(parents=True, exist_ok=True)
    settings = _llama(blocks, hidden_size) | config
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=2), encoding="utf-8")
    template = _TAGGED if generation_tags else _ROLES
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if weights:
        _write_weights(folder, seed)
    return folder


def _llama(blocks: int, hidden_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": blocks,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[0],
        "bos_token": SPECIALS[1],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    return tokenizer


def _sentences() -> Iterator[str]:
    for line in _WORDS:
        yield line
        yield line.capitalize() + "."


def _write_weights(folder: Path, seed: int) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    auto: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(transformers.AutoConfig.from_pretrained(str(folder)), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Larger than the usual initial 0.02: with that, the blocks of an untrained model add next to nothing to the
            # residual stream, and neighbouring layers could not be told apart.
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else parameter.shape[1] ** -0.5)
        tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
