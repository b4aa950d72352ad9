"""``rollout-inspector serve``: the same as ``make run`` and ``manage.py serve``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rollout_inspector.commands.manage import run_command


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("--port", type=int, default=8000, help="the first port to try (8000)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--no-workers", action="store_true", help="web server and Redis only")


def run(options: Namespace) -> int:
    """Start everything and wait until it ends."""
    more = ["--no-workers"] if options.no_workers else []
    return run_command(["serve", "--port", str(options.port), "--host", options.host, *more])
