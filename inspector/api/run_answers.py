"""What the API shows of a run and of a job."""

from dataclasses import fields
from typing import Any

from django.urls import reverse

from inspector.api.remedies import WORDS
from inspector.runs.jobs.job_values import JobValues
from inspector.runs.run_values import ListedRun, RunValues, ShownRun
from inspector.web.twins import some_fields
from rollouts.jobs.exports.exports import is_offered
from rollouts.store.models import Job, Run, StoredTrajectory

COLUMNS = " ".join(field.name for field in fields(RunValues))
RunOfProject: Any = some_fields(
    ListedRun, "RunOfProject", "A run as a line of a list.", f"{COLUMNS} project=project_code"
)
WholeRun: Any = some_fields(
    ShownRun, "WholeRun", "A run with its origin.",
    f"{COLUMNS} project=project_code tokenizer chat_template rows_chat_template seed_note tool_calls_note created_by "
    "lacks settings",
)
JobAnswer: Any = some_fields(
    JobValues, "JobValues", "Background work.",
    "code kind what status active run trajectory check done total error sentence notes file bytes created_at "
    "finished_at expires_at",
)


def run_line(run: Run) -> Any:
    """A run whose project is loaded."""
    return RunOfProject.of(ListedRun.of(run, project_code=run.project.code))


def whole_run(run: Run) -> Any:
    """A run whose project, tokenizer and templates are loaded."""
    return WholeRun.of(ShownRun.of(run, project=None, project_code=run.project.code))


def job_answer(job: Job) -> Any:
    """A job whose subject is loaded."""
    return JobAnswer.of(JobValues.with_subject(
        job, WORDS, run=job.run.code if job.run else None,
        trajectory=job.subject.code if isinstance(job.subject, StoredTrajectory) else None,
        check=job.template_check.code if job.template_check else None,
        file=reverse("api:job_file", kwargs={"code": job.code}) if is_offered(job) else None,
    ))
