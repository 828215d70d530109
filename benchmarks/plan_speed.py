"""Tokens a second of a whole plan (read, render, mask, tokenise, write) against the tokenizer library's own batch
speed on the same rendered texts, in alternating rounds.

    python benchmarks/plan_speed.py MODEL [--data FILE.jsonl] [--rows 1000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from wellhead.dataset.read import Row, rows
from wellhead.dataset.template import ChatTemplate, find_templates
from wellhead.dataset.tokenizer import load_tokenizer
from wellhead.identity import resolve_model
from wellhead.plan import PlanOptions, make_plan

NOON = datetime(2026, 12, 1, 12)
WORDS = (Path(__file__).read_text() + Path(random.__file__).read_text()).split()


def made_up_rows(count: int) -> list[str]:
    """Conversations of one to four turns, of 40 to 800 words each, from real text."""
    chance = random.Random(1)

    def text() -> str:
        start = chance.randrange(len(WORDS))
        return " ".join((WORDS[start:] + WORDS)[: chance.randrange(40, 800)])

    return [
        json.dumps({"messages": [{"role": role, "content": text()} for _ in range(chance.randrange(1, 5))
                                 for role in ("user", "assistant")]})
        for _ in range(count)
    ]  # fmt: skip


def cost(call: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU of all threads) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    model_dir = resolve_model(given.model)
    with tempfile.TemporaryDirectory() as folder:
        data = given.data or Path(folder) / "rows.jsonl"
        if given.data is None:
            data.write_text("\n".join(made_up_rows(given.rows)), encoding="utf-8")
        measure(model_dir, data, Path(folder), given.rounds)


def measure(model_dir: Path, data: Path, folder: Path, rounds: int) -> None:
    options = PlanOptions(date=NOON.isoformat(), control_tokens="keep")
    tokenizer = load_tokenizer(model_dir)
    template = ChatTemplate(find_templates(model_dir), tokenizer.special_tokens, now=NOON)
    texts = [template.render(row.messages, row.tools) for row in rows(data) if isinstance(row, Row)]
    # In batches, which is what gives the library its best speed: one call over everything needs much memory.
    batches = [texts[start : start + 256] for start in range(0, len(texts), 256)]

    def library() -> None:
        for batch in batches:
            tokenizer.backend.encode_batch(batch, add_special_tokens=False)

    plan = make_plan(folder / "warm", data, model_dir, options)  # imports are not part of a speed
    tokens = int(plan.column("full_tokens").sum())
    wall_ratios, cpu_ratios, rates = [], [], []
    for number in range(rounds):
        own = cost(library)
        loading = cost(lambda: load_tokenizer(model_dir))
        whole = cost(lambda run=folder / f"run{number}": make_plan(run, data, model_dir, options))
        wall_ratios.append(own[0] / (whole[0] - loading[0]))
        cpu_ratios.append(own[1] / (whole[1] - loading[1]))
        rates.append(tokens / (whole[0] - loading[0]))
    print(f"rows {len(texts)}, tokens {tokens}; plan {statistics.median(rates):,.0f} tok/s")
    for name, ratios in (("wall", wall_ratios), ("CPU", cpu_ratios)):
        spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"plan / tokenizer alone, {name} seconds: {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
