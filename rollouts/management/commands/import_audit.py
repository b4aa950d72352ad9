"""Import the trajectories that an audit flagged, and print where they are shown.

Neither Redis nor a worker is needed.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.outputs import line_of
from rollouts.jobs.imports import imports
from rollouts.jobs.imports.audit_import import write_flagged
from rollouts.management import TerminalCommand, findings_lines
from rollouts.management.arguments import add_project_option, project_named
from rollouts.management.jobs import run_jobs
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import find_tokenizer
from rollouts.store.database import reload
from rollouts.store.models import ChatTemplate, Project, Run, Tokenizer
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.trajectories import ids_and_codes

MAX_FLAGGED = 2_000
MAX_LINKS = 20  # Trajectories that are printed with their address. The page of the run lists all of them.


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("folder", metavar="DIR", help="what `rollout-inspector audit --output DIR` wrote")
        parser.add_argument(
            "--kind", action="append", default=[], help="only with this kind; several times for several"
        )
        parser.add_argument(
            "--severity", default="warning", choices=[severity.value for severity in Severity],
            help="with a finding of this severity or a worse one, where no kind is named (default: warning)",
        )
        parser.add_argument("--limit", type=int, default=MAX_FLAGGED, help=f"at most so many ({MAX_FLAGGED:,})")
        parser.add_argument("--tokenizer", default="", metavar="NAME_OR_DIR", help="default: that of the audit")
        parser.add_argument("--run", default="", metavar="NAME", help="a name for the run (default: the folder's)")
        add_project_option(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        folder = Path(options["folder"])
        if options["limit"] < 1:
            raise CommandError("--limit must be 1 or more.")
        project = project_named(options["project"])
        try:
            severity = Severity(options["severity"])
            file, n_left_out, settings = write_flagged(folder, options["kind"], severity, options["limit"])
            tokenizer, template = _tools(settings, options["tokenizer"], project)
        except (ValueError, OSError) as error:
            raise CommandError(str(error)) from error
        name = options["run"] or f"audit {folder.absolute().name}"
        run = create_run(Run.Kind.IMPORT, name, project=project, tokenizer=tokenizer, chat_template=template)
        with run_jobs() as jobs:
            jobs.append(imports.ask(run, [file.absolute()], "own_jsonl"))
        reload(run)
        if run.status != Run.Status.DONE:
            raise CommandError(run.error or f"The import ended as {run.status}.")
        pages = [(name, f"/trajectories/{code}") for name, code in ids_and_codes(run)]
        value = {
            "run": run.code,
            "page": f"/runs/{run.code}",
            "trajectories": [{"external_id": name, "page": page} for name, page in pages],
            "left_out": n_left_out,
            "findings": run.finding_counts,
        }
        lines = [f"Run {run.code}: {run.n_trajectories:,} flagged trajectories, at /runs/{run.code}"]
        lines += findings_lines(run.finding_counts)
        lines += [f"{page}  {line_of(name)}" for name, page in pages[:MAX_LINKS]]
        if n_left_out:
            lines.append(f"{n_left_out:,} more were flagged: --limit or --kind chooses others.")
        self.print_result(options["json"], value, lines)


def _tools(settings: AuditSettings, named: str, project: Project) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer and the chat template of the audit, registered in the project."""
    name = named or settings.tokenizer
    tokenizer = find_tokenizer(name, project) if name else None
    if settings.template:
        return tokenizer, register_chat_template(settings.template, "audit", project)
    return tokenizer, tokenizer.chat_template if tokenizer is not None else None
