"""vLLM's own parsers in their confined process: what they read, and that none of them holds the others up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.refusal import Refusal
from rollouts.sampling.engines import vllm_parsers
from rollouts.sampling.engines.vllm_parsers import VllmParsers

pytestmark = pytest.mark.vllm
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def parsers(vllm_available: None, tiny_tokenizer: Path) -> Iterator[VllmParsers]:
    with VllmParsers(tiny_tokenizer) as found:
        yield found


def test_every_parser_answers_or_says_why_not(parsers: VllmParsers) -> None:
    found = {(kind, name): one for kind, name, one in parsers.read_all(f"I look.\n{CALL}\n{CALL}", None)}
    assert len(found) == sum(map(len, parsers.names.values())) > 60 and parsers.version
    call = {"name": "add", "arguments": '{"a": 1}'}
    assert found["tool", "hermes"] == {"content": "I look.\n", "reasoning": "", "calls": [call, call]}
    assert found["tool", "pythonic"]["calls"] == [] and CALL in found["tool", "pythonic"]["content"]
    assert "could not locate" in found["tool", "mistral"]["error"]
    assert {"seccomp", "PermissionError", "OSError", "ImportError"}.isdisjoint(
        " ".join(map(str, found.values())).split()
    )
    assert not any("Operation not permitted" in one.get("error", "") for one in found.values())


def test_reasoning_without_an_end_and_broken_json(parsers: VllmParsers) -> None:
    def read(kind: str, name: str, text: str) -> dict[str, Any]:
        return parsers.read(kind, name, text, None)

    assert read("reasoning", "deepseek_r1", "<think>I add and")["content"] == ""
    assert "I add and" in read("reasoning", "deepseek_r1", "<think>I add and")["reasoning"]
    assert read("reasoning", "deepseek_r1", "I add.</think>Six.") == {
        "content": "Six.",
        "reasoning": "I add.",
        "calls": [],
    }
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
    assert read("tool", "hermes", broken) == {"content": broken, "reasoning": "", "calls": []}


def test_a_parser_that_takes_too_long_is_stopped_and_the_next_one_asked(
    parsers: VllmParsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_parsers, "READ_SECONDS", 1)
    monkeypatch.setattr(vllm_parsers, "READ_SECONDS_PER_MB", 0)
    slow = parsers.read("tool", "glm45", "<tool_call>" * 90_000, None)
    assert slow == {"error": "It was stopped after 1 s of computing time."}
    assert parsers.read("tool", "hermes", CALL, None)["calls"]
    monkeypatch.setattr(vllm_parsers, "TOTAL_SECONDS", -1)
    assert {one["error"] for _, _, one in parsers.read_all("I look.", None)} == {vllm_parsers.NOT_ASKED}


def test_without_vllm_a_sentence_says_so(tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_parsers, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="vLLM is not installed"):
        VllmParsers(tiny_tokenizer)
