"""How long a run with a million recorded samples takes to open: load, `missing` for every id, one `locate`.

    python benchmarks/open_million.py [--samples 1000000] [--samples-a-shard 30]

Makes a run folder that holds ledgers only, measures in a fresh process, and prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from wellhead.core import Provenance
from wellhead.paths import RunPaths
from wellhead.store.index import StoreIndex
from wellhead.store.ledger import Attempt, Commit, Opened, encode_line
from wellhead.store.life import Life
from wellhead.store.records import shard_name

TENSORS = ("r3", "r31", "r59", "final", "input_ids")
STATES = TENSORS[:-1]
LIVES = 3


def build(run: Path, samples: int, samples_a_shard: int) -> list[str]:
    """Writes the ledgers of a few lives; returns the ids."""
    rng = np.random.default_rng(0)
    packed = rng.bytes(16 * samples).hex()
    ids = [packed[at : at + 32] for at in range(0, len(packed), 32)]
    details = {"plugin": "0.1.0", "flags": ["--disable-radix-cache", "--tp-size=8"], "points": {"r3": "layers.2"}}
    provenance = Provenance("sglang", "0.5.6", details)
    bounds = np.linspace(0, samples, LIVES + 1).astype(int)
    for begin, end in itertools.pairwise(bounds.tolist()):
        life = replace(Life.this_process(), start_time=1.0)
        ledger = RunPaths(run).writer(life.id).ledger
        ledger.parent.mkdir(parents=True)
        with ledger.open("wb") as file:
            file.write(encode_line(Opened(life, "f" * 32)))
            for number, first in enumerate(range(begin, end, samples_a_shard)):
                members = ids[first : min(first + samples_a_shard, end)]
                file.write(encode_line(Attempt(tuple(members))))
                file.write(encode_line(commit(life, number, members, provenance, rng)))
    return ids


def commit(life: Life, number: int, ids: list[str], provenance: Provenance, rng: np.random.Generator) -> Commit:
    shape = (len(ids), len(TENSORS))
    sizes = rng.integers(400_000, 500_000, shape).astype("<u8")
    offsets = (np.cumsum(sizes).reshape(shape) - sizes + 65_536).astype("<u8")
    tokens = rng.integers(100, 10_000, len(ids)).tolist()
    return Commit(
        shard=shard_name(life.id, number),
        size=int(sizes.sum()) + 65_536,
        head_size=65_536,
        head_xxh3=int(rng.integers(2**63)),
        codec="planes-zstd",
        tensors=TENSORS,
        tables={name: (60_000 + 7_168 * at, 7_168, int(rng.integers(2**63))) for at, name in enumerate(STATES)},
        ids=tuple(ids),
        tokens=tuple(tokens),
        offsets=offsets,
        sizes=sizes,
        xxh3=rng.integers(2**63, size=shape).astype("<u8"),
        raw_bytes=sum(tokens) * len(STATES) * 7_168 * 2,
        provenance=provenance,
    )


def measure(run: Path, id_file: Path) -> dict[str, float]:
    ids = id_file.read_text().split()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.perf_counter(), time.process_time()
    index = StoreIndex.load(run)
    loaded, load_cpu_s = time.perf_counter(), time.process_time() - cpu
    after_load = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not index.missing(ids, STATES)
    complete = time.perf_counter()
    lacking = index.missing(ids, [*STATES, "r45"])
    lacked = time.perf_counter()
    index.locate(ids[len(ids) // 2], "final")
    located = time.perf_counter()
    assert index.samples == len(ids) == len(lacking)
    return {
        "samples": index.samples,
        "shards": len(index.shards),
        "load_s": round(loaded - began, 3),
        "load_cpu_s": round(load_cpu_s, 3),
        "missing_none_s": round(complete - loaded, 3),
        "missing_all_s": round(lacked - complete, 3),
        "locate_ms": round(1e3 * (located - lacked), 3),
        "rss_before_mb": round(base / 1e3, 1),
        "peak_rss_load_mb": round(after_load / 1e3, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--samples-a-shard", type=int, default=30)
    parser.add_argument("--measure", nargs=2, metavar=("RUN", "IDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), Path(args.measure[1]))))
        return
    with tempfile.TemporaryDirectory(prefix="wellhead-open-") as folder:
        run, id_file = Path(folder) / "run", Path(folder) / "ids"
        id_file.write_text("\n".join(build(run, args.samples, args.samples_a_shard)))
        ledger_mb = sum(path.stat().st_size for path in run.rglob("ledger.jsonl")) / 1e6
        command = [sys.executable, __file__, "--measure", str(run), str(id_file)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    print(json.dumps({**result, "ledger_mb": round(ledger_mb, 1)}, indent=2))


if __name__ == "__main__":
    main()
