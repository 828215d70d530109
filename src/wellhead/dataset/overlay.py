"""What turns a row into token ids and a loss mask, besides the row: recorded in the plan, never in the states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MaskPolicy = Literal["all-assistant", "last-assistant"]
ControlTokens = Literal["reject", "keep"]


@dataclass(frozen=True, slots=True)
class Overlay:
    """Two plans of equal overlay over an equal file are the same plan.

    `max_length` is in tokens. `date` is the frozen local time that the template sees ("2026-12-01T09:30:00"): a run
    that is resumed on another day renders the same text. `template_hash` and `tokenizer_hash` are BLAKE2b-128, in hex.
    """

    mask: MaskPolicy
    max_length: int
    date: str
    template_hash: str
    tokenizer_hash: str
    template_args: Mapping[str, Any] = field(default_factory=dict)
    control_tokens: ControlTokens = "reject"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "template_args": dict(self.template_args)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Overlay:
        return cls(**value)
