"""Errors that pass by themselves: a full disk, a lost connection, a lock. The work is tried again later."""

from __future__ import annotations

import errno

from django.db import DatabaseError, InterfaceError, OperationalError

from rollouts.store.files import StorageDown

DISK_FULL = "The disk of the server is full."


class WorkerLeaves(Exception):
    """The worker shuts down in the middle of the work. Another worker goes on; the message is a sentence."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an operation of the file system or of the database failed because a disk is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, DatabaseError) and any(
        words in str(error).lower() for words in ("disk is full", "no space left", "disk full")
    )


def is_outage(error: BaseException) -> bool:
    """Whether the same work may succeed later."""
    return is_disk_full(error) or isinstance(error, OperationalError | InterfaceError | StorageDown | WorkerLeaves)


def said_of(error: BaseException) -> str:
    """An outage as a sentence."""
    if is_disk_full(error):
        return DISK_FULL
    if isinstance(error, StorageDown | WorkerLeaves):
        return str(error)
    return f"The database did not answer ({type(error).__name__}: {str(error).strip()[:300]})."
