"""`make test`: every test on SQLite, then those that use the database again on PostgreSQL where one answers.

The last line is pytest's summary of the run on SQLite, which is the whole one.
"""

import argparse
import os
import subprocess
import sys


def postgres_answers(url: str) -> bool:
    """True when the server lets us in and may make databases."""
    import psycopg

    try:
        with psycopg.connect(url, connect_timeout=3) as connection:
            row = connection.execute(
                "SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
            return bool(row and row[0])
    except psycopg.Error:
        return False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--postgres", required=True)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    base = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    for name in ("DATABASE_URL", "REDIS_URL", "INSPECTOR_DATA", "DJANGO_SETTINGS_MODULE", "DEBUG", "SECRET_KEY"):
        base.pop(name, None)  # a developer's own settings must not decide what the tests see
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options.rest]
    has_postgres = postgres_answers(options.postgres)
    if has_postgres:
        print("--- the tests that use the database, on PostgreSQL", flush=True)
        again = {**base, "DATABASE_URL": options.postgres, "INSPECTOR_TEST_DATABASE_ONLY": "1"}
        status = subprocess.run(pytest, env=again, check=False).returncode
        if status not in (0, 5):  # 5: none of the chosen tests uses the database
            return status
    elif os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        print(f"--- CI=true allows no skips, and no PostgreSQL answers at {options.postgres}")
        print("    Start one that lets us make databases, or name it in INSPECTOR_TEST_POSTGRES.")
        return 1
    else:
        print("--- no PostgreSQL answers (INSPECTOR_TEST_POSTGRES names one): storage is tested on SQLite alone")
    print("--- all tests, on SQLite", flush=True)
    return subprocess.run(pytest, env=base, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
