"""Say which runs go because of their age or the size of all runs.

Nothing is deleted without --delete. Runs that are under way, shared by a live link, or changed within a day stay.
"""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Collection, Iterator
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from rollouts.jobs.storage import retention
from rollouts.management import TerminalCommand
from rollouts.management.arguments import add_project_option, project_named


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--days", type=_number, help="runs whose last change is longer ago go (INSPECTOR_KEEP_DAYS)"
        )
        parser.add_argument("--gb", type=_number, help="the oldest go while all take more (INSPECTOR_KEEP_GB)")
        add_project_option(parser, default="the runs of all projects")
        parser.add_argument("--delete", action="store_true", help="delete them")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        days = settings.KEEP_DAYS if options["days"] is None else options["days"]
        n_bytes = settings.KEEP_BYTES if options["gb"] is None else options["gb"] * 1_000_000_000
        if not days and not n_bytes:
            raise CommandError("Say what is kept: --days N, --gb N, or both.")
        project = project_named(options["project"]) if options["project"] else None
        plan = retention.plan(days or None, n_bytes or None, project)
        gone = [leaving[0].code for leaving in plan.leaving if options["delete"] and retention.delete(leaving)]
        runs = [{"run": run.code, "changed_at": run.changed_at.isoformat(), "bytes": size, "reason": reason}
                for run, size, reason in plan.leaving]
        body = {"runs": runs, "deleted": gone, "kept": plan.staying,
                "bytes": plan.n_bytes, "bytes_left": plan.n_bytes_left}
        self.print_result(options["json"], body, _lines(plan, gone, options["delete"]))


def _lines(plan: retention.RetentionPlan, gone: Collection[str], deletes: bool) -> Iterator[str]:
    for run, size, reason in plan.leaving:
        what = "deleted" if run.code in gone else "stays, because somebody uses it now" if deletes else "goes"
        yield f"{run.code} {what}: {reason}; {size / 1e6:,.1f} MB; {run.name}"
    for why, n in sorted(plan.staying.items()):
        yield f"{n} more would go and {'stays' if n == 1 else 'stay'}: {why}."
    n_left = plan.n_bytes - plan.n_bytes_left
    yield f"{len(plan.leaving)} runs, {n_left / 1e9:.2f} GB of {plan.n_bytes / 1e9:.2f} GB."
    if plan.leaving and not deletes:
        yield "Nothing was deleted. Say --delete to delete them."


def _number(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 6:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at most six digits")
    return int(text)
