"""What `verify` finds, typed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["missing", "corrupt", "orphan", "stale", "foreign", "suspect"]

HARMLESS: tuple[Kind, ...] = ("suspect",)
"""Worth a look, but normal in sound runs too: norm outliers are sink tokens as a rule."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    missing   recorded and not there        corrupt  there with other bytes or impossible values
    orphan    there and not recorded        stale    recorded once, and withdrawn since
    foreign   of another run or spec        suspect  possible, but unusual
    """

    kind: Kind
    detail: str
    shard: str | None = None
    id: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
