"""`verify` finds every byte that is not what was recorded, names it, and touches nothing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from wellhead.core import Capture, Provenance, sample_id, state_names
from wellhead.engines.stub import stub_state
from wellhead.finding import Finding
from wellhead.paths import RunPaths
from wellhead.recapture import verify_recapture
from wellhead.run import Run
from wellhead.store.index import StoreIndex
from wellhead.store.life import Life
from wellhead.store.writer import StoreOptions, StoreWriter
from wellhead.testing.runs import conversations, run_stub
from wellhead.verify import verify
from wellhead.verify_states import RowsSeen


@pytest.fixture(params=["planes-zstd", "raw"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    run_stub(tmp_path, conversations(12), codec=request.param, shard_seconds=0)
    return tmp_path / "run"


def wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.kind != "suspect"]


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def everything(run: Path) -> dict[Path, tuple[str, int]]:
    files = (path for path in sorted(run.rglob("*")) if path.is_file())
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def test_a_sound_run_is_sound_and_untouched(run: Path) -> None:
    before = everything(run)
    report = verify(run, deep=True, recapture=3)
    assert wrong(report.findings) == []
    assert report.ok
    assert report.checked["samples"] == 12
    assert report.checked["tensors"] == 12 * 4
    assert report.checked["stored_bytes"] == sum(path.stat().st_size for path in (run / "states").iterdir())
    assert everything(run) == before


def places(run: Path) -> Iterator[tuple[str, Path, int]]:
    """A byte in every region of a shard: prefix, header, padding, then every tensor's first and last."""
    index = StoreIndex.load(run)
    shard = index.shards[0]
    path, commit = run / "states" / shard.name, index.commit_of(shard)
    yield "prefix", path, 0
    yield "header", path, 9
    yield "end of head", path, shard.head_size - 1
    for name, (offset, _, _) in commit.tables.items():
        yield f"bias of {name}", path, offset + 5
    for column, name in enumerate(commit.tensors):
        for row in (0, len(commit.ids) - 1):
            offset, size = int(commit.offsets[row, column]), int(commit.sizes[row, column])
            yield f"{name} of {row}, first byte", path, offset
            yield f"{name} of {row}, last byte", path, offset + size - 1


def test_every_region_of_a_shard(run: Path) -> None:
    for what, path, at in list(places(run)):
        whole = path.read_bytes()
        flip(path, at, bit=at % 8)
        report = verify(run, deep=True)
        assert [f.kind for f in wrong(report.findings)][:1] == ["corrupt"], what
        assert report.findings[0].shard == path.name, what
        path.write_bytes(whole)
    assert verify(run, deep=True).ok


def test_flips_anywhere_in_a_shard_at_random(run: Path) -> None:
    rng = random.Random(5)
    shard = sorted((run / "states").iterdir())[-1]
    whole = shard.read_bytes()
    for _ in range(25):
        flip(shard, rng.randrange(len(whole)), rng.randrange(8))
        assert not verify(run, deep=True).ok
        shard.write_bytes(whole)


def test_flips_anywhere_in_a_ledger_run_json_and_the_plan(run: Path) -> None:
    rng = random.Random(6)
    ledger = next(run.glob("writers/*/ledger.jsonl"))
    for path in (ledger, run / "run.json", run / "plan" / "1.parquet"):
        whole = path.read_bytes()
        for _ in range(25):
            at = rng.randrange(len(whole))
            flip(path, at, rng.randrange(8))
            assert not verify(run, deep=True).ok, (path.name, at)
            path.write_bytes(whole)
    assert verify(run, deep=True).ok


def test_what_is_missing_cut_unrecorded_or_strange(run: Path) -> None:
    shards = sorted((run / "states").iterdir())
    whole = shards[0].read_bytes()

    def kinds() -> list[tuple[str, str | None]]:
        return [(finding.kind, finding.shard) for finding in wrong(verify(run).findings)]

    shards[0].unlink()
    assert kinds() == [("missing", shards[0].name)]
    shards[0].write_bytes(whole[:-1])
    assert kinds() == [("corrupt", shards[0].name)]
    shards[0].write_bytes(whole)
    (run / "states" / "notes.txt").write_text("mine")
    assert kinds() == [("foreign", "notes.txt")]
    (run / "states" / "notes.txt").unlink()
    orphan = run / "states" / shards[0].name.replace("000001", "000009")
    orphan.write_bytes(whole)
    assert kinds() == [("orphan", orphan.name)]


def test_values_that_are_whole_but_impossible(tmp_path: Path) -> None:
    """Zeros that somebody stored past the checks: every hash fits, the values do not."""
    run_stub(tmp_path, conversations(4))
    run = tmp_path / "run"
    with Run(run) as opened:
        fingerprint, width, model = opened.spec.fingerprint, opened.spec.hidden_size, opened.spec.blocks
    ids = np.arange(9, dtype=np.int32)
    states = {name: stub_state(ids, 1, width, model) for name in ("r1", "final")}
    states |= {"r3": np.zeros((9, width), np.uint16), "final": stub_state(ids, "final", width, model)}
    with StoreWriter(run, Life.this_process(), fingerprint, StoreOptions()) as writer:
        writer.add(Capture(sample_id(ids.tobytes()), ids, states, Provenance("stub", "1")))
        writer.commit()
    (finding,) = wrong(verify(run, deep=True).findings)
    assert (finding.kind, finding.id) == ("corrupt", sample_id(ids.tobytes()))
    assert "zero_rows" in finding.detail
    assert "r3" in finding.detail


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [("shift", "r1"), ("shift:layer=r3", "r3"), ("pre_norm", "final"), ("other_states", "r1")],
)
def test_recapture_finds_what_no_check_can_see(tmp_path: Path, fault: str, tensor: str) -> None:
    script = f"{fault}{',' if ':' in fault else ':'}after=1"  # not from the start: the preflight would refuse
    run_stub(tmp_path, conversations(6), fault=script)
    assert verify(tmp_path / "run", deep=True).ok
    report = verify(tmp_path / "run", recapture=6)
    assert not report.ok
    assert any(tensor in finding.detail for finding in wrong(report.findings))
    assert next(layer for layer in report.layers if layer["name"] == tensor)["own_error"] > 0.5


def test_recapture_reports_own_and_nearest_neighbour(tmp_path: Path) -> None:
    run_stub(tmp_path, conversations(6))
    with Run(tmp_path / "run") as run:
        findings, layers = verify_recapture(run, 4)
    assert findings == []
    assert [layer["name"] for layer in layers] == list(state_names((1, 3)))
    assert all(layer["own_error"] == 0.0 and layer["neighbour_error"] > 0.9 for layer in layers)
    assert {layer["samples"] for layer in layers} == {4}


def test_rows_of_another_sample_are_seen_across_samples() -> None:
    seen, width = RowsSeen(), 32
    ids = np.arange(1, 21, dtype=np.int32)
    other = ids + 100
    states, others = stub_state(ids, 1, width, 4), stub_state(other, 1, width, 4)
    assert seen.look("a", "r1", ids, states) == {}
    mixed = others.copy()
    mixed[5:9] = states[5:9]
    assert seen.look("b", "r1", other, mixed) == {"a": 4}
    shared = np.concatenate([ids[:10], ids[10:] + 50]).astype(np.int32)
    assert seen.look("c", "r1", shared, stub_state(shared, 1, width, 4)) == {}  # a shared prefix is no find


def test_rows_seen_stays_bounded_and_still_sees() -> None:
    seen, width = RowsSeen(most=64), 32
    ids = np.arange(1, 2001, dtype=np.int32)
    states = stub_state(ids, 1, width, 4)
    seen.look("a", "r1", ids, states)
    assert sum(seen.look("b", "r1", ids + 1, states).values()) > 0


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    from wellhead.errors import UsageError

    with pytest.raises(UsageError, match=r"run\.json"):
        verify(RunPaths(tmp_path).root)
