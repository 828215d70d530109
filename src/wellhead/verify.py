"""Proof that a run's bytes are what its ledgers say. Reads only; repairs nothing.

quick      run.json, the plan, every ledger line, every shard's size and head, what lies about
deep       every tensor: stored hash, decoding (which proves the values' own hash), ids, finite, zero, constant rows
recapture  a few samples computed again in other company, against the stored states and against their neighbours
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from wellhead.core import sample_id
from wellhead.errors import StoreDamaged, WellheadError
from wellhead.finding import HARMLESS, Finding, Kind
from wellhead.plan_file import file_xxh3
from wellhead.plan_read import Pointer
from wellhead.run import Run
from wellhead.store.atomic import TEMP_PREFIX
from wellhead.store.head import MAX_HEAD_BYTES
from wellhead.store.index import ShardInfo
from wellhead.store.life import is_dead
from wellhead.store.records import shard_life
from wellhead.store.shard import read_head
from wellhead.store.writer import FINGERPRINT

Progress = Callable[[int, int], None]
"""Called with (done, total) stored bytes."""


@dataclass(slots=True)
class Report:
    """`checked` counts what was looked at; `layers` has a row a tensor after `recapture`."""

    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(finding.kind in HARMLESS for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        found = [finding.to_json() for finding in self.findings]
        return {"ok": self.ok, "checked": self.checked, "findings": found, "layers": self.layers}


def verify(root: Path, deep: bool = False, recapture: int = 0, progress: Progress | None = None) -> Report:
    """Checks a run. Raises UsageError where there is no run; whatever else is wrong becomes a finding.

    Safe on a run that is being written: what a living process has open is left out."""
    report = Report()
    try:
        run = Run(root)
    except StoreDamaged as error:
        report.findings.append(Finding("corrupt", error.message))
        return report
    with run:
        report.findings += [*_ledgers(run), *_plan(run, deep), *_shards(run), *_strangers(run)]
        report.checked = {
            "ledgers": len(run.index.ledgers),
            "shards": len(run.index.shards),
            "samples": run.index.samples,
        }
        if deep:
            from wellhead.verify_states import DeepCheck

            check = DeepCheck(run)
            report.findings += check.findings(progress or _ignore)
            report.checked |= check.checked
        if recapture:
            from wellhead.recapture import verify_recapture

            findings, report.layers = verify_recapture(run, recapture)
            report.findings += findings
            report.checked["recaptured"] = min(recapture, len(run))
    return report


def _ledgers(run: Run) -> Iterator[Finding]:
    """Lines that do not prove themselves. A living process may be in the middle of its last one."""
    for problem in run.index.problems:
        if problem.kind == "torn_tail" and not _is_over(run, problem.life):
            continue
        kind: Kind = "foreign" if problem.kind == "foreign" else "corrupt"
        ledger = run.paths.writer(problem.life).ledger
        yield Finding(kind, f"{ledger} at byte {problem.offset}: {problem.kind.replace('_', ' ')}: {problem.detail}")


def _plan(run: Run, deep: bool) -> Iterator[Finding]:
    """The plan's file has the hash that was recorded; with `deep` its sample ids are the hashes of their token ids."""
    try:
        pointer = Pointer.read(run.paths)
        if pointer is None or file_xxh3(pointer.path) != pointer.xxh3:
            yield Finding("corrupt", f"{run.plan.path} is not the file that {run.paths.current_plan} recorded")
            return
        ids = run.plan.ids()
        for position, id in enumerate(ids if deep else ()):
            sample = run.plan.sample_at(position)
            if sample_id(sample.input_ids.tobytes()) != id or len(sample.loss_mask) != sample.tokens:
                yield Finding("corrupt", f"{run.plan.path}: its row {position} is not what its id says", id=id)
    except (WellheadError, OSError, ValueError) as error:
        yield Finding("corrupt", f"{run.plan.path}: {error}")


def _shards(run: Run) -> Iterator[Finding]:
    for shard in run.index.shards:
        path = run.paths.states / shard.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            detail = f"recorded with {shard.samples} samples, not there; extract captures them again"
            yield Finding("missing", detail, shard.name)
            continue
        except OSError as error:
            yield Finding("missing", f"cannot be read: {error}", shard.name)
            continue
        if size != shard.size:
            yield Finding("corrupt", f"{size} bytes, {shard.size} recorded", shard.name)
            continue
        with path.open("rb") as file:
            head = file.read(min(shard.head_size, MAX_HEAD_BYTES))
        if xxhash.xxh3_64_intdigest(head) != shard.head_xxh3:
            yield Finding("corrupt", "the header is not the one that was recorded", shard.name)
            continue
        yield from _head(path, shard, run.spec.fingerprint)


def _head(path: Path, shard: ShardInfo, fingerprint: str) -> Iterator[Finding]:
    """The header's own account, for readers that know no ledger."""
    try:
        head = read_head(path)
    except StoreDamaged as error:
        yield Finding("corrupt", error.message, shard.name)
        return
    its_own = head.metadata.get(FINGERPRINT)
    if its_own != fingerprint:
        yield Finding("foreign", f"its spec is {its_own}, the run's {fingerprint}", shard.name)
    if len(head.members) != shard.samples:
        yield Finding("corrupt", f"{len(head.members)} samples in its header, {shard.samples} recorded", shard.name)


def _strangers(run: Run) -> Iterator[Finding]:
    """Files in states/ that no ledger vouches for."""
    recorded = {shard.name for shard in run.index.shards}
    for path in sorted(run.paths.states.iterdir()) if run.paths.states.is_dir() else []:
        name = path.name
        if name in recorded:
            continue
        life = shard_life(name)
        if name in run.index.removed:
            yield Finding("stale", f"{run.index.removed[name].kind}: its samples do not count; it may go", name)
        elif name.startswith(TEMP_PREFIX):
            if all(_is_over(run, life) for life in run.index.ledgers if life in name):
                yield Finding("orphan", "the temp file of a process that is gone; the next extract sweeps it", name)
        elif life is None:
            yield Finding("foreign", "no file of this run", name)
        elif _is_over(run, life):
            detail = "no ledger names it; an extract later than 5 minutes after it was written adopts or removes it"
            yield Finding("orphan", detail, name)


def _is_over(run: Run, life_id: str) -> bool:
    found = run.index.ledgers.get(life_id)
    own = run.paths.writer(life_id)
    return found is None or found.life is None or is_dead(found.life, own.status, own.ledger)


def _ignore(_done: int, _total: int) -> None:
    return None
