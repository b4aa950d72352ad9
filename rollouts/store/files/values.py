"""What the file storage returns and raises."""

from datetime import datetime
from typing import NamedTuple

from django.core.files import File


class StorageDown(Exception):
    """The file storage does not answer, or refuses. The same work may succeed later. The message is a sentence."""


class StoredFile(NamedTuple):
    """A file of the storage."""

    key: str  # Names it.
    size: int  # Bytes.
    changed_at: datetime | None = None  # When it was put; None where nobody asked.


class PutFile(File):
    """A file to be stored. Who opened it closes it."""

    path: str | None = None  # Where it lies, if the storage may take it over; None = its bytes are copied.

    def close(self) -> None:
        """boto3 closes what it has sent."""
