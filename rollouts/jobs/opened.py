"""Files that are shown where they lie. Their index makes the list; what is looked at is read from the files then."""

import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.db import transaction

from rollout_inspector.formats import Rejected, Source
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.opened.index import FileIndex, read_diagnosis
from rollout_inspector.refusal import Refusal
from rollouts.jobs.imports.imports import FileImport
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.imports import add_checked, add_opened, add_rejections, is_filled, take_place
from rollouts.store.runs.runs import beat, delete_trajectories, end_run
from rollouts.store.trajectories.trajectories import ids_and_codes

COPY_SECONDS = 0.5
BATCH = 500


def opened_files() -> dict[str, Any]:
    """What this server shows in place: ``places``, the ``paths`` where they are read, ``tokenizer``, ``chat_template``,
    ``folder`` and ``environment``."""
    if not settings.OPENED:
        raise Refusal("These files are no longer open here. Open them again.")
    return dict(json.loads(settings.OPENED))


@lru_cache(maxsize=1)
def _index(pid: int) -> FileIndex:
    opened = opened_files()
    return FileIndex(opened["places"], AuditSettings(opened["tokenizer"], opened["chat_template"]))


def fill(record: StoredTrajectory) -> None:
    """Read a trajectory from its file where it is only a line of the list yet. Raises :class:`Refusal`."""
    if is_filled(record):
        return
    index = _index(os.getpid())
    if (line := index.find(record.external_id)) is None:
        raise Refusal("This trajectory is no longer in its file. Open the files again.")
    trajectory = index.load(line["id"])
    with transaction.atomic():
        delete_trajectories([record.pk])
        file_import = FileImport(record.run, Source.of_bytes(b""), 0, record.index, False, lambda: None)
        file_import.store([trajectory], [index.diagnose(line["id"], trajectory, encode_rows=True)])
        take_place(record)


def follow(run: Run, stop: threading.Event) -> None:
    """Add to the list of a run what the index of its files finds, until ``stop`` is set."""
    index = _index(os.getpid())
    reader = threading.Thread(target=index.follow, args=(stop,), daemon=True)
    reader.start()
    names, checked, is_ended = {name for name, _ in ids_and_codes(run)}, set[int](), False
    rejected, problem = set[Rejected](), ""
    while not stop.is_set():
        is_read = index.is_read.is_set()
        read_names = [row["name"] for row in index.all("SELECT name FROM trajectory WHERE state = 1 ORDER BY id")]
        fresh = [name for name in read_names if name not in names]
        for start in range(0, len(fresh), BATCH):
            lines = [line for name in fresh[start : start + BATCH] if (line := index.find(name)) is not None]
            add_opened(run, lines, index.formats())
            beat(run)
        names.update(fresh)
        index.take_checked()
        note_checked(run, index, checked)
        for rejection in [line for line in index.rejected() if line not in rejected] if is_read else ():
            if is_ended or not run.n_rejected:
                add_rejections(run, rejection.file, [rejection])
            rejected.add(rejection)
        if is_read and (fresh or not is_ended or index.problem != problem):
            problem, is_ended = index.problem, True
            end_run(run, Run.Status.DONE, problem)
        elif not is_ended:
            beat(run)
        stop.wait(COPY_SECONDS)
    reader.join()


def note_checked(run: Run, index: FileIndex, noted: set[int]) -> None:
    """Add to the list of a run what the index knows of findings. ``noted``: keys whose findings it has."""
    keys = [row["id"] for row in index.all("SELECT id FROM trajectory WHERE findings IS NOT NULL ORDER BY id")]
    fresh = [key for key in keys if key not in noted]
    for start in range(0, len(fresh), BATCH):
        part = fresh[start : start + BATCH]
        query = f"SELECT name, findings, checks FROM trajectory WHERE id IN ({','.join('?' * len(part))})"
        add_checked(run, {line["name"]: read_diagnosis(line) for line in index.all(query, *part)})
        noted.update(part)


def begin(run: Run, what: str) -> str:
    """Begin to ``check`` all files or to ``import`` them into the user's own server; returns where it ends."""
    opened, logs = opened_files(), settings.INSPECTOR_DATA / "logs"
    if is_active(run) and opened["places"] != opened["paths"]:
        raise Refusal("Objects of the bucket are still being fetched. Wait until the list is whole.")
    audit = settings.INSPECTOR_DATA.parent / "audit"
    check = ["audit", "--output", str(audit), "--index", str(audit.parent)]
    command = check if what == "check" else ["import_rollouts"]
    command += ["--tokenizer", opened["tokenizer"]] * bool(opened["tokenizer"])
    environment = {name: os.environ[name] for name in os.environ.keys() - {"INSPECTOR_DATA", "INSPECTOR_OPENED"}}
    with (logs / f"{what}.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "rollout_inspector", *command, "--", *opened["paths"]], stdout=log, stderr=log,
            cwd=opened["folder"], env={**environment, **opened["environment"]},
        )
    sentence = f"Findings appear in the list, and as tables in {audit}."
    place = sentence if what == "check" else "It will be a run of your own server."
    return f"{place} {logs / what}.log tells how it ends."
