"""Score a run with an engine, and print how far that is from the sampler's log-probabilities.

The engine's log-probabilities of the stored tokens become a column that can be compared with the sampler's, the
trainer's or another engine's. The run's page shows the progress.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.diagnose.gap.figures import GapFigures
from rollouts.jobs import rescore
from rollouts.jobs.broker import engine_queue
from rollouts.management import TerminalCommand
from rollouts.management.arguments import run_named
from rollouts.management.jobs import run_or_send
from rollouts.sampling.engines import scoring_engines
from rollouts.store.models import Job, Run, ScoredColumn
from rollouts.store.runs.logprob_columns import columns_of, find_scored_column, gap_of_columns, scored_value
from rollouts.worker.run_rollouts import close_engines


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN")
        parser.add_argument("--model", default="", help="a served model (setting INSPECTOR_MODELS)")
        parser.add_argument("--engine", default="", help=f"{', '.join(scoring_engines())} (default: the model's own)")
        parser.add_argument("--temperature", type=float, default=1.0, help="of the sampler, where it is not 1")
        parser.add_argument("--replay", action="store_true", help="decode the completions again, too, token by token")
        parser.add_argument("--calibrate", action="store_true", help="measure how far the engine differs from itself")
        parser.add_argument("--by-bytes", action="store_true", help="for a model of another vocabulary")
        parser.add_argument(
            "--compare", nargs=2, metavar=("FIRST", "SECOND"),
            help="score nothing; hold two columns against each other: sampler, trainer_logprobs, scored:CODE, ...",
        )
        parser.add_argument("--background", action="store_true", help="let a worker do it, and do not wait for it")
        parser.add_argument("--json", action="store_true")

    def handle(self, *_: Any, **options: Any) -> None:
        run = run_named(options["run"])
        if options["compare"]:
            first, second = options["compare"]
            self._compare(run, first, second, options["json"])
            return
        if not options["model"]:
            raise CommandError("Name the model that scores with --model, or two columns with --compare.")
        ask = partial(
            rescore.ask, run, options["model"], options["engine"], None, options["temperature"], options["replay"],
            options["calibrate"], options["by_bytes"],
        )
        try:
            job = run_or_send(run, ask, "scored", options["background"])
        finally:
            close_engines()
        if options["background"]:
            queue = engine_queue(options["model"])
            self.stdout.write(
                f"A worker of the queue {queue} scores run {run.code}. The run's page shows the progress."
            )
            return
        column = find_scored_column(run, (job.report or {})["column"])
        assert column is not None
        self._say(job, column, options["json"])

    def _compare(self, run: Run, first: str, second: str, as_json: bool) -> None:
        names = [column.name for column in columns_of(run)]
        for name in (first, second):
            if name not in names:
                raise CommandError(f"Run {run.code} has no column named {name!r}; it has {', '.join(names) or 'none'}.")
        gap = gap_of_columns(run, first, second)
        lack = "No token under the loss mask has a value in both columns."
        sentence = f"{second} against {first}, {_sentence(gap)}" if gap.tokens else lack
        self.print_result(as_json, {"run": run.code, "columns": [first, second], **gap.values()}, sentence)

    def _say(self, job: Job, column: ScoredColumn, as_json: bool) -> None:
        value, gap = scored_value(column), None if column.gap is None else GapFigures.from_json(column.gap)
        summary = {
            "run": column.run.code, "column": value.name, "model": value.model, "engine": value.engine,
            "weights": value.weights, "temperature": value.temperature,
            "trajectories": column.n_trajectories, "tokens": column.n_tokens,
            "against_sampler": None if gap is None else gap.values(),
            "columns": [f"scored:{code}" for code in (job.report or {}).get("columns", [])],
            "noise": (job.report or {}).get("noise"), "notes": job.notes,
        }
        title = f"The column {value.name} ({value.title}) has {column.n_tokens:,} scores."
        self.print_result(as_json, summary, [*job.notes, title, *_lines(summary["noise"], gap)])


def _lines(noise: dict[str, Any] | None, gap: GapFigures | None) -> Iterator[str]:
    if noise and noise["tokens"]:
        yield (
            f"The engine against itself, over {noise['tokens']:,} tokens: {noise['mean_abs']:.3g} nats on average, "
            f"{noise['largest']:.3g} at most."
        )
    if gap is None:
        yield "No token under the loss mask has a log-probability of the sampler to compare them with."
    else:
        yield f"Against the sampler, {_sentence(gap)}"


def _sentence(gap: GapFigures) -> str:
    return (
        f"over {gap.tokens:,} tokens: {gap.mean_abs:.3g} nats on average without the sign, {gap.largest:.3g} at most, "
        f"k3 {gap.mean_k3:.3g}."
    )
