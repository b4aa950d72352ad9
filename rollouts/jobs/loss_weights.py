"""What every loss makes of the tokens of a run: the weights of its trajectories, summed by a worker or a command."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.diagnose.gap.figures import trainer_column
from rollout_inspector.diagnose.gap.token_classes import TokenClasses
from rollout_inspector.diagnose.loss_weights.figures import IN_TRAJECTORY, TrajectoryWeights, WeightSums, moved
from rollout_inspector.diagnose.loss_weights.row_weights import common_advantage, with_columns_of
from rollout_inspector.diagnose.loss_weights.rules import MEANS
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.strategies.replay import StrategyResult
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs.replays.replay_context import BATCH, context_of, replayed
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, drop_earlier_reports, end_job
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import run_of_job
from rollouts.store.trajectories.findings import places_of_findings
from rollouts.store.trajectories.groups import advantages_of_groups
from rollouts.store.trajectories.trajectories import finished_trajectories, load_trajectories, trajectory_batches
from rollouts.store.trajectories.trajectory_parts import placed_finding

log = logging.getLogger(__name__)

VERSION = 1  # Raise it when a report becomes another: stored ones are then not shown.
MAX_REPLAYED = 20_000
"""Trajectories of a run that is also counted under the rows of every strategy: a number is kept of each of them."""
MAX_REASONS = 3  # Sentences of a strategy's refusals that are kept, the most frequent ones.
NOT_COUNTED = "not_decidable"  # The kind of finding that says that nothing was found out.


def run_key(run: Run) -> str:
    """The hash of all that the sums of a run depend on."""
    parts = run.n_trajectories, run.n_finished, run.n_tokens, run.n_rows, sorted(run.finding_counts.items())
    return hashlib.sha256(repr((*parts, run.n_rewards, run.reward_sum)).encode()).hexdigest()


Counted = tuple[Trajectory, float | None, Sequence[Finding], TrajectoryWeights]
"""A trajectory that was counted as recorded: itself, its advantage, its findings and its weights."""


class _StrategySums:
    """The sums under the rows of one strategy, beside those of the same trajectories as recorded."""

    def __init__(self) -> None:
        self._sums = WeightSums()
        self._before: list[TrajectoryWeights] = []
        self._after: list[TrajectoryWeights] = []
        self._why: Counter[str] = Counter()

    def add(self, counted: Counted, result: StrategyResult) -> None:
        if result.refused:
            self._why[result.refused] += 1
            return
        value, advantage, findings, weights = counted
        common = common_advantage(value.rows) if value.rows else None
        kinds = [replace(finding, step=None, row=None) for finding in {item.kind: item for item in findings}.values()]
        rows = [with_columns_of(row, value.rows, with_advantages=common is None) for row in result.rows]
        self._before.append(weights)
        self._after.append(self._sums.add(value, rows, advantage if common is None else common, kinds))

    def report(self) -> dict[str, Any]:
        """What the losses make of the rows. ``moved`` is among the ``compared`` trajectories. These have a decidable
        weight for each of their tokens, as recorded and under the strategy."""
        report = self._sums.report([IN_TRAJECTORY])
        del report["steps"]  # those of the run
        for n, line in enumerate(report["rules"]):
            pairs = [
                (before, after)
                for before, after in zip(self._before, self._after, strict=True)
                if before.known[n] == before.tokens and after.known[n] == after.tokens
            ]
            line["compared"] = len(pairs)
            before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            line["moved"] = {mean: moved(before, after, mean)[n] for mean in MEANS}
        return {"refused": self._why.total(), "why": dict(self._why.most_common(MAX_REASONS)), **report}


class RunWeights:
    """The weights of the finished trajectories of a run, which :meth:`counted` goes through."""

    def __init__(self, run: Run, strategies: bool) -> None:
        """``strategies``: also under the rows of every strategy. Raises :class:`Refusal` with a sentence."""
        self.run, self.key = run, run_key(run)
        self.sums = WeightSums()
        self.columns: Counter[str] = Counter()
        self.severities: dict[str, str] = {}
        self._strategies = {slug: _StrategySums() for slug in STRATEGIES} if strategies else {}
        if strategies and run.n_finished > MAX_REPLAYED:
            raise Refusal(
                f"Under other strategies at most {MAX_REPLAYED:,} trajectories are compared, and this run has "
                f"{run.n_finished:,}. Ask without strategies, or import a part of the run."
            )
        if strategies and not run.n_steps:
            raise Refusal(
                "This run holds training rows without steps, and a strategy is replayed over steps. Ask without "
                "strategies."
            )

    def counted(self) -> Iterator[int]:
        """Count every finished trajectory. Yields the number of those that are counted so far."""
        self._advantages = advantages_of_groups(self.run)
        self.sums = WeightSums(_classes_of(self.run))
        if not self._strategies:
            for n, _ in enumerate(self._recorded(), start=1):
                yield n
            return
        pairs = ((counted, counted[0]) for counted in self._recorded())
        with closing(replayed(pairs, self._strategies, *context_of(self.run))) as results_of:
            for n, (counted, results) in enumerate(results_of, start=1):
                for result in results:
                    self._strategies[result.slug].add(counted, result)
                yield n

    def _recorded(self) -> Iterator[Counted]:
        for batch in trajectory_batches(finished_trajectories(self.run), BATCH):
            findings = places_of_findings(batch, NOT_COUNTED)
            for record, value in zip(batch, load_trajectories(batch), strict=True):
                rows = value.rows or tuple(merged_rows(value.steps))
                self.columns.update(filter(None, (trainer_column(row) for row in rows)))
                placed = []
                for finding in findings[record.pk]:
                    self.severities.setdefault(finding.kind, finding.severity)
                    placed.append(placed_finding(finding))
                advantage = self._advantages.get(record.pk)
                weights = self.sums.add(value, rows, advantage, placed)
                yield value, advantage, placed, weights

    def report(self) -> dict[str, Any]:
        """All figures as JSON. Without ``strategies`` that list is empty."""
        recorded = self.sums.report()
        return {
            "key": self.key,
            "version": VERSION,
            **recorded,
            "trainer_columns": dict(self.columns),
            "severities": self.severities,
            "strategies": [{"strategy": slug, **sums.report()} for slug, sums in self._strategies.items()],
        }


def _classes_of(run: Run) -> TokenClasses | None:
    """The classes of the run's tokens; None without a tokenizer that can be read."""
    if run.tokenizer is None:
        return None
    try:
        return TokenClasses(load_tokenizer(run.tokenizer.files_sha256))
    except (ValueError, OSError) as error:
        log.warning("token classes are not counted run=%s: %s", run.code, error)
        return None


def do_job(job: Job, beat: Beat) -> None:
    """Sum the weights of a run. A worker that takes up a lost job begins again. Reports of earlier jobs go."""
    run = run_of_job(job)
    weights = RunWeights(run, bool(job.options.get("strategies")))
    beat(n_done=0, n_total=finished_trajectories(run).count())
    n_done = 0
    for n_done in weights.counted():
        beat.now_and_then(n_done=n_done)
    if not end_job(job, Job.Status.DONE, report=weights.report(), n_done=n_done):
        raise JobLost
    drop_earlier_reports(job)


KIND = JobKind(
    "loss_weights",
    "Weights in the loss",
    do_job,
    activity="loss weights computation started",
    page="run-gap#weights",
    details=lambda options: ", also under every strategy" if options.get("strategies") else "",
    done=lambda job: (f"{job.n_done:,} trajectories counted; the page Gap shows what each loss makes of their tokens."),
)
"""The weights of the tokens of a run under every loss are summed; ``report`` has the sums."""
