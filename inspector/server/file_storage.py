"""Where the files lie that all machines share: what INSPECTOR_FILES says, as an entry of Django's STORAGES."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from django.core.files.storage import Storage
from django.utils.module_loading import import_string

from inspector.server.env import EnvironmentReader
from rollout_inspector.refusal import Refusal

NAME = "INSPECTOR_FILES"
FOLDER = "rollouts.store.files.folder.FolderStorage"
OPTIONS = ("endpoint_url", "region_name", "addressing_style", "access_key", "secret_key")
"""What the query of a bucket's address may hold."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PART = re.compile(r"[\w+=@-][\w+=@. -]*", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")
_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")
MAX_PREFIX = 300  # Characters. With the longest key behind it, S3 still takes it.
WAY_OUT = (
    "Name a folder by its absolute path, or a bucket: s3://BUCKET/PREFIX?endpoint_url=https://HOST&region_name=REGION. "
    "Leave it unset for the folder `files` in the data folder."
)


def file_storage(env: EnvironmentReader) -> dict[str, Any]:
    """The storage that the environment names; a folder in the data folder where it names none that can be read."""
    place = env.text(NAME)
    if place.startswith("s3://"):
        try:
            return {"BACKEND": "rollouts.store.files.bucket.BucketStorage", "OPTIONS": _bucket(place)}
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


def _bucket(named: str) -> dict[str, Any]:
    """The options of a bucket's address. Raises :class:`Refusal`, which never repeats it: it may hold a secret."""
    try:
        parts = urlsplit(named)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        bucket, prefix = parts.netloc, parts.path.strip("/")
        endpoint = urlsplit(query.get("endpoint_url") or "https://amazon")
        has_host = endpoint.hostname is not None and _HOST.fullmatch(endpoint.hostname) and (endpoint.port or 1) > 0
    except ValueError:
        raise Refusal(f"{NAME} cannot be read.") from None
    if not _BUCKET.fullmatch(bucket):
        raise Refusal(f"{NAME} names no bucket after s3://.")
    if len(prefix) > MAX_PREFIX or not all(map(_PART.fullmatch, prefix.split("/") if prefix else ())):
        raise Refusal(
            f"The prefix of {NAME} is not made of parts of letters, digits and ._-+=@ between slashes."
        )
    if unknown := sorted(set(query) - set(OPTIONS)):
        raise Refusal(f"{NAME} has {unknown[0][:40]!r} in its query, which is not known.")
    if endpoint.scheme not in ("http", "https") or not has_host:
        raise Refusal(f"The endpoint_url of {NAME} is not http:// or https:// with a host behind it.")
    if query.get("addressing_style") not in (None, "", "auto", "path", "virtual"):
        raise Refusal(f"The addressing_style of {NAME} is none of auto, path, virtual.")
    if (region := query.get("region_name")) and not _REGION.fullmatch(region):
        raise Refusal(f"The region_name of {NAME} is not made of letters, digits and -.")
    if bool(query.get("access_key")) != bool(query.get("secret_key")):
        raise Refusal(f"{NAME} has one of access_key and secret_key without the other.")
    return {"bucket_name": bucket, "location": prefix, **{k: v for k, v in query.items() if v}}
