"""Plans: what a file of conversations becomes under one tokenizer, template and mask policy, before any GPU work.

A plan is a versioned file (`plan/<n>.parquet`); `plan/current` names the one in force. Equal inputs under an equal
overlay are never tokenised twice, and states never depend on anything but the token ids that a plan names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellhead.dataset.overlay import ControlTokens, MaskPolicy, Overlay
from wellhead.errors import DiskFull, PreflightRefused, RunHeld, StoreDamaged, UsageError, is_no_room
from wellhead.identity import model_shape
from wellhead.paths import RunPaths
from wellhead.plan_file import PlanHead, SourceFile, file_xxh3
from wellhead.plan_read import Plan, PlanRow, Pointer
from wellhead.store.atomic import POSIX, Disk, write_atomic

if TYPE_CHECKING:
    from wellhead.plan_build import PlanProgress

__all__ = ["Plan", "PlanOptions", "PlanRow", "make_plan"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is asked for. None means: as the model says (`max_length`), or as the run's plan before, else now
    (`date`, local time in ISO format). `strict` refuses the first rejected row."""

    mask: MaskPolicy = "all-assistant"
    max_length: int | None = None
    date: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    control_tokens: ControlTokens = "reject"
    strict: bool = False


def make_plan(
    run_dir: Path,
    data: Path,
    model_dir: Path,
    options: PlanOptions | None = None,
    progress: Callable[[PlanProgress], None] | None = None,
    disk: Disk = POSIX,
) -> Plan:
    """The plan of `data` for `model_dir`, in force in `run_dir` and durable on return.

    A plan of this run whose source file (size, mtime, inode) and overlay are the same is put into force as it is,
    without reading the data. Raises UsageError, PreflightRefused (tokenizer, template), RowRejected (`strict`),
    RunHeld (another process planned meanwhile), StoreDamaged (an earlier plan is), DiskFull.
    """
    options = options or PlanOptions()
    paths = RunPaths(run_dir)
    earlier, in_force = _plans(paths), Plan.find(run_dir)
    # A plan that a crash left without the pointer still says what the date was.
    before = in_force or (earlier[-1] if earlier else None)
    source, overlay = _source(data), _overlay(model_dir, options, before)
    plan = next((p for p in reversed(earlier) if p.source.unchanged(source) and p.overlay == overlay), None)
    if plan is None:
        from wellhead import plan_build

        number = max(_numbers(paths), default=0) + 1
        head = PlanHead(number, overlay, source, model_dir.resolve().name)
        asked = plan_build.Source(data, model_dir, earlier, options.strict)
        with _disk_errors(paths.plans):
            disk.make_dir(paths.plans)
            plan_build.build(asked, head, paths.plan(number), disk, progress)
        plan = Plan.load(paths.plan(number))
    elif options.strict and plan.rejected:
        from wellhead.plan_build import rejection

        raise rejection(data, *next(plan.rejects()))
    if in_force is None or in_force.number != plan.number:
        with _disk_errors(paths.plans):
            write_atomic(paths.current_plan, Pointer(plan.path, file_xxh3(plan.path)).to_bytes(), disk)
    return plan


def _plans(paths: RunPaths) -> list[Plan]:
    """Every plan of the run that can be read, by number: also those that are not in force any more. A damaged one in
    force is refused elsewhere; another one is only not reused."""
    plans = []
    for number in _numbers(paths):
        with contextlib.suppress(StoreDamaged):
            plans.append(Plan.load(paths.plan(number)))
    return plans


def _numbers(paths: RunPaths) -> list[int]:
    names = (file.stem for file in paths.plans.glob("*.parquet"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _source(data: Path) -> SourceFile:
    try:
        return SourceFile.of(data)
    except OSError as error:
        raise UsageError(f"cannot read the data file {data}: {error.strerror}", "name a JSONL file") from error


def _overlay(model_dir: Path, options: PlanOptions, before: Plan | None) -> Overlay:
    from wellhead.dataset.template import find_templates, template_hash
    from wellhead.dataset.tokenizer import tokenizer_hash

    date = options.date or (before.overlay.date if before else datetime.now().isoformat(timespec="seconds"))
    try:
        datetime.fromisoformat(date)
    except ValueError as error:
        raise UsageError(f"{date!r} is no date", "write it as 2026-12-01 or 2026-12-01T09:30:00") from error
    return Overlay(
        mask=options.mask,
        max_length=_max_length(model_dir, options.max_length),
        date=date,
        template_hash=template_hash(find_templates(model_dir)),
        tokenizer_hash=tokenizer_hash(model_dir),
        template_args=dict(options.template_args),
        control_tokens=options.control_tokens,
    )


def _max_length(model_dir: Path, asked: int | None) -> int:
    limit = model_shape(model_dir).max_positions
    if asked is not None and asked < 1:
        raise UsageError(f"a max length of {asked} tokens leaves nothing", "give a positive number")
    if limit is None:
        if asked is None:
            raise PreflightRefused(
                f"{model_dir / 'config.json'} does not say how many positions the model has", "give --max-length"
            )
        return asked
    if asked is not None and asked > limit:
        raise UsageError(
            f"a max length of {asked} tokens is more than the model's {limit} positions", f"give {limit} or less"
        )
    return asked or limit


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Errors of the plan's own files, in the words of the error table."""
    try:
        yield
    except FileExistsError as error:
        raise RunHeld(f"another process is planning in {folder}", "run the command again when it is done") from error
    except OSError as error:
        if is_no_room(error):
            raise DiskFull(f"no room for the plan in {folder}", "make room and run the command again") from error
        raise UsageError(
            f"cannot plan into {folder}: {error}", "can the folder be written and the data be read?"
        ) from error
