"""A bucket of an S3 server: its address, what lies in it, and what its answers mean. A base install lacks
boto3, so it is imported when a bucket is asked."""

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rollout_inspector.refusal import Refusal

SCHEME = "s3://"
OPTIONS = ("endpoint_url", "region_name", "addressing_style", "access_key", "secret_key")
"""What the query of a bucket's address may hold."""
CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 3, 10, 2
"""Who asks waits half a minute at most for a bucket that says nothing, and may ask again later."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PART = re.compile(r"[\w+=@-][\w+=@. -]*", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")
_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")
MAX_PREFIX = 300  # Characters. With the longest key behind it, S3 still takes it.
_REFUSALS = {
    "NoSuchBucket": "there is no such bucket. Make it, or name another one in its address",
    "RequestTimeTooSkewed": "the clock of this machine is wrong. Let NTP set it",
    "InvalidAccessKeyId": "it does not know the access key. Look at AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is not that of the access key. Look at AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "the access key lacks a right. It must ",
    "InvalidObjectState": "the object is archived. Restore it first",
}
"""What the answers of S3 mean that do not pass by themselves."""


def read_address(address: str, name: str) -> dict[str, Any]:
    """The options of ``s3://BUCKET/PREFIX?...``: ``bucket_name``, ``location``, and those of :data:`OPTIONS` that it
    has. ``name``: what the address is called. Raises :class:`Refusal`, which never repeats it: it may hold a secret."""
    try:
        parts = urlsplit(address, allow_fragments=False)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        bucket, prefix = parts.netloc, parts.path.strip("/")
        endpoint = urlsplit(query.get("endpoint_url") or "https://amazon")
        has_host = endpoint.hostname is not None and _HOST.fullmatch(endpoint.hostname) and (endpoint.port or 1) > 0
    except ValueError:
        raise Refusal(f"{name} cannot be read.") from None
    if not _BUCKET.fullmatch(bucket):
        raise Refusal(f"{name} names no bucket after s3://.")
    if len(prefix) > MAX_PREFIX or not all(map(_PART.fullmatch, prefix.split("/") if prefix else ())):
        raise Refusal(f"{name} has a prefix that is not made of parts of letters, digits and ._-+=@ between slashes.")
    if unknown := sorted(set(query) - set(OPTIONS)):
        raise Refusal(f"{name} has {unknown[0][:40]!r} in its query, which is not known.")
    if endpoint.scheme not in ("http", "https") or not has_host:
        raise Refusal(f"{name} has an endpoint_url that is not http:// or https:// with a host behind it.")
    if query.get("addressing_style") not in (None, "", "auto", "path", "virtual"):
        raise Refusal(f"{name} has an addressing_style that is none of auto, path, virtual.")
    if (region := query.get("region_name")) and not _REGION.fullmatch(region):
        raise Refusal(f"{name} has a region_name that is not made of letters, digits and -.")
    if bool(query.get("access_key")) != bool(query.get("secret_key")):
        raise Refusal(f"{name} has one of access_key and secret_key without the other.")
    return {"bucket_name": bucket, "location": prefix, **{k: v for k, v in query.items() if v}}


class Bucket:
    """What lies below ``location`` in a bucket."""

    def __init__(self, bucket_name: str, location: str = "", **options: str) -> None:
        """``options``: of :data:`OPTIONS`. Nobody is asked yet."""
        self.bucket_name, self.top, self._options = bucket_name, f"{location}/" if location else "", options

    @property
    def client(self) -> Any:
        """A client of boto3 for all threads of this process. Raises :class:`Refusal` where that is not installed."""
        return _client_of(os.getpid(), **self._options)

    def place(self, name: str) -> dict[str, str]:
        """How a request names an object."""
        return {"Bucket": self.bucket_name, "Key": self.top + name}

    def objects(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name below the location, and what the list says of it: ``Size``, ``ETag``, ``LastModified``."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket_name, Prefix=self.top + prefix)
        for page in pages:
            for entry in page.get("Contents", ()):
                yield entry["Key"].removeprefix(self.top), entry


@lru_cache
def _client_of(
    pid: int, endpoint_url: str | None = None, region_name: str | None = None, addressing_style: str | None = None,
    access_key: str | None = None, secret_key: str | None = None,
) -> Any:
    """Each takes 100 ms to make. ``pid``: after a fork, the parent's connections are not ours."""
    try:
        from boto3.session import Session
        from botocore.config import Config
    except ImportError:
        way_out = "Install it: pip install 'rollout-inspector[s3]'"
        raise Refusal(f"A bucket is read by the package boto3, which is not installed. {way_out}") from None
    config = Config(
        s3={"addressing_style": addressing_style}, connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS,
        max_pool_connections=32, retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        # Servers other than Amazon's refuse the newer checksums.
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
    )
    session = Session(access_key, secret_key, region_name=region_name)
    return session.client("s3", endpoint_url=endpoint_url, config=config)


def answer_of(error: Exception) -> tuple[int, str]:
    """The status and the code by which S3 refused; ``(0, "")`` where the error is no answer of it."""
    answer: Any = getattr(error, "response", None) or {}
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(answer.get("Error", {}).get("Code", ""))
    return status, "AccessDenied" if code == "403" else code


def meaning(error: Exception, place: str, rights: str) -> str:
    """What an error of boto3 or a refusal means, as a sentence about ``place``; empty for other errors. ``rights``:
    what the access key must be allowed to do."""
    status, code = answer_of(error)
    if status or code:
        reason = f": {_REFUSALS[code]}{rights * (code == 'AccessDenied')}" if code in _REFUSALS else ""
        return f"{place} refused ({code or status}){reason}."
    name, package = type(error).__name__, type(error).__module__.partition(".")[0]
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return f"There is no key of {place}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    if package in ("boto3", "botocore"):
        return f"{place} did not answer ({name}). Look at its server, its endpoint_url and the network."
    return str(error) if isinstance(error, Refusal) else ""
