"""The writer of one life: captures in, durable shards out. Durable first, then recorded.

A commit is: data fsync → rename → directory fsync → ledger line fsync. Only the ledger line makes members count, and
when it is there everything that it relies on is durable already. The samples of a shard share all four.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wellhead.core import Capture, Codec, Provenance, canonical_json
from wellhead.errors import WellheadError
from wellhead.paths import RunPaths
from wellhead.store.atomic import POSIX, TEMP_PREFIX, Disk, File, SyncError
from wellhead.store.faults import disk_error
from wellhead.store.ledger import Attempt, Commit, Ledger, Quarantine, Record, Tombstone
from wellhead.store.life import Life, mark_ended
from wellhead.store.records import shard_name
from wellhead.store.shard import ShardWriter, estimate_head_room

FINGERPRINT = "fingerprint"
PROVENANCE = "provenance"
"""Names in a shard's `__metadata__`: with them a shard can be adopted from itself alone."""

TEMP_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """When a shard is closed (at a batch boundary) and how states are stored.

    `shard_seconds` None: when the oldest sample in it is 30 s old and there are 64 MiB, or 5 minutes whatever the
    size. Otherwise: at this age, whatever the size.
    """

    codec: Codec = "planes-zstd"
    shard_bytes: int = 1 << 30
    shard_seconds: float | None = None


_USUAL_AGE_S, _USUAL_BYTES, _LONGEST_AGE_S = 30.0, 64 << 20, 300.0


@dataclass(slots=True)
class _OpenShard:
    """A shard under its temp name. `tokens` is counted here: other threads read it while samples are added."""

    name: str
    temp: Path
    file: File
    writer: ShardWriter
    provenance: Provenance
    since: float
    since_wall: float
    tokens: int = 0

    def takes(self, capture: Capture) -> bool:
        return capture.provenance == self.provenance and self.writer.fits(capture)


class StoreWriter:
    """See the module. One thread at a time; the properties may be read from any thread. A context manager.

    Raises DiskFull for a full disk or quota and DiskFailed for any other error of the disk. After one that leaves
    open what is durable (a failed fsync above all, which is never tried again), every later call raises it again:
    the life is over, and the next one recovers everything that was committed. The caller holds the run lock.
    """

    def __init__(
        self,
        run_dir: Path,
        life: Life,
        fingerprint: str,
        options: StoreOptions | None = None,
        disk: Disk = POSIX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the life's folder and opens its ledger, both durable on return."""
        self.life = life
        self.fingerprint = fingerprint
        self._paths = RunPaths(run_dir)
        self._options = options or StoreOptions()
        self._disk = disk
        self._clock = clock
        self._shard: _OpenShard | None = None
        self._number = 0
        self._failed: WellheadError | None = None
        own = self._paths.writer(life.id)
        with self._disk_errors("opening the ledger"):
            disk.make_dir(self._paths.states)
            disk.make_dir(own.root)
            self._ledger = Ledger.open(own.ledger, life, fingerprint, disk)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attempt(self, ids: Sequence[str]) -> None:
        """Records that these samples are about to be worked on. Durable on return."""
        if ids:
            self.record(Attempt(tuple(ids)))

    def add(self, capture: Capture) -> Commit | None:
        """Encodes a capture and appends it to the open shard, or to a new one. Not durable before `commit`.

        Where the open shard cannot take it (its head is full, or the provenance is another) that shard is committed
        first, and its record returned. DiskFull: the samples added before can still be committed.
        """
        early = None
        if self._shard is not None and not self._shard.takes(capture):
            early = self.commit()
        with self._disk_errors("writing a shard"):
            shard = self._shard or self._begin(capture)
            shard.writer.add(capture)
            shard.tokens += capture.tokens
        return early

    def due(self) -> bool:
        """Whether the open shard should be closed at this batch boundary, for its size or its age."""
        shard = self._shard
        if shard is None or not shard.writer.members_count:
            return False
        size, age, limit = shard.writer.bytes_written, self.oldest_age_s, self._options.shard_seconds
        if size >= self._options.shard_bytes:
            return True
        if limit is not None:
            return age >= limit
        return age >= _LONGEST_AGE_S or (age >= _USUAL_AGE_S and size >= _USUAL_BYTES)

    def commit(self) -> Commit | None:
        """Makes the open shard durable and records it; None if nothing is open. Only its return acknowledges."""
        self._require_usable()
        shard = self._shard
        if shard is None:
            return None
        if not shard.writer.members_count:
            self._drop()
            return None
        with self._disk_errors("sealing a shard"):
            try:
                sealed = shard.writer.seal(shard.name)
                shard.file.close()
            except OSError:
                self._drop()
                raise
        self._shard = None
        with self._disk_errors("publishing a shard", fatal=True):
            self._disk.publish(shard.temp, self._paths.states / shard.name)
            self._disk.sync_dir(self._paths.states)
        record = Commit.of(sealed, shard.provenance)
        with self._disk_errors("recording a shard", fatal=True):
            self._ledger.append(record)
        return record

    def quarantine(self, id: str, reason: str, detail: str) -> None:
        """Records that a sample could not be captured properly. Durable on return."""
        self.record(Quarantine(id, reason, detail))

    def tombstone(self, shard: str, reason: str) -> None:
        """Records that a shard is lost: its members do not count any more. Durable on return."""
        self.record(Tombstone(shard, reason))

    def record(self, record: Record) -> None:
        """Appends any record to the ledger of this life. Durable on return."""
        self._require_usable()
        with self._disk_errors("writing the ledger"):
            self._ledger.append(record)

    def close(self) -> None:
        """Ends the life. Drops the open shard if it was not committed. Safe to call twice."""
        self._drop()
        self._ledger.close()
        mark_ended(self.life)

    @property
    def uncommitted_samples(self) -> int:
        shard = self._shard
        return 0 if shard is None else shard.writer.members_count

    @property
    def uncommitted_tokens(self) -> int:
        shard = self._shard
        return 0 if shard is None else shard.tokens

    @property
    def uncommitted_bytes(self) -> int:
        """Size of the open shard's file."""
        shard = self._shard
        return 0 if shard is None else shard.writer.bytes_written

    @property
    def oldest_age_s(self) -> float:
        """Seconds since the open shard got its first sample; 0 if there is none."""
        shard = self._shard
        return 0.0 if shard is None else self._clock() - shard.since

    @property
    def open_since(self) -> float | None:
        """When that was, in seconds since the epoch."""
        shard = self._shard
        return None if shard is None else shard.since_wall

    def _begin(self, first: Capture) -> _OpenShard:
        self._number += 1
        name = shard_name(self.life.id, self._number)
        temp = self._paths.states / f"{TEMP_PREFIX}{name}{TEMP_SUFFIX}"
        provenance = canonical_json(first.provenance.to_json()).decode()
        metadata = {FINGERPRINT: self.fingerprint, PROVENANCE: provenance}
        room = estimate_head_room(first, self._options.codec, metadata, self._options.shard_bytes)
        file = self._disk.create(temp)
        try:
            writer = ShardWriter(file, codec=self._options.codec, metadata=metadata, head_room=room)
        except OSError:
            self._discard(file, temp)
            raise
        self._shard = _OpenShard(name, temp, file, writer, first.provenance, self._clock(), time.time())
        return self._shard

    def _drop(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._discard(shard.file, shard.temp)

    def _discard(self, file: File, temp: Path) -> None:
        file.close()
        with contextlib.suppress(OSError):  # a later life sweeps it
            self._disk.remove(temp)

    def _require_usable(self) -> None:
        if self._failed is not None:
            raise type(self._failed)(self._failed.message, self._failed.hint)

    @contextlib.contextmanager
    def _disk_errors(self, doing: str, fatal: bool = False) -> Iterator[None]:
        self._require_usable()
        try:
            yield
        except OSError as error:
            translated = disk_error(error, doing)
            if fatal or isinstance(error, SyncError):
                self._failed = translated
            raise translated from error
