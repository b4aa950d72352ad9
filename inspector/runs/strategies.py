"""The cost of a whole run under every strategy, from the figures that a worker added up."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from inspector.runs.jobs.job_values import JobValues
from rollout_inspector.streams.figures import percent_of, share, trained_as_sampled
from rollout_inspector.streams.strategies import about_strategy
from rollouts.jobs.replays import run_replays
from rollouts.store.jobs.jobs import is_active, latest_jobs
from rollouts.store.models import Job, Run


@dataclass(frozen=True)
class RunStrategies:
    """What every strategy would have made of a run."""

    job: JobValues | None  # The newest replay of the run.
    live: bool  # That replay still changes.
    why_not: str  # Why nothing can be replayed; empty when it can.
    recorded: dict[str, Any] | None  # What the run holds; None until a replay has ended.
    lines: list[dict[str, Any]]  # What each strategy would have made of it.
    stale: bool  # The run has changed since that replay.
    made_at: datetime | None  # When that replay ended.


def strategies_of(run: Run) -> RunStrategies:
    """The newest replay, and the report of the last one that was finished. One query beside the run's own."""
    jobs = latest_jobs(run, run_replays.KIND.slug)
    latest = jobs[0] if jobs else None
    done = next((job for job in jobs if job.status == Job.Status.DONE), None)
    report = done.report if done is not None else None
    return RunStrategies(
        job=JobValues.of(latest, run) if latest is not None else None, live=latest is not None and is_active(latest),
        why_not=_why_not(run), recorded=report["recorded"] if report else None,
        lines=[_line(line, report["recorded"]["tokens"], run) for line in report["strategies"]] if report else [],
        stale=report is not None and report["key"] != run_replays.run_key(run),
        made_at=done.finished_at if done is not None else None,
    )


def _why_not(run: Run) -> str:
    """A sentence that says why nothing can be replayed; empty when the run can be replayed."""
    if is_active(run):
        return "Strategies are replayed when the run has ended."
    if not run.n_trajectories:
        return "This run holds no trajectory."
    if not run.n_steps:
        return "This run holds training rows without steps, and a strategy is replayed over steps."
    return ""


def _line(one: dict[str, Any], recorded_tokens: int, run: Run) -> dict[str, Any]:
    """A strategy as a line of the table. Shares count only trajectories that the strategy could replay."""
    replayed = one["trajectories"] - one["refused"]
    trained = trained_as_sampled(one["sampled"], one["lost"])
    times = one["tokens"] / recorded_tokens if recorded_tokens and not one["refused"] else None
    return {
        **one,
        "name": one["strategy"].replace("_", " "),
        "about": about_strategy(one["strategy"]),
        "is_own": one["strategy"] == run.strategy,
        "replayed": replayed,
        "trained_share": share(trained, one["sampled"]),
        "percent": percent_of(trained, one["sampled"]),
        "times": times,
        "times_words": "" if times is None else f"×{times:.2f}",
        "why": [{"sentence": sentence, "trajectories": n} for sentence, n in one["why"].items()],
    }
