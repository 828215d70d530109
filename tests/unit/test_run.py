"""`wellhead.open`: what a trainer reads is what the function that made it says, row by row."""

from __future__ import annotations

import pickle
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wellhead
from wellhead.engines.stub import stub_state
from wellhead.errors import UsageError
from wellhead.testing.runs import conversation, conversations, run_stub


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    rows = conversations(9)
    run_stub(folder, [*rows, "broken", *rows[:2]], shard_seconds=0)
    run_stub(folder, [*rows, "broken", *rows[:2]], layers="2")
    return folder / "run"


def expected(ids: np.ndarray, layers: tuple[int, ...]) -> np.ndarray:
    stack = [stub_state(ids, k, 64, 6) for k in layers] + [stub_state(ids, "final", 64, 6)]
    return np.stack(stack, axis=1)


def test_records_are_what_was_captured(run: Path) -> None:
    with wellhead.open(run) as opened:
        assert len(opened) == len(opened.ids()) == 11
        assert opened.ids()[9:] == opened.ids()[:2]
        assert (opened.layers, opened.final, opened.spec.hidden_size) == ((1, 2, 3), "post_norm", 64)
        assert Path(opened.model_path).name == "model"
        for id in opened.ids():
            record = opened.read(id)
            assert record.id == id
            assert record.input_ids.dtype == np.int32
            assert record.loss_mask.shape == record.input_ids.shape
            assert 0 < record.loss_mask.sum() < len(record.loss_mask)
            assert record.hidden_states.dtype == ml_dtypes.bfloat16
            assert np.array_equal(record.hidden_states.view(np.uint16), expected(record.input_ids, (1, 2, 3)))


def test_a_subset_of_layers(run: Path) -> None:
    with wellhead.open(run) as opened:
        record = opened.read(opened.ids()[0], layers=(3,))
        assert record.layers == (3,)
        assert np.array_equal(record.hidden_states.view(np.uint16), expected(record.input_ids, (3,)))
        with pytest.raises(UsageError, match="r_4"):
            opened.read(opened.ids()[0], layers=(3, 4))
        with pytest.raises(UsageError, match="no sample"):
            opened.read("0" * 32)


def test_threads_and_pickles_read_the_same(run: Path) -> None:
    with wellhead.open(run) as opened:
        one = [record.hidden_states.tobytes() for record in opened]
        with ThreadPoolExecutor(4) as pool:
            many = list(pool.map(lambda row: opened.read_row(row).hidden_states.tobytes(), range(len(opened))))
        copied = pickle.loads(pickle.dumps(opened))
        assert many == one == [record.hidden_states.tobytes() for record in copied]


def test_each_row_has_its_own_mask_where_the_states_are_shared(tmp_path: Path) -> None:
    """Two rows of one text: another mask policy gives another mask over the same states."""
    two_turns = {
        "messages": [
            *conversation("first question")["messages"],
            *conversation("second question", "another answer")["messages"],
        ]
    }
    run_stub(tmp_path, [two_turns])
    with wellhead.open(tmp_path / "run") as opened:
        (id,) = opened.ids()
        both = opened.read(id).loss_mask.copy()
    from wellhead.plan import PlanOptions

    outcome = run_stub(tmp_path, [two_turns], plan=PlanOptions(mask="last-assistant"))
    assert outcome.summary["captured"] == 0
    with wellhead.open(tmp_path / "run") as opened:
        last = opened.read(id).loss_mask
    assert 0 < last.sum() < both.sum()
    assert np.array_equal(both & last, last)


def test_torch_dataset_in_workers(run: Path) -> None:
    torch = pytest.importorskip("torch")
    with wellhead.open(run) as opened:
        dataset = opened.dataset()
        assert len(dataset) == 11
        for workers in (0, 2):
            loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
            for row, item in enumerate(loader):
                ids = opened.read_row(row).input_ids
                assert torch.equal(item["input_ids"], torch.from_numpy(ids.copy()))
                assert item["hidden_states"].dtype == torch.bfloat16
                bits = item["hidden_states"].view(torch.uint16).numpy()
                assert np.array_equal(bits, expected(ids, (1, 2, 3)))
            assert row == 10


def test_a_quick_look_for_findings(run: Path) -> None:
    with wellhead.open(run) as opened:
        assert opened.findings() == []


def test_no_run_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        wellhead.open(tmp_path)


def test_states_of_another_spec_never_count(tmp_path: Path) -> None:
    """Two runs of one text under two specs, their folders thrown together: each reads its own values or none."""
    rows = conversations(5)
    run_stub(tmp_path / "a", rows, shard_seconds=0)
    run_stub(tmp_path / "b", rows, shard_seconds=0, final="pre_norm")
    theirs, ours = tmp_path / "b" / "run", tmp_path / "a" / "run"
    shutil.copytree(theirs / "states", ours / "states", dirs_exist_ok=True)
    shutil.copytree(theirs / "writers", ours / "writers", dirs_exist_ok=True)
    fingerprint = wellhead.open(ours).spec.fingerprint
    with wellhead.open(ours) as opened:
        assert all(fingerprint in (ours / "states" / shard.name).read_text("latin-1") for shard in opened.index.shards)
        assert {finding.kind for finding in opened.findings()} >= {"foreign"}
    for shard in {shard.name for shard in opened.index.shards}:
        (ours / "states" / shard).unlink()
    assert run_stub(tmp_path / "a", rows).summary["captured"] == 5  # not theirs


def test_a_clock_that_went_back_loses_nothing(tmp_path: Path) -> None:
    """A life of the future committed a shard that is then lost: the next life's tombstone must count all the same."""
    rows = conversations(5)
    run_stub(tmp_path, rows)
    run = tmp_path / "run"
    (life,) = (run / "writers").iterdir()
    future = life.name.replace(life.name[:4], "2999")
    for path in (life / "ledger.jsonl", run / "run.lock"):
        if path.name == "run.lock":
            path.write_text(path.read_text().replace(life.name, future))
            continue
        lines = [line.replace(life.name.encode(), future.encode()) for line in path.read_bytes().splitlines()]
        texts = [line[: line.rindex(b',"crc":"')] for line in lines]
        path.write_bytes(b"".join(b'%b,"crc":"%08x"}\n' % (text, zlib.crc32(text)) for text in texts))
    life.rename(run / "writers" / future)
    (shard,) = (run / "states").iterdir()
    shard = shard.rename(run / "states" / shard.name.replace(life.name, future))
    assert len(wellhead.open(run)) == 5
    assert run_stub(tmp_path, rows).summary["captured"] == 0
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run_stub(tmp_path, rows).summary["captured"] == 5
    assert run_stub(tmp_path, rows).summary["captured"] == 0


def test_a_plan_whose_ids_were_changed_is_not_captured_under_their_names(tmp_path: Path) -> None:
    run_stub(tmp_path, conversations(6), fault="fail:share=1", max_failure_rate=1.0)
    path = tmp_path / "run" / "plan" / "1.parquet"
    table = pq.read_table(path)
    ids = table["input_ids"].to_pylist()
    ids[2][3] += 1
    changed = table.set_column(
        table.schema.get_field_index("input_ids"), table.schema.field("input_ids"), pa.array(ids, pa.list_(pa.int32()))
    )
    pq.write_table(changed, path)
    outcome = run_stub(tmp_path, conversations(6), retry_quarantined=True)
    assert (outcome.summary["kept"], outcome.summary["quarantine"]) == (5, {"ids_differ": 1})
