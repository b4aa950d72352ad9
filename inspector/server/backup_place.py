"""Where a backup lies: a folder, or a bucket that is named as INSPECTOR_FILES names one."""

from __future__ import annotations

from pathlib import Path

from django.core.files.storage import Storage
from django.utils.module_loading import import_string

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import NAME, file_storage


def backup_place(named: str) -> Storage:
    """The storage. Raises ``ValueError`` with a sentence that does not repeat an address, which may hold a secret."""
    where = named if "://" in named else str(Path(named).expanduser().absolute())
    env = EnvironmentReader({NAME: where})
    entry = file_storage(env)
    if env.problems:
        raise ValueError(env.problems[0].message.replace(NAME, "The place of the backup"))
    storage: Storage = import_string(entry["BACKEND"])(**entry["OPTIONS"])
    return storage
