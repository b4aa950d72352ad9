"""Files that are shown where they lie. Their index makes the list; what is looked at is read from the files then."""

from __future__ import annotations

import json
import os
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings

from rollout_inspector.refusal import Refusal
from rollouts.jobs.diagnosis import diagnosis_for, gap_json
from rollouts.store.chat_templates.tokenizers import byte_table_of
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.runs import beat, end_run
from rollouts.store.trajectories.opened_trajectories import add_opened, drop_opened, fill_opened, is_filled, names_of

if TYPE_CHECKING:
    from rollout_inspector.opened.index import Index

COPY_SECONDS = 0.5
BATCH = 500


def opened_files() -> dict[str, Any]:
    """What this server shows in place: ``paths``, ``tokenizer``, ``chat_template`` and ``environment``."""
    if not settings.OPENED:
        raise Refusal("These files are no longer open here. Open them again.")
    return dict(json.loads(settings.OPENED))


@lru_cache(maxsize=1)
def _index(pid: int) -> Index:
    from rollout_inspector.guard.shard_audit import AuditSettings  # pyarrow, which other servers do without
    from rollout_inspector.opened.index import Index

    opened = opened_files()
    return Index(opened["paths"], AuditSettings(opened["tokenizer"], opened["chat_template"]))


def fill(record: StoredTrajectory) -> None:
    """Read a trajectory from its file where it is only a line of the list yet. Raises :class:`Refusal`."""
    if is_filled(record):
        return
    index = _index(os.getpid())
    line = index.find(record.external_id)
    if line is None:
        raise Refusal("This trajectory is no longer in its file. Look at the list of the run again.")
    trajectory = index.load(line["id"])
    diagnosis = diagnosis_for(trajectory, record.run)
    fill_opened(record, trajectory, diagnosis, gap_json(diagnosis), byte_table_of(record.run))


def follow(run: Run, stop: threading.Event) -> None:
    """Keep the list of a run equal to the index of its files, until ``stop`` is set."""
    index = _index(os.getpid())
    index.first()
    reader = threading.Thread(target=index.follow, args=(stop,), daemon=True)
    reader.start()
    names, is_ended = names_of(run), False
    while not stop.is_set():
        is_read, keys = index.is_read.is_set(), index.names()
        fresh = [name for name in keys if name not in names]
        for start in range(0, len(fresh), BATCH):
            lines = [line for name in fresh[start : start + BATCH] if (line := index.find(name)) is not None]
            add_opened(run, lines, index.formats())
            beat(run)
        if gone := names - keys.keys() if is_read else set():
            drop_opened(run, gone)
        names = (names | set(fresh)) - gone
        if is_read and (fresh or gone or not is_ended):
            end_run(run, Run.Status.DONE, index.problem)
            is_ended = True
        elif not is_ended:
            beat(run)
        stop.wait(COPY_SECONDS)
    reader.join()
