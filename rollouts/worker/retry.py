"""Trying again what a full disk, a lost connection or the death of a process has stopped for a while."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from django.db import connection

from rollouts.store.outages import is_outage

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
