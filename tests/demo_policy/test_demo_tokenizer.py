"""The demo policy's tokenizer and chat template, as transformers loads them from the folder."""

import json
import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.sampling.environments.calculator import CALCULATOR_TOOL
from tools.demo_policy.tokenizer import CHAT_TEMPLATE, CONTROL_TOKENS, MARKUP_TOKENS, RESPONSE_TEMPLATE

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is 12 * (3 + 4)?"}
TOOL = {"role": "tool", "name": "calculator", "content": "84"}
ASSISTANT = "<|im_start|>assistant\n"
ANSWER = {"role": "assistant", "content": "The answer is 84."}


def calling(*expressions: str, content: str = "") -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        for expression in expressions
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


def render(tokenizer: Any, messages: list[dict[str, Any]], generate: bool = False, tools: bool = True) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tools=[CALCULATOR_TOOL] if tools else None, tokenize=False, add_generation_prompt=generate
        )
    )


def test_the_folder_holds_the_sources_texts() -> None:
    assert (MODEL_DIR / "chat_template.jinja").read_text() == CHAT_TEMPLATE.read_text()
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    assert config["response_template"] == RESPONSE_TEMPLATE


def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    assert len(tokenizer) <= 2000
    for token in CONTROL_TOKENS + MARKUP_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|im_end|>"


def test_any_text_comes_back(tokenizer: Any) -> None:
    rng = random.Random(0)
    texts = [
        "".join(chr(rng.choice((rng.randint(9, 126), rng.randint(128, 0xD7FF)))) for _ in range(60)) for _ in range(50)
    ]
    for text in [*texts, "é e\u0301 \U0001f469\u200d\U0001f680", "", "\n\n  x"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone(tokenizer: Any) -> None:
    assert tokenizer.tokenize("12*(345-6)") == list("12*(345-6)")


@pytest.mark.parametrize(
    ("before", "appended"),
    [
        ([ASK, calling("12*7")], [TOOL]),
        ([ASK, calling("12*7", "1+1")], [TOOL, TOOL]),
        ([SYSTEM, ASK, calling("12*7"), TOOL], [ANSWER]),
        ([SYSTEM, ASK, ANSWER], [ASK]),
        ([ASK, calling("12*7", content="Let me see."), TOOL, ANSWER], [ASK, calling("1"), TOOL]),
    ],
)
@pytest.mark.parametrize("tools", [True, False])
def test_appending_never_changes_what_was_rendered(tokenizer: Any, before: Any, appended: Any, tools: bool) -> None:
    first = render(tokenizer, before, tools=tools)
    assert render(tokenizer, before + appended, tools=tools).startswith(first)
    assert render(tokenizer, before, generate=True, tools=tools) == first + "<|im_start|>assistant\n"


def test_consecutive_tool_messages_share_a_block(tokenizer: Any) -> None:
    text = render(tokenizer, [ASK, calling("12*7", "1+1"), TOOL, {**TOOL, "content": "2"}], tools=False)
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n84\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_tools_stand_in_the_system_block(tokenizer: Any) -> None:
    text = render(tokenizer, [SYSTEM, ASK])
    system = text[: text.index("<|im_end|>")]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.loads(system.splitlines()[-2]) == CALCULATOR_TOOL
    assert render(tokenizer, [ASK], tools=False).startswith("<|im_start|>user\n")


def test_generation_marks_cover_what_is_sampled(tokenizer: Any) -> None:
    messages = [SYSTEM, ASK, calling("12*(3+4)", content="Let me see."), TOOL, ANSWER]
    out = tokenizer.apply_chat_template(
        messages, tools=[CALCULATOR_TOOL], return_assistant_tokens_mask=True, return_dict=True
    )
    spans: list[list[int]] = [[]]
    for id_, sampled in zip(out["input_ids"], out["assistant_masks"], strict=True):
        if sampled:
            spans[-1].append(id_)
        elif spans[-1]:
            spans.append([])
    assert [tokenizer.decode(span) for span in spans if span] == [
        render(tokenizer, [calling("12*(3+4)", content="Let me see.")], tools=False).removeprefix(ASSISTANT).rstrip(),
        "The answer is 84.<|im_end|>",
    ]


@pytest.mark.parametrize(
    "message", [calling("12*(3+4)"), calling("1+1", "2*2"), calling("7", content="Let me see."), ANSWER]
)
def test_a_parsed_completion_is_the_message_that_renders_to_it(tokenizer: Any, message: dict[str, Any]) -> None:
    prompt = render(tokenizer, [ASK], generate=True)
    completion = render(tokenizer, [ASK, message])[len(prompt) :].removesuffix("\n")
    for response in (completion, tokenizer(completion)["input_ids"]):
        assert tokenizer.parse_response(response, prefix=prompt) == message


@pytest.mark.parametrize(
    ("completion", "content", "functions"),
    [
        ("<tool_call>\n{oops\n</tool_call><|im_end|>", "", ["{oops"]),
        ("<tool_call>\n{oops", "", ["{oops"]),
        ("Half a sent", "Half a sent", None),
        ("", "", None),
    ],
)
def test_broken_completions_parse_too(tokenizer: Any, completion: str, content: str, functions: Any) -> None:
    message = tokenizer.parse_response(completion, prefix="")
    assert message["content"] == content
    calls = message.get("tool_calls")
    assert (calls and [call["function"] for call in calls]) == functions
    render(tokenizer, [ASK, message, TOOL])


def test_a_call_is_written_as_the_policy_learned_it(tokenizer: Any) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
    text = render(tokenizer, [calling("1+2", content="Let me see.")], tools=False)
    assert text == f"{ASSISTANT}Let me see.\n{call}<|im_end|>\n"
