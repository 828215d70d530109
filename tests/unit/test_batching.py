"""Batches: a pure function of the plan, within limits, and stable when a plan grows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellhead.batching import batches, padded_tokens
from wellhead.core import PlanItem

ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2)), max_size=60)
ITEMS = ROWS.map(
    lambda rows: [PlanItem(f"{i:032x}", tokens, generation) for i, (tokens, generation) in enumerate(rows)]
)


@given(ITEMS, st.integers(1, 1000), st.integers(1, 8), st.randoms(use_true_random=False))
def test_whole_within_limits_and_independent_of_order(
    items: list[PlanItem], batch_tokens: int, batch_samples: int, rng: random.Random
) -> None:
    found = batches(items, batch_tokens, batch_samples)
    assert sorted(item.id for batch in found for item in batch) == sorted(item.id for item in items)
    for batch in found:
        assert len({item.generation for item in batch}) == 1
        assert len(batch) <= batch_samples
        assert len(batch) == 1 or padded_tokens(batch) <= batch_tokens
    longest = [max(item.tokens for item in batch) for batch in found]
    assert longest == sorted(longest, reverse=True)
    shuffled = items[:]
    rng.shuffle(shuffled)
    assert batches(shuffled, batch_tokens, batch_samples) == found


@given(ITEMS, st.integers(1, 1000), st.integers(1, 8))
def test_rows_added_later_regroup_nothing(items: list[PlanItem], batch_tokens: int, batch_samples: int) -> None:
    before = batches(items, batch_tokens, batch_samples)
    added = [PlanItem(f"a{i:031x}", item.tokens, 3) for i, item in enumerate(items)]
    after = batches([*items, *added], batch_tokens, batch_samples)
    assert [batch for batch in after if batch[0].generation < 3] == before


def test_padding_counts() -> None:
    items = [PlanItem(name, tokens, 0) for name, tokens in (("a", 50), ("b", 100), ("c", 10), ("d", 10), ("e", 1000))]
    found = batches(items, 200, 3)
    # 1000 is longer than a batch and goes alone; 100 + 50 take 2 x 100 with padding; a third would take 300.
    assert [[item.id for item in batch] for batch in found] == [["e"], ["b", "a"], ["c", "d"]]
    assert [padded_tokens(batch) for batch in found] == [1000, 200, 20]


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_refuses_limits_that_hold_nothing(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        batches([], *limits)
