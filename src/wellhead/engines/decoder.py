"""Where in a loaded model the residual stream can be read: found by structure, never by a table of model names.

A decoder is a module that owns a list of as many blocks as the configuration says, and a final norm beside it:
`model.layers` + `norm`, `transformer.h` + `ln_f`, `model.decoder.layers` + `final_layer_norm`, and the same nested in a
`language_model`. Anything that does not look like that is refused in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wellhead.core import FINAL, FinalNorm, layer_number
from wellhead.errors import PreflightRefused

_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm")
_TWO_WAY = ("use_bidirectional_attention", "is_encoder_decoder", "bidirectional")


@dataclass(frozen=True, slots=True)
class Decoder:
    """The parts of a model that capture touches (torch modules; this file does not import torch), and their names."""

    body: Any
    blocks: Any
    norm: Any
    body_name: str
    blocks_name: str
    norm_name: str

    def point(self, tensor: str, final: FinalNorm) -> tuple[Any, bool, str]:
        """(module, whether its input is taken instead of its output, that place in words) for a tensor name.

        r_0 is what enters the first block, behind any scaling of the embeddings; r_k is what block k (from 1) returns.
        """
        count = len(self.blocks)
        if tensor == FINAL and final == "post_norm":
            return self.norm, False, f"{self.norm_name} (output)"
        k = count if tensor == FINAL else layer_number(tensor)
        if k > count:
            raise PreflightRefused(f"{tensor} does not exist: the model has {count} blocks", f"r_0 to r_{count}")
        if k == 0:
            return self.blocks[0], True, f"{self.blocks_name}.0 (input)"
        return self.blocks[k - 1], False, f"{self.blocks_name}.{k - 1} (output)"


def find_decoder(model: Any, config: Any) -> Decoder:
    """Finds the decoder of a loaded model. `config` is its text configuration.

    Raises PreflightRefused if there is none, if there are several, if it has another number of blocks than the
    configuration says, or if it may look at later tokens.
    """
    name = type(model).__name__
    _require_causal(config, name)
    wanted = int(config.num_hidden_layers)
    modules = dict(model.named_modules())
    lists = {at: module for at, module in modules.items() if type(module).__name__ == "ModuleList"}
    beside_norm = {at: module for at, module in lists.items() if _norm_name(modules[_owner(at)])}
    found = [at for at, module in beside_norm.items() if len(module) == wanted]
    found = [at for at in found if "language_model" in at] or found
    if len(found) != 1:
        sizes = {at: len(module) for at, module in beside_norm.items()}
        raise PreflightRefused(
            f"{name}: {len(found)} lists of {wanted} blocks beside a final norm; lists there are: {sizes or 'none'}",
            "the transformers engine needs a decoder with one list of blocks followed by one norm",
        )
    blocks_name, owner = found[0], _owner(found[0])
    norm = _norm_name(modules[owner])
    return Decoder(
        body=modules[owner],
        blocks=modules[blocks_name],
        norm=modules[f"{owner}.{norm}".lstrip(".")],
        body_name=owner,
        blocks_name=blocks_name,
        norm_name=f"{owner}.{norm}".lstrip("."),
    )


def capture_points(decoder: Decoder, tensors: tuple[str, ...], final: FinalNorm) -> Mapping[str, str]:
    """Tensor name -> the place it is read from, as the loaded model calls it."""
    return {name: decoder.point(name, final)[2] for name in tensors}


def _require_causal(config: Any, name: str) -> None:
    two_way = [key for key in _TWO_WAY if getattr(config, key, False) is True]
    if two_way or getattr(config, "is_causal", True) is False:
        raise PreflightRefused(
            f"{name} is not causal ({', '.join(two_way) or 'is_causal=False'}): its states depend on later tokens",
            "wellhead captures decoder-only models",
        )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _norm_name(module: Any) -> str | None:
    children = dict(module.named_children())
    return next((name for name in _NORMS if name in children), None)
