"""Plans: what they hold, when they are made anew, and that nothing of a failed one stays."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from wellhead.core import PlanItem, sample_id
from wellhead.dataset.read import Row
from wellhead.dataset.render import Rendered, Renderer
from wellhead.errors import DiskFull, PreflightRefused, RowRejected, StoreDamaged, UsageError
from wellhead.paths import RunPaths
from wellhead.plan import Plan, PlanOptions, make_plan
from wellhead.plan_build import PlanProgress
from wellhead.plan_file import GROUP_ROWS, KeptRow, PlanHead, PlanWriter, RejectedRow, SourceFile
from wellhead.store.atomic import POSIX
from wellhead.testing.disk import FullDisk
from wellhead.testing.models import make_tiny_model


def talk(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}


def write(file: Path, rows: Sequence[dict[str, Any] | str]) -> Path:
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


ROWS: list[dict[str, Any] | str] = [
    talk("one", "first"),
    talk("two", "second", "more", "third"),
    "{\n",
    talk("one", "first"),
    "\n",
    {"messages": []},
    talk("three", "the well"),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", ROWS)


def test_a_plan_holds_every_row_of_the_file(tmp_path: Path, data: Path, model: Path) -> None:
    plan = make_plan(tmp_path / "run", data, model)
    good = [Row(line, 0, ROWS[line - 1]["messages"]) for line in (1, 2, 4, 7)]  # type: ignore[index]
    expected = Renderer(model, plan.overlay).render(good)
    ids = [sample_id(row.input_ids.astype("<i4").tobytes()) for row in expected if isinstance(row, Rendered)]
    assert (plan.rows, len(plan), plan.number) == (6, 4, 1)
    assert plan.ids() == ids
    assert ids[0] == ids[2]
    assert plan.rejected == {"bad_json": 1, "no_messages": 1}
    assert [(line, reason) for line, reason, _ in plan.rejects()] == [(3, "bad_json"), (6, "no_messages")]
    tokens = [len(row.input_ids) for row in expected if isinstance(row, Rendered)]
    assert plan.items() == [PlanItem(ids[i], tokens[i], 1) for i in (0, 1, 3)]
    assert plan.distinct.tolist() == [0, 1, 3]
    for position, row in enumerate(expected):
        assert isinstance(row, Rendered)
        sample = plan.sample_at(position)
        assert sample.id == ids[position]
        assert sample.input_ids.tolist() == row.input_ids.tolist()
        assert sample.loss_mask.tolist() == row.loss_mask.tolist()
        at = plan.row(int(plan.kept[position]))
        assert (at.line, at.id, at.tokens, at.reason) == (good[position].line, ids[position], tokens[position], None)
        assert at.supervised_tokens == row.loss_mask.sum()
    assert (plan.row(2).line, plan.row(2).id, plan.row(2).reason) == (3, None, "bad_json")
    assert [s.id for s in plan.samples([ids[3], ids[1], ids[3]])] == [ids[3], ids[1], ids[3]]
    for bad in (-1, 4):
        with pytest.raises(IndexError):
            plan.sample_at(bad)
    with pytest.raises(KeyError):
        plan.samples(["0" * 32])
    assert plan.overlay.max_length == 4096
    assert plan.source == SourceFile.of(data)


def test_the_first_row_s_mask_goes_with_the_id_and_each_row_keeps_its_own(tmp_path: Path) -> None:
    ids = np.arange(5, dtype=np.int32)
    id = sample_id(ids.tobytes())
    masks = [np.array([0, 0, 1, 1, 1], np.uint8), np.array([0, 0, 0, 0, 1], np.uint8)]
    path = written(tmp_path, [KeptRow(n + 1, id, ids, mask, 5, 1) for n, mask in enumerate(masks)])
    plan = Plan.load(path)
    assert plan.samples([id])[0].loss_mask.tolist() == masks[0].tolist()
    assert [plan.sample_at(n).loss_mask.tolist() for n in (0, 1)] == [mask.tolist() for mask in masks]


def written(folder: Path, rows: list[KeptRow | RejectedRow]) -> Path:
    from wellhead.dataset.overlay import Overlay

    writer = PlanWriter(
        folder / "1.parquet",
        PlanHead(1, Overlay("all-assistant", 9, "2026-12-01", "", ""), SourceFile("x", 1, 2, 3), "m"),
        POSIX,
    )
    for row in rows:
        writer.add(row)
    writer.finish()
    return folder / "1.parquet"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[KeptRow | RejectedRow]]:
    """More rows than a row group has, with rejected ones and repetitions."""
    chance = np.random.default_rng(3)
    rows: list[KeptRow | RejectedRow] = []
    for line in range(1, GROUP_ROWS * 2 + 100):
        if line % 5 == 0:
            rows.append(RejectedRow(line, ("bad_json", "no_messages")[line % 2], f"at {line}"))
            continue
        ids = chance.integers(0, 50_000, chance.integers(1, 60)).astype(np.int32) if line % 7 else np.ones(9, np.int32)
        mask = chance.integers(0, 2, len(ids)).astype(np.uint8)
        rows.append(KeptRow(line, sample_id(ids.tobytes()), ids, mask, len(ids) + line % 3, 1 + line % 2))
    return written(tmp_path_factory.mktemp("large"), rows), rows


def test_rows_over_several_row_groups(large: tuple[Path, list[KeptRow | RejectedRow]]) -> None:
    path, rows = large
    plan = Plan.load(path)
    kept = [row for row in rows if isinstance(row, KeptRow)]
    rejects = [row for row in rows if isinstance(row, RejectedRow)]
    assert pq.ParquetFile(path).num_row_groups > 2
    assert plan.ids() == [row.id for row in kept]
    first = {row.id: row for row in reversed(kept)}
    expected = [first[id] for id in dict.fromkeys(row.id for row in kept)]
    assert plan.items() == [PlanItem(row.id, len(row.input_ids), row.generation) for row in expected]
    assert list(plan.rejects()) == [(row.line, row.reason, row.detail) for row in rejects]
    assert sum(plan.rejected.values()) == len(rejects)
    for position in [0, 1, len(kept) // 2, len(kept) - 1, *range(5, len(kept), 997)]:
        sample, row = plan.sample_at(position), kept[position]
        assert (sample.id, sample.input_ids.tolist(), sample.loss_mask.tolist()) == (
            row.id, row.input_ids.tolist(), row.loss_mask.tolist())  # fmt: skip
    asked = [expected[n].id for n in (len(expected) - 1, 0, len(expected) // 2, 1)]
    assert [s.input_ids.tolist() for s in plan.samples(asked)] == [first[id].input_ids.tolist() for id in asked]
    assert plan.column("full_tokens").sum() == sum(row.full_tokens for row in kept)


def _in_child(plan: Plan, position: int, answers: Any) -> None:
    answers.put(plan.sample_at(position).input_ids.tolist())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_plan_goes_to_workers(large: tuple[Path, list[KeptRow | RejectedRow]], method: str) -> None:
    path, rows = large
    plan, kept = Plan.load(path), [row for row in rows if isinstance(row, KeptRow)]
    plan.sample_at(0)
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(plan, 20_000, answers))  # type: ignore[attr-defined]
    child.start()
    assert answers.get(timeout=60) == kept[20_000].input_ids.tolist()
    child.join(60)
    assert child.exitcode == 0
    assert plan.sample_at(20_001).input_ids.tolist() == kept[20_001].input_ids.tolist()


def test_a_plan_is_read_by_several_threads(large: tuple[Path, list[KeptRow | RejectedRow]]) -> None:
    path, rows = large
    kept = [row for row in rows if isinstance(row, KeptRow)]
    plan = pickle.loads(pickle.dumps(Plan.load(path)))
    wrong: list[int] = []

    def read(seed: int) -> None:
        positions = np.random.default_rng(seed).integers(0, len(kept), 200).tolist()
        wrong.extend(p for p in positions if plan.sample_at(p).input_ids.tolist() != kept[p].input_ids.tolist())

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_unchanged_inputs_are_not_tokenised_again(tmp_path: Path, data: Path, model: Path) -> None:
    first = make_plan(tmp_path / "run", data, model)
    code = (
        "import sys; from pathlib import Path; from wellhead.plan import make_plan\n"
        f"plan = make_plan(Path({str(tmp_path / 'run')!r}), Path({str(data)!r}), Path({str(model)!r}))\n"
        "assert plan.number == 1 and len(plan) == 4\n"
        "assert not {'transformers', 'tokenizers', 'torch'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert sorted(p.name for p in first.path.parent.iterdir()) == ["1.parquet", "current"]


def test_a_new_mask_is_a_new_plan_of_the_same_states(tmp_path: Path, data: Path, model: Path) -> None:
    run = tmp_path / "run"
    first, second = (make_plan(run, data, model, PlanOptions(mask=m)) for m in ("all-assistant", "last-assistant"))
    assert (first.number, second.number, Plan.current(run).number) == (1, 2, 2)
    assert second.items() == first.items()  # generations too
    assert second.sample_at(1).loss_mask.sum() < first.sample_at(1).loss_mask.sum()
    again = make_plan(run, data, model)
    assert (again.number, Plan.current(run).number) == (1, 1)
    assert again.overlay == first.overlay


def test_generations_name_the_first_plan_of_each_state(tmp_path: Path, model: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "rows.jsonl"
    a, b, c, d = (talk(name, "answer") for name in "abcd")
    generations = []
    for rows in ([a, b], [c, b, a], [c, d], [a, b, c, d]):
        write(file, rows)
        os.utime(file, ns=(0, len(generations)))  # a file system may be too coarse to tell the writes apart
        plan = make_plan(run, file, model)
        generations.append([item.generation for item in plan.items()])
    assert generations == [[1, 1], [2, 1, 1], [2, 3], [1, 1, 2, 3]]


@pytest.mark.parametrize("what", ["size", "mtime", "inode"])
def test_a_changed_file_is_planned_anew(tmp_path: Path, data: Path, model: Path, what: str) -> None:
    first = make_plan(tmp_path / "run", data, model)
    stat = data.stat()
    if what == "size":
        write(data, [*ROWS, talk("new", "row")])
        os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif what == "mtime":
        os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    else:
        other = write(tmp_path / "other.jsonl", ROWS)
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        other.rename(data)
    second = make_plan(tmp_path / "run", data, model)
    assert (first.number, second.number) == (1, 2)
    assert set(first.ids()) <= set(second.ids())


def test_the_date_is_frozen_with_the_first_plan(tmp_path: Path, data: Path) -> None:
    model = make_tiny_model(tmp_path / "dated")
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}\n" + template)
    first = make_plan(tmp_path / "run", data, model, PlanOptions(date="2020-02-29"))
    os.utime(data, ns=(1, 1))
    resumed = make_plan(tmp_path / "run", data, model)
    assert (resumed.number, resumed.overlay.date) == (2, "2020-02-29")
    assert resumed.ids() == first.ids()
    moved = make_plan(tmp_path / "run", data, model, PlanOptions(date="2020-03-01"))
    assert set(moved.ids()).isdisjoint(first.ids())
    with pytest.raises(UsageError, match="no date"):
        make_plan(tmp_path / "run", data, model, PlanOptions(date="tomorrow"))


def test_the_tokenizer_and_the_template_are_part_of_a_plan(tmp_path: Path, data: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    make_plan(tmp_path / "run", data, model)
    for number, (file, old, new) in enumerate(
        [("chat_template.jinja", "\n", " \n"), ("tokenizer_config.json", "4096", "4097"),
         ("tokenizer.json", '"version"', '"version" ')], 2
    ):  # fmt: skip
        text = (model / file).read_text()
        assert old in text
        (model / file).write_text(text.replace(old, new, 1))
        assert make_plan(tmp_path / "run", data, model).number == number


def test_max_length_must_suit_the_model(tmp_path: Path, data: Path, model: Path) -> None:
    with pytest.raises(UsageError, match="4096 positions"):
        make_plan(tmp_path / "run", data, model, PlanOptions(max_length=4097))
    with pytest.raises(UsageError):
        make_plan(tmp_path / "run", data, model, PlanOptions(max_length=0))
    plan = make_plan(tmp_path / "run", data, model, PlanOptions(max_length=25))
    assert plan.column("tokens").max() == 25
    assert plan.column("full_tokens").max() > 25
    endless = make_tiny_model(tmp_path / "endless", max_position_embeddings=None)
    with pytest.raises(PreflightRefused, match="positions"):
        make_plan(tmp_path / "run", data, endless)


def test_strict_names_the_first_rejected_row_and_leaves_nothing(tmp_path: Path, data: Path, model: Path) -> None:
    for run in (tmp_path / "fresh", tmp_path / "planned"):
        if run.name == "planned":
            make_plan(run, data, model)
        with pytest.raises(RowRejected, match="line 3: bad_json"):
            make_plan(run, data, model, PlanOptions(strict=True))
    assert list((tmp_path / "fresh/plan").iterdir()) == []
    clean = write(tmp_path / "clean.jsonl", [talk("a", "b")])
    assert len(make_plan(tmp_path / "clean", clean, model, PlanOptions(strict=True))) == 1


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, data: Path, model: Path) -> None:
    def touch(_: PlanProgress) -> None:
        os.utime(data, ns=(5, 5))

    with pytest.raises(UsageError, match="changed while"):
        make_plan(tmp_path / "run", data, model, progress=touch)
    assert list((tmp_path / "run/plan").iterdir()) == []


def test_progress_tells_bytes_rows_and_tokens(tmp_path: Path, data: Path, model: Path) -> None:
    seen: list[PlanProgress] = []
    plan = make_plan(tmp_path / "run", data, model, progress=seen.append)
    size = data.stat().st_size
    assert seen[-1] == PlanProgress(size, size, 6, int(plan.column("tokens").sum()))


def test_a_full_disk_ends_planning_and_the_next_call_goes_on(tmp_path: Path, data: Path, model: Path) -> None:
    needed = FullDisk(1 << 20)
    make_plan(tmp_path / "measure", data, model, disk=needed)
    used = (1 << 20) - needed.room
    for room in [*range(6), 1_000, 3_000, *range(used - 20, used)]:
        run = tmp_path / f"run{room}"
        with pytest.raises(DiskFull):
            make_plan(run, data, model, disk=FullDisk(room))
        assert [file.name for file in run.rglob(".*")] == []
        found = Plan.find(run)
        assert found is None or len(found) == 4  # only the pointer's last sync failed
    assert len(make_plan(run, data, model)) == 4


def test_a_crash_before_the_pointer_costs_no_tokenising(tmp_path: Path, data: Path, model: Path) -> None:
    make_plan(tmp_path / "run", data, model)
    RunPaths(tmp_path / "run").current_plan.unlink()
    seen: list[PlanProgress] = []
    assert make_plan(tmp_path / "run", data, model, progress=seen.append).number == 1
    assert seen == []
    assert Plan.current(tmp_path / "run").number == 1


def test_damaged_plans_are_named(tmp_path: Path, data: Path, model: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UsageError, match="no plan"):
        Plan.current(run)
    path, pointer = make_plan(run, data, model).path, RunPaths(run).current_plan
    whole = path.read_bytes()
    for content, what in [
        ("../../etc/passwd", "names no plan"),
        ("7.parquet 0123456789abcdef\n", "is gone"),
        ("1.parquet\n", "names no plan"),
        ("", "names no plan"),
    ]:
        pointer.write_text(content)
        with pytest.raises(StoreDamaged, match=what):
            Plan.current(run)
    pointer.write_text(f"1.parquet {0:016x}\n")
    for damaged in (b"", whole[:-20], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(StoreDamaged, match=r"1\.parquet"):
            Plan.current(run)
    path.write_bytes(whole.replace(b'"schema": 0', b'"schema": 9'))
    with pytest.raises(StoreDamaged, match="schema version 9"):
        Plan.current(run)
    pq.write_table(pq.read_table(path).replace_schema_metadata({}), path)
    with pytest.raises(StoreDamaged, match="no plan of wellhead"):
        Plan.current(run)


def test_an_unwritable_folder_and_a_missing_file_are_usage_errors(tmp_path: Path, data: Path, model: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot"):
        make_plan(tmp_path / "file", data, model)
    with pytest.raises(UsageError, match="cannot read the data file"):
        make_plan(tmp_path / "run", tmp_path / "none.jsonl", model)


@pytest.mark.slow
def test_memory_is_flat_in_the_file_s_size(tmp_path: Path, model: Path) -> None:
    peaks = []
    for count in (1_200, 4_800):
        rows = [talk(f"question {n} " + "x y " * 100, "answer " * 20) for n in range(count)]
        data = write(tmp_path / f"{count}.jsonl", rows)
        code = (
            "import resource; from pathlib import Path; from wellhead.plan import make_plan\n"
            f"make_plan(Path({str(tmp_path / f'run{count}')!r}), Path({str(data)!r}), Path({str(model)!r}))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=280)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 40 << 20, peaks


def test_an_old_plan_that_cannot_be_read_is_no_obstacle(tmp_path: Path, data: Path, model: Path) -> None:
    run = tmp_path / "run"
    make_plan(run, data, model)
    (RunPaths(run).plans / "7.parquet").write_bytes(b"no parquet")
    (RunPaths(run).plans / "9.parquet").mkdir()
    assert make_plan(run, data, model).number == 1
    assert make_plan(run, data, model, PlanOptions(mask="last-assistant")).number == 10
