"""Save the database and the files of the file storage, while the server runs.

The backup holds what the database holds, so keep it as safe. SECRET_KEY is not in it.
"""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from inspector.server.file_storage import backup_place
from rollout_inspector.commands.remedies import sentence_of
from rollouts.jobs.storage import backup
from rollouts.management import TerminalCommand
from rollouts.store.files.values import StorageDown
from rollouts.store.people.activity_log import Action, record


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("place", metavar="PLACE", help="a new folder, or s3://BUCKET/PREFIX?endpoint_url=...")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            manifest = backup.back_up(backup_place(options["place"]), self.stdout.write)
        except (ValueError, OSError, StorageDown) as error:
            raise CommandError(f"Nothing that can be restored was saved. {sentence_of(error)}") from error
        record(Action.BACKED_UP, detail=f"to {options['place'].partition('?')[0]}")
        if manifest.gone:
            raise CommandError(
                f"{len(manifest.gone)} files were deleted while they were saved, such as {manifest.gone[0]}. The "
                "backup can be restored without them. Make another when less is being deleted."
            )
        self.stdout.write("The backup is whole.")
