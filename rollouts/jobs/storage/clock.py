"""Whether the clock may decide what is old enough to be deleted. A clock that is set forward by mistake makes
everything old at once. So the file storage holds the time of the last sweep. After a long gap the next one waits: the
clock was moved, or nothing ran."""

import time
from datetime import UTC, datetime
from io import BytesIO

from rollouts.store import files
from rollouts.store.database import clock_offset

MARK = "machines/clock"
"""A file of the file storage: the time of the last sweep, and until when nothing is deleted. Unix times."""
MAX_GAP_SECONDS = 3600
"""Sweeps are ten minutes apart, so a longer gap is a clock that was set or a server that was off."""
MAX_OFFSET_SECONDS = 60  # By so much the clock of a machine may differ from the database's.
MAX_PAUSE_SECONDS = 24 * 3600  # A tenth of the gap passes before something is deleted, and at most this time.


def fault_of_clock(note: bool = False) -> str:
    """Why nothing may be deleted by its age now, as sentences; empty = the clock is believed. ``note``: write down that
    a sweep was here. Raises what the database raises, and :class:`rollouts.store.files.StorageDown`."""
    offset = clock_offset()
    if offset is not None and abs(offset) > MAX_OFFSET_SECONDS:
        way = "ahead of" if offset > 0 else "behind"
        return (
            f"The clock of this machine is {abs(offset):,.0f} s {way} the database's, so nothing is deleted by "
            "its age. Let NTP set the clocks of both."
        )
    now = time.time()
    last, paused_until = _read_mark() or (now, 0.0)
    gap = now - last
    if abs(gap) > MAX_GAP_SECONDS:
        paused_until = max(paused_until, now + abs(gap) / 10)
    paused_until = min(paused_until, now + MAX_PAUSE_SECONDS)
    if note:
        files.put(MARK, BytesIO(f"{now} {paused_until}".encode()))
    if now >= paused_until:
        return ""
    return (
        f"The clock was set, or nothing ran for long, so nothing is deleted by its age until "
        f"{datetime.fromtimestamp(paused_until, UTC):%Y-%m-%d %H:%M} UTC. If that time is wrong, set the clock."
    )


def _read_mark() -> tuple[float, float] | None:
    try:
        with files.open_file(MARK) as file:
            last, paused_until = map(float, file.read(100).split())
    except (FileNotFoundError, ValueError):
        return None
    return last, paused_until
