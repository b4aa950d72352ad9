"""Segments: what is put comes back byte for byte, moves both ways while it is read, and goes when nothing names it."""

import io
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.http import Http404
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import given, settings, strategies as st

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from rollout_inspector.streams.trajectory import Row, Step, Trajectory
from rollouts.jobs.imports import imports
from rollouts.jobs.storage import token_moves, unused_files
from rollouts.jobs.storage.token_moves import move_run
from rollouts.store import files, models
from rollouts.store.chat_templates.tokenizers import byte_table_of, find_tokenizer
from rollouts.store.files.bucket import BucketStorage
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import StoredStep, TokenSegment
from rollouts.store.outages import is_outage
from rollouts.store.runs import runs
from rollouts.store.runs.runs import create_run, delete_run, end_run
from rollouts.store.token_arrays import STORES, TokenItem, segment_file
from rollouts.store.token_arrays.items import COLUMNS, ROW_ARRAYS, STEP_ARRAYS
from rollouts.store.trajectories import token_moves as array_moves, token_segments, trajectory_parts
from rollouts.store.trajectories.launched_trajectories import save_steps
from rollouts.store.trajectories.rows import row_columns, row_spans, row_window
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.token_encoding import encode_trajectories
from rollouts.store.trajectories.token_moves import fill_origins
from rollouts.store.trajectories.trajectories import load_trajectories, load_trajectory
from tests.conftest import ROOT
from tests.storage.build import assert_same, chain, rows_only

SEGMENTS = STORES["segments"]


@pytest.fixture(autouse=True)
def every_batch_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(SEGMENTS), "min_tokens", 1)


@pytest.fixture
def run(db: None) -> Iterator[models.Run]:
    one = create_run(models.Run.Kind.IMPORT, "test", token_store="segments")
    yield one
    files.delete_all(f"segments/{one.code}/")


def save(run: models.Run, values: Sequence[Trajectory]) -> list[models.StoredTrajectory]:
    """Store trajectories as an import does."""
    return save_trajectories(run, values, encoded=encode_trajectories(values, put_for=run))


def segment_keys(run: models.Run) -> list[str]:
    return [one.key for one in files.listed(f"segments/{run.code}/")]


# -- the file


def arrays_of(dtype: str) -> Any:
    """Arrays of every bit pattern, empty ones and None among them."""
    if dtype == "b1":
        return st.none() | st.lists(st.booleans(), max_size=9).map(lambda found: np.array(found, dtype=np.bool_))
    size = np.dtype(dtype).itemsize
    raw = st.integers(0, 9).flatmap(lambda n: st.binary(min_size=n * size, max_size=n * size))
    return st.none() | raw.map(lambda data: np.frombuffer(data, dtype=dtype))


def values_of(fields: dict[str, Any]) -> Any:
    return st.fixed_dictionaries({name: arrays_of(field.dtype.str.lstrip("|<")) for name, field in fields.items()})


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
ITEMS = st.lists(
    st.builds(TokenItem, st.just("abc"), st.integers(0, 9), st.none(), values_of(STEP_ARRAYS), st.none())
    | st.builds(
        TokenItem, st.just("é"), st.none(), st.integers(0, 9), values_of(ROW_ARRAYS),
        st.dictionaries(NAMES, arrays_of("f4").filter(lambda values: values is not None), max_size=3),
    ),
    min_size=1, max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(ITEMS)
def test_every_array_comes_back_bit_for_bit(items: list[TokenItem]) -> None:
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_file, "GROUP_TOKENS", 8)  # so that a few items make several row groups
        segment_file.write_items(items, file)
    opened = pq.ParquetFile(io.BytesIO(file.getvalue()))
    n = 0
    for group in range(opened.num_row_groups):
        columns = {name: segment_file.read_column(opened, group, name) for name in (*segment_file.ARRAYS, COLUMNS)}
        for k in range(opened.metadata.row_group(group).num_rows):
            item, n = items[n], n + 1
            for name in segment_file.ARRAYS:
                same_bytes(columns[name].at(k), item.arrays.get(name))
            found = columns[COLUMNS].at(k)
            assert found.keys() == (item.columns or {}).keys()
            for name, values in found.items():
                same_bytes(values, (item.columns or {})[name])
    assert n == len(items)


def same_bytes(found: Any, wanted: Any) -> None:
    assert (found is None) == (wanted is None)
    if wanted is not None:
        assert found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()


def test_a_window_reads_one_range_and_the_cache_keeps_it(run: models.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "GROUP_TOKENS", 100)
    records = save(run, [chain(f"t{n}", 6, n) for n in range(20)])
    (key,) = segment_keys(run)
    opened: list[str] = []
    real = segment_file.read_column
    monkeypatch.setattr(
        segment_file, "read_column", lambda file, group, name: opened.append(group) or real(file, group, name)
    )
    whole = pq.ParquetFile(io.BytesIO(files.read_range(key, 0, files.size(key))))
    row_window(records[7], 0, 0, 10)
    assert len(set(opened)) == 1 < whole.num_row_groups
    n = len(opened)
    row_window(records[7], 0, 0, 10)
    assert len(opened) == n


def test_a_bucket_is_asked_for_ranges(bucket: str, settings: Any, monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": bucket}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    run = create_run(models.Run.Kind.IMPORT, "test", token_store="segments")
    long = np.random.default_rng(1).integers(0, 150_000, (40, 20_000), dtype=np.int32)
    values = [Trajectory(f"t{n}", (Step(ids, ids[:9]),)) for n, ids in enumerate(long)]
    records = save(run, values)
    (key,) = segment_keys(run)
    read: list[int] = []
    real = BucketStorage.read_range
    monkeypatch.setattr(
        BucketStorage, "read_range",
        lambda self, name, start, stop: read.append(stop - start) or real(self, name, start, stop),
    )
    assert row_window(records[11], 0, 0, 99).ids.tolist() == long[11, :99].tolist()
    assert 0 < sum(read) < files.size(key) / 2
    for step in load_trajectory(records[39]).steps:
        assert step.prompt_ids.tolist() == long[39].tolist()
    files.delete(key)
    with pytest.raises(files.StorageDown, match=f"lacks {re.escape(key)}, .* Restore it"):
        load_trajectory(records[0])
    files.put(key, io.BytesIO(b"something else"))
    with pytest.raises(files.StorageDown, match=r"cannot be read\. Restore it"):
        load_trajectory(records[0])


# -- what others read


def written_in_docs(language: str) -> str:
    """The example of docs/segments.md in a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "segments.md").read_text(), re.DOTALL)
    return str(found)


def duckdb_rows(sql: str) -> Any:
    """The rows of a query, by a process of its own: DuckDB writes two pages about its own leaks when a process ends."""
    code = "import duckdb, json, sys; print(json.dumps(duckdb.sql(sys.argv[1]).fetchall()))"
    return json.loads(subprocess.run([sys.executable, "-c", code, sql], capture_output=True, check=True).stdout)


def test_duckdb_and_polars_read_segments_as_the_docs_say(run: models.Run, tmp_path: Path) -> None:
    values = [chain(f"t{n}", 3, n) for n in range(4)] + [rows_only()]
    records = save(run, values)
    values.insert(4, chain("t5", 1, 5))  # in a file of its own, without alternatives
    records.insert(4, *save(run, values[4:5]))
    assert len({len(pq.read_schema(io.BytesIO(files.read_range(key, 0, files.size(key)))).names)
                for key in segment_keys(run)}) == 2
    for key in segment_keys(run):
        (tmp_path / Path(key).name).write_bytes(files.read_range(key, 0, files.size(key)))
    sql, code = written_in_docs("sql"), written_in_docs("python")
    everywhere = "data/files/segments/*/*.parquet"
    assert everywhere in sql and everywhere in code
    found = duckdb_rows(sql.replace(everywhere, f"{tmp_path}/*.parquet"))
    wanted = {
        record.code: np.concatenate([step.logprobs for step in value.steps if step.logprobs is not None])
        for record, value in zip(records[:5], values, strict=False)
    }
    assert {name: n for name, _, n in found} == {name: len(held) for name, held in wanted.items()}
    assert all(mean == pytest.approx(float(wanted[name].mean()), rel=1e-4) for name, mean, _ in found)
    assert [mean for _, mean, _ in found] == sorted(mean for _, mean, _ in found)

    place: dict[str, Any] = {}
    lines = code.replace(everywhere, f"{tmp_path}/*.parquet").strip()
    start = lines.index("\n(") + 1
    exec(f"{lines[:start]}\nfound = {lines[start:]}", place)
    sampled = Counter(np.concatenate([step.completion_ids for value in values for step in value.steps]).tolist())
    assert place["found"]["len"].to_list() == [n for _, n in sampled.most_common(10)]
    columns = duckdb_rows(f"SELECT columns['advantages'] FROM '{tmp_path}/*.parquet' WHERE row = 0")
    assert columns == [[[0.0, 0.0, 0.5, 0.5]]]


# -- writing


def test_an_import_puts_its_arrays_into_segments(run: models.Run, tmp_path: Path) -> None:
    source = create_run(models.Run.Kind.IMPORT, "source")
    values = [chain(f"t{n}", 4, n, hostile="é") for n in range(5)] + [rows_only()]
    save_trajectories(source, values)
    path = tmp_path / "all.jsonl"
    call_command("export_rollouts", source.code, "--format", "own_jsonl", "--output", str(path))
    imports.import_files(run, [path])
    assert (run.status, run.n_trajectories) == ("done", 6), list(run.rejections.values_list("reason"))
    assert not models.StepTokens.objects.filter(step__trajectory__run=run).exists()
    assert not models.RowTokens.objects.filter(row__trajectory__run=run).exists()
    assert not models.RowColumn.objects.filter(row__trajectory__run=run).exists()
    loaded = list(load_trajectories(list(run.trajectories.order_by("index"))))
    for value, found in zip(values, loaded, strict=True):
        assert_same(found, value)
    assert len(segment_keys(run)) == run.token_segments.count() == 1
    segment = run.token_segments.get()
    assert segment.n_bytes == files.size(segment.key) and segment.n_items == 5 * 4 + 2


def test_pages_read_columns_spans_and_prompts_alike(run: models.Run) -> None:
    other = create_run(models.Run.Kind.IMPORT, "other", token_store="database")
    value = Trajectory("both", chain(turns=4).steps, rows_only().rows)
    (here,), (there,) = save(run, [value]), save(other, [value])
    for read in (
        trajectory_parts.column_names,
        lambda t: {k: v.tolist() for k, v in trajectory_parts.column_values(t, 0, ["advantages", "nothing"]).items()},
        lambda t: {k: v.tolist() for k, v in row_columns(t.rows.get(index=1), 1, 5).items()},
        lambda t: row_spans(t.rows.get(index=0), trajectory_parts.rows_and_steps(t)[1]),
        lambda t: {k: one.tokens.logprobs.tolist() for k, one in trajectory_parts.steps_with_tokens(t, [1, 2]).items()},
        lambda t: [one.tokens.delta_ids.tolist() for one in trajectory_parts.continuing_steps(t, 0, 9)],
    ):
        with CaptureQueriesContext(connection) as ours:
            found = read(here)
        with CaptureQueriesContext(connection) as theirs:
            assert found == read(there) and found
        assert len(ours) == len(theirs)
    assert (
        trajectory_parts.column_values(here, 0, ["nothing"])
        == trajectory_parts.column_values(there, 0, ["nothing"])
        == {}
    )


def test_small_batches_wait_in_the_database_until_they_are_gathered(
    run: models.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(SEGMENTS), "min_tokens", 1 << 16)
    values = [chain("a"), chain("b", 2, 1)]
    save(run, values[:1])
    save(run, values[1:])
    assert segment_keys(run) == []
    end_run(run, models.Run.Status.DONE)
    monkeypatch.setattr(token_moves, "send_job", lambda job: "")
    token_moves.gather()
    token_moves.gather()
    job = models.Job.objects.get()  # one, however often the clock looks
    assert job.run == run and job.kind == "move_tokens"
    from rollouts.worker.jobs import do_job

    do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "done" and len(segment_keys(run)) == 1
    for record, value in zip(run.trajectories.order_by("index"), values, strict=True):
        assert_same(load_trajectory(record), value)
    token_moves.gather()
    assert models.Job.objects.count() == 1
    # A diagnosis may have found origins, and put them into the database.
    ask_job(run, "diagnose")
    run.jobs.filter(kind="diagnose").update(status="done", finished_at=timezone.now())
    token_moves.gather()
    assert run.jobs.filter(kind="move_tokens", status="queued").count() == 1


def test_steps_are_added_behind_steps_in_a_segment(run: models.Run) -> None:
    value = chain(turns=3)
    (record,) = save(run, [Trajectory("t", value.steps[:2])])
    save_steps([(record.pk, 2, value.steps[2])])
    assert StoredStep.objects.filter(trajectory=record, segment=None).count() == 1
    found = load_trajectory(record).steps
    assert [step.stream.tolist() for step in found] == [step.stream.tolist() for step in value.steps]
    step = record.steps.get(index=2)
    assert step.parent_id == record.steps.get(index=1).pk and step.shared_length == step.parent_length


# -- deleting


@pytest.mark.django_db(transaction=True)
def test_segments_go_with_the_last_trajectory_that_names_them(run: models.Run) -> None:
    first, second = save(run, [chain("a"), rows_only("b")])
    save(run, [chain("c", 2, 5)])
    assert len(segment_keys(run)) == 2
    runs.delete_trajectories([first.pk])
    assert len(segment_keys(run)) == 2
    assert_same(load_trajectory(second), rows_only("b"))
    runs.delete_trajectories([second.pk])
    assert len(segment_keys(run)) == run.token_segments.count() == 1
    files.put(f"segments/{run.code}/orphan.parquet", io.BytesIO(b"x"))
    delete_run(run)
    assert segment_keys(run) == [] and not TokenSegment.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_batch_that_is_not_committed_leaves_an_orphan_that_the_sweep_removes(
    run: models.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, [chain("kept")])
    with pytest.raises(KeyboardInterrupt), transaction.atomic():
        save(run, [chain("lost")])
        raise KeyboardInterrupt
    assert len(segment_keys(run)) == 2 and run.token_segments.count() == 1
    token_segments.delete_orphans(timezone.now())
    assert len(segment_keys(run)) == 2  # it may be of a transaction that is still under way
    token_segments.delete_orphans(timezone.now() + timedelta(days=2))
    assert segment_keys(run) == [run.token_segments.get().key]
    assert_same(load_trajectory(run.trajectories.get()), chain("kept"))


def test_a_database_that_names_no_segment_deletes_none(run: models.Run) -> None:
    """A new database beside the files of a lost one would delete every array."""
    save(run, [chain()])
    (key,) = segment_keys(run)
    StoredStep.objects.all().delete()
    TokenSegment.objects.all().delete()
    token_segments.delete_orphans(timezone.now() + timedelta(days=2))
    assert segment_keys(run) == [key]


@pytest.mark.django_db(transaction=True)
def test_a_run_that_is_deleted_while_a_page_reads_it_is_not_found(
    run: models.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = save(run, [chain()])
    opened = files.open_file

    def too_late(key: str) -> Any:
        delete_run(run)
        return opened(key)

    monkeypatch.setattr(files, "open_file", too_late)
    with pytest.raises(Http404, match="deleted a moment ago") as caught:
        row_window(record, 0, 0, 10)
    assert is_outage(caught.value)  # a job looks again, and finds that it is lost


# -- moving


def raw(run: models.Run) -> list[tuple[Any, ...]]:
    """Every array of a run as the database holds it, with its step or row."""
    found: list[tuple[Any, ...]] = []
    for model, owner in ((models.StepTokens, "step"), (models.RowTokens, "row")):
        order = (f"{owner}__trajectory", f"{owner}__index")
        for one in model.objects.filter(**{f"{owner}__trajectory__run": run}).order_by(*order):
            arrays = [vars(one)[name] for name in (STEP_ARRAYS if owner == "step" else ROW_ARRAYS)]
            found.append((one.pk, *[None if values is None else values.tobytes() for values in arrays]))
    columns = models.RowColumn.objects.filter(row__trajectory__run=run).order_by("row", "name")
    return found + [(one.row_id, one.name, one.values.tobytes()) for one in columns]


NAN = np.array([0x7FC00001, 0xFFC12345, 0x7F800001], dtype="<u4").view("<f4")
"""NaNs with payloads, a signalling one among them."""


def odd() -> list[Trajectory]:
    """Rows whose arrays are longer, shorter, empty or missing, and steps with NaN."""
    ids = np.array([1, 2, 3], dtype=np.int32)
    mask = np.ones(3, dtype=np.bool_)
    rows = (
        Row(ids, mask, NAN, columns={"a": NAN, "b": np.zeros(0, np.float32), "é": np.ones(9, np.float32)}),
        Row(ids, mask[:1], np.zeros(0, np.float32), np.zeros(0, np.uint8)),
        Row(ids[:0], mask[:0]),
    )
    plain = chain("steps", 3)
    return [plain, Trajectory("rows", rows=rows), chain("broken", 4, 2, broken_at=2)]


def test_a_run_moves_both_ways_byte_for_byte(run: models.Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.token_store = "database"
    save(run, odd())
    before = raw(run)
    assert len(before) == 3 + 3 + 4 + 3
    call_command("move_tokens", run.code, to="segments")
    assert "10 steps and rows" in capsys.readouterr().out
    run.refresh_from_db()
    assert raw(run) == [] and run.token_store == "segments" and len(segment_keys(run)) == 1
    for record, value in zip(run.trajectories.order_by("index"), odd(), strict=True):
        assert_same(load_trajectory(record), value)
    call_command("move_tokens", run.code, to="segments")
    assert "0 steps and rows" in capsys.readouterr().out and len(segment_keys(run)) == 1
    call_command("move_tokens", run.code, to="database")
    assert raw(run) == before
    assert not StoredStep.objects.exclude(segment=None, segment_offset=None, has_origin=None).exists()
    assert not models.StoredRow.objects.exclude(segment=None, segment_offset=None, column_names=None).exists()


@pytest.mark.django_db(transaction=True)
def test_what_was_replaced_stays_readable_for_a_while(run: models.Run) -> None:
    save(run, [chain()])
    (key,) = segment_keys(run)
    for _ in move_run(run, "database"):
        pass
    now = timezone.now()
    token_segments.delete_replaced(now + timedelta(minutes=59))
    assert segment_keys(run) == [key]
    token_segments.delete_replaced(now + timedelta(minutes=61))
    assert segment_keys(run) == [] and not TokenSegment.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_move_that_broke_off_goes_on(run: models.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At either moment: the file is put and no row names it, or a batch is done and the next is not."""
    monkeypatch.setattr(token_moves, "BATCH", 1)
    run.token_store = "database"
    values = odd()
    save(run, values)
    before = raw(run)
    next(move_run(run, "segments"))
    with monkeypatch.context() as patch:
        patch.setattr(array_moves, "_point", lambda moved: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(move_run(run, "segments"))
    assert len(segment_keys(run)) == 2 and run.token_segments.count() == 1
    for record, value in zip(run.trajectories.order_by("index"), values, strict=True):
        assert_same(load_trajectory(record), value)
    list(move_run(run, "segments"))
    assert raw(run) == []
    list(move_run(run, "database"))
    assert raw(run) == before


@pytest.mark.django_db(transaction=True)
def test_readers_see_no_move(run: models.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_moves, "BATCH", 1)
    values = [*odd(), *[chain(f"t{n}", 3, n) for n in range(5)]]
    records = save(run, values)
    done, errors, n_read = threading.Event(), [], 0

    def read() -> None:
        nonlocal n_read
        try:
            while not done.is_set():
                for record, value, found in zip(records, values, load_trajectories(records), strict=True):
                    assert_same(found, value)
                    trajectory_parts.column_names(record)
                    first = value.rows[0].ids if value.rows else value.steps[0].prompt_ids
                    window = row_window(record, 0, 0, len(first))
                    assert window.ids.tolist() == first.tolist()
                n_read += 1
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for to in ("database", "segments", "database", "segments"):
            list(move_run(run, to))
    finally:
        done.set()
        reader.join()
    assert errors == [] and n_read


def test_what_changed_while_it_was_put_stays_as_it_is(run: models.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose origins are found while its arrays are put is not moved with its old arrays."""
    run.token_store = "database"
    (record,) = save(run, [chain(turns=2)])
    step = record.steps.get(index=1)
    origin = np.ones(len(models.StepTokens.objects.get(pk=step.pk).delta_ids), dtype=np.uint8)
    real = type(SEGMENTS).put

    def put(self: Any, *args: Any) -> Any:
        models.StepTokens.objects.filter(pk=step.pk).update(delta_origin=origin)
        return real(self, *args)

    monkeypatch.setattr(type(SEGMENTS), "put", put)
    list(move_run(run, "segments"))
    assert [one.segment_id is None for one in record.steps.order_by("index")] == [False, True]
    assert load_trajectory(record).steps[1].delta_origin.tolist() == origin.tolist()
    list(move_run(run, "segments"))
    assert load_trajectory(record).steps[1].delta_origin.tolist() == origin.tolist()
    assert record.steps.get(index=1).has_origin is True


@pytest.mark.django_db(transaction=True)
def test_origins_that_are_found_later_go_into_a_new_segment(run: models.Run, tiny_tokenizer: Path) -> None:
    values = [chain("a", 3), chain("b", 2, 1)]
    records = save(run, values)
    (old,) = segment_keys(run)
    table = byte_table_of(models.Run(tokenizer=find_tokenizer(str(tiny_tokenizer))))
    assert table is not None
    assert fill_origins(records, list(load_trajectories(records)), table) == 3
    assert TokenSegment.objects.get(key=old).replaced_at is not None and len(segment_keys(run)) == 2
    for record, value in zip(records, values, strict=True):
        found = load_trajectory(record)
        assert_same(found, value, but=("delta_origin",))
        assert all(step.delta_origin is not None for step in found.steps[1:])
    unused_files._sweep_segments()
