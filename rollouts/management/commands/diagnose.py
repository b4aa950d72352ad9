"""Judge a run anew, with the tokenizer and the chat template it has now."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from rollouts import services
from rollouts.diagnosis import diagnose_and_save
from rollouts.models import Run


class Command(BaseCommand):
    help = "Judge every finished trajectory of a run again, by another tokenizer or chat template where one is named."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN")
        parser.add_argument("--tokenizer", default="", metavar="NAME_OR_DIR")
        parser.add_argument("--chat-template", default="", metavar="FILE")
        parser.add_argument("--json", action="store_true")

    def handle(self, *_: Any, **options: Any) -> None:
        run = (
            Run.objects.select_related("tokenizer__chat_template", "chat_template").filter(code=options["run"]).first()
        )
        if run is None:
            raise CommandError(f"There is no run with the code {options['run']!r}.")
        try:
            if options["tokenizer"]:
                run.tokenizer = services.find_tokenizer(options["tokenizer"])
                run.chat_template = run.chat_template or run.tokenizer.chat_template
            if options["chat_template"]:
                path = Path(options["chat_template"])
                run.chat_template = services.register_chat_template(path.read_text(encoding="utf-8"), path.stem)
        except (ValueError, OSError) as error:
            raise CommandError(str(error)) from error
        run.save(update_fields=["tokenizer", "chat_template"])
        n = diagnose_and_save(run)
        run.refresh_from_db()
        if options["json"]:
            self.stdout.write(json.dumps({"run": run.code, "trajectories": n, "findings": run.finding_counts}))
            return
        self.stdout.write(f"{n:,} trajectories judged.")
        for kind, count in sorted(run.finding_counts.items(), key=lambda item: (-item[1], item[0])):
            self.stdout.write(f"  {count:>6,}  {kind}")
