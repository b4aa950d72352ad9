"""Uploads go to the disk as they arrive. They stop at the limit, and without a login no byte of a file is kept."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadhandler import TemporaryFileUploadHandler

from rollouts.store.outages import disk_fault

MAX_SUFFIX = 20  # How many characters of a file name's suffix are kept. The name of the temporary file holds them.


class DiskFull(SuspiciousOperation):
    """The disk takes no file, for a reason that is a sentence. The page of the error has status 507."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} Nothing of the file was kept; try again when there is room.")


class LimitedUploadHandler(TemporaryFileUploadHandler):
    """Streams each file of a request to a temporary file; refuses a request with more than `UPLOAD_MAX_BYTES`."""

    received = 0

    def new_file(self, field_name: str, file_name: str, *arguments: Any, **named: Any) -> None:
        user = getattr(self.request, "user", None)
        if user is None or not user.is_authenticated:
            raise PermissionDenied("Log in before you send a file. Nothing of it was kept.")
        name = Path(file_name)
        super().new_file(field_name, f"{name.stem}{name.suffix[:MAX_SUFFIX]}", *arguments, **named)

    def receive_data_chunk(self, raw_data: bytes, start: int) -> Any:
        self.received += len(raw_data)
        if self.received > settings.UPLOAD_MAX_BYTES:
            raise RequestDataTooBig(
                f"The upload is larger than {settings.UPLOAD_MAX_BYTES >> 20} MB. Import it from the command line with "
                "`manage.py import_rollouts`, or raise INSPECTOR_UPLOAD_MAX_MB."
            )
        with self._writing():
            return super().receive_data_chunk(raw_data, start)

    def file_complete(self, file_size: int) -> Any:
        with self._writing():  # the last bytes of the file are written here
            return super().file_complete(file_size)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):  # what is still in memory cannot be written either
                self.upload_interrupted()  # the part of the file would keep the disk full
            if sentence := disk_fault(error):
                raise DiskFull(sentence) from None
            raise
