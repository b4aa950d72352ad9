"""Compare what the policy does on both sides of a finding: from what was sampled, and from what was made of it.

Both sides have the same seeds. With --wait it prints the difference of their rewards with its 95 % interval.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from rollouts.jobs.forks import ContinuationSettings, break_effect
from rollouts.management.commands.fork import ContinuationCommand
from rollouts.store.runs.forks import effect_of, find_fork


class Command(ContinuationCommand):
    kind = ContinuationSettings

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--finding", type=int, required=True, metavar="N", help="its number, from 1")

    def handle(self, *_: Any, **options: Any) -> None:
        _trajectory, runs = self.launched(
            options,
            lambda trajectory, settings, enqueue: list(
                break_effect(trajectory, options["finding"], settings, enqueue=enqueue)
            ),
        )
        side = find_fork(runs[0])
        assert side is not None
        effect = effect_of(side.pair)
        assert effect is not None
        self.print_result(options["json"], effect.contract(), " ".join(effect.sentences))
        self.check_ended(runs)
