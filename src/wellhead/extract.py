"""The main path: plan → engine → capture → store.

    rows ──plan──▶ batches ──engine──▶ payloads ──capture.check──▶ captures ──StoreWriter──▶ shard + ledger line

One batch is with the engine while the one before it is checked, encoded and written by the writer's own thread. A
shard is closed at batch boundaries only, and a resume reruns whole batches, so that an interrupted run holds the same
bytes as an undisturbed one. `extract` is the program, `_Extraction.run` its loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wellhead.capture import Rejection, check
from wellhead.core import Capture, PlanItem, Sample
from wellhead.engines.base import Engine, Failure, Payload
from wellhead.errors import DiskFailed, DiskFull, EngineDied, GaveUp, Stopped, WellheadError
from wellhead.guard import Level, wait_until
from wellhead.prepare import Observer, Request, load_engine, prepared, write_manifest
from wellhead.session import Session, session
from wellhead.store.records import Commit

ENDINGS = (Stopped, GaveUp, DiskFull, DiskFailed, EngineDied)
"""How the loop may end early. What is in hand then is still kept and committed, as far as the disk lets it be."""

FAILURES_BEFORE_GIVING_UP = 5
"""So many samples must have failed before a rate means anything."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call of `extract` ended: the object of `extract --json`, and the error that it ended with, if any."""

    summary: dict[str, Any]
    error: WellheadError | None = None


def extract(request: Request, observer: Observer) -> Outcome:
    """Captures everything that `request` asks for and the run does not hold yet.

    Gives an Outcome once capturing has begun, or if nothing was left to do (complete, stopped, gave up, disk full, the
    engine died); what is refused before that is raised as a WellheadError, and so is StoreDamaged, for a folder that
    somebody changed meanwhile."""
    with prepared(request, observer) as run, session(run, observer) as open_session:
        if not open_session.work.lacking:
            error = too_many_failures(len(open_session.work.quarantined), len(open_session.work.items), request)
            return Outcome(open_session.finish(error), error)
        engine = load_engine(run, open_session.index, observer.say, open_session.now)
        write_manifest(run, engine)
        open_session.begin(engine)
        try:
            asyncio.run(capture_all(open_session, engine, observer.stop_asked))
        except ENDINGS as error:
            return Outcome(open_session.finish(error), error)
        finally:
            asyncio.run(engine.aclose())
        open_session.require_complete()
        return Outcome(open_session.finish())


async def capture_all(open_session: Session, engine: Engine, stop_asked: Callable[[], bool]) -> None:
    """Everything that is pending. Raises one of `ENDINGS`, always after committing what was captured."""
    await _Extraction(open_session, engine, stop_asked).run()


def too_many_failures(failed: int, tried: int, request: Request) -> GaveUp | None:
    """The error that ends a run in which more samples fail than `--max-failure-rate` allows, else None."""
    limit = request.max_failure_rate
    if failed < FAILURES_BEFORE_GIVING_UP or failed <= limit * tried:
        return None
    return GaveUp(
        f"{failed} of {tried} samples failed, more than the {limit:.1%} allowed",
        f"`wellhead status {request.run_dir} --rejects` lists them; --retry-quarantined tries them again, "
        "--max-failure-rate sets the limit",
    )


@dataclass(frozen=True, slots=True)
class Captured:
    """What came back for one batch."""

    samples: Sequence[Sample]
    outcomes: Sequence[Payload | Failure]


class _Extraction:
    """The loop. Everything that touches the writer runs in the writer's thread."""

    def __init__(self, open_session: Session, engine: Engine, stop_asked: Callable[[], bool]) -> None:
        self._run, self._plan, self._work = open_session.run, open_session.plan, open_session.work
        self._writer, self._guard, self._progress = open_session.writer, open_session.guard, open_session.progress
        self._events, self._log = open_session.events, open_session.log
        self._engine = engine
        self._stop_asked = stop_asked
        self._writer_thread = ThreadPoolExecutor(1, thread_name_prefix="wellhead-writer")
        self._failed = 0
        self._tried = 0
        self._in_hand_raw = 0
        self._left_raw = self._work.pending_tokens * self._progress.bytes_per_token

    async def run(self) -> None:
        done: Captured | None = None
        try:
            for unit in self._work.units(self._engine.describe()):
                await self._admit(unit)
                samples = self._plan.samples([item.id for item in unit])
                await self._in_writer(self._writer.attempt, [s.id for s in samples if s.id in self._work.lacking])
                keeping, done = asyncio.create_task(self._keep(done)), None
                try:
                    done = await self._capture(samples)
                finally:
                    await keeping
            last, done = done, None
            await self._keep(last)
        except ENDINGS:
            await self._keep(done, judge=False)
            raise
        finally:
            await self._in_writer(self._commit)
            self._writer_thread.shutdown()
            await self._engine.drain()

    async def _admit(self, unit: Sequence[PlanItem]) -> None:
        """Lets a batch in, or waits for space, or ends the run."""
        self._stop_if_asked()
        batch_raw = sum(item.tokens for item in unit) * self._progress.bytes_per_token
        # the batch before this one is captured and not yet written: it needs its room too
        level = self._guard.level(self._in_hand_raw + batch_raw, self._left_raw)
        if level is Level.WARN:
            self._warn("disk_low", "what is left to capture would eat into the disk's reserve")
        elif level is Level.HOLD:
            await self._hold(self._in_hand_raw + batch_raw)
        self._left_raw -= batch_raw
        self._in_hand_raw = batch_raw

    def _stop_if_asked(self) -> None:
        if self._stop_asked():
            raise Stopped("stopped as asked; everything captured is committed", "run the same command to go on")

    async def _hold(self, batch_raw: int) -> None:
        self._warn("disk_hold", "no space for the next batch: nothing is admitted until there is")
        await self._in_writer(self._commit)
        self._progress.doing = "waiting for disk space"
        roomy = await asyncio.to_thread(
            wait_until,
            lambda: self._guard.level(batch_raw, self._left_raw) is not Level.HOLD,
            self._run.request.disk_wait_s,
            self._stop_asked,
        )
        self._stop_if_asked()
        if not roomy:
            raise DiskFull(
                f"{self._guard.folder}: {self._guard.free()} bytes free, the next batch needs {batch_raw} "
                f"and the reserve is {self._guard.reserve_bytes}",
                "make room and run the same command: it goes on where it stopped",
            )
        self._events.write("disk_ok", free_bytes=self._guard.free())

    async def _capture(self, samples: Sequence[Sample]) -> Captured:
        progress, longest = self._progress, max(samples, key=lambda sample: sample.tokens)
        progress.doing = "capturing"
        progress.begin_batch((longest.id, longest.tokens), len(samples), sum(sample.tokens for sample in samples))
        tensors = self._wanted(samples)
        outcomes = await self._answers(samples, tensors)
        # A batch that the engine could not take (out of memory) may be one that it can take sample by sample.
        again = {o.sample_id for o in outcomes if isinstance(o, Failure) and o.retryable}
        outcomes = [o for o in outcomes if o.sample_id not in again]
        for sample in samples:
            if sample.id in again:
                self._events.write("retry_alone", id=sample.id)
                outcomes += await self._answers([sample], tensors)
        progress.end_batch()
        return Captured(samples, outcomes)

    async def _answers(self, samples: Sequence[Sample], tensors: Sequence[str]) -> list[Payload | Failure]:
        try:
            return [outcome async for outcome in self._engine.capture(samples, tensors)]
        except WellheadError:
            raise
        except Exception as error:  # the seam where an engine's own errors become ours
            raise EngineDied(
                f"the engine died: {type(error).__name__}: {error}",
                "what was captured before is committed; see the engine's own message, then run the same command",
            ) from error

    def _wanted(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        lacking = {name for sample in samples for name in self._work.lacking.get(sample.id, ())}
        return tuple(name for name in self._run.tensors if name in lacking)

    async def _keep(self, done: Captured | None, judge: bool = True) -> None:
        """Checks, encodes and appends what came back; closes the shard when it is due."""
        if done is None:
            return
        await self._in_writer(self._keep_batch, done)
        for outcome in done.outcomes:
            if isinstance(outcome, Payload):
                self._engine.release(outcome)
        if judge:
            self._judge_failures()

    def _keep_batch(self, done: Captured) -> None:
        wanted = self._wanted(done.samples)
        outcomes = {outcome.sample_id: outcome for outcome in done.outcomes}
        for sample in done.samples:
            lacking = self._work.lacking.get(sample.id)
            if not lacking:
                continue  # captured for the sake of the batch's composition, stored long ago
            self._tried += 1
            verdict = _verdict(sample, outcomes.get(sample.id), wanted, self._run.spec.hidden_size)
            if isinstance(verdict, Rejection):
                self._quarantine(sample, verdict)
                continue
            states = {name: verdict.states[name] for name in lacking}
            capture = Capture(verdict.id, verdict.input_ids, states, verdict.provenance)
            self._count(self._writer.add(capture))
            self._progress.add_captured(sample.tokens)
        if self._writer.due():
            self._commit()

    def _quarantine(self, sample: Sample, why: Rejection) -> None:
        self._failed += 1
        self._writer.quarantine(sample.id, why.reason, why.detail)
        self._progress.add_quarantined(why.reason, self._work.rows_of[sample.id], sample.tokens)
        self._log.line(f"quarantined {sample.id} ({sample.tokens} tokens): {why.reason}: {why.detail}")
        self._events.write("quarantine", id=sample.id, reason=why.reason, detail=why.detail)

    def _judge_failures(self) -> None:
        error = too_many_failures(self._failed, self._tried, self._run.request)
        if error is not None:
            raise error

    def _commit(self) -> None:
        """Closes the open shard: durable, then recorded, then counted."""
        self._count(self._writer.commit())

    def _count(self, commit: Commit | None) -> None:
        if commit is None:
            return
        rows = sum(self._work.rows_of[id] for id in commit.ids)
        tokens = sum(commit.tokens)
        self._progress.add_commit(rows, len(commit.ids), tokens, commit.raw_bytes, commit.size)
        self._log.line(
            f"committed {commit.shard}: {len(commit.ids)} samples, {tokens} tokens, {commit.raw_bytes} raw bytes, "
            f"{commit.size} stored, {self._progress.pace()}"
        )
        self._events.write("commit", shard=commit.shard, samples=len(commit.ids), tokens=tokens, bytes=commit.size)

    def _warn(self, kind: str, text: str) -> None:
        if text not in self._progress.warnings:
            self._progress.warnings.append(text)
            self._log.line(f"warning: {text}")
        self._events.write(kind, free_bytes=self._guard.free())

    async def _in_writer(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._writer_thread, call, *args)


def _verdict(
    sample: Sample, outcome: Payload | Failure | None, tensors: Sequence[str], hidden_size: int
) -> Capture | Rejection:
    if outcome is None:
        return Rejection("no_answer", "the engine returned nothing for this sample")
    if isinstance(outcome, Failure):
        return Rejection(outcome.reason, outcome.detail)
    return check(sample, outcome, tensors, hidden_size)
