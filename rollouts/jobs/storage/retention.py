"""Which runs go because they are too old or too many, and their deletion. Nothing that somebody still uses goes. A run
stays while it or a job of it is under way or a file of an export is offered, and for a day after its last change. It
also stays while a share link to it or to one of its trajectories is live: to keep a run for good, share it."""

import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from io import BytesIO
from typing import Any

from django.conf import settings
from django.core.cache import cache
from django.utils import timezone

from rollouts.jobs import run_actions
from rollouts.store import files
from rollouts.store.database import clock_offset
from rollouts.store.models import ACTIVE, Project
from rollouts.store.people.activity_log import Actor, acting
from rollouts.store.runs.runs import runs_by_change, segment_bytes, with_change

log = logging.getLogger(__name__)

MIN_AGE = timedelta(days=1)  # A run that changed within this time stays, whatever its size.
BYTES_PER_TOKEN = 8  # Of a token in the database: its id and its log-probability.
SWEEP_SECONDS = 3600  # How often one of the workers deletes by itself.
MAX_RUNS_PER_SWEEP = 50


Leaving = tuple[Any, int, str]
"""A run that goes, with ``changed_at``; the bytes of its token arrays (its segments, or 8 bytes a token); and why."""


@dataclass
class RetentionPlan:
    """What goes and what stays under some limits."""

    leaving: list[Leaving] = field(default_factory=list)  # The oldest first.
    staying: dict[str, int] = field(default_factory=dict)  # Why runs stay that would go otherwise -> how many.
    n_bytes: int = 0  # Of all runs that count.
    n_bytes_left: int = 0  # Of those that stay.


def plan(
    days: int | None = None, n_bytes: int | None = None, project: Project | None = None, now: datetime | None = None
) -> RetentionPlan:
    """Runs go whose last change is over ``days`` ago, and the oldest ones while the token arrays of all are larger.
    None = everything is kept. ``project``: only its runs count and go. Two queries; nothing is changed."""
    now = now or timezone.now()
    sizes = segment_bytes(project)
    plan = RetentionPlan()
    sizes_of_runs = [(run, sizes.get(run.pk) or run.n_tokens * BYTES_PER_TOKEN) for run in runs_by_change(project)]
    plan.n_bytes = plan.n_bytes_left = sum(size for _, size in sizes_of_runs)
    for run, size in sizes_of_runs:
        age: timedelta = now - run.changed_at
        if days is not None and age > timedelta(days=days):
            reason = f"its last change was {age.days} days ago"
        elif n_bytes is not None and plan.n_bytes_left > n_bytes:
            reason = f"the runs take {plan.n_bytes_left / 1e9:.2f} GB"
        else:
            continue
        if why := _why_it_stays(run, now):
            plan.staying[why] = plan.staying.get(why, 0) + 1
            continue
        plan.leaving.append((run, size, reason))
        plan.n_bytes_left -= size
    return plan


def delete(leaving: Leaving) -> bool:
    """Delete a run with everything that belongs to it, unless somebody has begun to use it. Returns whether it went."""
    planned, _, reason = leaving
    run = with_change(planned)
    if run is None or _why_it_stays(run, timezone.now()) or run.changed_at != planned.changed_at:
        return False
    run_actions.delete(run, reason)
    return True


def sweep() -> None:
    """Once an hour, delete what the settings say; a bounded number of runs each time."""
    days, n_bytes = settings.KEEP_DAYS or None, settings.KEEP_BYTES or None
    if not (days or n_bytes) or not cache.add("retention", 1, timeout=SWEEP_SECONDS):
        return
    with acting(lambda: Actor("retention")):
        for leaving in plan(days, n_bytes).leaving[:MAX_RUNS_PER_SWEEP]:
            delete(leaving)


def _why_it_stays(run: Any, now: datetime) -> str:
    if run.status in ACTIVE or run.has_work:
        return "work is under way"
    if run.has_file:
        return "a file of an export is offered"
    if run.is_shared:
        return "a share link is live"
    if now - run.changed_at < MIN_AGE:
        return "it changed within a day"
    return ""


MARK = "machines/clock"
"""A file of the file storage: the time of the last sweep, and until when nothing is deleted. Unix times."""
MAX_GAP_SECONDS = 3600
"""Sweeps are ten minutes apart, so a longer gap is a clock that was set or a server that was off."""
MAX_OFFSET_SECONDS = 60  # By so much the clock of a machine may differ from the database's.
MAX_PAUSE_SECONDS = 24 * 3600  # A tenth of the gap passes before something is deleted, and at most this time.


def fault_of_clock(note: bool = False) -> str:
    """Why nothing may be deleted by its age now, as sentences; empty = the clock is believed. A clock that is set
    forward by mistake makes everything old at once, so the file storage holds the time of the last sweep. ``note``:
    write down that a sweep was here. Raises what the database raises, and `rollouts.store.files.StorageDown`."""
    offset = clock_offset()
    if offset is not None and abs(offset) > MAX_OFFSET_SECONDS:
        way = "ahead of" if offset > 0 else "behind"
        return (
            f"The clock of this machine is {abs(offset):,.0f} s {way} the database's, so nothing is deleted by "
            "its age. Let NTP set the clocks of both."
        )
    now = time.time()
    last, paused_until = _read_mark() or (now, 0.0)
    gap = now - last
    if abs(gap) > MAX_GAP_SECONDS:
        paused_until = max(paused_until, now + abs(gap) / 10)
    paused_until = min(paused_until, now + MAX_PAUSE_SECONDS)
    if note:
        files.put(MARK, BytesIO(f"{now} {paused_until}".encode()))
    if now >= paused_until:
        return ""
    return (
        f"The clock was set, or nothing ran for long, so nothing is deleted by its age until "
        f"{datetime.fromtimestamp(paused_until, UTC):%Y-%m-%d %H:%M} UTC. If that time is wrong, set the clock."
    )


def _read_mark() -> tuple[float, float] | None:
    try:
        with files.open_file(MARK) as file:
            last, paused_until = map(float, file.read(100).split())
    except (FileNotFoundError, ValueError):
        return None
    return last, paused_until
