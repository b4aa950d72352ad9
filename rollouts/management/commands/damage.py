"""Compare the gradient of the rows with that of what was sampled, and print what each finding does to it.

The weights are those of a served model. One step, this checkpoint: it tells nothing of later ones.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from typing import Any

from rollout_inspector.diagnose.loss_weights.rules import RULES
from rollouts.jobs import damage
from rollouts.management import TerminalCommand
from rollouts.management.arguments import run_named
from rollouts.management.jobs import run_or_send
from rollouts.store.runs.damage import damage_report, measurable
from rollouts.store.trajectories.trajectories import find_trajectory
from rollouts.worker.run_rollouts import close_engines


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("target", metavar="RUN|TRAJECTORY", help="the code of a run or of a trajectory")
        parser.add_argument("--model", default="", help="a served model (default: that of the run)")
        parser.add_argument("--rule", default="", choices=["", *RULES], help="of the loss (default: by the columns)")
        parser.add_argument("--layers", type=int, help="of the last so many layers alone, which is not exact")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        record = find_trajectory(options["target"])
        run, code = (run_named(options["target"]), "") if record is None else (record.run, record.code)
        ask = partial(damage.ask, run, options["model"], code, None, options["rule"], options["layers"])
        try:
            run_or_send(run, ask, "measured", background=False)
        finally:
            close_engines()
        report = damage_report(measurable(run, code))
        self.print_result(options["json"], report, _lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for line in report["trajectories"]:
        figures = ", ".join(f"{name} {line[name]}" for name in ("relative_error", "cosine", "norm_ratio"))
        words = f"not measured. {line['missing']}" if line["missing"] else figures
        yield f"{line['trajectory']}: {words}"
        for finding in line["findings"] if not line["missing"] else ():
            yield f"  {finding['number']} {finding['kind']}: {finding['share']:.1%} of it"
    if not report["exact"]:
        yield f"Not exact: over {', '.join(report['layers'])}."
