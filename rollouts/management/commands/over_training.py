"""Print a run by training step: trajectories, findings by kind, gap between trainer and sampler."""

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollout_inspector.diagnose.training_axis import axis_sentences
from rollouts.management import TerminalCommand
from rollouts.management.arguments import run_named
from rollouts.store.runs.training_steps import NOT_DECIDABLE, TrainingStepLine, over_training


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN", help="the code of a run")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        run = run_named(options["run"])
        lines, first_steps = over_training(run)
        value = {"steps": [asdict(line) for line in lines], "began": first_steps}
        self.print_result(options["json"], value, _lines(lines, first_steps))


def _lines(lines: Sequence[TrainingStepLine], first_steps: Mapping[str, int]) -> Iterator[str]:
    if not lines:
        yield "No trajectory of this run has a training step. docs/formats.md says where one is read."
        return
    yield from map(_words, lines)
    for kind, step in first_steps.items():
        if kind != NOT_DECIDABLE:  # no fault
            yield f"{kind} begins at training step {step:,}."
    yield from axis_sentences(lines)


def _words(line: TrainingStepLine) -> str:
    parts = [f"{line.trajectories:,} trajectories", f"{line.broken:,} broken"]
    if line.reward_mean is not None:
        parts.append(f"reward {line.reward_mean:.4g}")
    if line.gap is not None and line.gap["mean_abs"] is not None:
        parts.append(f"gap {line.gap['mean_abs']:.4g}, largest {line.gap['largest']:.4g}")
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in sorted(line.findings.items()))
    return f"step {line.training_step:,}: {', '.join(parts)}{'; ' + kinds if kinds else ''}"
