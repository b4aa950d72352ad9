"""The demo policy's tokenizer and template, loaded once for all tests of the loop."""

from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.streams.strategies import Context
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from tests.loop.harness import Harness


@pytest.fixture(scope="session")
def demo_context(tiny_tokenizer: Path) -> tuple[Any, Context]:
    tokenizer = load(tiny_tokenizer)
    return tokenizer, Context(tokenizer, renderer(tokenizer, tokenizer.chat_template), tokenizer.stop_ids)


@pytest.fixture
def harness(demo_context: tuple[Any, Context], tiny_tokenizer: Path) -> Harness:
    return Harness(*demo_context, folder=str(tiny_tokenizer))
