"""`make test`: every test on SQLite and, where a PostgreSQL answers, those that use the database on that as well.

The two passes run side by side where there are two processors. What the second one says is printed after the first has
ended; the last line is pytest's summary of the run on SQLite, which is the whole one.
"""

import argparse
import os
import subprocess
import sys
import tempfile


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


def run_shown(command: list[str], env: dict[str, str]) -> tuple[int, bytes]:
    """Run it with its output passed on as it comes; gives its status and the last line."""
    print("--- all tests, on SQLite", flush=True)
    tail = b""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        while piece := process.stdout.read1():
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            tail = (tail + piece)[-1000:]
    return process.returncode, tail.rstrip().rpartition(b"\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--postgres", required=True)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    base = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    for name in ("DATABASE_URL", "REDIS_URL", "INSPECTOR_DATA", "DJANGO_SETTINGS_MODULE", "DEBUG", "SECRET_KEY"):
        base.pop(name, None)  # a developer's own settings must not decide what the tests see
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options.rest]
    if not postgres_answers(options.postgres):
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            print(f"--- CI=true allows no skips, and no PostgreSQL answers at {options.postgres}")
            print("    Start one that lets us make databases, or name it in INSPECTOR_TEST_POSTGRES.")
            return 1
        print("--- no PostgreSQL answers (INSPECTOR_TEST_POSTGRES names one): storage is tested on SQLite alone")
        return run_shown(pytest, base)[0]
    again = {**base, "DATABASE_URL": options.postgres, "INSPECTOR_TEST_DATABASE_ONLY": "1"}
    # A test Redis that somebody named is emptied by both passes: then one has to wait for the other.
    side_by_side = (os.cpu_count() or 1) > 1 and not os.environ.get("INSPECTOR_TEST_REDIS")
    with tempfile.TemporaryFile() as output:
        second = subprocess.Popen(pytest, env=again, stdout=output, stderr=subprocess.STDOUT)
        try:
            if not side_by_side:
                second.wait()
            status, last = run_shown(pytest, base)
            second.wait()
        finally:
            if second.poll() is None:  # Ctrl-C
                second.terminate()
                second.wait()
        output.seek(0)
        print("--- the tests that use the database, on PostgreSQL", flush=True)
        sys.stdout.buffer.write(output.read())
        sys.stdout.buffer.flush()
    print(f"--- exit status {second.returncode} on PostgreSQL, {status} on SQLite:", flush=True)
    print(last.decode(errors="replace"), flush=True)
    return status or (0 if second.returncode == 5 else second.returncode)  # 5: none of the chosen tests uses it


if __name__ == "__main__":
    sys.exit(main())
