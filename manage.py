#!/usr/bin/env python
"""Run one of Rollout Inspector's commands: `python manage.py help` lists them."""

import sys

from rollout_inspector.commands.main import run_on_server


def main() -> None:
    if status := run_on_server(sys.argv[1:], "manage.py"):
        sys.exit(status)


if __name__ == "__main__":
    main()
