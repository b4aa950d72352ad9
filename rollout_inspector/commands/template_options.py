"""The chat templates that ``template`` and ``lock`` are asked about, and their names in a lock file."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path

from rollout_inspector.commands.tokenizer_options import load_tokenizer, template_text
from rollout_inspector.guard.checked_templates import NamedTemplate
from rollout_inspector.refusal import Refusal


def add_template_options(parser: ArgumentParser, n_paths: str) -> None:
    """Adds the paths of templates and the tokenizer of template files."""
    parser.add_argument(
        "paths", nargs=n_paths, metavar="TEMPLATE", help="a tokenizer's folder, or a template file (Jinja)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="of the template files; without it characters are compared")


def load_template(path: str, tokenizer: str | None) -> NamedTemplate:
    """The template of a tokenizer's folder, or of a file. Raises :class:`Refusal`."""
    if not Path(path).is_dir() and Path(path).name != "tokenizer.json":
        return NamedTemplate(path, template_text(path, "The chat template"), load_tokenizer(tokenizer))
    loaded = load_tokenizer(path, "")
    text = None if loaded is None else loaded.chat_template
    if text is None:
        raise Refusal(f"The tokenizer {path} has no chat template. Name a template file and --tokenizer {path}.")
    return NamedTemplate(path, text, loaded)


def name_in_lock(path: str, lock: str) -> str:
    """The name of a template in a lock file: its path from the folder of that file, or its last part if outside."""
    place = Path(os.path.realpath(path))  # Path.resolve fails on a link to itself
    folder = Path(os.path.realpath(lock)).parent
    return place.relative_to(folder).as_posix() if place.is_relative_to(folder) else place.name


def path_of_name(name: str, lock: str) -> str:
    """Where a template of a lock file lies, if it lies below the folder of that file."""
    return str(Path(lock).parent / name)
