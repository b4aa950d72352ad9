"""Replays of strategies over all trajectories of a run, in shards where the run is large."""

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.strategies.replay import StrategyResult
from rollouts.jobs.replays.replay_context import context_of, loaded_trajectories, replayed
from rollouts.jobs.replays.trajectory_replays import figures, hash_of
from rollouts.jobs.run_parts import cut_run, range_of
from rollouts.store.jobs.jobs import Beat, JobKind, Sharing, end_job
from rollouts.store.jobs.shards import shards_of
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import run_of_job
from rollouts.store.trajectories.rows import row_totals
from rollouts.store.trajectories.trajectories import LAST, finished_trajectories

MAX_REASONS = 3  # Sentences of a strategy's refusals that are kept, the most frequent ones.


def run_key(run: Run) -> str:
    """The hash of all that the replay of a run depends on."""
    return hash_of(run, run.n_trajectories, run.n_finished, run.n_steps, run.n_tokens)


def new_report(run: Run, first: int = 0, last: int = LAST) -> dict[str, Any]:
    """The report of a range of a run before any trajectory was replayed, with the figures of the stored rows."""
    return {
        "key": run_key(run),
        "recorded": row_totals(finished_trajectories(run, first, last)),
        "strategies": [
            {"strategy": slug, "trajectories": 0, "refused": 0, "why": {}, **dict.fromkeys(_SUMMED, 0), "differing": 0}
            for slug in STRATEGIES
        ],
    }


_SUMMED = {
    "rows": "rows_count", "tokens": "tokens", "trained": "trained_tokens", "sampled": "sampled_tokens",
    "lost": "lost_tokens", "repaid": "prompt_tokens_repaid",
}
"""Figure of a run -> the figure of its trajectories that is summed."""


def replay_run(run: Run, report: dict[str, Any], after: int = -1, last: int = LAST) -> Generator[int]:
    """Replay every strategy over the finished trajectories after the index ``after``, and add them to the report.
    Yields the index of each trajectory that was added; ``last`` is the index of the last one. A trajectory that cannot
    be replayed counts as refused."""
    stored = loaded_trajectories(finished_trajectories(run, after + 1, last))
    for record, results in replayed(stored, STRATEGIES, *context_of(run)):
        _add(report, results)
        yield record.index


def do_job(job: Job, beat: Beat) -> None:
    """Replay every strategy over a run. The report of an earlier worker is continued."""
    do_shard(job, beat)
    join(job, beat)


def do_shard(job: Job, beat: Beat) -> dict[str, Any]:
    """Replay every strategy over the trajectories that the options of a job or of a shard name. Returns the columns to
    store at its end: the report, and the number of trajectories."""
    run, first, last = run_of_job(job), *range_of(job)
    if job.report is None or job.report["key"] != run_key(run):
        job.report, job.reached = new_report(run, first, last), first - 1
    n_done, n_total = (finished_trajectories(run, first, stop).count() for stop in (job.reached, last))
    beat(n_done=n_done, n_total=n_total, report=job.report, reached=job.reached)
    with closing(replay_run(run, job.report, job.reached, last)) as indices:
        for index in indices:
            n_done += 1
            beat.now_and_then(n_done=n_done, report=job.report, reached=index)
    return {"report": job.report, "n_done": n_done}


def join(job: Job, beat: Beat) -> None:
    """End a replay: its report is the sum of the reports of its shards, in their order."""
    run = run_of_job(job)
    reports = [shard.report or {} for shard in shards_of(job) or [job]]
    total = new_report(run, 0, -1)
    if any(report.get("key") != total["key"] for report in reports):
        raise Refusal("The run changed while it was replayed. Replay it again.")
    for report in reports:
        _merge(total, report)
    for line in total["strategies"]:
        line["why"] = _most_frequent(line["why"])
    end_job(job, Job.Status.DONE, report=total, n_done=total["strategies"][0]["trajectories"])


def _add(report: dict[str, Any], made: Sequence[StrategyResult]) -> None:
    for line, result in zip(report["strategies"], made, strict=True):
        line["trajectories"] += 1
        if result.refused:
            line["refused"] += 1
            line["why"][result.refused] = line["why"].get(result.refused, 0) + 1
            continue
        of_one = figures(result)
        for name, figure in _SUMMED.items():
            line[name] += of_one[figure]
        line["differing"] += result.differs_at is not None


def _merge(total: dict[str, Any], report: dict[str, Any]) -> None:
    """Add the figures of a report to those of another one."""
    for line, other in zip(total["strategies"], report["strategies"], strict=True):
        line["why"] = dict(Counter(line["why"]) + Counter(other["why"]))
        for name in ("trajectories", "refused", *_SUMMED, "differing"):
            line[name] += other[name]
    for name, n in report["recorded"].items():
        total["recorded"][name] += n


def _most_frequent(why: dict[str, int]) -> dict[str, int]:
    """The sentences that are kept of why trajectories were refused."""
    return dict(sorted(why.items(), key=lambda item: (-item[1], item[0]))[:MAX_REASONS])


KIND = JobKind(
    "replay",
    "Replayed under every strategy",
    do_job,
    Sharing(cut_run, do_shard, join),
    activity="replay started",
    page="run-cost#strategies",
    done=lambda job: (
        f"{job.n_done:,} trajectories replayed; the cost page shows what each strategy would have made of them."
    ),
)
"""Every strategy is replayed over a run; ``report`` sums what each one makes."""
