"""What a run is doing, or where it stands: read from the run folder, nothing is touched."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from wellhead.core import raw_bytes
from wellhead.disk import free_bytes
from wellhead.errors import StoreDamaged
from wellhead.layers import final_words, layer_words
from wellhead.metrics import ratio
from wellhead.paths import RunPaths
from wellhead.plan import Plan
from wellhead.run import Run
from wellhead.store.index import StoreIndex
from wellhead.store.lock import Holder
from wellhead.work import other_states, plan_facts, quarantine_reasons

_DIED = "nothing: the last process died; what it had in hand is captured again by the next `wellhead extract`"
_ENDED = ("stopped", "gave_up", "disk")


def read_status(root: Path) -> dict[str, Any]:
    """The object of `status --json`. Raises UsageError where there is no run, StoreDamaged where it cannot be read.

    Of a living run the figures are the ones that it publishes every 2 s; of any other they are counted from the plan
    and the ledgers."""
    paths = RunPaths(root)
    holder = living_holder(paths)
    if holder is not None:
        live = _published(paths, holder.life.id)
        if live is not None:
            return {**live, "ledger_problems": None, "lost_shards": None, "holder": _describe(holder)}
        if not paths.manifest.exists():
            return {"state": "running", "doing": "planning", "holder": _describe(holder)}
    if not paths.manifest.exists() and (plan := Plan.find(root)) is not None:
        return _planned(plan)
    with Run(root) as run:
        return {**_counted(run, paths), "holder": _describe(holder) if holder else None}


def living_holder(paths: RunPaths) -> Holder | None:
    """Who holds the run, unless proven dead or released."""
    holder = Holder.read(paths.lock)
    return None if holder is None or holder.is_gone(paths.root, paths.lock, time.time()) else holder


def _counted(run: Run, paths: RunPaths) -> dict[str, Any]:
    work, index, spec = run.work, run.index, run.spec
    rejected = dict(run.plan.rejected)
    last = _last_published(paths)
    state = last.get("state") if last.get("state") in _ENDED else "stopped"
    if not work.lacking and not (state == "gave_up" and work.quarantined):
        state = "complete_with_rejects" if rejected or work.quarantined else "complete"
    return {
        "state": state,
        "doing": _DIED if last.get("state") == "running" else "nothing: no process works on it",
        "rows": run.plan.rows,
        "kept": work.kept_rows,
        "captured": 0,
        "rejected": rejected,
        "quarantined": work.quarantined_rows,
        "quarantine": quarantine_reasons(work, index),
        "pending": work.pending_rows,
        "tokens": work.kept_tokens,
        "plan_tokens": work.tokens,
        "uncommitted_tokens": 0,
        "raw_bytes": work.durable_raw_bytes(len(run.layers) + 1, spec.hidden_size),
        "stored_bytes": index.stored_bytes,
        "ratio": ratio(index.stored_bytes, sum(shard.raw_bytes for shard in index.shards)),
        "other_states": other_states(work, index),
        "lost_shards": len(index.lost_shards()),
        **plan_facts(run.plan),
        "bytes_per_token": raw_bytes(1, len(run.layers), spec.hidden_size),
        "tokens_per_s": None,
        "captured_tokens_per_s": None,
        "rates": last.get("rates", []),
        "eta_s": None,
        "oldest_in_flight": None,
        "still_s": None,
        "commits": 0,
        "warnings": [],
        "free_bytes": free_bytes(paths.root),
        "writer": last.get("writer"),
        "engine": last.get("engine") or {"engine": run.manifest.engine},
        "model": spec.model.name,
        "layers": [*layer_words(run.layers, spec.blocks), final_words(spec.blocks, spec.final)],
        "ledger_problems": len(index.problems),
    }


def _planned(plan: Plan) -> dict[str, Any]:
    rejected = dict(plan.rejected)
    return {
        "state": "planned",
        "doing": "nothing is captured yet: `wellhead extract` begins",
        "rows": plan.rows,
        "kept": 0,
        "rejected": rejected,
        "quarantined": 0,
        "pending": plan.rows - sum(rejected.values()),
        **plan_facts(plan),
        "holder": None,
    }


def rejects(root: Path) -> dict[str, Any]:
    """Every rejected row and every quarantined sample, with its reason: the lists behind the counts."""
    plan, index = Plan.current(root), StoreIndex.load(root)
    rows = [{"line": line, "reason": reason, "detail": detail} for line, reason, detail in plan.rejects()]
    samples = [
        {"id": item.id, "tokens": item.tokens, "reason": found.reason, "detail": found.detail}
        for item in plan.items()
        if (found := index.quarantined.get(item.id)) is not None
    ]
    return {"rejected_rows": rows, "quarantined_samples": samples}


def _published(paths: RunPaths, life_id: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(paths.writer(life_id).status.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreDamaged(f"{paths.writer(life_id).status} cannot be read: {error}", "look again in 2 s") from error
    return value if isinstance(value, dict) else None


def _last_published(paths: RunPaths) -> dict[str, Any]:
    """The last status of the last life that published one; ids sort by time."""
    for file in sorted(paths.writers.glob("*/status.json"), reverse=True):
        with suppress(StoreDamaged):  # never synced: a power cut may leave it empty
            return _published(paths, file.parent.name) or {}
    return {}


def _describe(holder: Holder) -> dict[str, Any]:
    life = holder.life
    return {"pid": life.pid, "host": life.host, "started": life.started, "writer": life.id, "command": holder.command}
