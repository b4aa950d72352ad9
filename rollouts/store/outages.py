"""Errors that pass by themselves: a full disk or memory, a lost connection, a lock. The work is tried again later."""

import errno
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, OperationalError, connection

from rollouts.store.files import StorageDown

DISK_FULL = "The disk of the server is full."
READ_ONLY = "The disk of the server is read-only."
_DISK_FAULTS = {
    DISK_FULL: ({errno.ENOSPC, errno.EDQUOT}, ("disk is full", "no space left", "disk full")),
    READ_ONLY: ({errno.EROFS}, ("readonly database", "read-only file system")),
}
"""Sentence -> the numbers of errors of the file system, and words of errors of a database."""
NO_MEMORY = "The machine or the process has no memory left for this."
BUSY = "Other work kept the database busy for too long. SQLite takes one writer at a time."


class WorkerLeaves(Exception):
    """The worker shuts down in the middle of the work. Another worker goes on; the message is a sentence."""


def disk_fault(error: BaseException) -> str:
    """Why a disk took no more of files or of the database, as a sentence; empty = the error is another one."""
    for sentence, (numbers, words) in _DISK_FAULTS.items():
        if isinstance(error, OSError) and error.errno in numbers:
            return sentence
        if isinstance(error, DatabaseError) and any(text in str(error).lower() for text in words):
            return sentence
    return ""


def lacks_memory(error: BaseException) -> bool:
    """Whether a process was given no more memory."""
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return no_thread or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def is_busy(error: BaseException) -> bool:
    """Whether another writer of SQLite did not end in time."""
    return isinstance(error, OperationalError) and "is locked" in str(error)


def is_outage(error: BaseException) -> bool:
    """Whether the same work may succeed later."""
    passes = isinstance(error, OperationalError | InterfaceError | StorageDown | WorkerLeaves)
    return passes or lacks_memory(error) or bool(disk_fault(error))


def said_of(error: BaseException) -> str:
    """An outage as a sentence."""
    if sentence := disk_fault(error):
        return sentence
    if lacks_memory(error):
        return NO_MEMORY
    if is_busy(error):
        return BUSY
    if isinstance(error, StorageDown | WorkerLeaves):
        return str(error)
    return f"The database did not answer ({type(error).__name__}: {str(error).strip()[:300]})."


log = logging.getLogger(__name__)
Result = TypeVar("Result")

OUTAGE_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0, 60.0, 60.0)
"""Seconds between tries during an outage: five minutes in all."""
POLL_SECONDS = 0.1


def try_again(
    do: Callable[[], Result],
    may_pass: Callable[[BaseException], bool] = is_outage,
    pauses: Sequence[float] = OUTAGE_PAUSES,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Returns what ``do`` returns. After a failure that may pass it is called again, with these pauses in seconds.
    Raises the last failure when no pause is left or ``should_stop`` returns True."""
    for pause in pauses:
        try:
            return do()
        except Exception as failure:
            if not may_pass(failure) or should_stop():
                raise
            log.warning("tried again in %g s after %s: %s", pause, type(failure).__name__, failure)
        connection.close()  # a lost one is not opened again by itself
        until = time.monotonic() + pause
        while time.monotonic() < until and not should_stop():
            time.sleep(POLL_SECONDS)
    return do()
