"""Every chat template of the corpus drives a calculator episode through the loop, or is refused with a sentence."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.streams.interfaces import Codec, Renderer
from rollout_inspector.streams.strategies import Context
from rollout_inspector.streams.trajectory import Ids
from rollout_inspector.text.chat_templates import renderer, wants_call_ids
from rollout_inspector.text.replies.parsing import (
    Parse, Way, answering, call_id, parser, plain_message, way_of, with_call_ids
)
from rollout_inspector.text.replies.tool_calls import as_written, learn, plain
from rollout_inspector.text.tokenizers import load
from rollouts.sampling.engines import EngineError
from rollouts.sampling.engines.vllm_engine import tool_call_reader
from rollouts.sampling.loop import RolloutJob
from tests.loop.harness import Harness


def call(expression: str) -> str:
    """As a model writes a call whose template writes none."""
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def written(renderer: Renderer, arguments: dict[str, Any], n: int = 1, name: str = "calculator") -> str | None:
    """A turn of ``n`` equal calls as a chat template writes it, or None; without its beginning and its stop token."""
    for give in (dict, json.dumps):
        calls = [
            {"type": "function", "id": call_id(5, i), "function": {"name": name, "arguments": give(arguments)}}
            for i in range(n)
        ]
        said = as_written(renderer, calls)
        if said is not None and name in said:
            return re.sub(STOPS, "", said)
    return None


STOPS = r"\s*(<\|im_end\|>|<\|eot_id\|>|<\|call\|>|</s>|<｜end▁of▁sentence｜>)\s*\Z"

REFUSED = {
    "qwen3": "not prefix-preserving",
    "qwen3--0.6b-early": "not prefix-preserving",
    "trl--gemma": "roles must alternate",
}
"""Templates that ``tool_delta`` cannot use, and what it says."""
READS_IDS = {"mistral-nemo", "gpt-oss", "trl-training--gptoss"}


def harnesses(corpus: Path) -> Iterator[tuple[str, Harness]]:
    """A harness for each template, with the tokenizer that the corpus' cases use it with."""
    used: dict[str, str] = {}
    for line in (corpus / "cases" / "prefix_cases.jsonl").read_text().splitlines():
        row = json.loads(line)
        used.setdefault(row["template"], row["tokenizer"])
    for path in sorted((corpus / "templates").glob("*.jinja")):
        tokenizer = load(corpus / "tokenizers" / used.get(path.name, "qwen3"))
        context = Context(tokenizer, renderer(tokenizer, path.read_text(encoding="utf-8")), tokenizer.stop_ids)
        yield path.stem, Harness(tokenizer, context, parse=parse_of(tokenizer, context.renderer))


def parse_of(codec: Codec, renderer: Renderer) -> Parse:
    """What a worker reads with: no tokenizer of the corpus has a response template."""
    read = learn(renderer) or plain

    def parse(prompt: Ids, ids: Ids, tools: Any = None) -> dict[str, Any]:
        return plain_message(codec.decode(ids[:-1]), read, tools)

    return parse


def episode(harness: Harness) -> None:
    """A call, another call, then the answer."""
    codec = harness.context.codec
    stop = codec.decode(np.array([codec.eos_id], dtype=np.int32))

    def say(prompt: Ids, text: str) -> str:
        if "4200" in text:
            return "The answer is 42." + stop
        expression = "6*700" if "42" in text else "6*7"
        return (written(harness.context.renderer, {"expression": expression}) or call(expression)) + stop

    task = replace(harness.tasks(1)[0], answer="42")
    harness.run(harness.scripted(say), [RolloutJob("a", task, seed=3)], harness.limits(max_turns=4, max_live=1))


def test_each_runs_an_episode_or_says_why_not(corpus: Path) -> None:
    refused, n_ran = {}, 0
    for name, harness in harnesses(corpus):
        episode(harness)
        done = harness.done["a"]
        if done.error:
            refused[name] = done.error
            assert not harness.steps, f"{name} was refused after something had been sampled"
            continue
        n_ran += 1
        assert (done.stop_reason, done.reward, len(harness.steps["a"])) == ("answered", 1.0, 3), name
        for before, after in pairwise(harness.steps["a"]):
            assert after.prompt_ids[: len(before.stream)].tolist() == before.stream.tolist(), name
        check_ids(name, harness)
    assert n_ran + len(refused) >= 30
    assert set(refused) == set(REFUSED)
    for name, words in REFUSED.items():
        assert words in refused[name]


def check_ids(name: str, harness: Harness) -> None:
    """Calls and answers carry the same ids where the template reads them, and none where it does not."""
    request = harness.steps["a"][2].request
    assert request is not None
    *_, reply, first, again, second = request.messages
    called = [message["tool_calls"][0].get("id") for message in (reply, again)]
    if name in READS_IDS:
        # Mistral's model writes an id with its call, which stays; the others write none.
        own = [call_id(5, 0)] * 2 if name == "mistral-nemo" else [call_id(3, 0), call_id(3, 1)]
        assert called == own == [first["tool_call_id"], second["tool_call_id"]]
    else:
        assert called == [None, None] and "tool_call_id" not in first
    if name == "mistral-nemo":
        assert f'"call_id": "{call_id(5, 0)}"' in harness.context.codec.decode(harness.steps["a"][2].prompt_ids)


def test_an_id_follows_from_the_trajectory_and_the_number_of_the_call() -> None:
    ids = [call_id(seed, number) for seed in range(50) for number in range(50)]
    assert len(set(ids)) == 2500 and call_id(7, 3) == call_id(7, 3)
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)


def test_ids_that_the_model_wrote_stay_and_strange_calls_do_no_harm() -> None:
    calls: list[Any] = [{"id": "mine", "function": {"name": "f"}}, {"function": "oops"}, "not even an object"]
    reply = with_call_ids({"role": "assistant", "tool_calls": calls}, 1, 5)
    assert reply["tool_calls"] == [calls[0], {"function": "oops", "id": call_id(1, 6)}, calls[2]]
    results = [{"role": "tool", "content": "1"}, {"role": "user", "content": "x"}, {"role": "tool", "content": "2"}]
    assert [message.get("tool_call_id") for message in answering(reply, results)] == ["mine", None, call_id(1, 6)]
    assert answering({"role": "assistant", "tool_calls": "none"}, results) == results
    assert with_call_ids({"role": "assistant"}, 1, 0) == {"role": "assistant"}


def test_a_template_that_only_speaks_of_ids_in_a_comment_does_not_read_them() -> None:
    assert wants_call_ids("{{ message.tool_call_id }}") and wants_call_ids("{{ call['id'] }}")
    assert not wants_call_ids("{# its id #}{{ message.identity }} {{ video }}")


# -- calls read back ---------------------------------------------------------------------------------------------------

HOSTILE = {"place": 'Port "Ellen"\n\tIsle', "days": 3, "deep": {"a": [1, None, True]}, "text": "17", "none": ""}
SCHEMA = [
    {
        "type": "function",
        "function": {
            "name": "look-up.x_1",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"},
                    "text": {"type": ["string", "null"]}, "none": {"type": "string"},
                },
            },
        },
    }
]
WITHOUT_CALLS = {
    "skyrl--qwen3_with_thinking", "skyrl--qwen3_without_thinking", "trl--gemma", "trl--llama3", "unsloth--zephyr",
    "vllm--chatml",
}


def of_calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [
        (one["name"], json.loads(one["arguments"]) if isinstance(one["arguments"], str) else one["arguments"])
        for one in functions
    ]


def test_calls_are_read_as_each_template_writes_them(corpus: Path) -> None:
    lacking = set()
    for name, harness in harnesses(corpus):
        codec, renderer = harness.context.codec, harness.context.renderer
        read = learn(renderer)
        if read is None:
            lacking.add(name)
            continue
        for n in (1, 2):
            text = written(renderer, HOSTILE, n, "look-up.x_1")
            if text is None or text.count("look-up.x_1") < n:
                assert n == 2, name  # it takes one call a turn
                continue
            message = plain_message(text, read, SCHEMA)
            assert of_calls(message) == [("look-up.x_1", HOSTILE)] * n, name
            assert message["content"].strip() == "", name
            # Cut anywhere, it is never a call with half its arguments, and never an error.
            for cut in range(0, len(text), 3):
                for _, given in of_calls(plain_message(text[:cut], read, SCHEMA)):
                    assert given == HOSTILE, (name, text[:cut])
        assert plain_message("The answer is 42.", read) == {"role": "assistant", "content": "The answer is 42."}
        assert harness.parse is not None
        ids = codec.encode("It is 42.")
        assert harness.parse(ids, np.append(ids, codec.eos_id), None)["content"] == "It is 42.", name
    assert lacking == WITHOUT_CALLS


HARMONY = "<|channel|>analysis<|message|>Hm.<|end|>"
LOOSE = {
    "llama3.1": [
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        '{ "parameters":{"a":1},\n"name":"f" }',
        '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}',
    ],
    "mistral-nemo": [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
        '[TOOL_CALLS][{"arguments":{"a":1},"name":"f"}]',
    ],
    "deepseek-r1": [
        'I see. <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\n "a": 1\n}\n```<｜tool▁call▁end｜>'
    ],
    "glm-4.5": ["<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"],
    "qwen3-coder": ["<tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</tool_call>"],
    "gpt-oss": [
        f'{HARMONY}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}',
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
    ],
}
"""Calls of f with a = 1 as these models are known to write them, not letter by letter as their templates do."""
NO_CALLS = {
    "llama3.1": ['He said {"name": "f", "parameters": {}}', '{"name": 3}', '{"name": "f", "parameters": ', "{"],
    "mistral-nemo": ["[TOOL_CALLS]", "[TOOL_CALLS][", '{"name": "f", "arguments": {"a": 1}}'],
    "deepseek-r1": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{oops}\n```"],
    "glm-4.5": ["<tool_call>", "<tool_call>f <arg_key>a</arg_key></tool_call>"],
    "qwen3-coder": ["<function=f>", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>"],
    "gpt-oss": ["to=functions.f", "<|channel|>commentary to=functions.f<|message|>{"],
}


def test_calls_that_models_write_more_loosely_are_read_too(corpus: Path) -> None:
    for name, harness in harnesses(corpus):
        read = learn(harness.context.renderer)
        for text in LOOSE.get(name, []):
            assert read is not None
            message = plain_message(text, read)
            assert set(map(str, of_calls(message))) == {"('f', {'a': 1})"}, (name, text)
            assert message["content"] in ("", "I see."), (name, message["content"])
        for text in NO_CALLS.get(name, []):
            assert read is not None
            assert plain_message(text, read) == {"role": "assistant", "content": text}, (name, text)


def test_a_model_that_goes_round_in_circles_is_read_at_once(corpus: Path) -> None:
    """Calls that are opened and never closed, arguments without end, blanks: reading them takes no time."""
    pairs = ("\n<parameter=a>\n1\n</parameter>" * 60, "<arg_key>a</arg_key><arg_value>1</arg_value>" * 60)
    texts = [
        f"<tool_call>\n<function=f>{pairs[0]}", f"<tool_call>f\n{pairs[1]}", "<tool_call>" * 20_000, "\n" * 60_000,
        f"<tool_call>\n<function=f>{pairs[0]}\n" * 100, "[TOOL_CALLS][" * 20_000, "{" * 50_000, '{"name": "' * 20_000,
        "<tool_call>" * 20_000 + "</tool_call>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n" * 5_000,
        "<|channel|>commentary to=functions.f<|message|>" * 5_000,
    ]
    for name, harness in harnesses(corpus):
        if name in LOOSE or name == "qwen2.5":
            read = learn(harness.context.renderer)
            assert read is not None
            for text in texts:
                assert plain_message(text, read)["role"] == "assistant"


def test_channels_of_gpt_oss_are_thought_and_answer(corpus: Path) -> None:
    read = next(learn(harness.context.renderer) for name, harness in harnesses(corpus) if name == "gpt-oss")
    text = "<|channel|>analysis<|message|>Six.<|end|><|start|>assistant<|channel|>final<|message|>It is 6."
    assert read is not None and plain_message(text, read)["content"] == "It is 6."


@pytest.mark.vllm
def test_vllms_parsers_by_name_read_the_same(corpus: Path, vllm_available: bool) -> None:
    from rollouts.sampling.engines.vllm_engine import tool_call_reader

    named = {
        "qwen2.5": "hermes", "llama3.1": "llama3_json", "deepseek-r1": "deepseek_v3", "deepseek-v3.1": "deepseek_v31",
        "glm-4.5": "glm45", "mistral-nemo": "mistral", "qwen3-coder": "qwen3_coder",
    }
    asked = {"harbour": "Port Ellen", "days": 3}
    schema = [{"type": "function", "function": {"name": "tides", "parameters": {
        "type": "object", "properties": {"harbour": {"type": "string"}, "days": {"type": "integer"}}}}}]
    for name, harness in harnesses(corpus):
        if name not in named:
            continue
        text = written(harness.context.renderer, asked, 1, "tides")
        assert text is not None
        theirs, ours = tool_call_reader(named.pop(name), harness.tokenizer.hf), learn(harness.context.renderer)
        assert ours is not None
        for _ in range(2):  # one parser reads many turns
            message = plain_message("I see.\n" * (name != "llama3.1") + text, theirs, schema)
            assert of_calls(message) == [("tides", asked)] == of_calls(plain_message(text, ours, schema)), name
            assert message["content"].strip() == "I see." * (name != "llama3.1")
        assert plain_message("It is 42.", theirs, schema)["content"] == "It is 42."
    assert not named


def test_a_parser_that_cannot_be_had_is_a_sentence(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(corpus / "tokenizers" / "qwen3")
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in [one for one in sys.modules if one.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EngineError, match=r"tool_call_parser names 'hermes', a parser of vLLM.*lacks the package vllm"):
        tool_call_reader("hermes", tokenizer.hf)


def test_how_calls_are_read_is_said(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(corpus / "tokenizers" / "qwen3")

    def way(text: str) -> Way:
        return way_of(tokenizer, renderer(tokenizer, text))

    assert way((corpus / "templates" / "qwen3.jinja").read_text())[0] is plain
    assert "that the chat template writes" in way((corpus / "templates" / "qwen3-coder.jinja").read_text())[1]
    assert way((corpus / "templates" / "vllm--chatml.jinja").read_text())[2] == ""
    strange = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}CALL"
        " {{ c.function.name }}{% for k in c.function.arguments %} {{ k|length }}{% endfor %}{% endfor %}\n{% endfor %}"
    )
    read, _, note = way(strange)
    assert read is plain and "form that is not understood" in note and "tool_call_parser" in note
    monkeypatch.setattr(tokenizer.hf, "response_template", {"x": 1}, raising=False)
    assert way(strange + "{# #}") == (None, "the tokenizer's response template", "")


def test_a_thought_that_the_template_has_begun_is_a_thought(corpus: Path) -> None:
    tokenizer = load(corpus / "tokenizers" / "qwen3")
    parse = parser(tokenizer.hf, tokenizer.stop_ids, plain)
    prompt, ids = (
        tokenizer.encode("<|im_start|>assistant\n<think>\n"),
        tokenizer.encode("Six?\n</think>\n\nSix.<|im_end|>"),
    )
    assert parse(prompt, ids, None) == {"role": "assistant", "reasoning_content": "Six?", "content": "Six."}
    assert parse(prompt[:-2], ids, None)["content"].startswith("Six?")
