"""What is left to capture: the plan's distinct states against what the ledgers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wellhead.batching import batches
from wellhead.core import BYTES_PER_VALUE, PlanItem
from wellhead.engines.base import EngineInfo
from wellhead.plan import Plan
from wellhead.store.index import StoreIndex


@dataclass(frozen=True, slots=True)
class Work:
    """`lacking` maps each pending state to the tensors it lacks; states that were quarantined are not in it."""

    items: Sequence[PlanItem]
    rows_of: Counter[str]
    """Plan rows a state stands for."""
    lacking: dict[str, tuple[str, ...]]
    quarantined: frozenset[str]

    @property
    def kept_rows(self) -> int:
        return sum(self.rows_of.values()) - self.pending_rows - self.quarantined_rows

    @property
    def pending_rows(self) -> int:
        return sum(self.rows_of[id] for id in self.lacking)

    @property
    def quarantined_rows(self) -> int:
        return sum(self.rows_of[id] for id in self.quarantined)

    @property
    def kept_tokens(self) -> int:
        return sum(i.tokens for i in self.items if i.id not in self.lacking and i.id not in self.quarantined)

    @property
    def tokens(self) -> int:
        """Of all distinct states that the plan asks for."""
        return sum(item.tokens for item in self.items)

    def durable_raw_bytes(self, tensors: int, hidden_size: int) -> int:
        """Raw bytes that are committed of the plan's states, of which each is to have `tensors` state tensors."""
        present = sum(item.tokens * (tensors - self._lacks(item.id, tensors)) for item in self.items)
        return present * hidden_size * BYTES_PER_VALUE

    def _lacks(self, id: str, tensors: int) -> int:
        return tensors if id in self.quarantined else len(self.lacking.get(id, ()))

    @property
    def pending_tokens(self) -> int:
        return sum(item.tokens for item in self.items if item.id in self.lacking)

    def units(self, engine: EngineInfo) -> list[tuple[PlanItem, ...]]:
        """The batches in which something is pending, whole. Composition depends on the plan alone, never on what is
        done, so that a resumed run computes each state in the same company as an undisturbed one."""
        all_batches = batches(self.items, engine.batch_tokens, engine.batch_samples)
        return [batch for batch in all_batches if any(item.id in self.lacking for item in batch)]


def quarantine_reasons(work: Work, index: StoreIndex) -> dict[str, int]:
    """Rows in quarantine by reason."""
    reasons: Counter[str] = Counter()
    for id in work.quarantined:
        reasons[index.quarantined[id].reason] += work.rows_of[id]
    return dict(reasons)


def other_states(work: Work, index: StoreIndex) -> int:
    """Distinct states in the store that the plan does not name: rows of earlier plans."""
    return len(set(index.ids()) - {item.id for item in work.items})


def plan_facts(plan: Plan) -> dict[str, Any]:
    """What `status` says of the plan in force."""
    overlay = plan.overlay
    return {"plan": plan.number, "data": plan.source.path, "mask": overlay.mask, "max_length": overlay.max_length}


def pending_work(plan: Plan, index: StoreIndex, tensors: Sequence[str], retry_quarantined: bool = False) -> Work:
    """Compares the plan with the store. `tensors` are the state tensors that every kept row must have."""
    items = plan.items()
    lacking = index.missing([item.id for item in items], tensors)
    quarantined = frozenset() if retry_quarantined else frozenset(id for id in lacking if id in index.quarantined)
    return Work(
        items,
        Counter(plan.ids()),
        {id: names for id, names in lacking.items() if id not in quarantined},
        quarantined,
    )
