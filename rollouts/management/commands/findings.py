"""List the findings of a run or a trajectory, or what each check of the diagnosis came to."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Container, Iterator
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.diagnose import KINDS
from rollout_inspector.diagnose.checks import CheckTotal, all_clear
from rollouts.management import TerminalCommand, one_line
from rollouts.store.models import StoredFinding
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.run_summary import check_totals
from rollouts.store.runs.runs import run_and_trajectories
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
        code = options["code"]
        found = run_and_trajectories(code)
        if found is None:
            raise CommandError(f"There is no run and no trajectory with the code {code!r}.")
        run, trajectories = found
        if options["kind"] and options["kind"] not in KINDS:
            raise CommandError(f"There is no kind {options['kind']!r}. There are: {', '.join(sorted(KINDS))}.")
        rows = list_findings(trajectories, options["kind"])
        checks, unknown = check_totals(trajectories)[1:]
        if options["checks"]:
            if options["kind"]:
                raise CommandError("--kind and --checks exclude each other: a check has findings of several kinds.")
            self._say_checks(checks, unknown, options["json"])
        elif options["json"]:
            self.stdout.write("[" + ",\n".join(json.dumps(finding_value(one, muted_in(run))) for one in rows) + "]")
        else:
            self._say(rows, muted_in(run))
            if unchecked := all_clear(checks).partition("Not checked: ")[2]:
                self.stdout.write(f"Not checked: {unchecked} --checks prints what was checked.")

    def _say_checks(self, checks: list[CheckTotal], unknown: int, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps([asdict(total) for total in checks]))
            return
        self.stdout.write(f"{'check':<18}{'checked':>9}{'failed':>9}{'not decidable':>15}  needs")
        for one in checks:
            counts = f"{one.checked:>9,}{one.failed:>9,}{one.not_decidable:>15,}"
            self.stdout.write(f"{one.name:<18}{counts}  {', '.join(one.needs)}".rstrip())
        if unknown:
            self.stdout.write(f"Of {unknown:,} trajectories it is not known what was checked: diagnose the run again.")

    def _say(self, rows: Iterator[StoredFinding], muted: Container[str]) -> None:
        n = 0
        for one in rows:
            n += 1
            place = f"row {one.row_index}" if one.step_index is None else f"step {one.step_index}"
            kind = f"{one.kind} (muted)" if one.kind in muted else one.kind
            self.stdout.write(
                f"{one.severity:7}  {kind}  {one_line(one.trajectory.external_id)} ({one.trajectory.code}) "
                f"{place}, tokens {one.start}-{one.stop}"
            )
            self.stdout.write(f"         {one_line(one.evidence)}")
            if one.remedy:
                self.stdout.write(f"         {one.remedy}")
        self.stdout.write(f"{n:,} finding{'s' * (n != 1)}.")


def finding_value(one: StoredFinding, muted: Container[str]) -> dict[str, Any]:
    """A finding as ``--json`` prints it. Its ``trajectory`` must be loaded. ``muted``: the muted kinds of its run."""
    return {
        "trajectory": one.trajectory.code,
        "external_id": one.trajectory.external_id,
        "step": one.step_index,
        "row": one.row_index,
        "axis": one.axis,
        "kind": one.kind,
        "muted": one.kind in muted,
        "severity": one.severity,
        "start": one.start,
        "stop": one.stop,
        "places": places_of(one),
        "expected_ids": one.expected_ids.tolist(),
        "actual_ids": one.actual_ids.tolist(),
        "expected_text": one.expected_text,
        "actual_text": one.actual_text,
        "message_index": one.message_index,
        "evidence": one.evidence,
        "remedy": one.remedy,
        "missing": one.missing,
        "decided": one.kind != "not_decidable",
        "cost": {
            "trained_tokens_lost": one.trained_tokens_lost,
            "trained_tokens_wrong": one.trained_tokens_wrong,
            "rows": one.rows,
            "prompt_tokens_repaid": one.prompt_tokens_repaid,
            "lost_in_one_row": one.lost_in_one_row,
        },
    }
