"""Write a lock file: what chat templates are and do today."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rollout_inspector.commands.template_options import add_template_options, load_template, template_paths
from rollout_inspector.guard.checked_templates import CheckedTemplate, check_template
from rollout_inspector.guard.template_lock import LOCK_TIME, lock_text, name_in_lock
from rollout_inspector.guard.text_files import check_place, write_whole
from rollout_inspector.outputs import line_of
from rollout_inspector.refusal import Refusal
from rollout_inspector.text.chat_templates import is_renderer


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    add_template_options(parser, "+")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the lock file; it is replaced as a whole"
    )


def run(options: Namespace) -> int:
    """Check the templates and write the lock file. Nothing is written where one cannot be rendered."""
    checked: dict[str, CheckedTemplate] = {}
    check_place(options.output, "--output")
    for path in template_paths(options.paths):
        if is_renderer(path):
            raise Refusal(f"{path} cannot be locked: it has no text. Pin the version of the package renderers.")
        if os.path.realpath(path) == os.path.realpath(options.output):
            raise Refusal(f"--output {path}: it is the template. Name another file.")
        name = name_in_lock(path, options.output)
        if name in checked:
            raise Refusal(f"{path} and {checked[name].name} are one template, {name}. Name it once.")
        checked[name] = check_template(path, *load_template(path, options.tokenizer), now=LOCK_TIME)
        if checked[name].report is None:
            raise Refusal(f"{path} cannot be locked. {checked[name].error}")
    tokenizer = os.path.relpath(options.tokenizer, Path(options.output).parent) if options.tokenizer else ""
    of_files = {name: tokenizer for name, item in checked.items() if not Path(item.name).is_dir()}
    write_whole(options.output, lock_text(checked, of_files).encode(), "--output")
    for name, item in checked.items():
        print(line_of(f"Locked {name}: {'; '.join(item.reasons()) or 'safe for tool results.'}"))
    return 0
