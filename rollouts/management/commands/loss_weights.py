"""Print how losses weigh the tokens of a run.

Which are clipped or masked, and what findings hold of the weight.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from rollout_inspector.diagnose.loss_weights.rules import MEANS, RULES
from rollout_inspector.streams.figures import percent_of
from rollouts.jobs.loss_weights import RunWeights
from rollouts.management import TerminalCommand
from rollouts.management.arguments import run_named


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN", help="the code of a run")
        parser.add_argument("--mean", default="row_mean", choices=list(MEANS), help="of the printed shares")
        parser.add_argument("--strategies", action="store_true", help="also under the rows of every strategy")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        run = run_named(options["run"], templates=True)
        weights = RunWeights(run, options["strategies"])
        for _counted in weights.counted():
            pass
        report = weights.report()
        value = {name: part for name, part in report.items() if name != "key"}
        self.print_result(options["json"], value, _lines(report, options["mean"]))


def _lines(report: dict[str, Any], mean: str) -> Iterator[str]:
    yield f"{report['tokens']:,} trained tokens in {report['rows']:,} rows"
    for line in report["rules"]:
        yield from _rule_lines(line, report["tokens"], mean)
    for line in report["strategies"]:
        if not line["trajectories"]:
            yield f"{line['strategy']}: refused. {next(iter(line['why']), '')}"
            continue
        moves = ", ".join(f"{RULES[rule['rule']].label} {_percent(rule['moved'][mean])}" for rule in line["rules"])
        yield f"{line['strategy']}: {line['rows']:,} rows, {line['tokens']:,} trained; moved: {moves}"


def _rule_lines(line: dict[str, Any], tokens: int, mean: str) -> Iterator[str]:
    label = RULES[line["rule"]].label
    if line["known"]:
        clipped, masked = (_percent(line[name] / line["known"]) for name in ("clipped", "masked"))
        yield f"{label}: {line['known']:,} tokens weighed, {clipped} clipped, {masked} masked"
        for kind, shares in line["findings"].items():
            if shares["trajectories"][mean]:
                words = ", ".join(f"{_percent(share[mean])} in its {what}" for what, share in shares.items())
                yield f"  {kind}: {words}"
        for item in line["classes"]:
            words = ", ".join(f"{_percent(item[name] / item['known'])} {name}" for name in ("clipped", "masked"))
            yield f"  {item['class']}: {_percent(item['share'][mean])} of the weight, {words}"
    for why in line["why_not"]:
        yield f"{label}: not decidable for {why['tokens']:,} of {tokens:,} tokens. {why['sentence']}"


def _percent(share: float | None) -> str:
    return percent_of(share, 1) or "not decidable"
