"""Continue a trajectory from one of its tokens, under the policy that sampled it.

With --wait it prints the continuations at their end. Where no worker serves the model, --wait makes them here.
"""

from argparse import ArgumentParser
from dataclasses import fields
from typing import Any, get_args

from django.core.management.base import CommandError

from rollouts.jobs.forks import ForkSettings, chosen_model, fork
from rollouts.jobs.launch import LaunchRefused
from rollouts.management import TerminalCommand
from rollouts.management.arguments import trajectory_named
from rollouts.management.jobs import finish_runs, works_here
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.forks import ForkFigures, fork_figures, forks_of

PLACE = ("row", "at", "token", "text")  # The options of a token. A finding has a place of its own.


class Command(TerminalCommand):
    of_finding = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("trajectory", metavar="TRAJECTORY", help="code of a trajectory")
        for setting in fields(ForkSettings):
            name, kind = f"--{setting.name.replace('_', '-')}", next(iter(get_args(setting.type)), setting.type)
            if setting.name in (PLACE if self.of_finding else ("finding",)):
                continue
            words = {"default": setting.default, "help": setting.metadata["description"]}
            if kind is bool:
                parser.add_argument(name, action="store_true", help=words["help"])
            else:
                is_needed = setting.name in ("finding", "row", "at")
                parser.add_argument(name, type=kind, required=is_needed, **words)
        parser.add_argument("--wait", action="store_true", help="return when the continuations have ended")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        trajectory = trajectory_named(options["trajectory"])
        settings = ForkSettings(**{
            setting.name: options[setting.name] for setting in fields(ForkSettings) if setting.name in options
        })
        try:
            here = works_here(chosen_model(trajectory.run, settings), options["wait"])
            runs = fork(trajectory, settings, enqueue=not here)
        except LaunchRefused as refusal:  # each setting is an option
            raise CommandError(
                "\n".join(f"--{name.replace('_', '-')}: {words}" for name, words in refusal.problems.items())
            ) from refusal
        if options["wait"]:
            finish_runs(runs, here, self.stderr.write)
        keys = [run.pk for run in runs]
        figures = fork_figures([of_run for of_run in forks_of(trajectory) if of_run.pk in keys])
        self.tell(trajectory, figures, options["json"])
        for run in runs:
            if run.status == Run.Status.FAILED:
                raise CommandError(f"The run {run.code} failed: {run.error}")

    def tell(self, trajectory: StoredTrajectory, figures: list[ForkFigures], as_json: bool) -> None:
        """Print what the forks came to."""
        (figure,) = figures
        samples = [
            {"trajectory": sample.code, "reward": sample.reward, "n_tokens": sample.n_tokens}
            for sample in figure.samples
        ]
        parent = {"trajectory": trajectory.code, "row": figure.row, "offset": figure.offset}
        score = "no reward" if figure.reward_mean is None else f"mean reward {figure.reward_mean:.3f}"
        ended = f"{figure.finished} of {figure.expected} continuations"
        result = {"run": figure.run, "parent": parent, "samples": samples}
        self.print_result(as_json, result, f"Run {figure.run} is {figure.status}: {ended}, {score}.")
