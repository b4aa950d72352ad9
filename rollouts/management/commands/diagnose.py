"""Diagnose every finished trajectory of a run again.

With another tokenizer or chat template if one is named. The run's page shows the progress and can cancel it.
"""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from rollouts.management import TerminalCommand, findings_lines
from rollouts.management.arguments import registered_chat_template, run_named
from rollouts.management.jobs import run_or_send
from rollouts.store.chat_templates.tokenizers import find_tokenizer
from rollouts.store.database import reload, save_columns
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN")
        parser.add_argument("--tokenizer", default="", metavar="NAME_OR_DIR")
        parser.add_argument("--chat-template", default="", metavar="FILE")
        parser.add_argument("--background", action="store_true", help="let a worker do it, and do not wait for it")
        parser.add_argument("--json", action="store_true")

    def handle(self, *_: Any, **options: Any) -> None:
        run = run_named(options["run"], templates=True)
        try:
            if options["tokenizer"]:
                run.tokenizer = find_tokenizer(options["tokenizer"], run.project)
                run.chat_template = run.chat_template or run.tokenizer.chat_template
            if options["chat_template"]:
                run.chat_template = registered_chat_template(options["chat_template"], run.project)
        except (ValueError, OSError) as error:
            raise CommandError(str(error)) from error
        job_options = {"tokenizer": run.tokenizer.name} if options["tokenizer"] and run.tokenizer else {}

        def ask() -> tuple[Job, bool]:
            job, is_new = ask_job(run, "diagnose", job_options)
            if is_new:
                save_columns(run, "tokenizer", "chat_template")
            return job, is_new

        job = run_or_send(run, ask, "diagnosed", options["background"])
        if options["background"]:
            self.stdout.write(f"A worker diagnoses run {run.code}. The run's page shows the progress.")
            return
        reload(run)
        result = {"run": run.code, "trajectories": job.n_done, "findings": run.finding_counts}
        lines = [f"{job.n_done:,} trajectories diagnosed.", *findings_lines(run.finding_counts)]
        self.print_result(options["json"], result, lines)
