"""Everything before the first batch, in the order in which it can fail cheaply.

arguments → model identity → the run's own spec → lock → plan → what is left → does it fit → engine → preflight
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellhead import __version__
from wellhead.core import CaptureSpec, Codec, Dtype, FinalNorm, Provenance, raw_bytes, state_names
from wellhead.disk import room
from wellhead.engines.base import Engine, EngineName
from wellhead.engines.registry import create, identity
from wellhead.errors import DoesNotFit, OtherSpec, Stopped, UsageError
from wellhead.identity import ModelShape, model_shape, resolve_model
from wellhead.layers import final_words, layer_words, parse_layers
from wellhead.manifest import Manifest, require_same_spec
from wellhead.paths import RunPaths
from wellhead.plan import Plan, PlanOptions, make_plan
from wellhead.predict import STORED_RATIO, predict
from wellhead.run import layers_in_force
from wellhead.store.index import StoreIndex
from wellhead.store.life import Life
from wellhead.store.lock import Holder, RunLock
from wellhead.store.writer import StoreOptions
from wellhead.testing.faults import FaultScript
from wellhead.work import Work, pending_work

if TYPE_CHECKING:
    from wellhead.plan_build import PlanProgress


@dataclass(frozen=True, slots=True)
class Observer:
    """Who watches a run. `show` is called every 2 s from a thread of its own, the others from the caller's.

    `say` gets remarks for people, `planning` surrounds the reading of the data file and gives what its progress is told
    to, `show` gets the figures of status.json; once `stop_asked` answers true, the batch in hand is finished and
    committed."""

    say: Callable[[str], None]
    show: Callable[[dict[str, Any]], None]
    planning: Callable[[], AbstractContextManager[Callable[[PlanProgress], None]]]
    stop_asked: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Request:
    """What `extract` was asked for. Sizes in bytes."""

    data: Path
    model: str
    run_dir: Path
    layers: str | None = None
    engine: EngineName = "transformers"
    dtype: Dtype = "bfloat16"
    final: FinalNorm = "post_norm"
    plan: PlanOptions = field(default_factory=PlanOptions)
    codec: Codec = "planes-zstd"
    shard_bytes: int = 1 << 30
    shard_seconds: float | None = None
    reserve_bytes: int = 0
    disk_wait_s: float = 600.0
    max_failure_rate: float = 0.03
    retry_quarantined: bool = False
    mix_engines: bool = False
    fault: str | None = None

    def check(self) -> None:
        """Raises UsageError for values that no type can refuse."""
        if not 0 <= self.max_failure_rate <= 1:
            raise UsageError(f"--max-failure-rate {self.max_failure_rate} is no share", "a number from 0 to 1")
        if self.fault and self.engine != "stub":
            raise UsageError("--fault is for the stub engine", "add --engine stub, or leave --fault out")
        FaultScript.parse(self.fault or "")
        for name in ("shard_seconds", "disk_wait_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(
                    f"--{name.removesuffix('_s').replace('_', '-')} {value} is no time", "seconds, 0 or more"
                )

    @property
    def store_options(self) -> StoreOptions:
        return StoreOptions(codec=self.codec, shard_bytes=self.shard_bytes, shard_seconds=self.shard_seconds)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is held, planned and compared with its store; no engine is loaded yet."""

    request: Request
    paths: RunPaths
    life: Life
    model_dir: Path
    shape: ModelShape
    spec: CaptureSpec
    manifest: Manifest | None
    """None until the first capture of the run is about to begin."""
    plan: Plan
    layers: tuple[int, ...]
    index: StoreIndex
    """As found, before anything that dead processes left behind is settled."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return state_names(self.layers)

    @property
    def bytes_per_token(self) -> int:
        return raw_bytes(1, len(self.layers), self.shape.hidden_size)

    @property
    def layer_words(self) -> list[str]:
        """What every stored tensor is: "r_3 = after block 3 of 61"."""
        return [*layer_words(self.layers, self.shape.blocks), final_words(self.shape.blocks, self.spec.final)]

    @property
    def ratio(self) -> float:
        return STORED_RATIO[self.request.codec]

    def work(self, index: StoreIndex) -> Work:
        return pending_work(self.plan, index, self.tensors, self.request.retry_quarantined)


@contextmanager
def prepared(request: Request, observer: Observer) -> Iterator[Prepared]:
    """Holds the run while the block runs. Raises UsageError, OtherSpec, RunHeld, RowRejected or Stopped."""
    request.check()
    model_dir = resolve_model(request.model)
    shape = model_shape(model_dir)
    spec = CaptureSpec(
        model=identity(request.engine, model_dir),
        blocks=shape.blocks,
        hidden_size=shape.hidden_size,
        compute_dtype=request.dtype,
        final=request.final,
    )
    paths = RunPaths(request.run_dir)
    manifest = _manifest_of(paths, spec)
    asked = parse_layers(request.layers, shape.blocks) if request.layers or manifest is None else manifest.layers
    life = Life.this_process(after=_earlier_lives(paths))
    with RunLock.acquire(paths.root, life).beating():
        plan = _plan(request, paths, model_dir, observer)
        index = StoreIndex.load(paths.root, spec.fingerprint)
        layers = layers_in_force((*asked, *(manifest.layers if manifest else ())), index)
        made = Prepared(request, paths, life, model_dir, shape, spec, manifest, plan, layers, index)
        for words in made.layer_words:
            observer.say(words)
        if set(layers) - set(asked):
            observer.say("layers are only ever added to a run; a reader takes a subset with layers=")
        yield made


def require_room(prepared: Prepared, work: Work) -> None:
    """Raises DoesNotFit, before any model is loaded, if what is left to capture does not fit."""
    request = prepared.request
    prediction = predict(
        prepared.plan, prepared.layers, prepared.shape.hidden_size, room(prepared.paths.root, request.reserve_bytes),
        codec=request.codec, pending=work.lacking,
    )  # fmt: skip
    if not prediction.fits:
        raise DoesNotFit(prediction.refusal, "free space, lower --reserve or --max-length, or plan fewer rows")


def load_engine(
    prepared: Prepared, index: StoreIndex, say: Callable[[str], None], doing: Callable[[str], None]
) -> Engine:
    """Loads the model, proves it (preflight), and that it may go on with this run. PreflightRefused, OtherSpec."""
    request = prepared.request
    doing("loading the model")
    say(f"loading {prepared.spec.model.name} ({request.engine}, {request.dtype})")
    engine = create(
        request.engine, prepared.model_dir, prepared.layers,
        dtype=request.dtype, final=request.final, fault=request.fault,
    )  # fmt: skip
    info = engine.describe()
    for note in info.notes:
        say(f"note: {note} (nothing is captured yet: Ctrl-C now costs nothing)")
    if not request.mix_engines:
        _require_same_engine(info.provenance, index, prepared.paths.root)
    longest = max((item.tokens for item in prepared.plan.items()), default=0)
    if longest > info.max_tokens:
        raise UsageError(
            f"the longest row has {longest:,} tokens, the engine takes {info.max_tokens:,}",
            f"cut rows with --max-length {info.max_tokens}",
        )
    doing("proving the layers (preflight)")
    asyncio.run(engine.preflight())
    for name in prepared.tensors:
        say(f"{name} is taken at {info.capture_points[name]}")
    return engine


def write_manifest(prepared: Prepared, engine: Engine) -> None:
    """run.json, once in the life of a run: only when something is about to be captured with a proven engine."""
    if prepared.manifest is None:
        request = prepared.request
        Manifest(
            spec=prepared.spec,
            layers=prepared.layers,
            model_path=str(prepared.model_dir.resolve()),
            engine=engine.describe().provenance.engine,
            data=str(request.data.resolve()),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            version=__version__,
        ).write(prepared.paths)


def _manifest_of(paths: RunPaths, spec: CaptureSpec) -> Manifest | None:
    if not paths.manifest.exists():
        return None
    manifest = Manifest.read(paths)
    require_same_spec(manifest, spec, paths.root)
    return manifest


def _plan(request: Request, paths: RunPaths, model_dir: Path, observer: Observer) -> Plan:
    before = Plan.find(paths.root)
    try:
        with observer.planning() as progress:
            plan = make_plan(paths.root, request.data, model_dir, request.plan, progress)
    except KeyboardInterrupt:  # at once, in the middle of a row: nothing of a plan counts before it is whole
        raise Stopped("stopped while planning; nothing was captured", "run the same command to begin again") from None
    if not plan.rows:
        raise UsageError(f"{request.data} holds no row", "give a JSONL file with a conversation a line")
    rejected = sum(plan.rejected.values())
    if before is not None and before.number != plan.number:
        observer.say(f"plan {plan.number} takes the place of plan {before.number}: {_changes(before, plan)}")
    observer.say(
        f"plan {plan.number}: {plan.rows:,} rows, {rejected:,} rejected, {len(plan.items()):,} distinct samples"
    )
    return plan


def _earlier_lives(paths: RunPaths) -> list[str]:
    holder = Holder.read(paths.lock)
    known = [path.name for path in paths.writers.iterdir()] if paths.writers.is_dir() else []
    return known if holder is None else [*known, holder.life.id]


def _changes(before: Plan, now: Plan) -> str:
    """What a new plan changes, so that no row and no mask leaves a run in silence."""
    words = [f"{now.rows:,} rows instead of {before.rows:,}"] if now.rows != before.rows else []
    if now.source.path != before.source.path:
        words.append(f"from {now.source.path} instead of {before.source.path}")
    old, new = before.overlay.to_json(), now.overlay.to_json()
    words += [f"{key} {new[key]} instead of {old[key]}" for key in new if new[key] != old[key]]
    return "; ".join(words) or "the data file has changed"


def _require_same_engine(now: Provenance, index: StoreIndex, root: Path) -> None:
    others = index.engines() - {(now.engine, now.version)}
    if others:
        before = ", ".join(f"{engine} {version}" for engine, version in sorted(others))
        raise OtherSpec(
            f"{root} was captured with {before}; this is {now.engine} {now.version}",
            "use the same engine and version, or --mix-engines if equal within bf16 noise is enough",
        )
