"""Print how far trainer and sampler are apart on the trained tokens of a run, and why."""

from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.diagnose.gap.report import causes_in
from rollouts.jobs.gap_reports import read_gap, why_no_columns, why_no_gap
from rollouts.management import TerminalCommand
from rollouts.management.arguments import run_named
from rollouts.store.models import Run

PRINTED_WORST = 5  # Worst tokens that are printed as text.


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN", help="the code of a run")
        parser.add_argument("--sampler", default="", metavar="COLUMN", help="the column in place of the sampler's")
        parser.add_argument("--trainer", default="", metavar="COLUMN", help="the column in place of the trainer's")
        parser.add_argument("--teacher", default="", metavar="COLUMN", help="the column of a teacher")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        run = run_named(options["run"])
        if options["teacher"] and options["trainer"]:
            raise CommandError("Name one of --trainer and --teacher: both are held against the sampler.")
        columns = {"sampler": options["sampler"], "trainer": options["teacher"] or options["trainer"]}
        if any(columns.values()) and (sentence := why_no_columns(run, **columns)):
            raise CommandError(sentence)
        report = read_gap(run, **columns, teacher=bool(options["teacher"]))
        value = {name: part for name, part in report.items() if name != "key"}
        self.print_result(options["json"], value, _lines(run, report))


def _lines(run: Run, report: dict[str, Any]) -> Iterator[str]:
    words, teacher = causes_in(report), report["teacher"]
    if not report["tokens"]:
        yield why_no_gap(run) or "No finished trajectory has a token with both log-probabilities."
        return
    yield (
        f"{report['tokens']:,} tokens: mean {report['mean_abs']:.4g}, 99th percentile {report['p99']:.4g}, "
        f"largest {report['largest']:.4g}, k3 {report['k3']:.4g}"
    )
    if without := report["rows_without"]:
        rows = "1 row lacks a side or holds it" if without == 1 else f"{without:,} rows lack a side or hold it"
        yield f"{rows} in another length, and {'is' if without == 1 else 'are'} not compared."
    if teacher:
        yield (
            f"Reverse KL to the teacher: {teacher['reverse_kl']:.4g} nats for each token. {teacher['carriers']:,} "
            f"tokens ({teacher['carriers_share']:.1%}) carry 80 % of the loss."
        )
    yield from report["notes"]
    for cause in report["causes"]:
        since = "" if cause["from_step"] is None else f", since training step {cause['from_step']:,}"
        yield f"{words[cause['cause']].title}{since}: {cause['evidence']}"
    if not report["causes"]:
        agree = "no fault of the column shows" if teacher else "sampler and trainer agree to rounding"
        yield f"No cause is named: {agree}."
    for name, sentence in report["undecided"].items():
        yield f"Not decided, {words[name].title.lower()}: {sentence}"
    if any(not report["decidable_now"][name] for name in report["undecided"]):
        yield f"To score the run: manage.py rescore {run.code} --model NAME"
    for token in report["worst"][:PRINTED_WORST]:
        place = f"{token['trajectory']} row {token['row']} token {token['offset']:,}"
        yield f"{place}: sampler {token['sampler']:.4g}, trainer {token['trainer']:.4g}"
