"""A bucket of an S3 server as the file storage, by boto3."""

import io
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from django.core.files import File
from django.core.files.storage import Storage

from rollout_inspector.opened.bucket import ATTEMPTS, Bucket, answer_of, meaning
from rollouts.store.files.values import StorageDown, StoredFile

FIRST_READ, LARGEST_READ = 256 << 10, 8 << 20
"""Bytes that one request of a reader asks for: few after a jump, then twice as many each time."""
RIGHTS = "list the bucket, and read, write and delete its files"
_TRANSFER = TransferConfig(num_download_attempts=ATTEMPTS)


class BucketStorage(Bucket, Storage):
    """Files below ``location`` in the bucket ``bucket_name``. A file is there when it is whole: S3 promises that."""

    folder = None

    def get_available_name(self, name: str, max_length: int | None = None) -> str:
        """The name itself: a file that is there is replaced."""
        return name

    def _save(self, name: str, content: File) -> str:
        self.client.upload_fileobj(content, **self.place(name), Config=_TRANSFER)
        return name

    def delete(self, name: str) -> None:
        self.client.delete_object(**self.place(name))

    def size(self, name: str) -> int:
        try:
            n: int = self.client.head_object(**self.place(name))["ContentLength"]
        except ClientError as error:
            if answer_of(error)[0] == 404:  # the answer to HEAD does not say what is missing
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

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        try:
            answer = self.client.get_object(**self.place(name), Range=f"bytes={start}-{stop - 1}")
            # Its own ``with`` hands out the stream below, whose errors are not boto3's.
            with closing(answer["Body"]) as body:
                data: bytes = body.read()
        except ClientError as error:
            if answer_of(error)[0] == 416:  # it begins behind the end
                return b""
            raise
        return data

    def fetch(self, name: str, target: Path) -> None:
        """Write a file to this machine's disk."""
        self.client.download_file(**self.place(name), Filename=str(target), Config=_TRANSFER)

    def stored(self, prefix: str) -> Iterator[StoredFile]:
        for name, entry in self.objects(prefix):
            yield StoredFile(name, entry["Size"], entry["LastModified"])

    def delete_all(self, prefix: str) -> None:
        for file in self.stored(prefix):
            self.delete(file.key)

    def meant(self, error: Exception) -> Exception:
        """The error that :mod:`rollouts.store.files` promises for an error of boto3."""
        status, code = answer_of(error)
        if status == 404 and code != "NoSuchBucket":
            return FileNotFoundError("The file storage holds no such file.")
        sentence = meaning(error, "The file storage", RIGHTS)
        return StorageDown(sentence) if sentence else error


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
