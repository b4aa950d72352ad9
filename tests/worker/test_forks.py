"""A process that forks while a thread of its own uses the database: the new process can use it as well."""

import os
import sqlite3
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollouts.worker import heartbeat


def write(path: Path) -> int:
    """Returns an exit status: 0 = a new connection could write a row."""
    try:
        with sqlite3.connect(path, timeout=60) as one:
            one.execute("INSERT INTO notes VALUES ('from the new process')")
    except sqlite3.OperationalError:
        return 1
    return 0


def test_a_fork_waits_for_what_a_thread_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool forked in the middle of a transaction. In the new process the database was locked for ever."""
    end, begun, forks, path = threading.Event(), threading.Event(), threading.Event(), tmp_path / "db.sqlite3"
    monkeypatch.setattr(heartbeat, "shutting_down", end)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: (forks.set(), time.monotonic())[1]))
    with sqlite3.connect(path) as one:
        one.execute("PRAGMA journal_mode = wal")
        one.execute("CREATE TABLE notes (text TEXT)")
    one.close()

    def store() -> None:
        own = sqlite3.connect(path, isolation_level=None)
        own.execute("BEGIN IMMEDIATE")
        own.execute("INSERT INTO notes VALUES ('from the thread')")
        begun.set()
        assert forks.wait(240)  # the other thread begins to
        own.execute("COMMIT")
        own.close()
        end.set()

    heartbeat.repeat("store", 60, store)
    assert begun.wait(240)
    child = os.fork()
    if child == 0:
        os._exit(write(path))
    end.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with sqlite3.connect(path) as one:
        assert [text for (text,) in one.execute("SELECT text FROM notes")] == [
            "from the thread",
            "from the new process",
        ]


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that sweeps a large storage does not keep the pool without a process."""
    end, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(heartbeat, "shutting_down", end)
    monkeypatch.setattr(heartbeat, "FORK_WAIT_SECONDS", 0.05)

    def work() -> None:
        begun.set()
        end.wait(240)

    heartbeat.repeat("work", 60, work)
    assert begun.wait(240)
    child = os.fork()
    if child == 0:
        os._exit(0)
    still_at_work = not end.is_set()
    end.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and still_at_work
