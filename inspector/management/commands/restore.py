"""Restore a backup into the empty database of DATABASE_URL, and into INSPECTOR_FILES.

The database may be of any kind. Start the server afterwards.
"""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import IntegrityError

from inspector.server.file_storage import backup_place
from rollout_inspector.commands.remedies import sentence_of
from rollouts.jobs.storage import restore
from rollouts.management import TerminalCommand
from rollouts.store.files.values import StorageDown
from rollouts.store.people.activity_log import Action, record


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--adopt-files",
            action="store_true",
            help="take over the files of INSPECTOR_FILES from a database that is no longer used",
        )
        parser.add_argument(
            "--keep-access",
            action="store_true",
            help="API keys, share links, invitations and sessions work again, also those ended since the backup",
        )
        parser.add_argument("place", metavar="PLACE", help="the folder of a backup, or s3://BUCKET/PREFIX?...")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            place, adopts = backup_place(options["place"]), options["adopt_files"]
            manifest = restore.restore(place, self.stdout.write, adopts, options["keep_access"])
        except (ValueError, OSError, StorageDown, IntegrityError) as error:
            raise CommandError(f"Nothing was restored into the database. {sentence_of(error)}") from error
        record(Action.RESTORED, detail=f"made at {manifest.made_at}")
        self.stdout.write(f"The backup of {manifest.made_at} is restored.")
