"""Diagnoses a run again, with the tokenizer and the chat template it has now."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import transaction

from rollout_inspector.commands.remedies import WORDS
from rollout_inspector.refusal import worded
from rollouts.jobs.sending import send
from rollouts.management import TerminalCommand
from rollouts.management.files import registered_chat_template
from rollouts.store.jobs.jobs import ask_job, end_job, take_job
from rollouts.store.models import Job
from rollouts.store.people.tokenizers import find_tokenizer
from rollouts.store.runs.runs import find_run
from rollouts.worker.jobs import work_on


class Command(TerminalCommand):
    help = (
        "Diagnose every finished trajectory of a run again, with another tokenizer or chat template if one is named. "
        "The run's page shows the progress and can cancel it."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN")
        parser.add_argument("--tokenizer", default="", metavar="NAME_OR_DIR")
        parser.add_argument("--chat-template", default="", metavar="FILE")
        parser.add_argument("--background", action="store_true", help="let a worker do it, and do not wait for it")
        parser.add_argument("--json", action="store_true")

    def handle(self, *_: Any, **options: Any) -> None:
        run = find_run(templates=True, code=options["run"])
        if run is None:
            raise CommandError(f"There is no run with the code {options['run']!r}.")
        try:
            if options["tokenizer"]:
                run.tokenizer = find_tokenizer(options["tokenizer"], run.project)
                run.chat_template = run.chat_template or run.tokenizer.chat_template
            if options["chat_template"]:
                run.chat_template = registered_chat_template(options["chat_template"], run.project)
        except (ValueError, OSError) as error:
            raise CommandError(str(error)) from error
        asked = {"tokenizer": run.tokenizer.name} if options["tokenizer"] and run.tokenizer else {}
        with transaction.atomic():  # no worker sees the job before it is taken here
            job, ours = ask_job(run, Job.Kind.DIAGNOSE, asked)
            if ours:
                run.save(update_fields=["tokenizer", "chat_template"])
            taken = take_job(job.pk) if ours and not options["background"] else None
        if not ours:
            raise CommandError(
                f"Run {run.code} is being diagnosed already: {job.n_done:,} of {job.n_total:,} trajectories are done. "
                "Wait for it, or cancel it on the run's page."
            )
        if options["background"]:
            if sentence := send(job):
                raise CommandError(sentence)
            self.stdout.write(f"A worker diagnoses run {run.code}. The run's page shows the progress.")
            return
        self._work(job, taken)
        run.refresh_from_db()
        if options["json"]:
            self.stdout.write(json.dumps({"run": run.code, "trajectories": job.n_done, "findings": run.finding_counts}))
            return
        self.stdout.write(f"{job.n_done:,} trajectories diagnosed.")
        for kind, count in sorted(run.finding_counts.items(), key=lambda item: (-item[1], item[0])):
            self.stdout.write(f"  {count:>6,}  {kind}")

    def _work(self, job: Job, taken: Job | None) -> None:
        """Do the job here. Raises :class:`CommandError` with a sentence when the job does not reach its end."""
        if taken is not None:
            try:
                work_on(taken, self._tell if sys.stderr.isatty() else lambda _: None)
            except KeyboardInterrupt:
                end_job(taken, Job.Status.CANCELLED)
        job.refresh_from_db()
        if job.status != Job.Status.DONE:
            what = worded(job.error, job.remedy, WORDS) or f"It was {job.status}."
            raise CommandError(f"{what} {job.n_done:,} of {job.n_total:,} trajectories have new findings.")

    def _tell(self, job: Job) -> None:
        end = "\n" if job.n_done == job.n_total else ""
        self.stderr.write(f"\r{job.n_done:,} of {job.n_total:,} trajectories", ending=end)
