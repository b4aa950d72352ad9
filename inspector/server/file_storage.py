"""Where the files lie that all machines share: what INSPECTOR_FILES says, as an entry of Django's STORAGES."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from django.core.files.storage import Storage
from django.utils.module_loading import import_string

from inspector.server.env import EnvironmentReader
from rollout_inspector.opened.bucket import SCHEME, read_address
from rollout_inspector.refusal import Refusal

NAME = "INSPECTOR_FILES"
FOLDER = "rollouts.store.files.folder.FolderStorage"
WAY_OUT = (
    "Name a folder by its absolute path, or a bucket: s3://BUCKET/PREFIX?endpoint_url=https://HOST&region_name=REGION. "
    "Leave it unset for the folder `files` in the data folder."
)


def file_storage(env: EnvironmentReader) -> dict[str, Any]:
    """The storage that the environment names; a folder in the data folder where it names none that can be read."""
    place = env.text(NAME)
    if place.startswith(SCHEME):
        try:
            return {"BACKEND": "rollouts.store.files.bucket.BucketStorage", "OPTIONS": read_address(place, NAME)}
        except Refusal as refusal:
            env.problem(str(refusal), WAY_OUT)
    elif "://" in place:
        env.problem(f"{NAME} begins with {place.partition(':')[0][:20]!r}, which is not served.", WAY_OUT)
    elif place:
        with suppress(ValueError, RuntimeError, OSError):  # such as a user who is unknown
            folder = Path(place).expanduser()
            if folder.is_absolute() and folder.resolve() != Path("/"):
                return {"BACKEND": FOLDER, "OPTIONS": {"location": str(folder.resolve())}}
        env.problem(f"{NAME} is a path that does not begin at the root, or is the root itself.", WAY_OUT)
    return {"BACKEND": FOLDER, "OPTIONS": {}}


def backup_place(named: str) -> Storage:
    """Where a backup lies: a folder, or a bucket as ``INSPECTOR_FILES`` names one. Raises ``ValueError`` with a
    sentence that does not repeat an address, which may hold a secret."""
    where = named if "://" in named else str(Path(named).expanduser().absolute())
    env = EnvironmentReader({NAME: where})
    entry = file_storage(env)
    if env.problems:
        raise ValueError(env.problems[0][0].replace(NAME, "The place of the backup"))
    storage: Storage = import_string(entry["BACKEND"])(**entry["OPTIONS"])
    return storage
