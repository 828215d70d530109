"""The stub engine passes the suite that every engine passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wellhead.core import FINAL, layer_number
from wellhead.engines.base import Engine
from wellhead.engines.stub import StubEngine, stub_state
from wellhead.testing.engine_suite import EngineSuite

if TYPE_CHECKING:
    from wellhead.core import Bits

BLOCKS, WIDTH = 6, 64


class TestStubEngine(EngineSuite):
    tensors = ("r0", "r2", "r3", FINAL)

    def make_engine(self) -> Engine:
        return StubEngine(BLOCKS, WIDTH, (0, 2, 3), seed=7, info={"max_tokens": 500})

    def reference(self, input_ids: NDArray[np.int32], tensors: Sequence[str]) -> dict[str, Bits]:
        """Row by row from prefixes, so that a row that depended on later tokens would differ."""
        return {
            name: np.concatenate([_row(input_ids[: t + 1], name) for t in range(len(input_ids))]) for name in tensors
        }


def _row(prefix: NDArray[np.int32], name: str) -> Bits:
    k = "final" if name == FINAL else layer_number(name)
    return stub_state(prefix, k, WIDTH, BLOCKS, seed=7)[-1:]  # type: ignore[arg-type]
