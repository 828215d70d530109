"""Engines by name. Each is imported only when it is asked for: the core knows no engine library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from wellhead.core import Dtype, FinalNorm, ModelIdentity
from wellhead.engines.base import Engine, EngineName
from wellhead.errors import PreflightRefused, UsageError
from wellhead.identity import model_identity, model_shape

NAMES = get_args(EngineName)


def create(
    name: str,
    model_dir: Path,
    layers: Sequence[int],
    *,
    dtype: Dtype = "bfloat16",
    final: FinalNorm = "post_norm",
    fault: str | None = None,
) -> Engine:
    """Makes and loads an engine; takes as long as loading the model does.

    `fault` is a script of `wellhead.testing.faults`, for the stub only. Raises UsageError for an unknown name or
    script, PreflightRefused if the engine cannot capture `layers` of this model or a library is missing.
    """
    if fault and name != "stub":
        raise UsageError(f"--fault is for the stub engine, not for {name}", "add --engine stub")
    if name == "stub":
        return _stub(model_dir, layers, final, fault)
    if name == "transformers":
        return _transformers(model_dir, layers, dtype, final)
    raise UsageError(f"no engine is called {name!r}", f"engines: {', '.join(NAMES)}")


def identity(name: str, model_dir: Path) -> ModelIdentity:
    """Which weights an engine computes with. The stub has none: its states depend on its own version alone."""
    found = model_identity(model_dir)
    if name != "stub":
        return found
    from wellhead.engines.stub import VERSION

    return replace(found, name=f"{found.name} (stub)", weights_hash=f"stub-{VERSION}")


def _stub(model_dir: Path, layers: Sequence[int], final: FinalNorm, fault: str | None) -> Engine:
    from wellhead.engines.stub import StubEngine
    from wellhead.testing.faults import FaultScript

    shape = model_shape(model_dir)
    return StubEngine(
        shape.blocks, shape.hidden_size, layers, faults=FaultScript.parse(fault or ""), info={"final": final}
    )


def _transformers(model_dir: Path, layers: Sequence[int], dtype: Dtype, final: FinalNorm) -> Engine:
    try:
        from wellhead.engines.transformers import TransformersEngine
    except ImportError as error:
        raise PreflightRefused(
            f"the transformers engine needs {error.name or 'torch'}, which is not installed",
            "pip install 'wellhead[transformers]'",
        ) from error
    return TransformersEngine(model_dir, layers, dtype=dtype, final=final)
