"""Where the files lie that all machines share: what INSPECTOR_FILES says, as an entry of Django's STORAGES."""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from inspector.server.env import EnvironmentReader

NAME = "INSPECTOR_FILES"
FOLDER = "rollouts.files.folder.FolderStorage"
OPTIONS = ("endpoint_url", "region_name", "addressing_style", "access_key", "secret_key")
"""What the query of a bucket's address may hold."""
WAY_OUT = (
    "Name a folder by its absolute path, or a bucket: s3://BUCKET/PREFIX?endpoint_url=https://HOST&region_name=REGION. "
    "Leave it unset for the folder `files` in the data folder."
)


def file_storage(env: EnvironmentReader) -> dict[str, Any]:
    """The storage that the environment names; a folder in the data folder where it names none that can be read."""
    named = env.text(NAME)
    if named.startswith("s3://"):
        if (options := _bucket(env, named)) is not None:
            return {"BACKEND": "rollouts.files.bucket.BucketStorage", "OPTIONS": options}
    elif "://" in named:
        env.problem(f"{NAME} begins with {named.partition(':')[0][:20]!r}, which is not served.", WAY_OUT)
    elif named:
        folder = Path(named).expanduser()
        if folder.is_absolute() and folder.resolve() != Path("/"):
            return {"BACKEND": FOLDER, "OPTIONS": {"location": str(folder.resolve())}}
        env.problem(f"{NAME} is a path that does not begin at the root, or is the root itself.", WAY_OUT)
    return {"BACKEND": FOLDER, "OPTIONS": {}}


def _bucket(env: EnvironmentReader, named: str) -> dict[str, Any] | None:
    """The options of a bucket's address. A sentence about a wrong one never repeats it: it may hold a secret."""
    try:
        parts = urlsplit(named)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        bucket = parts.netloc
    except ValueError:
        env.problem(f"{NAME} cannot be read.", WAY_OUT)
        return None
    if not bucket or not all(letter.isalnum() or letter in ".-_" for letter in bucket):
        env.problem(f"{NAME} names no bucket after s3://.", WAY_OUT)
        return None
    if unknown := sorted(set(query) - set(OPTIONS)):
        env.problem(f"{NAME} has {unknown[0][:40]!r} in its query, which is not known.", WAY_OUT)
        return None
    if not query.get("endpoint_url", "https://").startswith(("http://", "https://")):
        env.problem(f"The endpoint_url of {NAME} does not begin with http:// or https://.", WAY_OUT)
        return None
    return {"bucket_name": bucket, "location": parts.path.strip("/"), **{k: v for k, v in query.items() if v}}
