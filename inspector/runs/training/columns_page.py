"""`/runs/<code>/columns`: the columns of log-probabilities of a run, a form that makes one, and two held together."""

from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from inspector.runs.jobs.ask_for_job import STILL_WORKS, tell
from inspector.runs.jobs.job_values import JobValues
from inspector.runs.run_values import OfRun, RunValues
from inspector.web.access import reads_run, require_maker, writes_run
from inspector.web.twins import is_fragment, page
from rollout_inspector.diagnose.gap.figures import GapFigures
from rollout_inspector.refusal import Refusal
from rollouts.jobs import rescore
from rollouts.jobs.broker import send_job
from rollouts.jobs.launch import served_models
from rollouts.sampling.engines import scoring_engines
from rollouts.store.jobs.jobs import is_active, latest_jobs
from rollouts.store.models import Job, Run, ScoredColumn
from rollouts.store.people.activity_log import Action, record
from rollouts.store.runs.logprob_columns import (
    LogprobColumn, columns_of, delete_column, find_scored_column, gap_of_columns, scored_columns, scored_value
)

MAX_COMPARED_TOKENS = 500_000
"""New tokens of a run of which a request compares two columns. A command compares those of a larger run."""


Gap = dict[str, float | int | None]
"""How far two columns lie apart, over the tokens under the mask with a value in both: ``GapFigures.values``."""


@dataclass(frozen=True)
class ColumnLine(LogprobColumn):
    """A column of the list."""

    code: str = ""
    """Of a scored column; empty = it was recorded."""
    made_by: str | None = None
    """Who asked for it; None also for the visitor of a share link."""
    whole: bool = True
    """Every finished trajectory was scored, or named as left out."""
    trajectories: int | None = None
    """Trajectories that it holds; None = it was recorded, or is not whole."""
    tokens: int | None = None
    """Tokens that it holds, alike."""
    of_kept_sets: bool = False
    """It holds no log-probabilities, but the logarithms of the mass of the kept sets. It is compared with nothing."""
    against_sampler: Gap | None = None
    """The column minus the sampler's; None = they have no token in common, or it was recorded."""


@dataclass(frozen=True)
class ColumnsPage(OfRun):
    """The columns of log-probabilities of a run."""

    columns: list[ColumnLine]
    """What was recorded, then what engines made."""
    jobs: list[JobValues]
    """The newest jobs that score the run, the newest first."""
    jobs_live: bool
    """One of them still changes."""
    models: dict[str, str]
    """Each served model with its engine."""
    engines: list[str]
    """The engines that can score."""
    sampler: str
    """The name of the first column that is compared; empty = none was chosen."""
    trainer: str
    """The name of the second one."""
    compared: Gap | None
    """The second minus the first; None = two columns were not chosen, or cannot be compared here."""
    problem: str
    """Why the chosen columns are not compared; empty = they are, or none was chosen."""


@reads_run
def columns(request: HttpRequest, run: Run) -> HttpResponse:
    """The columns of a run, and how far two of them lie apart, where two were chosen."""
    jobs = latest_jobs(run, rescore.KIND.slug)
    live = any(map(is_active, jobs))
    if is_fragment(request, "run-jobs"):
        if not live:
            return HttpResponse(headers={"HX-Refresh": "true"})  # the list of columns has changed
        part = {"run": RunValues.of(run), "jobs": [JobValues.of(job, run) for job in jobs], "jobs_live": live}
        return render(request, "runs/_jobs.html", part)
    lines = lines_of(run)
    choices = [line for line in lines if line.whole and not line.of_kept_sets]
    sampler, trainer = (request.GET.get(name, "")[:80] for name in ("sampler", "trainer"))
    compared, problem = None, ""
    if sampler or trainer:
        problem = _problem(run, {line.name for line in choices}, sampler, trainer)
        if not problem:
            compared = gap_of_columns(run, sampler, trainer).values()
            if not compared["tokens"]:
                problem = "No token under the loss mask has a value in both columns."
    data = ColumnsPage(
        run=RunValues.of(run), columns=lines, jobs=[JobValues.of(job, run) for job in jobs],
        jobs_live=live, models={name: engine.engine for name, engine in served_models().items()},
        engines=scoring_engines(), sampler=sampler, trainer=trainer, compared=compared, problem=problem,
    )
    titles = {line.name: line.title for line in lines}
    return page(
        request, "runs/columns.html", data, choices=choices,
        compared_titles=(titles.get(sampler, ""), titles.get(trainer, "")),
    )


def lines_of(run: Run) -> list[ColumnLine]:
    """What was recorded, then what engines scored."""
    recorded = [ColumnLine(column.name, column.title) for column in columns_of(run) if column.made_at is None]
    return [*recorded, *(_scored_line(run, column) for column in scored_columns(run))]


def _scored_line(run: Run, column: ScoredColumn) -> ColumnLine:
    whole = column.finished_at is not None
    return ColumnLine(
        **vars(scored_value(column)), code=column.code,
        made_by=column.created_by.get_username() if run.makers_shown and column.created_by else None, whole=whole,
        trajectories=column.n_trajectories if whole else None, tokens=column.n_tokens if whole else None,
        of_kept_sets=column.is_of_kept_sets,
        against_sampler=None if column.gap is None else GapFigures.from_json(column.gap).values(),
    )


def _problem(run: Run, names: set[str], sampler: str, trainer: str) -> str:
    for name in (sampler, trainer):
        if name not in names:
            return f"This run has no column named “{name}”. Choose two of the list." if name else "Choose two columns."
    if sampler == trainer:
        return "A column does not differ from itself. Choose another one."
    if run.n_tokens > MAX_COMPARED_TOKENS:
        return (
            f"The run has more than {MAX_COMPARED_TOKENS:,} tokens, so only a command compares two columns of it: "
            f"manage.py rescore {run.code} --compare {sampler} {trainer}"
        )
    return ""


@writes_run
def begin(request: HttpRequest, run: Run) -> HttpResponse:
    """Send a worker of a model to score the run."""
    model, engine = (request.POST.get(name, "").replace("\0", "")[:100] for name in ("model", "engine"))
    if is_active(run):
        return _told(request, run, STILL_WORKS, 409)
    typed = request.POST.get("temperature", "").strip().replace(",", ".")[:20] or "1"
    try:
        temperature = float(typed)
    except ValueError:
        return _told(request, run, f"“{typed}” is no temperature. Write a number such as 0.7.", 422)
    try:
        more = {name: request.POST.get(name, "") in ("on", "1", "true") for name in ("replay", "calibrate", "by_bytes")}
        job, is_new = rescore.ask(run, model, engine, request.user, temperature, **more)
    except Refusal as error:
        return _told(request, run, str(error), 422)
    if is_new and (sentence := send_job(job)):
        return _told(request, run, sentence, 503)
    sentence = "A worker of the model scores this run; its progress stands below."
    return _told(request, run, sentence if is_new else "This run is being scored already.", 202, job)


@writes_run
def delete_scores(request: HttpRequest, run: Run, column: str) -> HttpResponse:
    """Remove a column that an engine made."""
    scored = find_scored_column(run, column)
    if scored is None:
        return _told(request, run, f"This run has no scored column with the code {column[:16]}.", 404)
    require_maker(request, scored)
    if any(map(is_active, latest_jobs(run, rescore.KIND.slug))):
        return _told(request, run, "This run is being scored. Wait until that has ended, or cancel it first.", 409)
    delete_column(scored)
    record(Action.SCORES_DELETED, run, detail=f"{scored}, column {scored.code}")
    return _told(request, run, f"The column of {scored} was deleted. Score again to make a new one.", 200)


def _told(request: HttpRequest, run: Run, sentence: str, status: int, job: Job | None = None) -> HttpResponse:
    return tell(request, run, sentence, status, reverse("run-columns", args=[run.code]), job)
