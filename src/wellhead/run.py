"""`wellhead.open(RUN)`: a run as its readers see it. Read-only, safe while the run is being written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from wellhead.core import FINAL, CaptureSpec, FinalNorm, layer_number, state_names
from wellhead.errors import UsageError
from wellhead.manifest import Manifest
from wellhead.paths import RunPaths
from wellhead.plan import Plan
from wellhead.store.index import StoreIndex
from wellhead.store.reader import StateReader
from wellhead.work import Work, pending_work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.finding import Finding
    from wellhead.torch_view import RunDataset


@dataclass(frozen=True, slots=True)
class Record:
    """One sample as a trainer wants it.

    `input_ids` int32 [T]; `loss_mask` uint8 [T] from the plan; `hidden_states` bf16 (ml_dtypes) [T, L + 1, H],
    stacked in the order of `layers`, then the final state, which `final` says is post- or pre-norm.
    """

    id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    hidden_states: NDArray[Any]
    layers: tuple[int, ...]
    final: FinalNorm

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.hidden_states.shape))
        return f"<Record {self.id}: hidden_states {shape} bf16, layers {self.layers} + {self.final} final>"

    def torch(self) -> dict[str, Any]:
        """`input_ids` int32, `loss_mask` uint8, `hidden_states` bfloat16 as torch tensors; needs torch."""
        from wellhead.torch_view import record_tensors

        return record_tensors(self)


class Run:
    """A run folder, opened. `layers` excludes the final state; rows and ids are those of the current plan.

    Picklable (DataLoader workers reopen it by path) and usable from several threads."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.paths = RunPaths(Path(root))
        self.manifest = Manifest.read(self.paths)
        self.plan = Plan.current(self.paths.root)
        self.index = StoreIndex.load(self.paths.root, self.manifest.spec.fingerprint)
        self._reader = StateReader(self.paths.root, self.index)

    def __repr__(self) -> str:
        return f"<Run {self.paths.root}: {len(self)} of {self.plan.rows} rows, layers {self.layers} + final>"

    @property
    def spec(self) -> CaptureSpec:
        return self.manifest.spec

    @property
    def model_path(self) -> str:
        return self.manifest.model_path

    @property
    def final(self) -> FinalNorm:
        return self.spec.final

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """What the run was begun with, and what was added since."""
        return layers_in_force(self.manifest.layers, self.index)

    @cached_property
    def work(self) -> Work:
        """What is kept, quarantined and pending of the current plan."""
        return pending_work(self.plan, self.index, state_names(self.layers))

    @cached_property
    def kept_positions(self) -> list[int]:
        """Positions in the plan's kept rows whose states are complete; the order of `ids()` and of `dataset()`."""
        work = self.work
        return [
            position
            for position, id in enumerate(self.plan.ids())
            if id not in work.lacking and id not in work.quarantined
        ]

    def __len__(self) -> int:
        return len(self.kept_positions)

    def ids(self) -> list[str]:
        """Ids of the readable rows in plan order; a row that repeats another's token ids repeats its id."""
        ids = self.plan.ids()
        return [ids[position] for position in self.kept_positions]

    def read(self, id: str, layers: Sequence[int] | None = None) -> Record:
        """The states of one sample; `layers` takes a subset of `run.layers`. The mask is the first such row's.

        Raises UsageError for an id or a layer that the run has not, StoreDamaged if the bytes are not right."""
        (sample,) = self.plan.samples([self._known(id)])
        return self._record(id, sample.loss_mask, layers)

    def read_row(self, row: int, layers: Sequence[int] | None = None) -> Record:
        """Like `read`, by position in `ids()` and with that very row's mask."""
        sample = self.plan.sample_at(self.kept_positions[row])
        return self._record(sample.id, sample.loss_mask, layers)

    def __iter__(self) -> Iterator[Record]:
        return (self.read_row(row) for row in range(len(self)))

    def dataset(self, layers: Sequence[int] | None = None) -> RunDataset:
        """A torch map-style dataset over the readable rows; survives DataLoader workers. Needs torch."""
        from wellhead.torch_view import RunDataset

        return RunDataset(self, layers)

    def findings(self) -> list[Finding]:
        """What a quick `verify` finds."""
        from wellhead.verify import verify

        return list(verify(self.paths.root).findings)

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> Mapping[str, str]:
        return {"root": str(self.paths.root)}

    def __setstate__(self, state: Mapping[str, str]) -> None:
        self.__init__(state["root"])  # type: ignore[misc]

    def _known(self, id: str) -> str:
        if id not in self._known_ids:
            raise UsageError(f"{self.paths.root} has no sample {id!r} in its current plan", "run.ids() lists them")
        return id

    @cached_property
    def _known_ids(self) -> frozenset[str]:
        return frozenset(self.plan.ids())

    def _record(self, id: str, loss_mask: NDArray[np.uint8], layers: Sequence[int] | None) -> Record:
        wanted = tuple(sorted(set(self.layers if layers is None else layers)))
        absent = set(wanted) - set(self.layers)
        if absent:
            raise UsageError(
                f"{self.paths.root} has no layer {', '.join(f'r_{k}' for k in sorted(absent))}",
                f"it has {', '.join(f'r_{k}' for k in self.layers)}; `wellhead extract --layers` adds layers",
            )
        names = state_names(wanted)
        try:
            states = self._reader.read(id, names)
        except KeyError:
            raise UsageError(
                f"sample {id} is not captured yet", "`wellhead extract` captures what is pending"
            ) from None
        stacked = np.stack([states[name] for name in names], axis=1).view(ml_dtypes.bfloat16)
        return Record(id, self._reader.read_input_ids(id), loss_mask, stacked, wanted, self.final)


def layers_in_force(begun_with: Sequence[int], index: StoreIndex) -> tuple[int, ...]:
    """The layers that every kept row must have: those the run was begun with and all that the ledgers name."""
    recorded = {layer_number(name) for name in index.tensors if name != FINAL}
    return tuple(sorted({*begun_with, *recorded}))


def open(root: str | os.PathLike[str]) -> Run:
    """Opens a run folder for reading. Raises UsageError if there is none, StoreDamaged if it cannot be read."""
    return Run(root)
