"""The chat templates that ``template`` and ``lock`` are asked about."""

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from rollout_inspector.commands.tokenizer_options import load_tokenizer, template_text
from rollout_inspector.refusal import Refusal
from rollout_inspector.text.tokenizers import LoadedTokenizer

OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""What a tokenizer's folder holds; any other folder holds templates and tokenizers."""
MAX_TEMPLATES = 10_000


def add_template_options(parser: ArgumentParser, n_paths: str) -> None:
    """Adds the paths of templates and the tokenizer of template files."""
    parser.add_argument(
        "paths", nargs=n_paths, metavar="TEMPLATE",
        help="a tokenizer's folder, a template file (Jinja), a folder of many of these, or renderer:NAME",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="of the template files; without it characters are compared")


def template_paths(paths: list[str]) -> list[str]:
    """The paths; in place of a folder of many its template files and tokenizers, by name. Raises :class:`Refusal`."""
    templates = [template for path in paths for template in _below(Path(path), path)]
    if len(templates) > MAX_TEMPLATES:
        raise Refusal(f"These are {len(templates):,} templates, more than {MAX_TEMPLATES:,}. Name fewer of them.")
    return templates


def _below(place: Path, name: str) -> Iterator[str]:
    if not place.is_dir() or any((place / file).exists() for file in OF_A_TOKENIZER):
        yield name
        return
    files = sorted(place.rglob("*"))
    folders = {file.parent for file in files if file.name in OF_A_TOKENIZER}
    templates = [file for file in files if file.suffix in (".jinja", ".jinja2", ".j2") and file.parent not in folders]
    if not folders and not templates:
        raise Refusal(f"{name} is no tokenizer's folder, and no file below it ends in .jinja. Name a template.")
    yield from map(str, sorted([*folders, *templates]))


def load_template(path: str, tokenizer: str | None) -> tuple[str, LoadedTokenizer | None]:
    """The template and the tokenizer of a folder, of a file, or of ``renderer:NAME``. Raises :class:`Refusal`."""
    if not Path(path).is_dir() and Path(path).name != "tokenizer.json":
        return template_text(path, "The chat template"), load_tokenizer(tokenizer)
    loaded = load_tokenizer(path, "")
    text = None if loaded is None else loaded.chat_template
    if text is None:
        raise Refusal(f"The tokenizer {path} has no chat template. Name a template file and --tokenizer {path}.")
    return text, loaded
