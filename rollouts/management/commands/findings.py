"""List the findings of a run or a trajectory, or what each check of the diagnosis came to."""

import json
from argparse import ArgumentParser
from collections.abc import Container, Iterator
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.diagnose import KINDS
from rollout_inspector.diagnose.checks import CheckTotal, check_sentence
from rollout_inspector.outputs import line_of
from rollouts.management import TerminalCommand
from rollouts.management.arguments import run_and_trajectories_named
from rollouts.store.models import StoredFinding
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.run_summary import check_totals
from rollouts.store.trajectories.findings import list_findings
from rollouts.store.trajectories.trajectory_parts import places_of


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("code", metavar="RUN_OR_TRAJECTORY")
        parser.add_argument("--kind", default="", help="only this kind")
        parser.add_argument(
            "--checks", action="store_true",
            help="print of each check on how many trajectories it decided, failed, and could not decide",
        )
        parser.add_argument("--json", action="store_true", help="print a JSON list")

    def handle(self, *_: Any, **options: Any) -> None:
        run, trajectories = run_and_trajectories_named(options["code"])
        if options["kind"] and options["kind"] not in KINDS:
            raise CommandError(f"There is no kind {options['kind']!r}. There are: {', '.join(sorted(KINDS))}.")
        rows = list_findings(trajectories, options["kind"])
        checks, unknown = check_totals(trajectories)[1:]
        if options["checks"]:
            if options["kind"]:
                raise CommandError("--kind and --checks exclude each other: a check has findings of several kinds.")
            self.print_result(options["json"], [asdict(total) for total in checks], _check_lines(checks, unknown))
        elif options["json"]:
            self.stdout.write(
                "[" + ",\n".join(json.dumps(finding_value(finding, muted_in(run))) for finding in rows) + "]"
            )
        else:
            self._say(rows, muted_in(run))
            if any(total.not_decidable for total in checks):
                self.stdout.write(f"{check_sentence(checks)} --checks prints what was checked.")

    def _say(self, rows: Iterator[StoredFinding], muted: Container[str]) -> None:
        n = 0
        for finding in rows:
            n += 1
            place = f"row {finding.row_index}" if finding.step_index is None else f"step {finding.step_index}"
            kind = f"{finding.kind} (muted)" if finding.kind in muted else finding.kind
            self.stdout.write(
                f"{finding.severity:7}  {kind}  {line_of(finding.trajectory.external_id)} ({finding.trajectory.code}) "
                f"{place}, tokens {finding.start}-{finding.stop}"
            )
            self.stdout.write(f"         {line_of(finding.evidence)}")
            if finding.remedy:
                self.stdout.write(f"         {finding.remedy}")
        self.stdout.write(f"{n:,} finding{'s' * (n != 1)}.")


def _check_lines(checks: list[CheckTotal], unknown: int) -> Iterator[str]:
    yield f"{'check':<18}{'checked':>9}{'failed':>9}{'not decidable':>15}  needs"
    for check in checks:
        counts = f"{check.checked:>9,}{check.failed:>9,}{check.not_decidable:>15,}"
        yield f"{check.name:<18}{counts}  {', '.join(check.needs)}".rstrip()
    if unknown:
        yield f"Of {unknown:,} trajectories it is not known what was checked: diagnose the run again."


def finding_value(finding: StoredFinding, muted: Container[str]) -> dict[str, Any]:
    """A finding as ``--json`` prints it. Its ``trajectory`` must be loaded. ``muted``: the muted kinds of its run."""
    return {
        "trajectory": finding.trajectory.code,
        "external_id": finding.trajectory.external_id,
        "step": finding.step_index,
        "row": finding.row_index,
        "axis": finding.axis,
        "kind": finding.kind,
        "muted": finding.kind in muted,
        "severity": finding.severity,
        "start": finding.start,
        "stop": finding.stop,
        "places": places_of(finding),
        "expected_ids": finding.expected_ids.tolist(),
        "actual_ids": finding.actual_ids.tolist(),
        **{name: getattr(finding, name) for name in ("expected_text", "actual_text", "message_index")},
        **{name: getattr(finding, name) for name in ("evidence", "remedy", "missing")},
        "decided": finding.kind != "not_decidable",
        "cost": vars(finding.cost),
    }
