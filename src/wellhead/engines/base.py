"""What wellhead asks of an engine. The core knows this protocol and no engine library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from wellhead.core import FinalNorm, Provenance, Sample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wellhead.core import Bits

EngineName = Literal["transformers", "stub"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself. `capture_points` is read back from the loaded model, never assumed:
    tensor name -> what the engine calls that place ("model.layers.2 output")."""

    provenance: Provenance
    blocks: int
    hidden_size: int
    final: FinalNorm
    max_tokens: int
    """Longest sample that the engine takes."""
    batch_tokens: int
    """Tokens, padding included, that one call of `capture` should hold at most; a longer sample goes alone."""
    batch_samples: int
    capture_points: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What an operator should know before hours are spent: a slow dtype, modules on another device."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.provenance.to_json(),
            "blocks": self.blocks,
            "hidden_size": self.hidden_size,
            "final": self.final,
            "max_tokens": self.max_tokens,
            "capture_points": dict(self.capture_points),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Payload:
    """What an engine returns for one sample, before any check.

    `input_ids` are the ids as the engine saw them (int32 [T]), not a copy of the request. `states` maps `r<k>` and
    `final` to bf16 bits [T, H]; an array may be a memory map of staging. The payload is the caller's until
    `Engine.release`; the engine does not touch the arrays again.
    """

    sample_id: str
    input_ids: NDArray[np.int32]
    states: Mapping[str, Bits]
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that the engine could not capture. `reason` is a short code (`out_of_memory`, `engine_error`)."""

    sample_id: str
    reason: str
    detail: str
    retryable: bool


class Engine(Protocol):
    """Captures residual-stream states. Every sample handed in comes back exactly once, in any order."""

    def describe(self) -> EngineInfo:
        """Facts about the loaded engine. Cheap; does not compute."""

    async def preflight(self) -> None:
        """Proves on a few short samples that this engine captures what it says.

        Raises PreflightRefused in words."""

    def capture(self, samples: Sequence[Sample], tensors: Sequence[str]) -> AsyncIterator[Payload | Failure]:
        """Captures the named tensors (`r<k>`, `final`) of the samples, which form one batch."""

    def release(self, payload: Payload) -> None:
        """The sample is committed: its staging may be freed now, and not before."""

    async def drain(self) -> None:
        """Waits until nothing is in flight. Cancels nothing."""

    async def aclose(self) -> None:
        """Frees everything. Safe to call twice."""
