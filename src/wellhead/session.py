"""A life of `extract`: its writer, its log, its pulse, and the figures that it publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from wellhead.engines.base import Engine
from wellhead.errors import CompleteWithRejects, DiskFailed, DiskFull, EngineDied, Stopped, StoreDamaged, WellheadError
from wellhead.guard import DiskGuard
from wellhead.heartbeat import Heartbeat, Snapshot
from wellhead.log import EventLog, RunLog
from wellhead.metrics import Progress
from wellhead.plan import Plan
from wellhead.prepare import Observer, Prepared, require_room
from wellhead.store.index import StoreIndex, file_sizes
from wellhead.store.recovery import RecoveryReport, recover
from wellhead.store.writer import StoreWriter
from wellhead.work import Work, other_states, pending_work, plan_facts, quarantine_reasons

_ENDED_AS = {DiskFailed: DiskFull.code, EngineDied: Stopped.code}
"""Errors whose code is no state of a run."""

DEADLY_LIVES = 3
"""So many processes must have died with a sample in hand before that is worth a word."""


class Session:
    """What the loop works with. Made by `session`; `begin` and `finish` mark the loop's ends."""

    def __init__(self, run: Prepared, index: StoreIndex, work: Work, stack: ExitStack) -> None:
        self.run = run
        self.index = index
        self.work = work
        self.guard = DiskGuard(run.paths.root, run.request.reserve_bytes, run.ratio)
        self.progress = Progress(
            rows=run.plan.rows,
            rejected=run.plan.rejected,
            kept_before=self.work.kept_rows,
            quarantine=quarantine_reasons(self.work, index),
            tokens_before=self.work.kept_tokens,
            raw_before=self.work.durable_raw_bytes(len(run.tensors), run.shape.hidden_size),
            stored_before=index.stored_bytes,
            coded_before=sum(shard.raw_bytes for shard in index.shards),
            work_tokens=self.work.pending_tokens,
            bytes_per_token=run.bytes_per_token,
        )
        self.other_states = other_states(self.work, index)
        self.engine: Engine | None = None
        self._stack = stack
        self._heartbeat: Heartbeat | None = None

    writer: StoreWriter
    events: EventLog
    log: RunLog

    @property
    def plan(self) -> Plan:
        return self.run.plan

    def open_life(self, writer: StoreWriter, show: Callable[[Snapshot], None]) -> None:
        """The life's own files, and its pulse, which beats until the session is over."""
        files = self.run.paths.writer(self.run.life.id)
        self.writer = writer
        self.log = self._stack.enter_context(RunLog(files.log))
        self.events = self._stack.enter_context(EventLog(files.events))
        self.events.write("start", life=self.run.life.to_json(), request=str(self.run.request))
        self._heartbeat = self._stack.enter_context(Heartbeat(files.status, self.events, self.snapshot, show))

    def now(self, doing: str) -> None:
        """What status.json says that the run is at."""
        self.progress.doing = doing

    def begin(self, engine: Engine) -> None:
        """The engine is proven and capturing starts: rates count from here."""
        self.engine = engine
        info = engine.describe().to_json()
        self.events.write("capturing", engine=info, pending_tokens=self.work.pending_tokens)
        self.log.line(f"capturing {self.work.pending_tokens} tokens of {len(self.work.lacking)} states with {info}")
        self.progress.begin_work()

    def require_complete(self) -> None:
        """Looks at the disk once more before anything is called complete: the folder may have been changed under us.

        Raises StoreDamaged."""
        index = StoreIndex.load(self.run.paths.root, self.run.spec.fingerprint)
        lost = index.lost_shards()
        missing = len(pending_work(self.run.plan, index, self.run.tensors).lacking)
        if lost or missing:
            raise StoreDamaged(
                f"{self.run.paths.root} was changed while it was written: {missing} states are not recorded any more, "
                f"{len(lost)} shards are not there",
                "find out by whom, then run the same command: it captures what is lacking",
            )

    def finish(self, error: WellheadError | None = None) -> dict[str, Any]:
        """Sets the final state, publishes it and returns the object of `extract --json`."""
        summary = self.snapshot()
        state = "complete" if error is None else _ENDED_AS.get(type(error), error.code)
        if state == "complete" and (sum(summary["rejected"].values()) or summary["quarantined"]):
            state = CompleteWithRejects.code
        self.progress.state, self.progress.doing = state, "ended"
        if self._heartbeat is None:
            return self.snapshot()
        self.log.line(f"{state}: {error.message}" if error else state)
        self.events.write("end", state=state)
        return self._heartbeat.publish()

    def snapshot(self) -> Snapshot:
        """Every figure of status.json. Any thread."""
        return {
            **self.progress.snapshot(),
            "rows": self.run.plan.rows,
            "plan_tokens": self.work.tokens,
            "other_states": self.other_states,
            **plan_facts(self.run.plan),
            "bytes_per_token": self.run.bytes_per_token,
            "free_bytes": self.guard.free(),
            "engine": self.engine.describe().to_json() if self.engine else {},
            "model": self.run.spec.model.name,
            "layers": self.run.layer_words,
            "writer": self.run.life.id,
        }


@contextmanager
def session(run: Prepared, observer: Observer) -> Iterator[Session]:
    """Settles what dead lives left behind, then opens this life, unless there is nothing to do for one."""
    with ExitStack() as stack:
        index = run.index
        work = run.work(index)
        if not work.lacking and _is_settled(run, index):
            yield Session(run, index, work, stack)
            return
        require_room(run, work)
        writer = StoreWriter(run.paths.root, run.life, run.spec.fingerprint, run.request.store_options)
        stack.callback(writer.close)
        report = recover(run.paths.root, writer)
        index = report.index or StoreIndex.load(run.paths.root, run.spec.fingerprint)
        opened = Session(run, index, run.work(index), stack)
        opened.open_life(writer, observer.show)
        for words in (*_told(report), *_deadly(opened)):
            observer.say(words)
            opened.log.line(words)
        yield opened


def _deadly(opened: Session) -> list[str]:
    """A warning about samples that several processes died with. Not more: it may have been the operator's kill."""
    lost = opened.index.attempts_lost(list(opened.work.lacking))
    often = sorted((id for id, lives in lost.items() if lives >= DEADLY_LIVES), key=lambda id: -lost[id])
    if not often:
        return []
    return [f"{len(often)} pending samples were in hand when {DEADLY_LIVES} or more processes died; first: {often[0]}"]


def _is_settled(run: Prepared, index: StoreIndex) -> bool:
    """Whether the ledgers and the shards' folder agree, so that a life with nothing to do need not open a ledger."""
    files = file_sizes(run.paths.states)
    return (
        not index.problems
        and all(files.pop(shard.name, None) == shard.size for shard in index.shards)
        and not files.keys() - index.removed.keys()
    )


def _told(report: RecoveryReport) -> list[str]:
    """What recovery did, for people. That a ledger was closed is not worth a word."""
    facts = {
        "adopted: whole shards that a dead process could not record any more": report.adopted,
        "removed: shards that a dead process left broken, unrecorded": report.discarded,
        "lost: recorded shards that are not there or have another size; what they held is captured again":
            report.tombstoned,
        "left alone: files in states/ that are not this run's to judge": report.left,
        "swept: temp files of dead processes": report.swept,
    }  # fmt: skip
    return [
        f"{len(names)} {text} ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
        for text, names in facts.items()
        if names
    ]
