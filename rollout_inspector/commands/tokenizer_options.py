"""The options ``--tokenizer`` and ``--chat-template`` of every subcommand."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_inspector.guard.text_files import read_text
from rollout_inspector.refusal import Refusal

if TYPE_CHECKING:
    from rollout_inspector.text.chat_templates import TemplateRenderer
    from rollout_inspector.text.tokenizers import LoadedTokenizer


def add_tokenizer_options(parser: ArgumentParser) -> None:
    """Adds both options to a parser."""
    parser.add_argument("--tokenizer", metavar="DIR", help="the folder that holds the tokenizer.json of the policy")
    about = "a Jinja file, or renderer:NAME; default: the tokenizer's own"
    parser.add_argument("--chat-template", metavar="FILE", help=about)


def load_tokenizer(folder: str | None, option: str = "--tokenizer") -> LoadedTokenizer | None:
    """The tokenizer of a folder; None without a folder.

    ``option``: what named it. Raises :class:`Refusal`.
    """
    if not folder:
        return None
    from rollout_inspector.text import tokenizers

    try:
        return tokenizers.load(folder)
    except (ValueError, OSError) as error:
        raise Refusal(f"{option} {folder}: {error}".strip()) from error


def template_text(path: str | Path, option: str = "--chat-template") -> str:
    """The text of a chat template, or the name of a renderer as it is kept. Raises :class:`Refusal`."""
    from rollout_inspector.text.chat_templates import is_renderer, kept_text

    if is_renderer(str(path)):
        return kept_text(str(path))
    text = read_text(path, option)
    if "\0" in text or not text.strip():
        raise Refusal(f"{option} {path} holds no template text. Name another file.")
    return text


def load_renderer(tokenizer: LoadedTokenizer | None, path: str | None) -> TemplateRenderer | None:
    """The renderer of the chat template that the options name; None where there is none.

    Raises :class:`Refusal`.
    """
    if path and tokenizer is None:
        raise Refusal("--chat-template needs --tokenizer: what a template writes is compared as tokens.")
    from rollout_inspector.text import chat_templates

    text = template_text(path) if path else (tokenizer.chat_template if tokenizer is not None else None)
    if text is None:
        return None
    renderer = chat_templates.renderer(tokenizer, text)
    if problem := chat_templates.cannot_render(renderer):
        where = path or f"of {tokenizer.name if tokenizer else ''}"
        raise Refusal(f"The chat template {where} cannot be used. {problem} Mend it, or name another file.")
    return renderer
