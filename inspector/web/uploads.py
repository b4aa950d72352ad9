"""Uploads go to the disk as they arrive. They stop at the limit, and without a login no byte of a file is kept."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadhandler import TemporaryFileUploadHandler

from rollouts.store.outages import DISK_FULL, is_disk_full

MAX_SUFFIX = 20
"""How many characters of a file name's suffix are kept. The name of the temporary file holds them."""


class DiskFull(SuspiciousOperation):
    """The server has no room for a file. The page of the error has status 507."""

    def __init__(self) -> None:
        super().__init__(f"{DISK_FULL} Nothing of the file was kept; try again when there is room.")


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
        try:
            return super().receive_data_chunk(raw_data, start)
        except OSError as error:
            self.upload_interrupted()  # the part of the file would keep the disk full
            if is_disk_full(error):
                raise DiskFull from None
            raise
