"""The embedded engine passes the suite that every engine passes: a tiny random model, and the demo's real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from wellhead.core import FINAL, Dtype
from wellhead.engines.base import Engine
from wellhead.engines.transformers import TransformersEngine
from wellhead.reference import Reference
from wellhead.testing.engine_suite import EngineSuite
from wellhead.testing.models import make_tiny_model

if TYPE_CHECKING:
    from wellhead.core import Bits


class _Suite(EngineSuite):
    layers: Sequence[int] = (0, 2, 3, 6)
    tensors: Sequence[str] = ("r0", "r2", "r3", "r6", FINAL)
    dtype: Dtype = "bfloat16"
    folder: Path
    independent: Reference

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), weights=True, max_position_embeddings=300)
        cls.independent = Reference(cls.folder, cls.dtype)
        yield
        del cls.independent

    def make_engine(self) -> Engine:
        return TransformersEngine(self.folder, self.layers, dtype=self.dtype)

    def reference(self, input_ids: NDArray[np.int32], tensors: Sequence[str]) -> dict[str, Bits]:
        return self.independent.states(input_ids, tensors)


class TestBfloat16(_Suite):
    pass


class TestFloat32(_Suite):
    dtype: Dtype = "float32"


@pytest.mark.real_model
class TestRealModel(_Suite):
    layers = (2, 15, 27)
    tensors = ("r2", "r15", "r27", FINAL)
    vocab_size = 49152
    lengths = (5, 1, 90, 40)
    dtype: Dtype = "float32"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, real_model: Path) -> Iterator[None]:
        cls.folder = real_model
        cls.independent = Reference(cls.folder, cls.dtype)
        yield
        del cls.independent
