"""Speed and ratio of the codec, per core: MB/s of raw states by thread CPU time, best of several runs.

    python benchmarks/codec.py [--json] [--states STATES.npy] [--repeat 15]

Without `--states` the data are made up: Gaussian values, a scale for each channel, and a few channels and rows far
out, as real states have. `STATES.npy` holds real ones as bf16 bits: uint16 [T, L, H]. A memory copy is measured in
the same run, in turn with the codec, so that figures of different machines can be compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from wellhead.store import codec

Bits = NDArray[np.uint16]


def made_up_states(tokens: int, hidden_size: int) -> Bits:
    """bf16 bits [T, H] with about the exponent statistics of a residual stream."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 0.6, hidden_size)).astype(np.float32)
    scale[rng.integers(0, hidden_size, 2)] *= 300
    values = rng.standard_normal((tokens, hidden_size), dtype=np.float32) * scale
    values[0] *= 100
    bits: Bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits


def copy_all(samples: list[Bits], target: Bits) -> None:
    for bits in samples:
        np.copyto(target[: len(bits)], bits)


def measure(name: str, samples: list[Bits], repeat: int) -> dict[str, object]:
    """All samples share the bias table of the first, as in a shard; its cost is not part of encoding here."""
    bias = codec.bias_table(samples[0])
    encoded = [b"".join(codec.encode(bits, bias)) for bits in samples]
    for bits, data in zip(samples, encoded, strict=True):
        assert np.array_equal(codec.decode(data, bias), bits)
    raw = sum(bits.nbytes for bits in samples)
    target = np.empty_like(max(samples, key=len))
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: copy_all(samples, target),
        "encode": lambda: [codec.encode(bits, bias) for bits in samples],
        "decode": lambda: [codec.decode(data, bias) for data in encoded],
    }
    best = dict.fromkeys(works, float("inf"))
    for _ in range(repeat):
        for work, run in works.items():
            start = time.thread_time()
            run()
            best[work] = min(best[work], time.thread_time() - start)
    speed = {f"{work}_mb_s": round(raw / 1e6 / seconds) for work, seconds in best.items()}
    return {
        "states": name,
        "samples": len(samples),
        "raw_mb": round(raw / 1e6, 1),
        "ratio": round(sum(map(len, encoded)) / raw, 4),
        **speed,
        "encode_to_copy": round(best["copy"] / best["encode"], 3),
        "decode_to_copy": round(best["copy"] / best["decode"], 3),
    }


def cases(states: Path | None) -> list[tuple[str, list[Bits]]]:
    wide = made_up_states(3 * 1024, 7168)
    narrow = made_up_states(64 * 200, 576)
    found = [
        ("made up, 7168 wide, 1024 tokens", [wide[i : i + 1024] for i in range(0, len(wide), 1024)]),
        ("made up, 576 wide, 1024 tokens", [narrow[i : i + 1024] for i in range(0, 8192, 1024)]),
        ("made up, 576 wide, 200 tokens", [narrow[i : i + 200] for i in range(0, len(narrow), 200)]),
        ("made up, 576 wide, 30 tokens", [narrow[i : i + 30] for i in range(0, len(narrow) - 30, 30)]),
    ]
    if states is not None:
        real = np.load(states, mmap_mode="r")
        for layer in range(real.shape[1]):
            bits = np.ascontiguousarray(real[:, layer])
            for tokens in (1024, 200):
                pieces = [bits[i : i + tokens] for i in range(0, len(bits), tokens)]
                found.append((f"{states.stem}[:, {layer}], {bits.shape[1]} wide, {tokens} tokens", pieces))
            copies = -(-7168 // bits.shape[1])
            tiled = np.ascontiguousarray(np.tile(bits[:1024], copies)[:, :7168])
            found.append((f"{states.stem}[:, {layer}], tiled to 7168 wide, {len(tiled)} tokens", [tiled]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--states", type=Path, help=".npy of uint16 [T, L, H]")
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    states = options.states if options.states and options.states.exists() else None
    results = [measure(name, samples, options.repeat) for name, samples in cases(states)]
    if options.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "results": results}))
        return
    print(f"{'states':46} {'ratio':>6} {'encode':>7} {'decode':>7} {'copy':>7}  MB/s of raw states per core")
    for row in results:
        print(f"{row['states']:46} {row['ratio']:6} {row['encode_mb_s']:7} {row['decode_mb_s']:7} {row['copy_mb_s']:7}")


if __name__ == "__main__":
    main()
