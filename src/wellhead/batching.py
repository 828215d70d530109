"""Which samples go through the engine together: a pure function of the plan.

The low bits of a state depend on the shape of the batch it was computed in (about half of all samples change when they
are grouped otherwise), so an interrupted run can only be byte-equal to an undisturbed one if the grouping depends on
nothing but the plan: not on what is done already, not on speed, not on memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from wellhead.core import PlanItem


def batches(items: Sequence[PlanItem], batch_tokens: int, batch_samples: int) -> list[tuple[PlanItem, ...]]:
    """Groups distinct samples by length, the longest first.

    A batch holds at most `batch_samples` samples and at most `batch_tokens` tokens *with padding* (its longest sample
    times their number); a sample that is longer than that goes alone. A batch never mixes generations, so rows that
    are added to a plan later do not regroup those that were there. The order of `items` does not matter. The longest
    batches come first, so that a run that will not fit into memory says so at once.

    Raises ValueError for limits below 1.
    """
    if batch_tokens < 1 or batch_samples < 1:
        raise ValueError(f"batch_tokens={batch_tokens} and batch_samples={batch_samples} must both be at least 1")
    generations: dict[int, list[PlanItem]] = defaultdict(list)
    for item in items:
        generations[item.generation].append(item)
    grouped = [batch for members in generations.values() for batch in _grouped(members, batch_tokens, batch_samples)]
    return sorted(grouped, key=lambda batch: (-batch[0].tokens, batch[0].generation, batch[0].id))


def padded_tokens(batch: Sequence[PlanItem]) -> int:
    """What the engine computes for a batch: its longest sample times the number of samples."""
    return max(item.tokens for item in batch) * len(batch)


def _grouped(items: Iterable[PlanItem], batch_tokens: int, batch_samples: int) -> list[tuple[PlanItem, ...]]:
    ordered = sorted(items, key=lambda item: (-item.tokens, item.id))
    out: list[tuple[PlanItem, ...]] = []
    start = 0
    while start < len(ordered):
        # The first of a batch is its longest, so it alone decides how many fit.
        fitting = batch_tokens // max(1, ordered[start].tokens)
        count = max(1, min(batch_samples, fitting))
        out.append(tuple(ordered[start : start + count]))
        start += count
    return out
