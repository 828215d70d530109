"""`wellhead plan`: what a data set will take, to the byte, before any GPU work."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wellhead.cli._options import (
    CodecName,
    Control,
    Date,
    Layers,
    Mask,
    MaxLength,
    Reserve,
    Strict,
    TemplateArg,
    size,
    template_args,
)
from wellhead.cli._shared import output
from wellhead.errors import DoesNotFit, OtherSpec, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wellhead.cli._shared import Output
    from wellhead.disk import Room
    from wellhead.plan import Plan, PlanOptions
    from wellhead.predict import Prediction

_HINT = "free space, lower --reserve or --max-length, or plan fewer rows"


def plan(
    context: typer.Context,
    data: Annotated[Path | None, typer.Argument(help="JSONL file of conversations.")] = None,
    model: Annotated[str | None, typer.Option("--model", "--model-path", help="Model folder, or smollm2-demo.")] = None,
    layers: Layers = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to plan for and to leave the plan in; none: leave nothing.")
    ] = None,
    reserve: Reserve = "0",
    free: Annotated[str | None, typer.Option(help="Free space to assume, such as 2.7TB. Default: measured.")] = None,
    mask: Mask = "all-assistant",
    max_length: MaxLength = None,
    template_arg: TemplateArg = None,
    date: Date = None,
    control_tokens: Control = "reject",
    codec: CodecName = "planes-zstd",
    strict: Strict = False,
    tokens_per_s: Annotated[
        str | None, typer.Option(help="A measured speed, to forecast the time: 800, or a range 700-900.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="Token lengths instead of DATA: an integer a line, or a JSON list.")
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Of the model, with --lengths.", min=1, max=1 << 20)] = None,
    blocks: Annotated[int | None, typer.Option(help="Blocks of the model, with --lengths.", min=1, max=1 << 20)] = None,
    observed: Annotated[
        str | None, typer.Option(help="SIZE/SAMPLES seen on disk, such as 13GB/121: what is that worth?")
    ] = None,
) -> None:
    """Tokens, bytes and files of a run, and whether they fit, before any GPU work."""
    from wellhead.layers import final_words, layer_words
    from wellhead.plan import PlanOptions

    options = PlanOptions(
        mask=mask,
        max_length=max_length,
        date=date,
        template_args=template_args(template_arg),
        control_tokens=control_tokens,
        strict=strict,
    )
    asked = _Asked(layers, out, codec, _room(out, free, reserve), tokens_per_s, observed)
    say = output(context)
    if lengths is not None:
        if data is not None:
            raise UsageError("DATA and --lengths are two sources", "give one of them")
        found = _from_lengths(lengths, _shape(model, hidden_size, blocks), max_length, asked)
    elif data is None or model is None:
        raise UsageError("plan needs DATA and --model", "or --lengths FILE --hidden-size H --blocks N")
    else:
        found = _from_data(data, model, options, asked, say)
    words = [*layer_words(found.layers, found.blocks), final_words(found.blocks, "post_norm")]
    _show(say, found, asked, words)
    if not found.prediction.fits:
        raise DoesNotFit(found.prediction.refusal, _HINT)


@dataclass(frozen=True, slots=True)
class _Asked:
    layers: str | None
    out: Path | None
    codec: str
    room: Room
    tokens_per_s: str | None
    observed: str | None


@dataclass(frozen=True, slots=True)
class _Found:
    title: str
    prediction: Prediction
    tokens: NDArray[np.int64]
    layers: tuple[int, ...]
    blocks: int
    about: list[tuple[str, str | list[str]]]
    extra: dict[str, Any]
    preview: Any = None


def _from_data(data: Path, model: str, options: PlanOptions, asked: _Asked, say: Output) -> _Found:
    from wellhead.cli._plan_view import contents, previews, progress
    from wellhead.identity import model_shape, resolve_model
    from wellhead.layers import parse_layers
    from wellhead.plan import make_plan
    from wellhead.predict import predict

    model_dir = resolve_model(model)
    shape = model_shape(model_dir)
    with _run_folder(asked.out, model_dir) as (run_dir, begun_with):
        layers = begun_with if begun_with and asked.layers is None else parse_layers(asked.layers, shape.blocks)
        with progress(say.stderr, say.quiet) as tick:
            made = make_plan(run_dir, data, model_dir, options, tick)
        pending = _pending(made, run_dir, layers) if begun_with else None
        prediction = predict(made, layers, shape.hidden_size, asked.room, asked.codec, pending)
        return _Found(
            title=f"{data} for {model}" + (f": plan {made.number} of {asked.out}" if asked.out else ""),
            prediction=prediction,
            tokens=made.column("tokens")[made.kept],
            layers=layers,
            blocks=shape.blocks,
            about=contents(made, prediction),
            extra={"rows": made.rows, "plan": made.number, "max_length": made.overlay.max_length,
                   "date": made.overlay.date,
                   "truncated": int((made.column("full_tokens") > made.column("tokens")).sum())},
            preview=None
            if say.json and say.quiet
            else previews(made, model_dir, say.stderr if say.json else say.stdout),
        )  # fmt: skip


@contextmanager
def _run_folder(out: Path | None, model_dir: Path) -> Iterator[tuple[Path, tuple[int, ...] | None]]:
    """The folder for the plan, and the layers that a run there was begun with. Held against other processes."""
    from wellhead.identity import model_identity
    from wellhead.manifest import Manifest
    from wellhead.paths import RunPaths
    from wellhead.store.life import Life
    from wellhead.store.lock import RunLock

    with ExitStack() as stack:
        if out is None:
            yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wellhead-plan-"))), None
            return
        begun_with = None
        if RunPaths(out).manifest.exists():
            manifest = Manifest.read(RunPaths(out))
            if manifest.spec.model.config_hash != model_identity(model_dir).config_hash:
                raise OtherSpec(f"{out} is a run of {manifest.spec.model.name}, another model", "name another --out")
            begun_with = manifest.layers
        stack.enter_context(RunLock.acquire(out, Life.this_process()).beating())
        yield out, begun_with


def _pending(made: Plan, run_dir: Path, layers: tuple[int, ...]) -> Mapping[str, Sequence[str]]:
    from wellhead.core import state_names
    from wellhead.store.index import StoreIndex

    return StoreIndex.load(run_dir).missing([item.id for item in made.items()], state_names(layers))


def _from_lengths(file: Path, shape: tuple[int, int], max_length: int | None, asked: _Asked) -> _Found:
    import numpy as np

    from wellhead.layers import parse_layers
    from wellhead.predict import Workload, predict

    blocks, hidden_size = shape
    layers = parse_layers(asked.layers, blocks)
    tokens = np.minimum(_read_lengths(file), max_length or np.iinfo(np.int64).max)
    prediction = predict(Workload.of_lengths(tokens), layers, hidden_size, asked.room, asked.codec)
    mean = f"{tokens.mean():,.0f}" if len(tokens) else "none"
    about = [("tokens", f"{prediction.tokens:,} in {len(tokens):,} samples; mean {mean}, longest "
                        f"{prediction.longest_tokens:,}")]  # fmt: skip
    return _Found(str(file), prediction, tokens, layers, blocks, [*about], {})


def _show(say: Output, found: _Found, asked: _Asked, words: list[str]) -> None:
    from rich.console import Group
    from rich.text import Text

    from wellhead.cli._plan_view import as_json, forecast, observation, table
    from wellhead.extrapolate import extrapolate, parse_observed

    prediction, extra = found.prediction, dict(found.extra)
    if asked.tokens_per_s is not None:
        prediction = replace(prediction, seconds=_seconds(asked.tokens_per_s, _tokens_left(prediction)))
    rows = [*found.about, *forecast(prediction, asked.codec, words)]
    if asked.observed is not None:
        judged = extrapolate(parse_observed(asked.observed), found.tokens, prediction.bytes_per_token)
        rows += observation(judged)
        extra["observed"] = judged.to_json()
    human = Text(f"{found.title}\n{table(rows)}")
    say.result(as_json(prediction, words, extra), Group(human, found.preview) if found.preview else human)


def _shape(model: str | None, hidden_size: int | None, blocks: int | None) -> tuple[int, int]:
    """(blocks, hidden size) as given, else as the model's config says."""
    if model is not None:
        from wellhead.identity import model_shape, resolve_model

        shape = model_shape(resolve_model(model))
        return blocks or shape.blocks, hidden_size or shape.hidden_size
    if hidden_size is None or blocks is None:
        raise UsageError("--lengths needs the model's size", "give --hidden-size and --blocks, or --model")
    return blocks, hidden_size


def _read_lengths(file: Path) -> NDArray[np.int64]:
    import json

    import numpy as np

    try:
        text = file.read_text("utf-8")
        numbers = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read lengths from {file}: {error}", "an integer a line, or one JSON list") from error
    if not all(type(number) is int and 0 < number < 1 << 40 for number in numbers) or not numbers:
        raise UsageError(f"{file} holds something that is no token length", "every length is a positive integer")
    return np.array(numbers, np.int64)


def _room(out: Path | None, free: str | None, reserve: str) -> Room:
    from wellhead.disk import Room, room

    reserve_bytes = size("--reserve", reserve)
    if free is not None:
        return Room(size("--free", free), None, reserve_bytes)
    return room(out or Path.cwd(), reserve_bytes)


def _seconds(text: str, tokens: int) -> tuple[float, float]:
    try:
        rates = [float(part) for part in text.split("-")]
        if not 1 <= len(rates) <= 2 or not all(0 < rate < float("inf") for rate in rates):
            raise ValueError(text)
    except ValueError as error:
        raise UsageError(f"--tokens-per-s {text!r} is no speed", "write it like 800 or 700-900") from error
    return tokens / max(rates), tokens / min(rates)


def _tokens_left(prediction: Prediction) -> int:
    return round(prediction.tokens * prediction.needed_bytes / max(prediction.stored_bytes, 1))
