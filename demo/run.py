"""`make demo`: the main job on a real model, and what nobody else shows about it.

plan → extract (killed in mid-run, on purpose) → extract again → verify --deep --recapture 4. Writes .demo/summary.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import wellhead
from wellhead.paths import RunPaths
from wellhead.plan import Plan
from wellhead.store.index import StoreIndex
from wellhead.units import format_bytes, format_duration

DATA = Path(__file__).parent / "conversations.jsonl"
ROOT = Path(".demo")
RUN = ROOT / "run"
SUMMARY = ROOT / "summary.json"
MODEL = "smollm2-demo"
EXTRACT = ("extract", str(DATA), "--model", MODEL, "--out", str(RUN), "--shard-seconds", "2")
TENSORS = ("r2", "r15", "r27", "final")


def main() -> None:
    began = time.monotonic()
    ROOT.mkdir(exist_ok=True)
    if not SUMMARY.exists() and RUN.exists():
        say("an earlier demo did not finish: starting over")
        shutil.rmtree(RUN)
    heading("1. plan: every byte, before any model is loaded")
    planned = wellhead_json("plan", str(DATA), "--model", MODEL, "--out", str(RUN))
    if SUMMARY.exists():
        show_again(planned)
        return
    heading("2. extract, and a SIGKILL in the middle of it")
    extract = (*EXTRACT, "--dtype", fast_dtype())
    committed = extract_and_kill(extract)
    heading("3. extract again: it goes on where the ledger says")
    done, resume_s = resume(extract)
    lost = len(committed - recorded_ids())
    heading("4. verify: every byte read, and 4 samples computed again by an independent path")
    proof = wellhead_json("verify", str(RUN), "--deep", "--recapture", "4")

    summary = {
        "samples": done["kept"],
        "tokens": done["tokens"],
        "raw_bytes": done["raw_bytes"],
        "stored_bytes": done["stored_bytes"],
        "ratio": round(done["stored_bytes"] / done["raw_bytes"], 4),
        "tokens_per_s": done["captured_tokens_per_s"],
        "verify_ok": proof["ok"],
        "dtype": wellhead.open(RUN).spec.compute_dtype,
        "committed_before_kill": len(committed),
        "kill_lost": lost,
        "resume_s": round(resume_s, 1),
        "layers": [{key: layer[key] for key in ("name", "own_error", "neighbour_error")} for layer in proof["layers"]],
        "seconds": round(time.monotonic() - began, 1),
    }
    heading("what this showed")
    show(planned, summary)
    if done["raw_bytes"] != planned["raw_bytes"] or lost or not proof["ok"]:
        raise SystemExit("the demo found something wrong: see above")
    SUMMARY.write_text(json.dumps(summary, indent=2) + "\n")
    say(f"written to {SUMMARY}; the run is {RUN}: try `wellhead status {RUN}`")


def fast_dtype() -> str:
    """bfloat16, unless this CPU has no instructions for it and would take ten times as long."""
    from wellhead.engines.transformers import SLOW_BF16, bf16_slowdown

    slower = bf16_slowdown()
    if slower < SLOW_BF16:
        return "bfloat16"
    say(f"this CPU multiplies bf16 {slower:.0f} times slower than float32: computing in float32, storing bf16")
    return "float32"


def extract_and_kill(extract: tuple[str, ...]) -> set[str]:
    """Starts an extraction, kills it -9 once something is committed and more is in hand. Ids committed by then."""
    with subprocess.Popen(command(*extract), stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            time.sleep(0.2)
            status = latest_status()
            if status and status["commits"] and status["uncommitted_tokens"]:
                os.kill(process.pid, signal.SIGKILL)
                break
    if process.returncode != -signal.SIGKILL:
        raise SystemExit(f"the extraction ended (exit code {process.returncode}) before it could be killed")
    assert status is not None
    committed = recorded_ids()
    say(f"killed -9 with {len(committed)} samples committed and {status['uncommitted_tokens']} tokens in hand")
    return committed


def resume(extract: tuple[str, ...]) -> tuple[dict[str, Any], float]:
    """Runs the same command again. Its result, and the seconds from its start to its first batch."""
    started = time.time()
    done = wellhead_json(*extract)
    events = max(RunPaths(RUN).writers.glob("*/events.jsonl")).read_text().splitlines()
    capturing = next(event for event in map(json.loads, events) if event["kind"] == "capturing")
    return done, datetime.fromisoformat(capturing["time"]).timestamp() - started


def latest_status() -> dict[str, Any] | None:
    files = sorted(RunPaths(RUN).writers.glob("*/status.json"))
    return json.loads(files[-1].read_text()) if files else None


def recorded_ids() -> set[str]:
    """What a reader sees as done, by the ledgers alone."""
    ids = [item.id for item in Plan.current(RUN).items()]
    return set(ids) - set(StoreIndex.load(RUN).missing(ids, TENSORS))


def show(planned: dict[str, Any], summary: dict[str, Any]) -> None:
    exact = "equal to the byte" if planned["raw_bytes"] == summary["raw_bytes"] else "DIFFERENT"
    say(f"predicted {planned['raw_bytes']:,} raw bytes, stored {summary['raw_bytes']:,}: {exact}")
    say(
        f"on disk {format_bytes(summary['stored_bytes'])} of {format_bytes(summary['raw_bytes'])} raw: "
        f"ratio {summary['ratio']:.3f}, lossless"
    )
    say(
        f"killed -9 in mid-run with {summary['committed_before_kill']} samples committed: {summary['kill_lost']} lost, "
        f"capturing again {format_duration(summary['resume_s'])} after the restart"
    )
    say("relative error of a row against an independent run, and of its nearest neighbouring layer:")
    for layer in summary["layers"]:
        factor = layer["neighbour_error"] / max(layer["own_error"], 1e-12)
        say(
            f"  {layer['name']:<6} own {layer['own_error']:.2e}   neighbour {layer['neighbour_error']:.2e}"
            f"   ({factor:,.0f} times as far)"
        )
    verdict = "sound" if summary["verify_ok"] else "NOT SOUND"
    say(
        f"{summary['samples']} samples, {summary['tokens']:,} tokens, {summary['tokens_per_s']:,.0f} tok/s "
        f"in {summary['dtype']}; "
        f"verify: {verdict}; {format_duration(summary['seconds'])} in all"
    )


def show_again(planned: dict[str, Any]) -> None:
    heading("2. extract")
    summary = json.loads(SUMMARY.read_text())
    wellhead_json(*EXTRACT, "--dtype", summary["dtype"])
    heading("what the first run showed")
    show(planned, summary)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "wellhead", "--json", *arguments]


def wellhead_json(*arguments: str) -> dict[str, Any]:
    """Runs a verb: its words for people go to the screen, its object comes back."""
    say("$ wellhead " + " ".join(arguments))
    done = subprocess.run(command(*arguments), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"`wellhead {arguments[0]}` ended with exit code {done.returncode}")
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
