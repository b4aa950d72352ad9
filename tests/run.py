"""`make test`: every test on SQLite and, where a PostgreSQL answers, those that use the database on that as well.

The tests run in parts, side by side where there are two processors: those that start real workers and servers mostly
wait. One part is shown as it comes; what the others say is printed after they have ended, and at the end stands
pytest's summary of each.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from typing import IO

from tests.conftest import DATABASE_FOLDERS, STORAGE_FOLDERS, WORK_FOLDERS

PASSES = 4
"""How many parts run side by side on two processors: tests of workers and servers mostly wait."""
NO_TESTS = 5
"""Pytest's exit status when none of the chosen tests is in a part."""


@dataclass(frozen=True)
class Part:
    """One run of pytest: `name` says to conftest.py which tests are in it."""

    name: str
    title: str
    database: str = ""
    folders: tuple[str, ...] = ()
    """Where its tests lie; empty = everywhere. Collecting the others costs seconds and imports torch."""
    command: tuple[str, ...] = ()
    """What runs in place of pytest."""


WORK = Part("work", "workers, servers and commands, on SQLite", folders=WORK_FOLDERS)
PAGES = Part("pages", "everything else that uses the database or a browser, on SQLite")
PLAIN = Part("plain", "the tests that need no database")
TYPES = Part("types", "the types, by mypy", command=(sys.executable, "-m", "mypy"))


def postgres_answers(url: str) -> bool:
    """True when the server lets us in and may make databases."""
    import psycopg

    try:
        with psycopg.connect(url, connect_timeout=10) as connection:
            row = connection.execute(
                "SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
            return bool(row and row[0])
    except psycopg.Error:
        return False


class Pass:
    """Runs parts one after the other, in processes of their own; takes the next one of those that wait for a pass."""

    def __init__(self, parts: deque[Part], pytest: list[str], env: dict[str, str]) -> None:
        self._parts, self._pytest, self._env = parts, pytest, env
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self.summaries: list[str] = []
        self.failed = False
        self.tested = False

    def run(self, output: IO[bytes]) -> None:
        """Run them with what they print passed on as it comes."""
        while not self._stopped:
            try:
                part = self._parts.popleft()
            except IndexError:
                return
            self._run(part, output)

    def stop(self) -> None:
        """End what runs, and begin nothing more."""
        self._stopped = True
        if self._process is not None:
            self._process.terminate()

    def _run(self, part: Part, output: IO[bytes]) -> None:
        env = {**self._env, "INSPECTOR_TEST_PART": part.name}
        if part.database:
            env["DATABASE_URL"] = part.database
            env["PGOPTIONS"] = "-c synchronous_commit=off"  # no test cuts the power
        output.write(f"--- {part.title}\n".encode())
        output.flush()
        tail = b""
        named = any(one.partition("::")[0].startswith("tests") for one in self._pytest)
        folders = [] if named else [f"tests/{name}" for name in part.folders]
        command = part.command or (*self._pytest, *folders)
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            self._process = process
            assert process.stdout is not None
            while piece := process.stdout.read1():
                output.write(piece)
                output.flush()
                tail = (tail + piece)[-1000:]
        self.failed |= process.returncode not in (0, NO_TESTS)
        self.tested |= process.returncode != NO_TESTS
        last = tail.rstrip().rpartition(b"\n")[2].decode(errors="replace")
        self.summaries.append(f"--- {part.title}: exit status {process.returncode}\n{last}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--postgres", required=True)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    base = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    for name in ("DATABASE_URL", "REDIS_URL", "INSPECTOR_DATA", "DJANGO_SETTINGS_MODULE", "DEBUG", "SECRET_KEY"):
        base.pop(name, None)  # a developer's own settings must not decide what the tests see
    base.pop("PYTHONDONTWRITEBYTECODE", None)  # each part and each process of a test would compile everything again
    quiet = ["-q", "-p", "no:cacheprovider", "--durations=15", "--durations-min=5"]
    pytest = [sys.executable, "-m", "pytest", *quiet, *options.rest]
    parts = deque([PAGES, WORK, PLAIN, *([] if options.rest else [TYPES])])  # the longest first
    if postgres_answers(options.postgres):
        url, doors = options.postgres, tuple(name for name in DATABASE_FOLDERS if name not in STORAGE_FOLDERS)
        parts.append(Part("storage again", "storage and workers, on PostgreSQL", url, STORAGE_FOLDERS))
        parts.append(Part("pages again", "pages, pushes and commands, on PostgreSQL", url, doors))
    elif os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        print(f"--- CI=true allows no skips, and no PostgreSQL answers at {options.postgres}")
        print("    Start one that lets us make databases, or name it in INSPECTOR_TEST_POSTGRES.")
        return 1
    else:
        print("--- no PostgreSQL answers (INSPECTOR_TEST_POSTGRES names one): storage is tested on SQLite alone")
    shown, *others = [Pass(parts, pytest, base) for _ in range(PASSES)]
    # A test Redis that somebody named is emptied by every pass: then one has to wait for the other.
    side_by_side = (os.cpu_count() or 1) > 1 and not os.environ.get("INSPECTOR_TEST_REDIS")
    if not side_by_side:
        shown.run(sys.stdout.buffer)
    else:
        with contextlib.ExitStack() as stack:
            outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in others]
            threads = [
                threading.Thread(target=one.run, args=(output,)) for one, output in zip(others, outputs, strict=True)
            ]
            for thread in threads:
                thread.start()
            try:
                shown.run(sys.stdout.buffer)
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                for one in others:
                    one.stop()
                raise
            for output in outputs:
                output.seek(0)
                shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.buffer.flush()
    for one in (*others, shown):
        print("\n".join(one.summaries))
    done = (shown, *others)
    return int(any(one.failed for one in done) or not any(one.tested for one in done))


if __name__ == "__main__":
    sys.exit(main())
