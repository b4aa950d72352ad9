"""``rollout-inspector import-audit``: the same as ``manage.py import_audit``."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace

from rollout_inspector.commands.manage import run_command


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("folder", metavar="DIR", help="what `audit --output DIR` wrote; `DIR --help` lists the options")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options of manage.py import_audit")


def run(options: Namespace) -> int:
    """Import what the audit flagged."""
    return run_command(["import_audit", options.folder, *options.arguments])
