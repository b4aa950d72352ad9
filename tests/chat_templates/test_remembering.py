"""Renders made ahead are the renders that would have been made; what fails for the moment is asked for again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.chat_templates import RememberingRenderer, renderer, sandbox
from rollouts.tito.codec import Conversation, RenderFailed
from rollouts.tito.trajectory import Message
from rollouts.tokenizers import load

TOOLS = [{"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}]
TALK: list[Message] = [
    {"role": "user", "content": "What's 2+2? 漢字"},
    {"role": "assistant", "content": "<think>hm</think>4"},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many renders each request to the sandbox asked for."""
    seen: list[int] = []
    real = sandbox.Pool.render

    def counted(self: sandbox.Pool, template: str, jobs: Sequence[Any]) -> list[sandbox.Rendered]:
        seen.append(len(jobs))
        return real(self, template, jobs)

    monkeypatch.setattr(sandbox.Pool, "render", counted)
    return seen


def asks() -> list[Conversation]:
    kwargs = {"enable_thinking": False, "messages": "is not mine to say"}
    made = [Conversation(TALK[:n], None, {}, n % 2 == 1) for n in range(1, 5)]
    return [*made, Conversation(TALK[:3], TOOLS, {}, True), Conversation(TALK[:3], [], kwargs, True)]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "trl-training--qwen3", "llama3.1", "gpt-oss"])
def test_the_same_text_ids_and_spans_in_one_round_trip(corpus: Path, trips: list[int], name: str) -> None:
    tokenizer = load(corpus / "tokenizers" / ("qwen3" if "qwen3" in name else name))
    text = (corpus / "templates" / f"{name}.jinja").read_text()
    plain, made = renderer(tokenizer, text), RememberingRenderer(tokenizer, text, tokenizer.encode)
    wanted = asks()
    made.use(made.foresee(wanted))
    assert len(trips) == 1
    for ask in wanted:
        given = (ask.messages, ask.tools, ask.kwargs, ask.add_generation_prompt)
        assert made.render_tracked(*given) == plain.render_tracked(*given)
        assert made.render_ids(*given).tolist() == plain.render_ids(*given).tolist()
    assert len(trips) == 1 + 2 * len(wanted)  # those of the plain one


def test_another_conversation_of_equal_messages_is_rendered_by_itself(tiny_tokenizer: Path, trips: list[int]) -> None:
    tokenizer = load(tiny_tokenizer)
    made = RememberingRenderer(tokenizer, tokenizer.chat_template or "", tokenizer.encode)
    made.use(made.foresee([Conversation(TALK[:1], None, {}, True)]))
    text = made.render_text(TALK[:1], None, {}, True)
    assert len(trips) == 1
    assert made.render_text([dict(TALK[0])], None, {}, True) == text and len(trips) == 2
    assert made.render_text(TALK[:1], None, {}, False) != text and len(trips) == 3


LOOPS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


def test_a_template_that_raises_is_remembered_and_one_that_ran_too_long_is_not(
    tiny_tokenizer: Path, trips: list[int]
) -> None:
    tokenizer = load(tiny_tokenizer)
    raising = "{% if messages|length == 2 %}{{ raise_exception('no pairs') }}{% endif %}{{ messages[-1].content }}"
    made = RememberingRenderer(tokenizer, raising, tokenizer.encode)
    made.use(made.foresee([Conversation(TALK[:n]) for n in (1, 2, 3)]))
    with pytest.raises(RenderFailed, match="no pairs"):
        made.render_text(TALK[:2])
    assert made.render_text(TALK[:3]) == "And 3+3?" and len(trips) == 1
    slow = RememberingRenderer(tokenizer, "{% if messages|length == 2 %}" + LOOPS + "{% endif %}x", tokenizer.encode)
    slow.use(slow.foresee([Conversation(TALK[:n]) for n in (1, 2, 3)]))
    assert slow.render_text(TALK[:3]) == "x" and len(trips) == 3


def test_what_is_no_json_fails_only_whom_it_concerns(tiny_tokenizer: Path) -> None:
    tokenizer = load(tiny_tokenizer)
    made = RememberingRenderer(tokenizer, "{{ messages[-1].content }}", tokenizer.encode)
    strange: Message = {"role": "user", "content": object()}
    made.use(made.foresee([Conversation(TALK[:1]), Conversation([strange])]))
    assert made.render_text(TALK[:1]) == TALK[0]["content"]
    with pytest.raises(RenderFailed, match="plain JSON"):
        made.render_text([strange])
