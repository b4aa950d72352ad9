"""Scores a run with an engine, and prints how far its log-probabilities lie from those of the sampler."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import transaction

from rollout_inspector.commands.remedies import WORDS
from rollout_inspector.diagnose.gap.figures import GapFigures
from rollout_inspector.refusal import worded
from rollouts.jobs import rescore
from rollouts.jobs.sending import engine_queue, send
from rollouts.management import TerminalCommand
from rollouts.sampling.engines import scoring_engines
from rollouts.store.jobs.jobs import end_job, take_job
from rollouts.store.models import Job, Run, ScoredColumn
from rollouts.store.runs.runs import find_run
from rollouts.store.trajectories.columns import columns_of, gap_of_columns, scored_value
from rollouts.worker.jobs import work_on
from rollouts.worker.run_rollouts import close_engines


class Command(TerminalCommand):
    help = (
        "Have an engine give its log-probabilities to the stored tokens of a run, and store them as a column that can "
        "be compared with the sampler's, the trainer's or another engine's. The run's page shows the progress."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN")
        parser.add_argument("--model", default="", help="a served model (setting INSPECTOR_MODELS)")
        parser.add_argument("--engine", default="", help=f"{', '.join(scoring_engines())} (default: the model's own)")
        parser.add_argument("--temperature", type=float, default=1.0, help="of the sampler, where it is not 1")
        parser.add_argument(
            "--compare", nargs=2, metavar=("FIRST", "SECOND"),
            help="score nothing; hold two columns against each other: sampler, trainer_logprobs, scored:CODE, ...",
        )  # fmt: skip
        parser.add_argument("--background", action="store_true", help="let a worker do it, and do not wait for it")
        parser.add_argument("--json", action="store_true")

    def handle(self, *_: Any, **options: Any) -> None:
        run = find_run(code=options["run"])
        if run is None:
            raise CommandError(f"There is no run with the code {options['run']!r}.")
        if options["compare"]:
            first, second = options["compare"]
            self._compare(run, first, second, options["json"])
            return
        if not options["model"]:
            raise CommandError("Name the model that scores with --model, or two columns with --compare.")
        with transaction.atomic():  # no worker sees the job before it is taken here
            job, ours = rescore.ask(run, options["model"], options["engine"], None, options["temperature"])
            taken = take_job(job.pk) if ours and not options["background"] else None
        if not ours:
            raise CommandError(
                f"Run {run.code} is being scored already: {job.n_done:,} of {job.n_total:,} trajectories are done. "
                "Wait for it, or cancel it on the run's page."
            )
        if options["background"]:
            if sentence := send(job):
                raise CommandError(sentence)
            queue = engine_queue(options["model"])
            self.stdout.write(
                f"A worker of the queue {queue} scores run {run.code}. The run's page shows the progress."
            )
            return
        self._work(job, taken)
        self._say(job, ScoredColumn.objects.get(code=(job.report or {})["column"]), options["json"])

    def _compare(self, run: Run, first: str, second: str, as_json: bool) -> None:
        names = [column.name for column in columns_of(run)]
        for name in (first, second):
            if name not in names:
                raise CommandError(f"Run {run.code} has no column named {name!r}; it has {', '.join(names) or 'none'}.")
        gap = gap_of_columns(run, first, second)
        if as_json:
            self.stdout.write(json.dumps({"run": run.code, "columns": [first, second], **_figures(gap)}))
        elif not gap.tokens:
            self.stdout.write("No token under the loss mask has a value in both columns.")
        else:
            self.stdout.write(f"{second} against {first}, {_sentence(gap)}")

    def _work(self, job: Job, taken: Job | None) -> None:
        """Do the job here. Raises :class:`CommandError` with a sentence when the job does not reach its end."""
        if taken is not None:
            try:
                work_on(taken, self._tell if sys.stderr.isatty() else lambda _: None)
            except KeyboardInterrupt:
                end_job(taken, Job.Status.CANCELLED)
            finally:
                close_engines()
        job.refresh_from_db()
        if job.status != Job.Status.DONE:
            raise CommandError(worded(job.error, job.remedy, WORDS) or f"It was {job.status}.")

    def _say(self, job: Job, column: ScoredColumn, as_json: bool) -> None:
        value, gap = scored_value(column), None if column.gap is None else GapFigures.from_json(column.gap)
        if as_json:
            told = {
                "run": column.run.code, "column": value.name, "model": value.model, "engine": value.engine,
                "weights": value.weights, "temperature": value.temperature,
                "trajectories": column.n_trajectories, "tokens": column.n_tokens,
                "against_sampler": None if gap is None else _figures(gap),
                "notes": job.notes,
            }  # fmt: skip
            self.stdout.write(json.dumps(told))
            return
        for note in job.notes:
            self.stdout.write(note)
        self.stdout.write(f"The column {value.name} ({value.title}) has {column.n_tokens:,} scores.")
        if gap is None:
            self.stdout.write("No token under the loss mask has a log-probability of the sampler to compare them with.")
            return
        self.stdout.write(f"Against the sampler, {_sentence(gap)}")

    def _tell(self, job: Job) -> None:
        end = "\n" if job.n_done and job.n_done == job.n_total else ""
        self.stderr.write(f"\r{job.n_done:,} of {job.n_total:,} trajectories", ending=end)


def _figures(gap: GapFigures) -> dict[str, Any]:
    return {"tokens": gap.tokens, "mean_abs": gap.mean_abs, "k3": gap.mean_k3, "largest": gap.largest}


def _sentence(gap: GapFigures) -> str:
    return (
        f"over {gap.tokens:,} tokens: {gap.mean_abs:.3g} nats on average without the sign, {gap.largest:.3g} at most, "
        f"k3 {gap.mean_k3:.3g}."
    )
