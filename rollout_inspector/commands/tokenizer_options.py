"""The options ``--tokenizer`` and ``--chat-template`` of every subcommand."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_inspector.guard.text_files import read_text
from rollout_inspector.refusal import Refusal

if TYPE_CHECKING:
    from rollout_inspector.text.chat_templates import TemplateRenderer
    from rollout_inspector.text.chat_templates.package_renderer import PackageRenderer
    from rollout_inspector.text.tokenizers import LoadedTokenizer


def add_tokenizer_options(parser: ArgumentParser) -> None:
    """Adds both options to a parser."""
    parser.add_argument("--tokenizer", metavar="DIR", help="the folder that holds the tokenizer.json of the policy")
    about = "a Jinja file, or renderer:NAME; default: the tokenizer's own"
    parser.add_argument("--chat-template", metavar="FILE", help=about)


RENDERER = "renderer:"
"""What begins a name that stands for a renderer of the package ``renderers``, in place of a template's file."""


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
    """The text of a chat template. Raises :class:`Refusal`."""
    if str(path).startswith(RENDERER):
        raise Refusal(f"{option} {path}: a renderer has no text, which is needed here. Name a template file.")
    text = read_text(path, option)
    if "\0" in text or not text.strip():
        raise Refusal(f"{option} {path} holds no template text. Name another file.")
    return text


def package_renderer(tokenizer: LoadedTokenizer | None, name: str) -> PackageRenderer:
    """The renderer of the package ``renderers`` that a name stands for. Raises :class:`Refusal`."""
    if tokenizer is None:
        raise Refusal(f"{name} needs --tokenizer: a renderer writes ids.")
    from rollout_inspector.text.chat_templates.package_renderer import PackageRenderer

    return PackageRenderer(tokenizer, name.removeprefix(RENDERER))


def load_renderer(tokenizer: LoadedTokenizer | None, path: str | None) -> TemplateRenderer | None:
    """The renderer of the chat template that the options name; None where there is none.

    Raises :class:`Refusal`.
    """
    if path and tokenizer is None:
        raise Refusal("--chat-template needs --tokenizer: what a template writes is compared as tokens.")
    from rollout_inspector.text import chat_templates

    if path and path.startswith(RENDERER):
        renderer: TemplateRenderer = package_renderer(tokenizer, path)
    else:
        text = template_text(path) if path else (tokenizer.chat_template if tokenizer is not None else None)
        if text is None:
            return None
        renderer = chat_templates.renderer(tokenizer, text)
    if problem := chat_templates.cannot_render(renderer):
        where = path or f"of {tokenizer.name if tokenizer else ''}"
        raise Refusal(f"The chat template {where} cannot be used. {problem} Mend it, or name another file.")
    return renderer
