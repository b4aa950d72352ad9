"""Files that many workers import, and how one of them dies."""

import gzip
import io
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone

from rollout_inspector.formats.containers.compression import zstd
from rollouts.jobs.imports import import_shards, imports
from rollouts.store import models
from rollouts.store.jobs.jobs import take_job
from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.runs.imports import IMPORTED
from rollouts.store.runs.runs import create_run
from rollouts.worker import jobs
from tests.samples.formats import CALL, GYM, TRAIN, changed, jsonl, own_line
from tests.storage.build import chain

LONG_AGO = timedelta(minutes=10)

Files = Sequence[tuple[str, bytes]]


def gym(*numbers: int, rollout: int = 2) -> bytes:
    return jsonl(*[changed(changed(GYM, "_ng_task_index", to=n), "_ng_rollout_index", to=rollout) for n in numbers])


def asked(files: Files) -> Job:
    run = create_run(Run.Kind.IMPORT, "files")
    imports.send_import(
        run, imports.ask_for_uploads(run, [SimpleUploadedFile(name, data) for name, data in files], "auto", True)
    )
    return run.jobs.get()


def cut(files: Files) -> Job:
    job = asked(files)
    taken = take_job(job.pk)
    assert taken is not None
    jobs.work_on(taken, share=True)
    return job


def in_one(files: Files) -> Run:
    job = asked(files)
    taken = take_job(job.pk)
    assert taken is not None
    jobs.work_on(taken)
    return run_of(job)


def run_of(job: Job) -> Run:
    return Run.objects.get(pk=job.run_id)


VOLATILE = {
    "id", "code", "run_id", "trajectory_id", "step_id", "row_id", "parent_id", "last_step_id", "created_at",
    "started_at", "finished_at", "heartbeat_at",
}
"""Columns that two imports of the same files never share."""


def tables(run: Run) -> dict[str, Any]:
    """Every table of an import, in an order that the files say."""
    in_run = {"run": run}
    querysets = {
        "trajectories": StoredTrajectory.objects.filter(run=run).order_by("index"),
        "steps": models.StoredStep.objects.filter(trajectory__run=run).order_by("trajectory__index", "index"),
        "step tokens": models.StepTokens.objects.filter(step__trajectory__run=run).order_by(
            "step__trajectory__index", "step__index"
        ),
        "rows": models.StoredRow.objects.filter(trajectory__run=run).order_by("trajectory__index", "index"),
        "row tokens": models.RowTokens.objects.filter(row__trajectory__run=run).order_by(
            "row__trajectory__index", "row__index"
        ),
        "columns": models.RowColumn.objects.filter(row__trajectory__run=run).order_by(
            "row__trajectory__index", "row__index", "name"
        ),
        "findings": models.StoredFinding.objects.filter(**in_run).order_by(
            "trajectory__index", "step_index", "start", "kind"
        ),
        "rejections": models.Rejection.objects.filter(**in_run).order_by("pk"),
        "run": Run.objects.filter(pk=run.pk),
    }
    found: dict[str, Any] = {}
    for name, queryset in querysets.items():
        found[name] = [plain(row) for row in queryset.values()]
    for row in found["run"]:
        row["settings"][IMPORTED].pop("last_rejection")
        assert row["bytes_done"] == row["bytes_total"] > 0
    found["rejections"].sort(key=str)
    parents = models.StoredStep.objects.filter(trajectory__run=run).order_by("trajectory__index", "index")
    found["parents"] = list(parents.values_list("parent__index", flat=True))
    return found


def plain(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in VOLATILE}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in kept.items()}


def parquet() -> bytes:
    file = io.BytesIO()
    rows = [changed(TRAIN, "idx", to=500 + n) for n in range(60)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=9)
    return file.getvalue()


BIG = gym(*range(40))

FILES: dict[str, Files] = {
    "one file": [("a.jsonl", BIG)],
    "bad lines": [
        (
            "a.jsonl",
            b"\n" + gym(*range(9)) + b'{"response": "\\u0000 \\ud800"}\n{\n\n' + gym(*range(9, 30)) + b"nonsense\n",
        )
    ],
    "an id twice in a file": [("a.jsonl", gym(*range(12), 3, *range(12, 25), 3, 20))],
    "ids of an earlier file": [("a.jsonl", gym(*range(20))), ("b.jsonl", gym(*range(10, 31))), ("c.jsonl", gym(5, 60))],
    "files of one name": [("a.jsonl", gym(*range(12))), ("a.jsonl", gym(*range(8, 20))), ("a.jsonl", gym(1))],
    "small files, sessions and a damaged one": [
        ("a.jsonl", BIG), ("calls.jsonl", jsonl(CALL, changed(CALL, "session_id", to="s2"))), ("x.pt", b"\x80\x04abc"),
        ("b.jsonl", gym(*range(50, 80))), ("train.jsonl", jsonl(TRAIN)), ("empty.jsonl", b""),
    ],
    "sessions between each other": [
        ("a.jsonl", jsonl(*[changed(CALL, "session_id", to=f"s{n % 9 + n // 30}") for n in range(60)]) + b"{\n"),
        ("b.jsonl", gym(*range(20)) + jsonl(changed(CALL, "session_id", to="s3"))),
        ("c.jsonl", jsonl(*[changed(CALL, "session_id", to=f"s{n // 2}") for n in range(40)])),
    ],
    "packed lines": [
        ("a.jsonl.gz", b"".join(gzip.compress(gym(n, n + 100)) for n in range(20))),
        ("b.jsonl.zst", b"".join(zstd.compress(BIG[at : at + 999]) for at in range(0, len(BIG), 999))),
    ],
    "row groups": [("a.parquet", parquet()), ("b.jsonl", BIG)],
    "our own format": [
        ("own.jsonl", b"".join(own_line(chain(f"t{n}", broken_at=1 if n % 3 else None, hostile="")) for n in range(40)))
    ],
    "nothing to read": [("a.jsonl", b"nonsense\n" * 800), ("b.jsonl", b"{}\n" * 500)],
    "a name that another file's id has": [
        ("a.jsonl", b"".join(own_line(chain(x, hostile="")) for x in ["x", "x", "b.jsonl:x", *map(str, range(30))])),
        ("b.jsonl", own_line(chain("x", hostile=""))),
    ],
}


def kill_in_shard(shard: Job, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies after its nth diagnosis."""
    taken, seen = take_job(shard.pk), 0
    assert taken is not None
    real = imports.diagnosis_for

    class Killed(BaseException):
        """Not caught by anybody, as a kill is not."""

    def die(value: Any, run: Run) -> Any:
        nonlocal seen
        seen += 1
        if seen > n:
            raise Killed
        return real(value, run)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(imports, "diagnosis_for", die)
        import_shards.do_shard(taken, jobs.Beat(taken))
    Job.objects.filter(pk=shard.pk).update(heartbeat_at=timezone.now() - LONG_AGO)
