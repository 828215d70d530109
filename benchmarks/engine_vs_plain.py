#!/usr/bin/env python3
"""The embedded engine against the loop that everybody writes, and against its own prefill, alternating in one run.

    plain      the whole model, `output_hidden_states=True`, one `torch.save` a sample; the same batches, same dtype
    engine     `TransformersEngine.capture` of the default layers and the final state, nothing written
    prefill    the engine's own forward pass with nothing captured: the speed that it could reach at best
    extract    `wellhead extract` itself once its engine is loaded: checked, encoded, durable, recorded

They run in turn over the same batches, so that a busy machine slows all of them alike; figures are the median of
the rounds with the range, in wall clock and in CPU seconds (the steadier of the two), and ratios are taken per round.
`METHODS` is a table: another way to run the same batches (a whole `extract`, say) is one more entry.

    python benchmarks/engine_vs_plain.py                       # the demo's model and conversations
    python benchmarks/engine_vs_plain.py --rows 40 --rounds 3 --dtype float32
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from wellhead.batching import batches
from wellhead.core import FINAL, PlanItem, Sample, default_layers, layer_name
from wellhead.engines.transformers import TransformersEngine
from wellhead.extract import capture_all
from wellhead.identity import model_shape, resolve_model
from wellhead.preflight import make_sample
from wellhead.prepare import Observer, Request, prepared, write_manifest
from wellhead.reference import load_model, pad_right
from wellhead.session import session

DATA = Path(__file__).parent.parent / "demo" / "conversations.jsonl"


class Clock:
    """Wall and CPU seconds of the innermost `with`: a method may leave its own preparation out."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self._begun: list[tuple[float, float]] = []
        self._has_inner = False

    def __enter__(self) -> None:
        self._has_inner = False
        self._begun.append((time.perf_counter(), time.process_time()))

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._begun.pop()
        if not self._has_inner:
            self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu
        self._has_inner = bool(self._begun)


@dataclass(frozen=True)
class Setting:
    model_dir: Path
    dtype: Any
    layers: tuple[int, ...]
    units: Sequence[Sequence[Sample]]
    rows: int
    scratch: Path
    clock: Clock


def plain(setting: Setting) -> Callable[[], None]:
    """What other tools do, batched as ours, padding cut off before the save."""
    model = load_model(setting.model_dir, setting.dtype, torch.device("cpu"))

    def run() -> None:
        for unit in setting.units:
            batch = pad_right([s.input_ids for s in unit], 0)
            with torch.inference_mode():
                hidden = model(input_ids=batch, output_hidden_states=True, use_cache=False).hidden_states
            for row, sample in enumerate(unit):
                kept = {
                    layer_name(k): hidden[k][row, : sample.tokens].to(torch.bfloat16).clone() for k in setting.layers
                }
                kept[FINAL] = hidden[-1][row, : sample.tokens].to(torch.bfloat16).clone()
                torch.save(
                    {"input_ids": batch[row, : sample.tokens].clone(), **kept}, setting.scratch / f"{sample.id}.pt"
                )

    return run


def engine(setting: Setting) -> Callable[[], None]:
    loaded = TransformersEngine(setting.model_dir, setting.layers, dtype=setting.dtype)
    tensors = (*(layer_name(k) for k in setting.layers), FINAL)

    async def capture() -> None:
        for unit in setting.units:
            async for outcome in loaded.capture(unit, tensors):
                loaded.release(outcome)  # type: ignore[arg-type]

    return lambda: asyncio.run(capture())


def prefill(setting: Setting) -> Callable[[], None]:
    body = load_model(setting.model_dir, setting.dtype, torch.device("cpu")).base_model

    def run() -> None:
        for unit in setting.units:
            with torch.inference_mode():
                body(input_ids=pad_right([s.input_ids for s in unit], 0), use_cache=False)

    return run


def extract(setting: Setting) -> Callable[[], None]:
    loaded = TransformersEngine(setting.model_dir, setting.layers, dtype=setting.dtype)
    observer = Observer(_ignore, _ignore, lambda: nullcontext(_ignore), lambda: False)
    data = setting.scratch / "rows.jsonl"
    data.write_text("".join(DATA.read_text(encoding="utf-8").splitlines(keepends=True)[: setting.rows]))
    numbers = itertools.count()

    def run() -> None:
        request = Request(data, str(setting.model_dir), setting.scratch / f"run-{next(numbers)}", dtype=setting.dtype)
        with prepared(request, observer) as run, session(run, observer) as opened:
            write_manifest(run, loaded)
            opened.begin(loaded)
            with setting.clock:
                asyncio.run(capture_all(opened, loaded, observer.stop_asked))

    return run


def _ignore(_: object) -> None:
    return None


METHODS: dict[str, Callable[[Setting], Callable[[], None]]] = {
    "plain": plain,
    "engine": engine,
    "prefill": prefill,
    "extract": extract,
}


def samples(model_dir: Path, rows: int) -> list[Sample]:
    """The first distinct `rows` of the demo's conversations, tokenised."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(model_dir))
    found: dict[str, Sample] = {}
    for line in DATA.read_text(encoding="utf-8").splitlines():
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True, return_dict=False)
        sample = make_sample(ids)
        found.setdefault(sample.id, sample)
        if len(found) == rows:
            break
    return list(found.values())


def measure(setting: Setting, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each method in each round, after one round that only warms up."""
    runs = {name: make(setting) for name, make in METHODS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            with setting.clock:
                run()
            if turn:
                times[name].append((setting.clock.wall, setting.clock.cpu))
    return times


def report(times: dict[str, list[tuple[float, float]]], tokens: int) -> None:
    for name, rounds in times.items():
        speeds = [tokens / wall for wall, _ in rounds]
        print(f"{name:8} {statistics.median(speeds):7.0f} tok/s  ({min(speeds):.0f} to {max(speeds):.0f})")
    for over, under in (("engine", "plain"), ("engine", "prefill"), ("extract", "prefill")):
        for at, clock in enumerate(("wall", "CPU")):
            ratios = [b[at] / a[at] for a, b in zip(times[over], times[under], strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"{over} ÷ {under}, {clock}: {statistics.median(ratios):.2f}  ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    asked = parser.parse_args()
    model_dir = resolve_model(asked.model)
    found = samples(model_dir, asked.rows)
    by_id = {sample.id: sample for sample in found}
    items = [PlanItem(sample.id, sample.tokens, 0) for sample in found]
    units = [[by_id[item.id] for item in unit] for unit in batches(items, 2048, 16)]
    tokens = sum(sample.tokens for sample in found)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, {asked.dtype}")  # fmt: skip
    print(f"{len(found)} samples, {tokens} tokens, {len(units)} batches, {asked.rounds} rounds")
    with tempfile.TemporaryDirectory(prefix="wellhead-bench-") as scratch:
        layers = default_layers(model_shape(model_dir).blocks)
        setting = Setting(model_dir, asked.dtype, layers, units, asked.rows, Path(scratch), Clock())
        report(measure(setting, asked.rounds), tokens)


if __name__ == "__main__":
    main()
