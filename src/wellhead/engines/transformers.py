"""The embedded engine: the model in this process, through Transformers, on a CPU or one CUDA device.

Only the decoder runs: no logits, no key-value cache, no `output_hidden_states`; hooks copy the states asked for out of
the blocks that produce them. Samples of a batch are padded on the right and run *without* an attention mask: in a
causal model no row looks at a later one, so padding behind a sample cannot reach it, and the kernels for plain causal
attention are used, which are the ones a sample alone would get.

The same batch gives the same bits in every process; other company changes the low bits (see `batching`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from wellhead.core import FINAL, Dtype, FinalNorm, Provenance, Sample, layer_name
from wellhead.engines.base import EngineInfo, Failure, Payload
from wellhead.engines.decoder import capture_points, find_decoder
from wellhead.preflight import prove_capture
from wellhead.reference import load_model, pad_right, prove_numbering, text_config

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.core import Bits

CPU_BATCH = (2048, 16)
CUDA_BATCH = (16384, 64)
"""(padded tokens, samples) of a batch. On two cores, larger batches are no faster; on a GPU small ones starve it."""

SLOW_BF16 = 3.0
"""From this slowdown on, bf16 on a CPU is worth a word."""

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class TransformersEngine:
    """Captures r_k and the final state of a decoder-only model in `model_dir`, which is never downloaded.

    `layers` are the r_k that a run will ask for: `preflight` proves them, `capture` takes any. States are computed in
    `dtype` and come back as bf16 bits, rounded to nearest even from float32. `final` is the state after the final norm
    (`post_norm`) or before it (`pre_norm`, which is r_n).

    The constructor loads the model and blocks. Torch runs in one thread of the engine's own, so the event loop lives.
    Raises PreflightRefused for a model that it cannot read or capture from.
    """

    def __init__(
        self,
        model_dir: Path,
        layers: Sequence[int],
        *,
        dtype: Dtype = "bfloat16",
        final: FinalNorm = "post_norm",
        device: str = "auto",
    ) -> None:
        self._device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self._model: Any = load_model(model_dir, dtype, self._device)
        config = text_config(self._model)
        self._decoder = find_decoder(self._model, config)
        self._final = final
        self._tensors = (*(layer_name(k) for k in sorted(layers)), FINAL)
        self._vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        pad = config.pad_token_id
        self._pad_id = pad if isinstance(pad, int) and 0 <= pad < self._vocab_size else 0
        batch_tokens, batch_samples = CPU_BATCH if self._device.type == "cpu" else CUDA_BATCH
        self._info = EngineInfo(
            provenance=Provenance("transformers", transformers.__version__, self._details(dtype)),
            blocks=len(self._decoder.blocks),
            hidden_size=int(config.hidden_size),
            final=final,
            max_tokens=int(getattr(config, "max_position_embeddings", None) or 1 << 20),
            batch_tokens=batch_tokens,
            batch_samples=batch_samples,
            capture_points=capture_points(self._decoder, self._tensors, final),
            notes=_notes(self._device, dtype),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wellhead-engine")
        self._closed = False

    def describe(self) -> EngineInfo:
        return self._info

    async def preflight(self) -> None:
        """A few short samples: alone, together, with a shared prefix; then the numbering of every layer against an
        independent run of the whole model, and the final state through the head against the model's own choice.

        The head is let go afterwards, so a second call proves nothing more."""
        if self._model is None:
            return
        together = await prove_capture(self, self._tensors, self._vocab_size)
        await self._in_thread(prove_numbering, self._model, together, self._final)
        self._model = None

    async def capture(self, samples: Sequence[Sample], tensors: Sequence[str]) -> AsyncIterator[Payload | Failure]:
        """One forward pass over the samples that it can take; the others come back as failures. Cancelling waits for
        nothing: the pass in progress ends in the engine's thread."""
        fit = []
        for sample in samples:
            failure = self._refused(sample)
            if failure:
                yield failure
            else:
                fit.append(sample)
        if not fit:
            return
        outcomes: list[Payload | Failure] = await self._in_thread(self._capture_batch, fit, tuple(tensors))
        for outcome in outcomes:
            yield outcome

    def release(self, payload: Payload) -> None:
        """Nothing is staged: the arrays are ordinary memory."""

    async def drain(self) -> None:
        """Waits for the pass in progress."""
        if not self._closed:
            await self._in_thread(lambda: None)

    async def aclose(self) -> None:
        """Waits for the pass in progress and lets the model go."""
        if self._closed:
            return
        await self.drain()
        self._closed = True
        self._thread.shutdown()
        del self._model, self._decoder
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _details(self, dtype: Dtype) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "device": self._device.type,
            "dtype": dtype,
            "attention": getattr(self._model.config, "_attn_implementation", None),
        }

    async def _in_thread(self, call: Any, *args: Any) -> Any:
        if self._closed:
            raise RuntimeError("this engine is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _refused(self, sample: Sample) -> Failure | None:
        """Samples that would fail a whole batch are answered before it runs."""
        if not 0 < sample.tokens <= self._info.max_tokens:
            detail = f"{sample.tokens} tokens; the model takes 1 to {self._info.max_tokens}"
            return Failure(sample.id, "bad_length", detail, retryable=False)
        low, high = int(sample.input_ids.min()), int(sample.input_ids.max())
        if low < 0 or high >= self._vocab_size:
            detail = f"token id {low if low < 0 else high}; the model has {self._vocab_size} embeddings"
            return Failure(sample.id, "bad_token_id", detail, retryable=False)
        return None

    def _capture_batch(self, samples: Sequence[Sample], tensors: tuple[str, ...]) -> list[Payload | Failure]:
        """In the engine's thread."""
        try:
            seen, states = self._forward(samples, tensors)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            no_memory = any(words in str(error).lower() for words in _NO_MEMORY)
            reason = "out_of_memory" if no_memory else "engine_error"
            return [Failure(s.id, reason, str(error).splitlines()[0], retryable=no_memory) for s in samples]
        return [
            Payload(s.id, ids, {name: states[name][i] for name in tensors}, self._info.provenance)
            for i, (s, ids) in enumerate(zip(samples, seen, strict=True))
        ]

    def _forward(
        self, samples: Sequence[Sample], tensors: tuple[str, ...]
    ) -> tuple[list[NDArray[np.int32]], dict[str, list[Bits]]]:
        """The ids that the model saw, read back from its input, and tensor name -> the bits of each sample; both
        without padding."""
        batch = pad_right([sample.input_ids for sample in samples], self._pad_id).to(self._device)
        lengths = [sample.tokens for sample in samples]
        copies: dict[str, list[torch.Tensor]] = {}
        with torch.inference_mode(), self._hooks(tensors, lengths, copies), contextlib.suppress(_Enough):
            self._decoder.body(input_ids=batch, use_cache=False)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        rows = batch.to("cpu", torch.int32).numpy()
        seen = [rows[i, :length].copy() for i, length in enumerate(lengths)]
        return seen, {name: [copy.view(torch.uint16).numpy() for copy in copies[name]] for name in tensors}

    @contextlib.contextmanager
    def _hooks(
        self, tensors: tuple[str, ...], lengths: list[int], copies: dict[str, list[torch.Tensor]]
    ) -> Iterator[None]:
        """While it lasts, a forward pass puts copies of the tensors into `copies`. Where the last of them comes before
        the final norm, the pass ends there with _Enough."""
        handles = []
        to_the_end = FINAL in tensors and self._final == "post_norm"
        for name in tensors:
            module, takes_input, _ = self._decoder.point(name, self._final)

            def keep(hidden: Any, name: str = name) -> None:
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
                copies[name] = _copies(hidden, lengths)
                if len(copies) == len(tensors) and not to_the_end:
                    raise _Enough

            if takes_input:
                handles.append(module.register_forward_pre_hook(_before(keep), with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(_after(keep)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def bf16_slowdown() -> float:
    """How many times slower this CPU multiplies bf16 matrices than float32 ones: below 1 with bf16 instructions, 30
    and more without. Measured on a small product in one thread, since several wait for each other on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _seconds_of_a_product(torch.bfloat16) / _seconds_of_a_product(torch.float32)
    finally:
        torch.set_num_threads(threads)


def _seconds_of_a_product(dtype: torch.dtype) -> float:
    a, b = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(4):  # the first sets the kernel up
        began = time.perf_counter()
        torch.nn.functional.linear(a, b)
        times.append(time.perf_counter() - began)
    return min(times)


def _notes(device: torch.device, dtype: Dtype) -> tuple[str, ...]:
    if device.type != "cpu" or dtype != "bfloat16":
        return ()
    slower = bf16_slowdown()
    if slower < SLOW_BF16:
        return ()
    return (f"this CPU multiplies bf16 {slower:.0f} times slower than float32: --dtype float32 is faster here",)


class _Enough(Exception):
    """Everything asked for is copied: the blocks above need not run."""


def _copies(hidden: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """bf16 [T, H] of each sample on the CPU, without padding. Copied at once: a later block may write in place."""
    out = []
    for row, length in enumerate(lengths):
        rows = hidden[row, :length].detach()
        copy = torch.empty(rows.shape, dtype=torch.bfloat16, pin_memory=hidden.is_cuda)
        # Rounds to nearest even on the device; from there the copy runs beside the next block.
        copy.copy_(rows.to(torch.bfloat16), non_blocking=hidden.is_cuda)
        out.append(copy)
    return out


def _after(keep: Callable[[Any], None]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        keep(output)

    return hook


def _before(keep: Callable[[Any], None]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    return hook
