#!/usr/bin/env python3
"""Lets the demo's model answer `prompts.jsonl`, greedily, and writes `conversations.jsonl`.

The result is in the repository, so nobody has to run this; it is kept so that everybody can. A drafter has to learn
the distribution of its target, so the answers are the target's own. A line of prompts has `turns` (user messages,
answered one after the other) and perhaps `system`; a line of conversations has `messages`.

An answer ends where the model ends its turn. One that reaches its cap instead (caps vary from 56 to 180 tokens, so
that lengths do) is cut back to the last whole sentence or line, because the chat template closes every assistant turn
and half a word before the closing token would be something that the model never says.

The weights are computed with in float32, which two cores without bf16 instructions do many times faster.

    python demo/get_model.py
    python demo/make_conversations.py
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from get_model import model_dir

HERE = Path(__file__).parent
BATCH = 20
MIN_CAP, MAX_CAP = 56, 180
LONG_CHARS = 700
CAP_STEP = 37  # coprime to the span: neighbouring lines get caps far apart
SENTENCE_END = re.compile(r"[.!?:][\"')*`]*(?=\s)|\n")


def cap(line: int) -> int:
    return MIN_CAP + line * CAP_STEP % (MAX_CAP - MIN_CAP + 1)


def to_last_sentence(text: str) -> str:
    """`text` up to its last whole sentence or line; all of it where there is none."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[-1]].rstrip() if ends else text.rstrip()


def answer(model: Any, tokenizer: Any, chats: list[list[dict[str, str]]], caps: list[int]) -> list[str]:
    """The greedy answers to one batch. Left padding, so that all of them continue at the same column."""
    import torch

    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.inference_mode():
        out = model.generate(**batch, do_sample=False, max_new_tokens=max(caps))
    end = tokenizer.eos_token_id
    answers = []
    for row, limit in zip(out[:, batch["input_ids"].shape[1] :].tolist(), caps, strict=True):
        new = row[:limit]
        whole = end in new
        text = tokenizer.decode(new[: new.index(end)] if whole else new, skip_special_tokens=True).strip()
        answers.append(text if whole else to_last_sentence(text))
    return answers


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_dir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [json.loads(line) for line in (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    chats = [[{"role": "system", "content": p["system"]}] if "system" in p else [] for p in prompts]
    started = time.monotonic()
    for turn in range(max(len(p["turns"]) for p in prompts)):
        lines = [line for line, p in enumerate(prompts) if turn < len(p["turns"])]
        for line in lines:
            chats[line].append({"role": "user", "content": prompts[line]["turns"][turn]})
        # A batch costs its longest prompt times its size, and then runs as long as its largest cap.
        lines.sort(key=lambda line: (len(str(chats[line])) > LONG_CHARS, cap(line), line))
        for at in range(0, len(lines), BATCH):
            part = lines[at : at + BATCH]
            answers = answer(model, tokenizer, [chats[line] for line in part], [cap(line) for line in part])
            for line, text in zip(part, answers, strict=True):
                if not text:
                    sys.exit(f"make_conversations: line {line + 1} of prompts.jsonl got an empty answer")
                chats[line].append({"role": "assistant", "content": text})
            print(f"turn {turn + 1}: {at + len(part)}/{len(lines)}, {time.monotonic() - started:.0f} s", flush=True)
    text = "".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)
    (HERE / "conversations.jsonl").write_text(text, encoding="utf-8")
    print(f"wrote {len(chats)} conversations, {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
