"""Import trajectories from files and look for faults in them.

Neither Redis nor a worker is needed. Exit code 1: nothing was imported.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.diagnose.checks import all_clear
from rollout_inspector.formats import FORMATS
from rollout_inspector.formats.folders import files_of
from rollout_inspector.formats.training_step import checked_rule
from rollouts.jobs.imports import imports
from rollouts.management import TerminalCommand, findings_lines
from rollouts.management.arguments import add_project_option, project_named, registered_chat_template
from rollouts.management.jobs import run_jobs
from rollouts.store.chat_templates.tokenizers import find_tokenizer
from rollouts.store.database import reload
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Run
from rollouts.store.runs.imports import MAX_REJECTIONS, list_rejections
from rollouts.store.runs.run_summary import check_totals
from rollouts.store.runs.runs import create_run


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "files", nargs="+", metavar="FILE", help="files, or folders of files, read in the order of their steps"
        )
        parser.add_argument("--format", default="auto", help=f"auto, or one of: {', '.join(FORMATS)}")
        parser.add_argument(
            "--tokenizer", default="", metavar="NAME_OR_DIR", help="a registered name, a folder or a hub id"
        )
        parser.add_argument("--chat-template", default="", metavar="FILE", help="default: the tokenizer's own")
        parser.add_argument("--run", default="", metavar="NAME", help="a name for the run (default: the file's)")
        parser.add_argument("--training-step", default="", metavar="N", help="the training step of all that is read")
        parser.add_argument(
            "--training-step-from", default="", metavar="REGEX",
            help="finds the training step in the path of each file, with one group: 'step_([0-9]+)'",
        )
        add_project_option(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        if options["format"] != "auto" and options["format"] not in FORMATS:
            raise CommandError(f"There is no format {options['format']!r}. There are: auto, {', '.join(FORMATS)}.")
        paths = [Path(name) for name in options["files"]]
        project = project_named(options["project"])
        try:
            files = [file for path in paths for file in files_of(path)]
            rule = checked_rule(options["training_step"], options["training_step_from"])
            tokenizer = find_tokenizer(options["tokenizer"], project) if options["tokenizer"] else None
            template = tokenizer.chat_template if tokenizer else None
            if options["chat_template"]:
                template = registered_chat_template(options["chat_template"], project)
        except (ValueError, OSError) as error:
            raise CommandError(str(error)) from error
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        run = create_run(
            Run.Kind.IMPORT,
            options["run"] or f"{paths[0].name}{more}",
            project=project,
            tokenizer=tokenizer,
            chat_template=template,
        )
        with run_jobs() as jobs:
            jobs.append(imports.ask(run, files, options["format"], training_step=rule))
        reload(run)
        rejections = [
            {"file": rejection.file, "line": rejection.line, "reason": rejection.reason}
            for rejection in list_rejections(run, MAX_REJECTIONS)
        ]
        self.print_result(options["json"], result(run, rejections), _lines(run) if run.n_trajectories else ())
        if not options["json"]:
            self._say_rejected(run, rejections)
        if is_active(run):  # an outage
            raise CommandError(
                f"{jobs[0].error} A worker of the queue default goes on with it as soon as one is there."
            )
        if run.status != Run.Status.DONE:
            raise CommandError(run.error or f"The import ended as {run.status}.")

    def _say_rejected(self, run: Run, rejections: list[dict[str, Any]]) -> None:
        for rejection in rejections:
            place = rejection["file"] if rejection["line"] is None else f"{rejection['file']}:{rejection['line']}"
            self.stderr.write(f"rejected {place}: {rejection['reason']}")
        if run.n_rejected > len(rejections):
            self.stderr.write(f"... and {run.n_rejected - len(rejections):,} more.")


def _lines(run: Run) -> Iterator[str]:
    yield (
        f"Run {run.code} ({run.format}): {run.n_trajectories:,} trajectories, {run.n_steps:,} steps, "
        f"{run.n_rows:,} rows, {run.n_tokens:,} new tokens."
    )
    if run.tokenizer is None:
        yield "No tokenizer was chosen, so text-level findings are missing: name one with --tokenizer."
    yield from findings_lines(run.finding_counts)
    if not run.finding_counts:
        _, checks, _ = check_totals(run.trajectories.all())
        yield f"Findings: {all_clear(checks)}"


def result(run: Run, rejections: list[dict[str, Any]]) -> dict[str, Any]:
    """The value that ``--json`` prints."""
    return {
        "run": run.code,
        "status": run.status,
        "format": run.format,
        "trajectories": run.n_trajectories,
        "steps": run.n_steps,
        "rows": run.n_rows,
        "tokens": run.n_tokens,
        "n_rejected": run.n_rejected,
        "rejected": rejections,
        "findings": run.finding_counts,
        "error": run.error,
    }
