"""Show files where they lie: what `rollout-inspector open` starts. Ctrl-C stops it."""

import threading
import webbrowser
from typing import Any

from django.conf import settings
from django.db import close_old_connections
from django.urls import reverse

from inspector.management.commands import serve
from rollouts.jobs.opened import follow, opened_files
from rollouts.management.arguments import project_named
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import find_tokenizer
from rollouts.store.jobs.job_queue import take_next_job
from rollouts.store.runs.imports import opened_run
from rollouts.worker.jobs import work_on

JOB_SECONDS = 0.5  # Pause before the next waiting job is looked for.


class Command(serve.Command):
    help = __doc__

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--port", type=int, default=8000, help="the first port to try (8000)")
        parser.add_argument("--no-browser", action="store_true", help="print the address, and start no browser")

    def handle(self, *args: Any, **options: Any) -> None:
        opened_files()
        self.opens_browser, self.stop = not options["no_browser"], threading.Event()
        self.threads: list[threading.Thread] = []
        try:
            super().handle(port=options["port"], host="127.0.0.1", no_workers=True)
        finally:
            self.stop.set()
            for thread in self.threads:
                thread.join()

    def prepare(self) -> None:
        """The tables, then the run, whose list a thread fills from now on. Another thread does jobs: no worker is."""
        super().prepare()
        opened, project = opened_files(), project_named("")
        tokenizer = find_tokenizer(opened["tokenizer"], project) if opened["tokenizer"] else None
        template = tokenizer.chat_template if tokenizer is not None else None
        if opened["chat_template"]:
            template = register_chat_template(opened["chat_template"], "named", project)
        self.opened = opened_run(opened["paths"], project=project, tokenizer=tokenizer, chat_template=template)
        for work in (lambda: follow(self.opened, self.stop), self.do_jobs):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self.threads.append(thread)

    def do_jobs(self) -> None:
        while not self.stop.wait(JOB_SECONDS):
            while (job := take_next_job(settings.JOBS_PER_USER)) is not None and not self.stop.is_set():
                work_on(job)
            close_old_connections()

    def register_models(self) -> None:
        """Nothing is launched here."""

    def way_in(self, url: str) -> str:
        way = f"{super().way_in(url)}&next={reverse('run', args=[self.opened.code])}"
        if self.opens_browser:
            webbrowser.open(way)
        return way
