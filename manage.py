#!/usr/bin/env python
"""Run one of Rollout Inspector's commands: `python manage.py help` lists them."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
    try:
        from django.core.management import execute_from_command_line
    except ImportError as error:
        sys.exit(
            f"Django cannot be imported ({error}). Run `make run` once, which creates .venv, "
            "and then call `.venv/bin/python manage.py ...`."
        )
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
