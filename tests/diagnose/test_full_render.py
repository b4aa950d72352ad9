"""The end of a trajectory against a full render: what is a difference, in which mode, of which kind, and where."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose.finding import Finding, Severity
from rollout_inspector.diagnose.full_render import compare_with_render
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.trajectory import Ids, Request, Step, Trajectory
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
ASK = {"role": "user", "content": "What is 6*7?"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}}],
}
RESULT = {"role": "tool", "name": "calculator", "content": "42"}
ANSWER = {"role": "assistant", "content": "It is 42."}
TURN = "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"

Compare = Callable[..., Finding | None]


@pytest.fixture(scope="module")
def codec_and_renderer(tiny_tokenizer: Path) -> Any:
    tokenizer = load(tiny_tokenizer)
    return tokenizer, renderer(tokenizer, tokenizer.chat_template)


@pytest.fixture
def compare(codec_and_renderer: Any) -> Compare:
    """Two steps: a call as given, its result, an answer as given; compared with what the template renders."""
    codec, bound = codec_and_renderer
    head = bound.render_ids(Conversation([ASK], None, {}, True))

    def run(
        called: str = CALL, answer: str | Ids = "It is 42.<|im_end|>", mode: str = "ignore_whitespace",
        turn: str = TURN, reply: Any = ANSWER, text: str | None = None, **last: Any,
    ) -> Finding | None:
        first = Step(head, codec.encode(called + "<|im_end|>"), request=Request((ASK,)), reply=CALLED)
        prompt = np.concatenate([first.stream, codec.encode(turn.removeprefix("<|im_end|>"))])
        said = codec.encode(answer) if isinstance(answer, str) else answer
        second = Step(prompt, said, request=Request((ASK, CALLED, RESULT)), reply=reply, finish_reason="stop")
        value = Trajectory("t", (first, replace(second, **last)))
        return compare_with_render(value, codec, bound if text is None else renderer(codec, text), mode)

    return run


@pytest.mark.parametrize("mode", ["strict", "ignore_whitespace", "off"])
def test_the_same_stream_is_no_finding(compare: Compare, mode: str) -> None:
    assert compare(mode=mode) is None


def test_a_call_in_other_characters_is_named_and_placed(compare: Compare, codec_and_renderer: Any) -> None:
    codec, _ = codec_and_renderer
    found = compare(called=CALL.replace('"expression": "', '"expression":"'), mode="strict")
    assert found is not None and (found.kind, found.severity, found.step) == (
        "tool_call_reserialized", Severity.INFO, 1,
    )
    # The sampled side stands in the stream at that place, and the other one is what the template writes.
    assert codec.decode(found.actual_ids).startswith(('":"', ':"', '"')) and '": "' in found.expected_text
    assert (
        found.cost.rows == 1
        and '":"' in found.actual_text
        and "Nothing, if the trainer takes these tokens" in found.remedy
    )
    assert compare(called=CALL.replace('"expression": "', '"expression":"')) is None  # white space alone


def test_white_space_counts_in_strict_mode_alone(compare: Compare) -> None:
    found = compare(answer="It is  42.<|im_end|>", mode="strict")
    assert found is not None and found.kind == "whitespace_changed" and found.severity is Severity.INFO
    assert compare(answer="It is  42.<|im_end|>") is None


def test_other_tokens_for_the_same_text_count_in_strict_mode_unless_they_are_known(
    compare: Compare, codec_and_renderer: Any
) -> None:
    codec, bound = codec_and_renderer
    odd = np.concatenate([codec.encode(letter) for letter in "It is 42."] + [codec.encode("<|im_end|>")])
    assert len(odd) > len(codec.encode("It is 42.<|im_end|>"))
    found = compare(answer=odd, mode="strict")
    assert found is not None and found.kind == "noncanonical_sampling" and found.severity is Severity.INFO
    assert compare(answer=odd) is None
    head = bound.render_ids(Conversation([ASK], None, {}, True))
    alone = Trajectory("t", (Step(head, odd, request=Request((ASK,)), reply=ANSWER),))
    assert (told := compare_with_render(alone, codec, bound, "strict")) is not None
    assert compare_with_render(alone, codec, bound, "strict", [replace(told, kind="noncanonical_sampling")]) is None


def test_scaffold_that_the_strategy_left_out_is_a_warning(compare: Compare) -> None:
    turn = TURN.replace("<tool_response>\n42\n</tool_response>", "42")
    found = compare(turn=turn)
    assert found is not None and found.severity is Severity.WARNING
    assert found.kind in ("delta_differs", "template_not_append_only") and "the strategy put" in found.evidence


def test_reasoning_that_a_render_drops_is_named(compare: Compare, codec_and_renderer: Any) -> None:
    said = {"role": "assistant", "content": "It is 42.", "reasoning_content": "Six times seven."}
    dropping = codec_and_renderer[0].chat_template.replace("message.reasoning_content", "message.nothing_of_the_kind")
    found = compare(answer="<think>\nSix times seven.\n</think>\n\nIt is 42.<|im_end|>", reply=said, text=dropping)
    assert found is not None and (found.kind, found.severity) == ("thinking_stripped", Severity.INFO)
    assert "Six times seven" in found.actual_text and "Six times seven" not in found.expected_text


def test_a_completion_that_was_cut_is_not_closed_for_it(compare: Compare) -> None:
    cut = {"role": "assistant", "content": "It is"}
    assert compare(answer="It is", reply=cut, mode="strict", finish_reason="length") is None
    found = compare(answer="It is", reply=cut, mode="strict")
    assert found is not None and "<|im_end|>" in found.expected_text


def test_what_a_render_has_behind_the_end_is_said(compare: Compare, codec_and_renderer: Any) -> None:
    longer = codec_and_renderer[0].chat_template + "{{- 'The end.' -}}"
    found = compare(text=longer)
    assert found is not None and (found.kind, found.severity) == ("delta_differs", Severity.WARNING)
    assert found.start == found.stop and "goes on with 'The end.'" in found.evidence.replace("\\n", "")


def test_a_call_that_was_never_closed_is_info(compare: Compare) -> None:
    open_call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": "oops"}]}
    found = compare(answer="<tool_call>\noops<|im_end|>", reply=open_call)
    assert found is not None and (found.kind, found.severity) == ("tool_call_reserialized", Severity.INFO)
    assert "</tool_call>" in found.expected_text and "</tool_call>" not in found.actual_text


def test_a_template_that_refuses_the_conversation_is_not_decidable(compare: Compare) -> None:
    found = compare(text="{{ raise_exception('no tools here') }}")
    assert found is not None and (found.kind, found.severity) == ("not_decidable", Severity.INFO)
    assert compare(text="{{ raise_exception('no tools here') }}", mode="off") is None
