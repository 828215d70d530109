"""The independent way to the same states: the whole model, `output_hidden_states=True`, no hooks.

It is slow and simple on purpose. Preflight, `verify --recapture` and the tests compare the engine with it: two paths
that share nothing but the weights. Transformers numbers as wellhead does: `hidden_states[k]` is r_k for k < n, and
`hidden_states[n]` is the state after the final norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wellhead.compare import Comparison, compare, mean_error
from wellhead.core import FINAL, Capture, Dtype, FinalNorm, layer_name, layer_number
from wellhead.engines.decoder import Decoder, find_decoder
from wellhead.errors import PreflightRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.core import Bits

TOP1_AGREEMENT = 0.95
"""Share of rows whose final state, through the head, must give the model's own next token. Ties in bf16 cost a few."""


class Reference:
    """The whole model in `model_dir`. Raises PreflightRefused if it cannot be read."""

    def __init__(self, model_dir: Path, dtype: Dtype = "bfloat16", device: str = "cpu") -> None:
        self._model = load_model(model_dir, dtype, torch.device(device))
        self._decoder = find_decoder(self._model, text_config(self._model))

    @property
    def blocks(self) -> int:
        return len(self._decoder.blocks)

    def states(
        self, input_ids: NDArray[np.int32], tensors: Sequence[str], final: FinalNorm = "post_norm"
    ) -> dict[str, Bits]:
        """Tensor name -> bf16 bits [T, H], computed alone. `r<n>` is the state before the final norm."""
        return self.batch_states([input_ids], tensors, final)[0]

    def batch_states(
        self, rows: Sequence[NDArray[np.int32]], tensors: Sequence[str], final: FinalNorm = "post_norm"
    ) -> list[dict[str, Bits]]:
        """The same for several samples computed in one batch, in this order, padded on the right."""
        batch, lengths = pad_right(rows, 0), [len(row) for row in rows]
        hidden = list(whole_model(self._model, batch)[0])
        before_norm = layer_name(self.blocks)
        if before_norm in tensors or (FINAL in tensors and final == "pre_norm"):
            hidden.append(self._without_norm(batch))
        places = {name: self._place(name, final) for name in tensors}
        return [
            {name: to_bits(hidden[place][at, :length]) for name, place in places.items()}
            for at, length in enumerate(lengths)
        ]

    def normed(self, bits: Bits) -> Bits:
        """What the model's final norm makes of a state [T, H]."""
        return _normed(self._decoder, bits)

    def _place(self, name: str, final: FinalNorm) -> int:
        if name == FINAL:
            return self.blocks if final == "post_norm" else self.blocks + 1
        k = layer_number(name)
        if k > self.blocks:
            raise PreflightRefused(f"{name} does not exist: the model has {self.blocks} blocks", "ask for a layer less")
        return k if k < self.blocks else self.blocks + 1

    def _without_norm(self, batch: torch.Tensor) -> torch.Tensor:
        """r_n: Transformers shows the last state only behind the norm, so the norm is taken out for one pass."""
        owner, _, attribute = self._decoder.norm_name.rpartition(".")
        module = self._model.get_submodule(owner)
        setattr(module, attribute, torch.nn.Identity())
        try:
            return whole_model(self._model, batch)[0][-1]
        finally:
            setattr(module, attribute, self._decoder.norm)


def reference_states(
    model_dir: Path, input_ids: NDArray[np.int32], tensors: Sequence[str], dtype: Dtype = "bfloat16"
) -> dict[str, Bits]:
    """`Reference(model_dir, dtype).states(...)` for a single sample: loads the model each time."""
    return Reference(model_dir, dtype).states(input_ids, tensors)


def load_model(model_dir: Path, dtype: Dtype, device: torch.device) -> Any:
    """A causal language model from a folder: never downloaded, never with code of its own, in silence.

    Raises PreflightRefused if Transformers cannot read it, or would fill in weights that the folder does not hold.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    try:
        with _quiet():
            model, info = auto.from_pretrained(
                str(model_dir),
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise PreflightRefused(f"cannot load the model in {model_dir}: {words}", "is the folder whole?") from error
    unset = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if unset:
        raise PreflightRefused(
            f"{model_dir} does not hold {len(unset)} of the model's weights, among them {unset[0]}",
            "they would be random numbers: is the download complete, and of this architecture?",
        )
    return model.eval().requires_grad_(False).to(device)


def text_config(model: Any) -> Any:
    """The configuration of the decoder, nested or not."""
    return model.config.get_text_config(decoder=True)


def pad_right(rows: Sequence[NDArray[np.int32]], pad_id: int) -> torch.Tensor:
    """int64 [samples, longest], each row filled up with `pad_id`."""
    batch = np.full((len(rows), max(len(row) for row in rows)), pad_id, np.int64)
    for at, row in enumerate(rows):
        batch[at, : len(row)] = row
    return torch.from_numpy(batch)


def to_bits(states: torch.Tensor) -> Bits:
    """bf16 bits [T, H], a copy, rounded to nearest even where the states are float32."""
    bits: Bits = states.to(torch.bfloat16).contiguous().clone().view(torch.uint16).cpu().numpy()
    return bits


def whole_model(model: Any, batch: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(hidden states 0..n, logits) of one pass. Like the engine's pass it has no attention mask: see there why."""
    with torch.inference_mode():
        out = model(input_ids=batch.to(model.device), use_cache=False, output_hidden_states=True)
    return out.hidden_states, out.logits


def prove_numbering(model: Any, captures: Sequence[Capture], final: FinalNorm) -> dict[str, Comparison]:
    """Compares captures, made as one batch in this order, with the whole model: every tensor must be the state of its
    own number and no other, and the final state must lead to the model's own next token. Returns the errors.

    Raises PreflightRefused naming the tensor, and the number that it really is.
    """
    decoder = find_decoder(model, text_config(model))
    blocks = len(decoder.blocks)
    hidden, logits = whole_model(model, pad_right([capture.input_ids for capture in captures], 0))
    if len(hidden) != blocks + 1:
        raise PreflightRefused(f"{blocks} blocks, but {len(hidden)} hidden states", "this model is not supported")
    truth = [np.concatenate([to_bits(h[at, : c.tokens]) for at, c in enumerate(captures)]) for h in hidden]
    found = {}
    for name in captures[0].states:
        bits = np.concatenate([capture.states[name] for capture in captures])
        k = blocks if name == FINAL else layer_number(name)
        if k == blocks and (name != FINAL or final == "pre_norm"):
            bits = _normed(decoder, bits)
        found[name] = _numbered(name, bits, truth, k)
        if name == FINAL:
            _prove_top1(model, bits, [logits[at, : c.tokens] for at, c in enumerate(captures)])
    return found


def _numbered(name: str, bits: Bits, truth: list[Bits], k: int) -> Comparison:
    near = [truth[j] for j in (k - 1, k + 1) if 0 <= j < len(truth)]
    comparison = compare(bits, truth[k], near)
    if not comparison.same:
        best = min(range(len(truth)), key=lambda j: mean_error(bits, truth[j]))
        raise PreflightRefused(
            f"{name} differs from hidden state {k} of the whole model by {comparison.own:.3g}, from its neighbour by "
            f"{comparison.neighbour or 0:.3g}; it is closest to hidden state {best}",
            "the engine reads another place of this model than it should; please report the architecture",
        )
    return comparison


def _normed(decoder: Decoder, bits: Bits) -> Bits:
    with torch.inference_mode():
        return to_bits(decoder.norm(_from_bits(bits, decoder.norm)))


def _prove_top1(model: Any, bits: Bits, logits: list[torch.Tensor]) -> None:
    head = model.get_output_embeddings()
    with torch.inference_mode():
        ours = head(_from_bits(bits, head)).argmax(-1)
    theirs = torch.cat([rows.argmax(-1) for rows in logits])
    agreement = float((ours == theirs).float().mean())
    if agreement < TOP1_AGREEMENT:
        raise PreflightRefused(
            f"the final state leads to the model's own next token in only {agreement:.0%} of rows",
            "the final state is not what the head consumes: pre- and post-norm mixed up, perhaps",
        )


def _from_bits(bits: Bits, module: torch.nn.Module) -> torch.Tensor:
    weight = next(module.parameters())
    return torch.from_numpy(bits).view(torch.bfloat16).to(weight.device, weight.dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no notices of Transformers on a terminal that shows a run."""
    import transformers

    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
