"""Every chat template of the corpus drives a calculator episode through the loop, or is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rollouts.chat_templates import renderer
from rollouts.loop import Job
from rollouts.parsing import answering, call_id, plain_message, wants_call_ids, with_call_ids
from rollouts.tito.codec import Codec
from rollouts.tito.strategies import Context
from rollouts.tito.trajectory import Ids
from rollouts.tokenizers import load
from tests.loop.harness import Harness


def call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


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
        # No tokenizer of the corpus has a response template, so the plain parser is what a worker would use.
        yield path.stem, Harness(tokenizer, context, parse=lambda _, ids, codec=tokenizer: said(codec, ids))


def said(codec: Codec, ids: Ids) -> dict[str, Any]:
    return plain_message(codec.decode(ids[:-1]))


def episode(harness: Harness) -> None:
    """A call, another call, then the answer."""
    codec = harness.context.codec
    stop = codec.decode(np.array([codec.eos_id], dtype=np.int32))

    def say(prompt: Ids, text: str) -> str:
        said = "The answer is 42." if "4200" in text else call("6*700") if "42" in text else call("6*7")
        return said + stop

    task = replace(harness.tasks(1)[0], answer="42")
    harness.run(harness.scripted(say), [Job("a", task, seed=3)], harness.limits(max_turns=4, max_live=1))


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
        assert (done.stop_reason, done.reward, done.n_steps) == ("answered", 1.0, 3), name
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
        assert called == [call_id(3, 0), call_id(3, 1)] == [first["tool_call_id"], second["tool_call_id"]]
    else:
        assert called == [None, None] and "tool_call_id" not in first
    if name == "mistral-nemo":
        assert f'"call_id": "{call_id(3, 1)}"' in harness.context.codec.decode(harness.steps["a"][2].prompt_ids)


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
