"""Imports in shards: the database holds what one worker would have stored, whoever read which part and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.http import QueryDict
from django.utils import timezone

from inspector.runs.progress import IN_PARTS, progress
from inspector.trajectories.frame import find_siblings
from rollout_inspector.formats import FORMATS
from rollout_inspector.formats.containers import cutting
from rollout_inspector.refusal import Refusal
from rollouts.jobs import run_actions
from rollouts.jobs.imports import import_join, import_shards, imports
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.jobs.jobs import adopt_jobs, take_job
from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.runs.imports import PROVISIONAL
from rollouts.worker import jobs
from tests.samples.formats import CALL, changed, jsonl
from tests.samples.import_shards import BIG, FILES, LONG_AGO, cut, gym, in_one, kill_in_shard, run_of, tables
from tests.samples.shard_work import do_all, share_by, waiting

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("small_parts")]


@pytest.mark.parametrize("name", FILES)
def test_every_table_is_that_of_an_import_in_one_task(name: str) -> None:
    files = FILES[name]
    expected = tables(in_one(files))
    job = cut(files)
    assert job.shards.count() > 1
    do_all(random.Random(len(name)))
    run = run_of(job)
    made = tables(run)
    for table, rows in expected.items():
        assert made[table] == rows, table
    assert run.status == ("failed" if name == "nothing to read" else "done")
    assert run.status == "failed" or not Job.objects.exclude(whole=None).exists()


@pytest.mark.parametrize(("n_bytes", "n"), [(10**6, 0), (9000, 2), (6000, 3), (100, 40)])
def test_the_number_of_shards_and_who_ends_first_change_nothing(
    n_bytes: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FILES["ids of an earlier file"]
    expected = tables(in_one(files))
    monkeypatch.setattr(import_shards, "PART_BYTES", n_bytes)
    for seed in range(2):
        job = cut(files)
        assert job.shards.count() >= n
        do_all(random.Random(seed))
        assert tables(run_of(job)) == expected


def test_the_list_has_the_order_of_the_files_while_parts_are_read() -> None:
    job = cut([("a.jsonl", BIG)])
    shards = list(job.shards.order_by("pk"))
    for shard in (shards[2], shards[0]):
        taken = take_job(shard.pk)
        assert taken is not None
        jobs.work_on(taken, share=True)
    run = run_of(job)
    ids = [int(name.split("-")[0]) for name in run.trajectories.order_by("index").values_list("external_id", flat=True)]
    assert ids == sorted(ids) and 0 < len(ids) < 40 and (run.status, run.bytes_total) == ("running", len(BIG))
    first = run.trajectories.order_by("index").select_related("run")[0]
    assert first.index >= PROVISIONAL
    assert find_siblings(first, QueryDict(), "tokens", None).at == "numbered when the import has ended"
    assert run.bytes_done == 0 or run.bytes_done <= run.bytes_total
    assert Job.objects.get(pk=job.pk).progress == f"2 of {len(shards)} parts"


def test_rejected_lines_are_told_when_all_parts_are_read() -> None:
    """In the order of the files, whoever found them first; until then the page says that they will come."""
    bad = gym(*range(9)) + b"{\n" + gym(*range(9, 20)) + b"{\n\n{\n" + gym(*range(20, 30)) + b"nonsense"
    job = cut([("a.jsonl", bad), ("b.jsonl", b"{\n" + bad)])
    taken = take_job(job.shards.order_by("-pk")[0].pk)
    assert taken is not None
    jobs.work_on(taken, share=True)
    run = run_of(job)
    assert run.n_rejected == 0 and progress(run).partial == IN_PARTS
    do_all(random.Random(3))
    run = run_of(job)
    lines = list(run.rejections.order_by("pk").values_list("file", "line"))
    assert lines == [
        *(("a.jsonl", line) for line in (10, 22, 24, 35)), *(("b.jsonl", line) for line in (1, 11, 23, 25, 36)),
    ]
    assert run.n_rejected == 9 and progress(run).partial == ""


def test_a_part_that_cannot_be_read_takes_its_file_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is whole or not at all."""
    from rollout_inspector.formats import FileRefused, Source

    files = [("a.jsonl", gym(*range(20))), ("b.jsonl", gym(*range(15, 40))), ("c.jsonl", gym(16, 90))]
    job = cut(files)
    real = Source.of_part

    def damaged(source: Source, part: Any) -> Source:
        found = real(source, part)
        if source.name == "b.jsonl" and part.line > 3:
            found.on_line = lambda: None
            monkeypatch.setattr(found, "_lines", lambda: refuse(part.line))
        return found

    def refuse(line: int) -> Any:
        yield from ()
        raise FileRefused(f"b.jsonl is damaged behind line {line}.")

    monkeypatch.setattr(Source, "of_part", damaged)
    do_all(random.Random(4))
    monkeypatch.setattr(Source, "of_part", real)
    run = run_of(job)
    expected = tables(in_one([files[0], files[2]]))
    made = tables(run)
    assert made["trajectories"] == expected["trajectories"] and made["findings"] == expected["findings"]
    assert run.n_rejected == 1 and "b.jsonl is damaged behind line" in run.rejections.get().reason
    assert run.status == "done"


def test_a_lost_worker_costs_its_shard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FILES["an id twice in a file"]
    expected = tables(in_one(files))
    job = cut(files)
    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 1)
    kill_in_shard(job.shards.order_by("pk")[1], 2, monkeypatch)
    assert run_of(job).n_trajectories == 2
    assert len(adopt_jobs()) == 1
    do_all(random.Random(2))
    assert tables(run_of(job)) == expected


@pytest.mark.parametrize("n_faults", [2, jobs.MAX_ATTEMPTS])
def test_a_shard_that_breaks_off_begins_again_alone(n_faults: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file; what the other shards have read of it is not read again. A fault that stays ends the import."""
    files = FILES["one file"]
    expected = tables(in_one(files))
    job = cut(files)
    faults = [RuntimeError("A fault of the program.")] * n_faults
    read: list[str] = []
    real = imports.diagnosis_for

    def diagnosed(value: Any, run: Run) -> Any:
        if value.external_id == "21-2" and faults:
            raise faults.pop()
        read.append(value.external_id)
        return real(value, run)

    monkeypatch.setattr(imports, "diagnosis_for", diagnosed)
    do_all(random.Random(n_faults))
    if n_faults < jobs.MAX_ATTEMPTS:
        assert tables(run_of(job)) == expected and not faults
        twice = sorted(int(name.split("-")[0]) for name in set(read) if read.count(name) > 1)
        assert len(set(read)) == 40 and 0 < len(twice) <= 3 and all(abs(n - 21) < 4 for n in twice)
    else:
        run = run_of(job)
        assert (run.status, run.n_trajectories) == ("failed", 0) and "A fault of the program." in run.error


def test_a_worker_that_was_only_slow_stores_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FILES["one file"]
    expected = tables(in_one(files))
    job = cut(files)
    slow = take_job(job.shards.order_by("pk")[0].pk)
    assert slow is not None
    real = imports.diagnosis_for

    def be_taken_over(value: Any, run: Run) -> Any:
        monkeypatch.setattr(imports, "diagnosis_for", real)
        Job.objects.filter(pk=slow.pk).update(heartbeat_at=timezone.now() - LONG_AGO)
        assert len(adopt_jobs()) == 1
        do_all(random.Random(3))
        return real(value, run)

    monkeypatch.setattr(imports, "diagnosis_for", be_taken_over)
    jobs.work_on(slow, share=True)
    assert tables(run_of(job)) == expected


STEPS = ("_free_ids", "_place", "set_rejections", "note_imported", "recount", "end_import")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["ids of an earlier file", "an id twice in a file"])
def test_a_worker_lost_while_it_joins_is_followed_by_another(
    step: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FILES[name]
    expected = tables(in_one(files))
    job = cut(files)
    while keys := [key for key in waiting() if key != job.pk]:
        taken = take_job(keys[-1])
        assert taken is not None
        jobs.work_on(taken, share=True)

    class Killed(BaseException):
        """Not caught by anybody, as a kill is not."""

    real, n = getattr(import_join, step), 0

    def die(*arguments: Any) -> Any:
        nonlocal n
        n += 1
        if n == 2 or step != "_place":
            raise Killed
        return real(*arguments)

    lost = take_job(job.pk)
    assert lost is not None
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(import_join, step, die)
        import_join.join(lost, jobs.Beat(lost))
    Job.objects.filter(pk=job.pk).update(heartbeat_at=timezone.now() - LONG_AGO)
    assert len(adopt_jobs()) == 1
    do_all(random.Random(1))
    assert tables(run_of(job)) == expected


def test_resume_reads_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [*FILES["ids of an earlier file"], ("d.jsonl", gym(*range(9)))]
    expected = tables(in_one(files))
    job = cut(files)
    shards = list(job.shards.order_by("pk"))
    last = shards[-1]
    for shard in [one for one in shards if one.options["pieces"][0]["name"] in ("c.jsonl", "b.jsonl")]:
        taken = take_job(shard.pk)
        assert taken is not None
        jobs.work_on(taken, share=True)
    with monkeypatch.context() as patched:
        patched.setattr(import_shards, "do_shard", fail)
        share_by(patched, "import", fail)
        do_all(random.Random(5))
    run = run_of(job)
    assert (run.status, run.error) == ("failed", "The disk broke.") and run.n_trajectories == 23
    names = list(run.trajectories.order_by("index").values_list("index", "external_id"))
    assert names[0] == (0, "10-2") and [index for index, _ in names] == list(range(23))
    assert run_actions.can_resume(run) and last.pk
    read: list[str] = []
    real = imports.diagnosis_for
    monkeypatch.setattr(
        imports, "diagnosis_for", lambda value, of: (read.append(value.external_id), real(value, of))[1]
    )
    run_actions.resume(run)
    do_all(random.Random(6))
    run = run_of(job)
    made = tables(run)
    assert made["trajectories"] == expected["trajectories"] and made["run"] == expected["run"] and len(read) == 29
    assert made["findings"] == expected["findings"] and made["rejections"] == expected["rejections"]


def fail(*_: Any) -> Any:
    raise Refusal("The disk broke.")


@pytest.mark.parametrize("state", ["waiting", "one is read", "a worker is at it"])
def test_cancel_leaves_complete_files_alone(state: str) -> None:
    job = cut([("a.jsonl", BIG), ("b.jsonl", gym(*range(50, 53)))])
    shards = list(job.shards.order_by("pk"))
    taken = take_job(shards[-1].pk)
    assert taken is not None
    if state == "one is read":
        jobs.work_on(taken, share=True)
    run_actions.cancel(run_of(job))
    assert run_of(job).status == "running" and waiting() == [job.pk]
    if state == "a worker is at it":
        jobs.work_on(taken, share=True)
    run_actions.cancel(run_of(job))  # pressed again
    do_all(random.Random(1))
    run = run_of(job)
    assert (run.status, Job.objects.get(pk=job.pk).status) == ("cancelled", "cancelled")
    expected = [0, 1, 2] if state == "one is read" else []
    assert list(run.trajectories.order_by("index").values_list("index", flat=True)) == expected
    assert run.n_trajectories == len(expected) and not Job.objects.exclude(whole=None).exists()
    assert not run_actions.can_resume(run)


def test_a_small_import_is_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_shards, "PART_BYTES", len(BIG))
    job = cut([("a.jsonl", BIG)])
    assert run_of(job).status == "done" and job.shards.count() == 0


def test_the_tokenizer_is_the_one_that_the_first_file_names(tiny_tokenizer: Path) -> None:
    registered = register_tokenizer(tiny_tokenizer, name="qwen3")
    calls = jsonl(*[changed(CALL, "session_id", to=f"s{n}") for n in range(20)])
    job = cut([("calls.jsonl", calls), ("a.jsonl", BIG)])
    assert run_of(job).tokenizer == registered and job.shards.count() > 1
    do_all(random.Random(1))
    assert tables(run_of(job))["findings"] == tables(in_one([("calls.jsonl", calls), ("a.jsonl", BIG)]))["findings"]


def test_a_deleted_import_stays_deleted() -> None:
    job = cut([("a.jsonl", BIG)])
    taken = take_job(job.shards.order_by("pk")[0].pk)
    assert taken is not None
    run_actions.delete(run_of(job))
    jobs.work_on(taken, share=True)
    assert not Run.objects.exists() and not StoredTrajectory.objects.exists() and not Job.objects.exists()


def test_cutting_reads_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not large is not opened to cut it."""
    cut_files: list[str] = []
    real: Callable[..., Any] = cutting.parts_of
    spy = replace(FORMATS["nemo_gym"], cut=lambda source, n: (cut_files.append(source.name), real(source, n))[1])
    monkeypatch.setitem(FORMATS, "nemo_gym", spy)
    cut([("a.jsonl", BIG), ("b.jsonl", gym(90))])
    assert cut_files == ["a.jsonl"]
