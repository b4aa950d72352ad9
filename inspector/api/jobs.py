"""Work that is asked for: launch, import, export, diagnosis and replay of a run; and the jobs that do it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from ninja import File, Form, Query, Router, Schema
from ninja.files import UploadedFile
from pydantic import ConfigDict, Field

from inspector.api.answers import (
    AnswerPart, Body, JobAnswer, JobKind, PartAsked, WholeRun, answer, extra, file_answer, found, job_answer,
    resting_run, the_run, the_trajectory, whole_run
)
from inspector.api.callers import named_tokenizer, project_for
from inspector.runs.jobs.job_views import offered_file
from inspector.runs.launches.import_views import start_import
from inspector.runs.training.gap_page import GapPage, gap_of
from inspector.trajectories.forks_page import ForksPage
from inspector.web.access import access, reader_of, require
from inspector.web.forms import NO_TOKENIZER, ImportForm
from inspector.web.twins import ApiProblem, Page, some_fields
from rollouts.jobs import diagnosis, forks, gap_reports, launch
from rollouts.jobs.broker import send_job
from rollouts.jobs.exports import exports
from rollouts.jobs.exports.exports import ExportOptions
from rollouts.jobs.forks import ForkSettings
from rollouts.jobs.launch import LaunchSettings
from rollouts.jobs.replays import run_replays
from rollouts.store.jobs import jobs
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job, Role, Run, StoredTrajectory
from rollouts.store.parameters import Count, StatusName, Text
from rollouts.store.people.visible_objects import find_visible_job, find_visible_run, visible_jobs
from rollouts.store.runs.forks import effects_of, fork_figures, forks_of
from rollouts.store.runs.runs import choose_tokenizer
from rollouts.store.trajectory_filters import FilterParameters, TrajectoryFilters

router = Router(tags=["work"])


class SettingsAsked(LaunchSettings):
    """The settings of a launch, as a run reports them. With the defaults a run works."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")


class ForkSettingsAsked(ForkSettings):
    """From where a trajectory is continued, and how."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")


class ForkAsked(Body):
    """A fork of a trajectory: from a token, or from both sides of a finding."""

    settings: ForkSettingsAsked = Field(default_factory=ForkSettingsAsked)
    """From where, and how."""


class LaunchAsked(Body):
    """A launch. Without any settings it makes a run that works."""

    name: Text = ""
    """What the run is called; empty = after its model and environment."""
    project: Text = ""
    """Code of the project; empty = the caller's first."""
    settings: SettingsAsked = Field(default_factory=SettingsAsked)
    """As a run reports them."""


class ImportAsked(Schema):
    """How files are to be read."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: Text = ""
    """What the run is called; empty = after its first file."""
    format: Text = "auto"
    """A format of ours, or ``auto``."""
    tokenizer: Text = ""
    """Name of a registered tokenizer; empty = the one that the files name; ``none`` = ids are shown as ids."""
    project: Text = ""
    """Code of the project; empty = the caller's first."""
    training_step: Count | None = None
    """Of all that is read; null = a field of each record tells it, or the name of its file."""
    training_step_from: Text = ""
    """A regular expression with one group, the training step in the name of a file."""


class ExportedAlone(Body, FilterParameters):
    """The filter of the run's page: which trajectories are written. An empty value filters nothing."""

    def chosen(self, reader: int | None) -> dict[str, Any]:
        """The fields that filter. ``reader``: the key of the user who asks."""
        return TrajectoryFilters(**self.model_dump(), reader=reader if self.seen else None).chosen()


class ExportAsked(Body):
    """How a run is to be written."""

    format: Text = "own_jsonl"
    """A format of ours, or of a trainer."""
    strategy: Text = ""
    """The strategy whose rows are written; empty = the stored rows."""
    force: bool = False
    """Write rows that break the target's rules too."""
    leave_out: bool = False
    """Leave trajectories with such rows out."""
    skip_discontinuous: bool = False
    """Leave trajectories out that are several rows, because a prompt does not continue the call before it."""
    pad_to: Annotated[int, Field(ge=1, le=exports.MAX_PADDING)] | None = None
    """Pad each row to so many tokens; for ``sft`` alone."""
    pad_id: Count = 0
    """The id to pad with."""
    only: ExportedAlone | None = None
    """Write only the trajectories that pass this filter; null = all."""


class DiagnoseAsked(Body):
    """How a run is to be diagnosed again."""

    tokenizer: Text = ""
    """Name of a registered tokenizer that the run takes; empty = its own."""


class JobsAsked(PartAsked):
    """Which jobs are listed."""

    status: StatusName = ""
    """Only jobs in this state."""
    kind: JobKind = ""
    """Only jobs that do this."""
    run: Text = ""
    """Code of a run."""


@router.post("/launches", response={201: WholeRun}, openapi_extra=extra(413, 422))
def launch_run(request: HttpRequest, asked: LaunchAsked) -> HttpResponse:
    """Launch rollouts. The run is returned as it is queued; read it again to follow it."""
    project = project_for(request, asked.project)
    run = launch.launch(asked.settings, name=asked.name.strip(), user=request.user, project=project)
    return answer(whole_run(_again(request, run)), 201)


ForksAnswer: Any = some_fields(ForksPage, "ForksAnswer", "What the policy would have done otherwise.", "forks effects")


@router.get("/trajectories/{code}/forks", response=ForksAnswer, openapi_extra=extra())
def list_forks(request: HttpRequest, code: str) -> HttpResponse:
    """The newest forks of a trajectory, and what breaks did. Read them again while they grow."""
    return answer(_forks(the_trajectory(request, code)))


@router.post("/trajectories/{code}/forks", response={201: ForksAnswer}, openapi_extra=extra(413, 422))
def fork_trajectory(request: HttpRequest, code: str, asked: ForkAsked) -> HttpResponse:
    """Continue a trajectory from a token, or from both sides of a finding. Returns the new forks alone."""
    trajectory = the_trajectory(request, code)
    require(request, trajectory, Role.MEMBER)
    runs = forks.fork(trajectory, asked.settings, request.user)
    return answer(_forks(trajectory, [run.pk for run in runs]), 201)


def _forks(trajectory: StoredTrajectory, only: Sequence[int] = ()) -> ForksAnswer:
    figures = fork_figures([fork for fork in forks_of(trajectory) if fork.pk in only or not only])
    return ForksAnswer(figures, effects_of(figures))


@dataclass(frozen=True)
class ImportBegun(Page):
    """An import that a worker does now."""

    run: WholeRun
    """The run that the files are read into."""
    job: JobAnswer | None
    """The job that reads them."""


@router.post("/imports", response={202: ImportBegun}, openapi_extra=extra(413, 422))
def import_files(request: HttpRequest, files: File[list[UploadedFile]], asked: Form[ImportAsked]) -> HttpResponse:
    """Upload files of trajectories, which a worker reads into a new run."""
    project = project_for(request, asked.project)
    chosen = asked.tokenizer
    if chosen not in ("", NO_TOKENIZER):
        chosen = f"id:{named_tokenizer(project, chosen).pk}"
    typed = {
        "name": asked.name, "format": asked.format, "tokenizer": chosen, "training_step": asked.training_step,
        "training_step_from": asked.training_step_from,
    }
    form = ImportForm(project, typed, request.FILES)
    run = start_import(form, request, project)
    if run is None:
        errors = form.sentences()
        raise ApiProblem(422, next(iter(errors.values()))[0], errors)
    jobs = visible_jobs(access(request), {"run__code": run.code}, "", 1)[0]
    return answer(ImportBegun(whole_run(_again(request, run)), job_answer(jobs[0]) if jobs else None), 202)


def _again(request: HttpRequest, run: Run) -> Run:
    return found(find_visible_run(access(request), run.code), "run", run.code)


@router.post("/runs/{code}/exports", response={200: JobAnswer, 202: JobAnswer}, openapi_extra=extra(409, 413, 422))
def export_run(request: HttpRequest, code: str, asked: ExportAsked) -> HttpResponse:
    """Have a worker write a run to a file; 200 where the same export is being written already."""
    run = resting_run(request, code)
    try:
        only = asked.only.chosen(reader_of(request)) if asked.only else None
        options = ExportOptions(**asked.dict(exclude={"only"}), only=only or None).as_options()
    except ValueError as error:
        raise ApiProblem(422, str(error)) from error
    return _begin(request, run, exports.KIND.slug, options)


@router.post("/runs/{code}/diagnose", response={200: JobAnswer, 202: JobAnswer}, openapi_extra=extra(409, 413, 422))
def diagnose_run(request: HttpRequest, code: str, asked: DiagnoseAsked) -> HttpResponse:
    """Have a worker diagnose every finished trajectory of a run again."""
    run = resting_run(request, code)
    tokenizer = named_tokenizer(run.project_id, asked.tokenizer) if asked.tokenizer else None
    response = _begin(request, run, diagnosis.KIND.slug, {"tokenizer": tokenizer.name} if tokenizer else {})
    if tokenizer is not None and response.status_code == 202 and tokenizer.pk != run.tokenizer_id:
        choose_tokenizer(run, tokenizer)
    return response


@router.post("/runs/{code}/replay", response={200: JobAnswer, 202: JobAnswer}, openapi_extra=extra(409))
def replay_run(request: HttpRequest, code: str) -> HttpResponse:
    """Have a worker replay every strategy over the finished trajectories of a run."""
    run = resting_run(request, code)
    return _begin(request, run, run_replays.KIND.slug, {})


@router.get("/runs/{code}/gap", response=GapPage, openapi_extra=extra(422))
def get_gap(request: HttpRequest, code: str, teacher: bool | None = None) -> HttpResponse:
    """How far trainer and sampler are apart, and why: the stored report, or why there is none. With ``teacher`` that of
    a teacher's column."""
    return answer(gap_of(the_run(request, code), teacher))


@router.post("/runs/{code}/gap", response={200: JobAnswer, 202: JobAnswer}, openapi_extra=extra(409, 422))
def read_gap(request: HttpRequest, code: str) -> HttpResponse:
    """Have a worker name the causes of the gap between trainer and sampler of a run."""
    run = resting_run(request, code)
    if sentence := gap_reports.why_no_gap(run):
        raise ApiProblem(422, sentence)
    return _begin(request, run, gap_reports.KIND.slug, {})


def _begin(request: HttpRequest, run: Run, kind: str, options: dict[str, Any]) -> HttpResponse:
    """Ask for a job: 202 when a worker is sent, 200 when it is under way, 409 when another one is."""
    job, is_new = ask_job(run, kind, options, request.user)
    if not is_new and job.options != options:
        raise ApiProblem(409, f"Other work of this kind is under way: wait for the job {job.code}, or cancel it first.")
    if is_new and (sentence := send_job(job)):
        raise ApiProblem(503, sentence)
    return answer(job_answer(job), 202 if is_new else 200)


# -- jobs --------------------------------------------------------------------------------------------------------------


@router.get("/jobs", response=AnswerPart[JobAnswer], openapi_extra=extra(422), tags=["jobs"])
def list_jobs(request: HttpRequest, asked: Query[JobsAsked]) -> HttpResponse:
    """The background work of the caller's projects, newest first."""
    columns = {"status": asked.status, "kind": asked.kind, "run__code": asked.run}
    return answer(AnswerPart.of(visible_jobs(access(request), columns, asked.cursor, asked.limit), job_answer))


@router.get("/jobs/{code}", response=JobAnswer, openapi_extra=extra(), tags=["jobs"])
def get_job(request: HttpRequest, code: str) -> HttpResponse:
    """One job: how far it is, and the address of its file."""
    return answer(job_answer(_job(request, code)))


@router.post("/jobs/{code}/cancel", response=JobAnswer, openapi_extra=extra(), tags=["jobs"])
def cancel_job(request: HttpRequest, code: str) -> HttpResponse:
    """Ask a job to stop; one that has ended stays as it is."""
    job = _job(request, code)
    assert job.subject is not None  # as of every job but a shard
    require(request, job.subject, Role.MEMBER)
    jobs.cancel_job(job)
    return answer(job_answer(_job(request, code)))


@router.get(
    "/jobs/{code}/file", url_name="job_file",
    openapi_extra=extra(410, answers=file_answer("The file of an export.", "application/octet-stream", "*/*")),
    tags=["jobs"],
)
def get_job_file(request: HttpRequest, code: str) -> HttpResponseBase:
    """The file of an export, while it is offered."""
    job = _job(request, code)
    if job.kind != exports.KIND.slug or job.run is None:
        raise ApiProblem(404, f"The job {job.code} is no export, so it has no file.")
    file = offered_file(job, job.run)
    if file is None:
        raise ApiProblem(410, "The export has expired, or was never finished. Export the run again.")
    return file


def _job(request: HttpRequest, code: str) -> Job:
    return found(find_visible_job(access(request), code), "job", code)
