"""A run as torch tensors and as a torch dataset. The only reader module that imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wellhead.errors import UsageError

try:
    import torch
    from torch.utils.data import Dataset
except ModuleNotFoundError as error:  # pragma: no cover - exercised by the wheel's smoke test, which has no torch
    raise UsageError(
        "torch is not installed, and this view of a run needs it", "pip install 'wellhead[transformers]'"
    ) from error

if TYPE_CHECKING:
    from wellhead.run import Record, Run


def record_tensors(record: Record) -> dict[str, Any]:
    """`input_ids` int32 [T], `loss_mask` uint8 [T], `hidden_states` bfloat16 [T, L + 1, H]."""
    bits = record.hidden_states.view(np.uint16)  # torch knows no ml_dtypes
    return {
        "input_ids": torch.from_numpy(np.array(record.input_ids)),
        "loss_mask": torch.from_numpy(np.array(record.loss_mask)),
        "hidden_states": torch.from_numpy(bits).view(torch.bfloat16),
    }


class RunDataset(Dataset[dict[str, Any]]):
    """Rows of a run in plan order, each a dict as `Record.torch` gives it. Pickles as the run's path."""

    def __init__(self, run: Run, layers: Sequence[int] | None = None) -> None:
        self._run = run
        self._layers = layers
        self.ids = run.ids()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return self._run.read_row(row % len(self), self._layers).torch()
