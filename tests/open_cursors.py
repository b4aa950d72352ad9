"""Finds writes on a connection of SQLite whose cursor is still open.

SQLite refuses such a write at once, without waiting, where somebody else has written since the cursor was opened.
"""

import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db.backends.sqlite3 import base

from rollouts.store.jobs.jobs import Beat

WRITES = ("INSERT", "UPDATE", "DELETE", "REPLACE", "BEGIN")
READS = ("SELECT", "WITH")


@contextmanager
def watched_cursors() -> Iterator[list[str]]:
    """Gives the places at which something was written, or may be written by a sign of life, beside an open cursor."""
    faults: list[str] = []
    held = threading.local()  # a connection belongs to a thread

    def open_cursors() -> weakref.WeakSet[Any]:
        if not hasattr(held, "cursors"):
            held.cursors = weakref.WeakSet()
        return held.cursors  # type: ignore[no-any-return]

    def check(cursor: Any, what: str) -> None:
        if any(other is not cursor for other in list(open_cursors())):
            faults.append(f"{what}\n{''.join(traceback.format_stack(limit=25)[:-2])}")

    class WatchedCursor(base.SQLiteCursorWrapper):
        """A cursor that is open from its query until it is closed or has given its last row."""

        def execute(self, query: str, params: Any = None) -> Any:
            open_cursors().discard(self)
            first = query.lstrip("( \n")[:7].upper()
            if first.startswith(WRITES):
                check(self, query[:200])
            result = super().execute(query, params)
            if first.startswith(READS):
                open_cursors().add(self)
            return result

        def executemany(self, query: str, param_list: Any) -> Any:
            check(self, query[:200])
            return super().executemany(query, param_list)

        def fetchone(self) -> Any:
            return self._ended(super().fetchone())

        def fetchmany(self, size: int = 1) -> Any:
            return self._ended(super().fetchmany(size))

        def fetchall(self) -> Any:
            open_cursors().discard(self)
            return super().fetchall()

        def close(self) -> None:
            open_cursors().discard(self)
            super().close()

        def _ended(self, rows: Any) -> Any:
            if not rows:
                open_cursors().discard(self)
            return rows

    now_and_then = Beat.now_and_then

    def checked(beat: Beat, **fields: Any) -> None:
        check(None, "a sign of life")
        now_and_then(beat, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "SQLiteCursorWrapper", WatchedCursor)
        patch.setattr(Beat, "now_and_then", checked)
        yield faults
