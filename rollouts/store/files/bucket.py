"""A bucket of an S3 server as the file storage, by django-storages and boto3."""

import io
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError
from storages.backends.s3 import S3Storage

from rollouts.store.files.values import StorageDown, StoredFile

FIRST_READ, LARGEST_READ = 256 << 10, 8 << 20
"""Bytes that one request of a reader asks for: few after a jump, then twice as many each time."""
CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 3, 10, 2
"""A thread of the web server waits half a minute at most for a bucket that says nothing. Jobs are tried again later."""
_REFUSALS = {
    "NoSuchBucket": "there is no such bucket. Make it, or name another in INSPECTOR_FILES",
    "RequestTimeTooSkewed": "the clock of this machine is wrong. Let NTP set it",
    "InvalidAccessKeyId": "it does not know the access key. Look at AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is not that of the access key. Look at AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "the access key lacks a right. It must list the bucket, and read, write and delete its files",
}
"""What the answers of S3 mean that do not pass by themselves."""
_TRANSFER = TransferConfig(num_download_attempts=ATTEMPTS)


class BucketStorage(S3Storage):
    """Files below ``location`` in the bucket ``bucket_name``. A file is there when it is whole: S3 promises that."""

    folder = None

    def __init__(self, **options: Any) -> None:
        config = Config(
            s3={"addressing_style": options.get("addressing_style")},
            signature_version=options.get("signature_version"),
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=32,
            # Servers other than Amazon's refuse the newer checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        fixed = {"object_parameters": {"ContentType": "application/octet-stream"}, "file_overwrite": True}
        super().__init__(**{"client_config": config, "transfer_config": _TRANSFER, **fixed, **options})
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        """After a fork: the parent's connections are not ours."""
        self._one: Any = None
        self._bucket = None
        self._opening = threading.Lock()

    @property
    def connection(self) -> Any:
        """One for all threads of this process; its client is made for that, and each takes 100 ms to make."""
        with self._opening:
            if self._one is None:
                self._one = self._create_session().resource(
                    "s3", region_name=self.region_name, endpoint_url=self.endpoint_url, config=self.client_config,
                    use_ssl=self.use_ssl, verify=self.verify,
                )
            return self._one

    @property
    def client(self) -> Any:
        return self.connection.meta.client

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket_name, "Key": self._normalize_name(name)}

    def size(self, name: str) -> int:
        try:
            n: int = self.client.head_object(**self._place(name))["ContentLength"]
        except ClientError as error:
            if _status(error) == 404:  # the answer to HEAD does not say what is missing
                self.client.list_objects_v2(Bucket=self.bucket_name, MaxKeys=1)
            raise
        return n

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except ClientError as error:
            if isinstance(self.meant(error), FileNotFoundError):
                return False
            raise
        return True

    def reader(self, name: str) -> IO[bytes]:
        return io.BufferedReader(_Reader(self, name, self.size(name)), 64 << 10)

    def _open(self, name: str, mode: str = "rb") -> Any:
        return self.reader(name)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        try:
            answer = self.client.get_object(**self._place(name), Range=f"bytes={start}-{stop - 1}")
            # Its own ``with`` hands out the stream below, whose errors are not boto3's.
            with closing(answer["Body"]) as body:
                data: bytes = body.read()
        except ClientError as error:
            if _status(error) == 416:  # it begins behind the end
                return b""
            raise
        return data

    def fetch(self, name: str, target: Path) -> None:
        """Write a file to this machine's disk."""
        self.client.download_file(**self._place(name), Filename=str(target), Config=self.transfer_config)

    def stored(self, prefix: str) -> Iterator[StoredFile]:
        location = self.location.strip("/")
        top = f"{location}/{prefix}" if location else prefix
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket_name, Prefix=top)
        for page in pages:
            for entry in page.get("Contents", ()):
                yield StoredFile(prefix + entry["Key"].removeprefix(top), entry["Size"], entry["LastModified"])

    def delete_all(self, prefix: str) -> None:
        for file in self.stored(prefix):
            self.client.delete_object(**self._place(file.key))

    def meant(self, error: Exception) -> Exception:
        """The error that :mod:`rollouts.store.files` promises for an error of boto3."""
        if isinstance(error, ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            if _status(error) == 404 and code != "NoSuchBucket":
                return FileNotFoundError("The file storage holds no such file.")
            code = "AccessDenied" if code == "403" else code
            reason = f": {_REFUSALS[code]}" if code in _REFUSALS else ""
            return StorageDown(f"The file storage refused ({code or _status(error)}){reason}.")
        if isinstance(error, BotoCoreError | HTTPClientError | Boto3Error):
            if isinstance(error, NoCredentialsError):
                return StorageDown("There is no key of the bucket. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")
            return StorageDown(f"The file storage did not answer ({type(error).__name__}).")
        return error


class _Reader(io.RawIOBase):
    """A seekable stream of one file. It asks for ranges, so that only what is read travels."""

    def __init__(self, storage: BucketStorage, name: str, size: int) -> None:
        self._storage, self._name, self._size = storage, name, size
        self._place, self._start, self._data = 0, 0, b""
        self._next_read = FIRST_READ

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"{base + offset} lies before the file.")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._place >= self._size or not view:
            return 0
        if not self._start <= self._place < self._start + len(self._data):
            self._fetch(len(view))
        offset = self._place - self._start
        n = min(len(view), len(self._data) - offset)
        view[:n] = self._data[offset : offset + n]
        self._place += n
        return n

    def _fetch(self, wanted: int) -> None:
        follows = self._place == self._start + len(self._data) and self._data
        self._next_read = min(self._next_read * 2, LARGEST_READ) if follows else FIRST_READ
        stop = min(self._place + max(wanted, self._next_read), self._size)
        try:
            data = self._storage.read_range(self._name, self._place, stop)
        except Exception as error:
            if (promised := self._storage.meant(error)) is error:
                raise
            raise promised from error
        if len(data) != stop - self._place:
            raise StorageDown("The file storage sent less than it holds.")
        self._start, self._data = self._place, data


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


_all: weakref.WeakSet[BucketStorage] = weakref.WeakSet()


def _forget_all() -> None:
    for storage in _all:
        storage._forget()


os.register_at_fork(after_in_child=_forget_all)
