"""Settles what dead lives left behind, before a new life begins.

Run at every start by the life that holds the run lock. Every step may be interrupted and is done again by the next
start. Nothing that was ever recorded is removed; lives that may be alive elsewhere are left alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from wellhead.core import Provenance
from wellhead.errors import StoreDamaged
from wellhead.paths import RunPaths
from wellhead.store.atomic import POSIX, TEMP_PREFIX, Disk
from wellhead.store.faults import disk_errors
from wellhead.store.head import SealedShard, read_head
from wellhead.store.index import StoreIndex, file_sizes
from wellhead.store.ledger import Adopt, Opened, Recover, Tombstone, parse, scan
from wellhead.store.life import HEARTBEAT_LIMIT_S, Life, is_dead, is_life_id
from wellhead.store.lock import Holder
from wellhead.store.records import shard_life
from wellhead.store.shard import damaged_tensors
from wellhead.store.writer import FINGERPRINT, PROVENANCE, TEMP_SUFFIX, StoreWriter

MISSING = "missing"
"""The reason of a tombstone for a file that is not there. If it comes back whole it is adopted."""


@dataclass(slots=True)
class RecoveryReport:
    """What was found and done. Lives by id, shards by name, `swept` temp files by name.

    `left`: orphan shards that were not touched: of another capture spec, of a life that may be alive, or recorded as
    lost and still there. `index` is what the run held before, and holds still unless a shard was adopted or
    tombstoned: then it is None, and the index must be loaded again.
    """

    recovered: list[str] = field(default_factory=list)
    living: list[str] = field(default_factory=list)
    adopted: list[str] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    tombstoned: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    index: StoreIndex | None = field(default=None, compare=False, repr=False)

    def __bool__(self) -> bool:
        """Whether anything was done."""
        return bool(self.recovered or self.adopted or self.discarded or self.tombstoned or self.swept)


def recover(run_dir: Path, writer: StoreWriter, disk: Disk = POSIX) -> RecoveryReport:
    """See the module. `writer` is the new life's; its ledger gets the records. Raises DiskFull, DiskFailed and what
    `StoreIndex.load` raises. What is adopted is durable and counts on return; load the index afterwards."""
    with disk_errors("recovering the run"):
        return _Recovery(run_dir, writer, disk).run()


class _Recovery:
    def __init__(self, run_dir: Path, writer: StoreWriter, disk: Disk) -> None:
        self._paths = RunPaths(run_dir)
        self._writer = writer
        self._disk = disk
        self._report = RecoveryReport()
        # Compared with times of other files: taken from the same clock.
        self._now = self._paths.writer(writer.life.id).ledger.stat().st_mtime

    def run(self) -> RecoveryReport:
        others = [path.name for path in sorted(self._paths.writers.iterdir()) if is_life_id(path.name)]
        # Death is proven before the ledgers are read: a life that dies in between could have recorded more.
        dead = {life_id for life_id in others if self._is_over(life_id)}
        index = StoreIndex.load(self._paths.root, self._writer.fingerprint)
        self._settle(index, dead)
        sizes = file_sizes(self._paths.states)
        self._bury_the_lost(index, sizes)
        self._take_in_orphans(index, sizes)
        self._sweep(dead)
        if not self._report.adopted and not self._report.tombstoned:
            self._report.index = index
        return self._report

    def _is_over(self, life_id: str, *signs: Path) -> bool:
        """Whether a life is dead; one that cannot be identified counts as dead 5 minutes after its last sign."""
        if life_id == self._writer.life.id:
            return False
        own = self._paths.writer(life_id)
        signs = (own.status, own.ledger, *signs)
        life = _life_of(own.ledger)
        if life is not None:
            return is_dead(life, *signs, now=self._now)
        ages = [self._now - path.stat().st_mtime for path in signs if path.exists()]
        return bool(ages) and min(ages) > HEARTBEAT_LIMIT_S

    def _settle(self, index: StoreIndex, dead: set[str]) -> None:
        for life_id, info in index.ledgers.items():
            if life_id in index.settled or life_id == self._writer.life.id:
                continue
            if life_id not in dead:
                self._report.living.append(life_id)
                continue
            # A killed process may have left its last line unsynced; what is said of it here must stay true.
            self._disk.sync_file(self._paths.writer(life_id).ledger)
            self._writer.record(Recover(life_id, info.valid_bytes, info.xxh3))
            self._report.recovered.append(life_id)

    def _bury_the_lost(self, index: StoreIndex, sizes: dict[str, int]) -> None:
        for shard in index.shards:
            size = sizes.get(shard.name)
            if size != shard.size:
                reason = MISSING if size is None else f"has {size} bytes, recorded with {shard.size}"
                self._writer.tombstone(shard.name, reason)
                self._report.tombstoned.append(shard.name)

    def _take_in_orphans(self, index: StoreIndex, sizes: dict[str, int]) -> None:
        recorded = {shard.name for shard in index.shards}
        orphans = [name for name in sorted(sizes.keys() - recorded) if shard_life(name) is not None]
        for name in orphans:
            removal = index.removed.get(name)
            lost = isinstance(removal, Tombstone) and removal.reason == MISSING
            path = self._paths.states / name
            if (removal is not None and not lost) or not self._is_over(shard_life(name) or "", path):
                self._report.left.append(name)
                continue
            self._judge_orphan(path, recorded_before=lost)

    def _judge_orphan(self, path: Path, recorded_before: bool) -> None:
        try:
            sealed = read_head(path)
            if sealed.metadata.get(FINGERPRINT) != self._writer.fingerprint:
                self._report.left.append(path.name)
                return
            record = Adopt.of(sealed, _provenance(path, sealed))
            damaged = damaged_tensors(path, sealed)
            if damaged:
                raise StoreDamaged(f"{path}: {damaged[0]} does not have its hash")
        except StoreDamaged:
            if recorded_before:
                self._report.left.append(path.name)
            else:
                self._disk.remove(path)
                self._report.discarded.append(path.name)
            return
        # The dead life may have been killed between the rename and the sync of the directory.
        self._disk.sync_file(path)
        self._disk.sync_dir(self._paths.states)
        self._writer.record(record)
        self._report.adopted.append(path.name)

    def _sweep(self, dead: set[str]) -> None:
        for path in self._paths.states.iterdir():
            life_id = shard_life(path.name.removeprefix(TEMP_PREFIX).removesuffix(TEMP_SUFFIX))
            if _is_temp(path) and life_id is not None and self._is_over(life_id, path):
                self._remove(path)
        folders = [self._paths.root, self._paths.plans, *(self._paths.writer(life_id).root for life_id in dead)]
        claims = f"{TEMP_PREFIX}{self._paths.lock.name}."
        for path in _temps(folders):
            if not path.name.startswith(claims):
                self._remove(path)
        for path in self._paths.root.glob(f"{claims}*"):
            if self._is_dead_claim(path):
                self._remove(path)

    def _is_dead_claim(self, path: Path) -> bool:
        """Whether a temp file or a claim of the lock is of no use to anybody. While this life holds the run, no claim
        on another holder has any effect; a living owner takes its own away."""
        with contextlib.suppress(FileNotFoundError):
            try:
                holder = Holder.read(path)
            except StoreDamaged:  # half written, perhaps at this moment
                return self._now - path.stat().st_mtime > HEARTBEAT_LIMIT_S
            return holder is not None and holder.is_gone(self._paths.root, path, self._now)
        return False

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(path)
            self._report.swept.append(path.name)


def _life_of(ledger: Path) -> Life | None:
    """Who wrote a ledger; None if its first line is missing or damaged."""
    try:
        for _, line in scan(ledger):
            record = parse(line)
            return record.life if isinstance(record, Opened) else None
    except (FileNotFoundError, ValueError):
        pass
    return None


def _provenance(path: Path, sealed: SealedShard) -> Provenance:
    try:
        return Provenance.from_json(json.loads(sealed.metadata[PROVENANCE]))
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path}: its provenance cannot be read: {error}") from None


def _is_temp(path: Path) -> bool:
    return path.name.startswith(TEMP_PREFIX) and path.name.endswith(TEMP_SUFFIX)


def _temps(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir()) if _is_temp(path)]
