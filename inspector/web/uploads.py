"""Uploads go to the disk as they arrive, and stop at the limit."""

from typing import Any

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.core.files.uploadhandler import TemporaryFileUploadHandler


class LimitedUploadHandler(TemporaryFileUploadHandler):
    """Streams each file of a request to a temporary file; refuses a request with more than `UPLOAD_MAX_BYTES`."""

    received = 0

    def receive_data_chunk(self, raw_data: bytes, start: int) -> Any:
        self.received += len(raw_data)
        if self.received > settings.UPLOAD_MAX_BYTES:
            raise RequestDataTooBig(
                f"The upload is larger than {settings.UPLOAD_MAX_BYTES >> 20} MB. Import it from the command line with "
                "`manage.py import_rollouts`, or raise INSPECTOR_UPLOAD_MAX_MB."
            )
        return super().receive_data_chunk(raw_data, start)
