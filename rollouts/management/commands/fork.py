"""Continue a trajectory from one of its tokens, under the policy that sampled it.

With --wait it prints the continuations at their end. Where no worker serves the model, --wait makes them here.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.streams.figures import reward_mean
from rollouts.jobs.forks import ContinuationSettings, ForkSettings, chosen_model, fork
from rollouts.jobs.launch import LaunchRefused
from rollouts.management import TerminalCommand
from rollouts.management.arguments import trajectory_named
from rollouts.management.launches import finish_runs, works_here
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.forks import samples_of


class ContinuationCommand(TerminalCommand):
    """A command that continues a trajectory."""

    kind: type[ContinuationSettings]
    """Its options."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("trajectory", metavar="TRAJECTORY", help="code of a trajectory")
        for setting in fields(self.kind):
            name, number = f"--{setting.name.replace('_', '-')}", setting.type.partition(" ")[0]
            words = {"default": None if setting.default is MISSING else setting.default,
                     "help": setting.metadata["description"], "required": setting.name in ("row", "at")}
            if number == "bool":
                parser.add_argument(name, action="store_true", help=words["help"])
            else:
                parser.add_argument(name, type={"int": int, "float": float}.get(number, str), **words)
        parser.add_argument("--wait", action="store_true", help="return when the continuations have ended")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def launched(
        self, options: dict[str, Any], launch: Callable[[StoredTrajectory, Any, bool], list[Run]]
    ) -> tuple[StoredTrajectory, list[Run]]:
        """The trajectory, and the runs that continue it: ended ones with --wait."""
        trajectory = trajectory_named(options["trajectory"])
        settings = self.kind(**{setting.name: options[setting.name] for setting in fields(self.kind)})
        try:
            here = works_here(chosen_model(trajectory.run, settings), options["wait"])
            runs = launch(trajectory, settings, not here)
        except LaunchRefused as refusal:  # each setting is an option
            raise CommandError(
                "\n".join(f"--{name.replace('_', '-')}: {words}" for name, words in refusal.problems.items())
            ) from refusal
        if options["wait"]:
            finish_runs(runs, here, self.stderr.write)
        return trajectory, runs

    def check_ended(self, runs: list[Run]) -> None:
        """Raises :class:`CommandError` for the first run that failed."""
        for run in runs:
            if run.status == Run.Status.FAILED:
                raise CommandError(f"The run {run.code} failed: {run.error}")


class Command(ContinuationCommand):
    kind = ForkSettings

    def handle(self, *_: Any, **options: Any) -> None:
        trajectory, runs = self.launched(
            options, lambda trajectory, settings, enqueue: [fork(trajectory, settings, enqueue=enqueue)]
        )
        (run,) = runs
        samples = samples_of([run.pk])[run.pk]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        mean = reward_mean(sum(rewards), len(rewards))
        result = {
            "run": run.code,
            "parent": {"trajectory": trajectory.code, "row": options["row"], "offset": options["at"]},
            "samples": [
                {"trajectory": sample.code, "reward": sample.reward, "n_tokens": sample.n_tokens} for sample in samples
            ],
        }
        score = "no reward" if mean is None else f"mean reward {mean:.3f}"
        self.print_result(
            options["json"], result, f"Run {run.code} is {run.status}: {len(samples)} continuations, {score}."
        )
        self.check_ended(runs)
