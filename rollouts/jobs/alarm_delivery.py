"""Tells the webhook of a project of its alarms: one signed POST for each, tried again later where it is not taken."""

import asyncio
import hashlib
import hmac
import json
import logging
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from rollout_inspector.diagnose.alarm_rules import AlarmFigure, Raised, alarm_sentence
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.refusal import Refusal
from rollouts.jobs.broker import send_job
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, ask_job, delete_ended_jobs, end_job
from rollouts.store.models import Alarm, Job, ProjectAlarms, Run
from rollouts.store.runs.alarms import (
    alarms_of_project, note_delivered, note_undelivered, projects_to_check, runs_to_tell_of, take_alarms_again,
    waiting_alarms, webhook_key, webhook_parts
)

log = logging.getLogger(__name__)

CLOCK_SECONDS = 5.0  # How often a worker looks for alarms that are due.
ANSWER_SECONDS = 10.0  # The whole of one POST, from the name of the host to the status of the answer.
MAX_AT_ONCE = 20  # Alarms that one job delivers.
FIRST_RETRY_SECONDS = 30.0
MAX_RETRY_SECONDS = 6 * 3600.0  # The pause doubles twice with each failure, up to this.


def send_due() -> None:
    """Check runs whose limits were changed, and send a job for each project whose webhook is to be told of an alarm."""
    for changed in projects_to_check():
        take_alarms_again(changed)
    # One job of a project at a time, so that a webhook that hangs holds one worker.
    for run in runs_to_tell_of(timezone.now(), KIND.slug):
        delete_ended_jobs(run, KIND.slug)  # the alarms say what came of them
        job, is_new = ask_job(run, KIND.slug)
        if is_new:
            send_job(job)


def do_job(job: Job, beat: Beat) -> None:
    """Tell a project's webhook of the alarms of a run. The first one that is not taken ends the job with a sentence."""
    run = job.run
    alarms = alarms_of_project(run.project) if run is not None else None
    if run is None:
        raise JobLost
    due = [] if alarms is None else list(waiting_alarms(timezone.now(), run)[:MAX_AT_ONCE])
    for n, alarm in enumerate(due):
        beat(n_done=n, n_total=len(due))
        assert alarms is not None
        sentence = deliver(alarm, run, alarms)
        now = timezone.now()
        if sentence:
            log.warning("alarm not delivered run=%s alarm=%s: %s", run.code, alarm.code, sentence)
            note_undelivered(alarm, alarms, sentence, now + pause_after(alarms.n_failures + 1))
            end_job(job, Job.Status.FAILED, sentence)
            return
        note_delivered(alarm, alarms, now)
    end_job(job, Job.Status.DONE)


def pause_after(n_failures: int) -> timedelta:
    """How long a webhook is left alone after so many failures in a row."""
    return timedelta(seconds=min(FIRST_RETRY_SECONDS * 4.0 ** min(n_failures - 1, 20), MAX_RETRY_SECONDS))


def deliver(alarm: Alarm, run: Run, held: ProjectAlarms) -> str:
    """POST an alarm. Returns a sentence that says why it was not taken; empty = it was."""
    try:
        parts = webhook_parts(held.webhook)  # what is allowed may have changed since the address was typed
    except Refusal as refusal:
        return str(refusal)
    body = json.dumps(message(alarm, run), ensure_ascii=True).encode()
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "rollout-inspector",
        **signed(body, timezone.now(), webhook_key(held)),
        "X-Inspector-Delivery": alarm.code,
    }
    return asyncio.run(_post(parts.geturl(), body, headers))


def signed(body: bytes, now: datetime, key: str) -> dict[str, str]:
    """The headers that prove who sent a body: HMAC-SHA256 over the seconds since 1970, a full stop, and the body."""
    seconds = str(int(now.timestamp()))
    signature = hmac.new(key.encode(), seconds.encode() + b"." + body, hashlib.sha256)
    return {"X-Inspector-Timestamp": seconds, "X-Inspector-Signature": f"sha256={signature.hexdigest()}"}


def message(alarm: Alarm, run: Run) -> dict[str, Any]:
    """What a webhook is told. Nothing of a trajectory is in it."""
    return {
        "alarm": alarm.code,
        "figure": alarm.figure,
        "kind": alarm.kind,
        "sentence": sentence_of(alarm),
        "limit": alarm.limit,
        "first_step": alarm.first_step,
        "last_step": alarm.last_step,
        "worst_step": alarm.worst_step,
        "worst": alarm.worst,
        "baseline": alarm.baseline,
        "raised_at": alarm.raised_at.isoformat(),
        "run": run.code,
        "run_name": run.name,
        "project": run.project.code,
        "page": f"/runs/{run.code}/alarms",
    }


def sentence_of(alarm: Alarm) -> str:
    """What an alarm says; empty for a figure that only a newer version knows."""
    if alarm.figure not in set(AlarmFigure):
        return ""
    raised = Raised(alarm.first_step, alarm.last_step, alarm.n_steps, alarm.worst_step, alarm.worst, alarm.baseline)
    title = KINDS[alarm.kind].title if alarm.kind in KINDS else alarm.kind
    return alarm_sentence(AlarmFigure(alarm.figure), title, alarm.limit, raised)


async def _post(address: str, body: bytes, headers: dict[str, str]) -> str:
    import aiohttp

    limit = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    try:
        # No proxy and no redirect: either could lead to a host that is not allowed. The body of the answer is not read.
        async with (
            aiohttp.ClientSession(timeout=limit, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.post(address, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            status = answer.status
    except TimeoutError:
        return f"The webhook did not answer within {ANSWER_SECONDS:g} seconds."
    except (aiohttp.ClientError, ValueError, OSError) as error:
        return f"The webhook could not be reached: {type(error).__name__}."
    if 200 <= status < 300:
        return ""
    if 300 <= status < 400:
        return f"The webhook answered {status}, a redirect, which is not followed. Write the address that it leads to."
    return f"The webhook answered {status}."


KIND = JobKind("deliver_alarms", "Deliver Alarms", do_job)  # The webhook of a project is told of the alarms of a run.
