"""`verify --recapture N`: N samples computed again, alone and by an independent path, against what is stored.

The path is the whole model with `output_hidden_states=True` (`reference.py`), which shares nothing with the engine but
the weights; another batch composition comes with it. Every stored tensor must be within bf16 noise of the fresh one,
row by row, and its nearest neighbour must not be: a layer off by one, another sample's rows, or a state before the norm
for the one after it cannot pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from wellhead.compare import compare, mean_error, row_errors
from wellhead.core import FINAL, layer_name, layer_number, state_names
from wellhead.engines.registry import identity
from wellhead.errors import PreflightRefused
from wellhead.finding import Finding
from wellhead.run import Run
from wellhead.store.reader import StateReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wellhead.core import Bits

ROW_BOUND = 0.5
"""No single row may be farther off. Unrelated rows differ by about 1.4, noise stays two orders of magnitude below."""


class Independent(Protocol):
    """Computes states of one sample, alone."""

    def states(self, input_ids: NDArray[np.int32], tensors: Sequence[str]) -> dict[str, Bits]:
        """`r<k>` for k up to the number of blocks (before the norm there), and `final` as the run has it."""

    def normed(self, bits: Bits) -> Bits | None:
        """What the final norm makes of a state; None where there is no norm."""


def verify_recapture(run: Run, count: int) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Findings, and a row a tensor: name, own_error, neighbour, neighbour_error (means over samples and rows).

    Raises PreflightRefused if the model is not there any more, or is not the one that the run was captured with."""
    independent = _independent(run)
    names = state_names(run.layers)
    reader = StateReader(run.paths.root, run.index)
    errors: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in names}
    findings = []
    for id in spread(run, count):
        ids, stored = reader.read_input_ids(id), reader.read(id, names)
        fresh = independent.states(ids, _with_neighbours(names, run.spec.blocks))
        for name in names:
            near = _neighbours(name, fresh, run, independent)
            found = compare(stored[name], fresh[name], list(near.values()))
            rows = row_errors(stored[name], fresh[name])
            errors[name].append((found.own, {label: mean_error(stored[name], b) for label, b in near.items()}))
            if not found.same:
                detail = f"{name} is {found.own:.3g} from a fresh capture, {found.neighbour:.3g} from its neighbour"
                findings.append(Finding("corrupt", detail, id=id))
            elif rows.max() > ROW_BOUND:
                far = int(rows.argmax())
                findings.append(
                    Finding("corrupt", f"{name}: row {far} differs from a fresh capture by {rows[far]:.3g}", id=id)
                )
    reader.close()
    return findings, [_summary(name, errors[name]) for name in names if errors[name]]


def spread(run: Run, count: int) -> list[str]:
    """`count` of the readable samples, from the shortest to the longest, the same each time."""
    kept = set(run.ids())
    by_length = sorted((item.tokens, item.id) for item in run.plan.items() if item.id in kept)
    if not by_length:
        return []
    places = np.linspace(0, len(by_length) - 1, min(count, len(by_length))).round().astype(int)
    return [by_length[place][1] for place in dict.fromkeys(places.tolist())]


def _with_neighbours(names: Sequence[str], blocks: int) -> list[str]:
    layers = {layer_number(name) for name in names if name != FINAL}
    wanted = {k for layer in layers for k in (layer - 1, layer, layer + 1) if k >= 0} | {blocks - 1, blocks}
    return [*(layer_name(k) for k in sorted(wanted)), FINAL]


def _neighbours(name: str, fresh: dict[str, Bits], run: Run, independent: Independent) -> dict[str, Bits]:
    """The states that this one would be if it were off by one block, or on the wrong side of the norm."""
    blocks = run.spec.blocks
    if name != FINAL:
        k = layer_number(name)
        return {f"r{j}": fresh[layer_name(j)] for j in (k - 1, k + 1) if j >= 0}
    before = fresh[layer_name(blocks - 1)]
    if run.final == "pre_norm":
        return {f"r{blocks - 1}": before}
    near = {f"r{blocks}": fresh[layer_name(blocks)]}
    normed = independent.normed(before)
    return near if normed is None else {f"norm(r{blocks - 1})": normed, **near}


def _summary(name: str, errors: list[tuple[float, dict[str, float]]]) -> dict[str, Any]:
    labels = errors[0][1]
    means = {label: float(np.mean([near[label] for _, near in errors])) for label in labels}
    nearest = min(means, key=lambda label: means[label])
    return {
        "name": name,
        "own_error": float(np.mean([own for own, _ in errors])),
        "neighbour": nearest,
        "neighbour_error": means[nearest],
        "samples": len(errors),
    }


def _independent(run: Run) -> Independent:
    model_dir = Path(run.model_path)
    now = identity(run.manifest.engine, model_dir)
    if (now.config_hash, now.weights_hash) != (run.spec.model.config_hash, run.spec.model.weights_hash):
        raise PreflightRefused(
            f"the model in {model_dir} is not the one that {run.paths.root} was captured with",
            "put the original checkpoint back to that place",
        )
    return _StubAgain(run) if run.manifest.engine == "stub" else _WholeModel(run, model_dir)


class _WholeModel:
    """Transformers' own hidden states."""

    def __init__(self, run: Run, model_dir: Path) -> None:
        from wellhead.reference import Reference

        self._model = Reference(model_dir, run.spec.compute_dtype)
        self._final = run.final

    def states(self, input_ids: NDArray[np.int32], tensors: Sequence[str]) -> dict[str, Bits]:
        return self._model.states(input_ids, tensors, self._final)

    def normed(self, bits: Bits) -> Bits | None:
        return self._model.normed(bits)


class _StubAgain:
    """The stub's states, from the function that defines them."""

    def __init__(self, run: Run) -> None:
        self._spec = run.spec

    def states(self, input_ids: NDArray[np.int32], tensors: Sequence[str]) -> dict[str, Bits]:
        from wellhead.engines.stub import stub_state

        width, blocks = self._spec.hidden_size, self._spec.blocks
        return {
            name: stub_state(input_ids, "final" if name == FINAL else layer_number(name), width, blocks)
            for name in tensors
        }

    def normed(self, bits: Bits) -> Bits | None:
        return None
