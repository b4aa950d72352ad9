#!/usr/bin/env python
"""Run one of Rollout Inspector's commands: `python manage.py help` lists them."""

import sys

from rollout_inspector.commands.manage import run_command


def main() -> None:
    if status := run_command(sys.argv[1:]):
        sys.exit(status)


if __name__ == "__main__":
    main()
