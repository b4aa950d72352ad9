"""Copy a tokenizer's JSON and chat template into the data folder and give it a name.

Nothing of it is executed.
"""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from rollouts.management import TerminalCommand
from rollouts.management.arguments import add_project_option, project_named
from rollouts.store.chat_templates.tokenizers import register_tokenizer


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "folder", metavar="DIR", help="a folder with tokenizer.json, that file, or a zip of the folder"
        )
        parser.add_argument("--name", default=None, help="default: the folder's name")
        add_project_option(parser)
        parser.add_argument("--json", action="store_true")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            tokenizer = register_tokenizer(
                options["folder"], options["name"], project=project_named(options["project"])
            )
        except (ValueError, OSError) as error:
            raise CommandError(str(error)) from error
        fields = {name: getattr(tokenizer, name) for name in ("name", "sha256", "vocab_size", "encoder")}
        template = "with its chat template" if tokenizer.chat_template_id else "without a chat template"
        encoder = f"{tokenizer.vocab_size:,} tokens, encoder {tokenizer.encoder}"
        self.print_result(
            options["json"], {**fields, "chat_template": tokenizer.chat_template_id},
            f"Registered {tokenizer.name}: {encoder}, {template}.",
        )
