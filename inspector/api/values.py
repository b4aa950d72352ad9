"""What the API returns of runs, jobs and searches. The schema takes these docstrings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.urls import reverse

from inspector.api.remedies import WORDS
from inspector.runs.jobs import notes_of, sentence_of, what_of
from inspector.runs.pages import RunValues, ShownRun
from inspector.search.search_page import SearchResult
from inspector.web.twins import Page, from_columns
from rollout_inspector.refusal import worded
from rollouts.jobs.exports.exports import is_offered
from rollouts.store.jobs.activity import is_active
from rollouts.store.models import Job, Run, StoredTrajectory


@dataclass(frozen=True)
class RunOfProject(RunValues):
    """A run as a line of a list."""

    project: str
    """Code of its project."""


@dataclass(frozen=True)
class WholeRun(ShownRun):
    """A run with its origin."""

    project: str
    """Code of its project."""


@dataclass(frozen=True)
class RunsPart(Page):
    """Part of the list of runs."""

    items: list[RunOfProject]
    """Newest first."""
    next: str | None
    """What ``cursor`` takes for the following part; null on the last."""


@dataclass(frozen=True)
class JobValues(Page):
    """Background work."""

    code: str
    """Names it in addresses."""
    kind: str
    """What is done."""
    what: str
    """The kind and its options in words."""
    status: str
    """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``."""
    active: bool
    """It still changes."""
    run: str | None
    """Code of the run that it works on."""
    trajectory: str | None
    """Code of the trajectory that it replays."""
    check: str | None
    """Code of the template check that it answers."""
    done: int
    """Trajectories that are done."""
    total: int
    """Trajectories that it has to go through."""
    error: str
    """Why it failed; empty otherwise."""
    sentence: str
    """Where it stands, and what to do where it does not go on."""
    notes: list[str]
    """Sentences about what was left out."""
    file: str | None
    """Address of the file of an export, while it is offered."""
    bytes: int
    """Size of that file."""
    created_at: datetime
    """When it was asked for."""
    finished_at: datetime | None
    """When it ended."""
    expires_at: datetime | None
    """When its file goes."""

    @classmethod
    def of(cls, job: Job) -> JobValues:
        """A job whose subject is loaded."""
        return from_columns(
            cls,
            job,
            what=what_of(job),
            active=is_active(job),
            run=job.run.code if job.run else None,
            trajectory=job.subject.code if isinstance(job.subject, StoredTrajectory) else None,
            check=job.template_check.code if job.template_check else None,
            error=worded(job.error, job.remedy, WORDS),
            sentence=sentence_of(job, WORDS),
            notes=notes_of(job),
            file=reverse("api:job_file", kwargs={"code": job.code}) if is_offered(job) else None,
            bytes=job.bytes_written,
        )


@dataclass(frozen=True)
class JobsPart(Page):
    """Part of the list of jobs."""

    items: list[JobValues]
    """Newest first."""
    next: str | None
    """What ``cursor`` takes for the following part; null on the last."""


@dataclass(frozen=True)
class ImportBegun(Page):
    """An import that a worker does now."""

    run: WholeRun
    """The run that the files are read into."""
    job: JobValues | None
    """The job that reads them."""


@dataclass(frozen=True)
class ReplayValues(Page):
    """What every strategy makes of a trajectory."""

    trajectory: str
    """Code of the trajectory."""
    job: JobValues
    """The job that replays it."""
    strategies: list[dict[str, Any]]
    """The figures of each strategy; empty until the job is done."""


@dataclass(frozen=True)
class FoundTrajectory(Page):
    """A trajectory that a search found."""

    code: str
    """Names it in addresses."""
    url: str
    """Address of its page."""
    run: str
    """Code of its run."""
    run_name: str
    """Name of its run."""
    external_id: str
    """Its name in the source."""
    group: str
    """Trajectories of one prompt share it."""
    status: str
    """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``."""

    @classmethod
    def of(cls, trajectory: StoredTrajectory) -> FoundTrajectory:
        """A trajectory whose run is loaded."""
        run, url = trajectory.run, reverse("trajectory", args=[trajectory.code])
        return from_columns(cls, trajectory, run=run.code, run_name=run.name, url=url)


@dataclass(frozen=True)
class SearchPart(Page):
    """Part of what a search finds."""

    runs: list[RunOfProject]
    """Runs whose name or model holds the text, or whose code it is."""
    trajectories: list[FoundTrajectory]
    """Trajectories whose external id holds the text, or whose code or group it is."""
    next_runs: str | None
    """What ``cursor`` takes, with ``kind=runs``, for more runs; null = there are none."""
    next_trajectories: str | None
    """What ``cursor`` takes, with ``kind=trajectories``, for more trajectories; null = there are none."""
    results: list[SearchResult]
    """Ranges of tokens, findings or metadata, where ``by`` and ``q`` ask for them."""
    next_results: str | None
    """What ``cursor`` takes for more results; null = everything was searched. An empty part may have a next one."""
    notes: list[str]
    """Sentences about what could not be searched for results."""


def run_line(run: Run) -> RunOfProject:
    """A run whose project is loaded."""
    return RunOfProject.of(run, project=run.project.code)


def whole_run(run: Run) -> WholeRun:
    """A run whose project, tokenizer and templates are loaded."""
    return WholeRun.of(run, project=run.project.code)
