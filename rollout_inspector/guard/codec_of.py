"""The tokenizer that a caller names: a folder, one that is loaded, or one of ``transformers``."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout_inspector.text import tokenizers
from rollout_inspector.text.tokenizers import LoadedTokenizer, TokenizerUnusable


def codec_of(tokenizer: Any) -> tuple[LoadedTokenizer | None, TemporaryDirectory[str] | None]:
    """The loaded tokenizer, and the folder that must live as long as it; None for None.

    A tokenizer of ``transformers`` is saved to such a folder. Raises :class:`TokenizerUnusable`.
    """
    if tokenizer is None or isinstance(tokenizer, LoadedTokenizer):
        return tokenizer, None
    if isinstance(tokenizer, str | Path):
        return tokenizers.load(tokenizer), None
    if not hasattr(tokenizer, "save_pretrained"):
        raise TokenizerUnusable(
            f"A {type(tokenizer).__name__} is no tokenizer. Name its folder, or pass a tokenizer of transformers."
        )
    folder = TemporaryDirectory(prefix="rollout-inspector-")
    try:
        tokenizer.save_pretrained(folder.name)
        return tokenizers.load(folder.name), folder
    except BaseException:
        folder.cleanup()
        raise
