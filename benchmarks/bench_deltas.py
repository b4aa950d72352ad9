"""The page of template deltas of a trajectory of 100,000 tokens, with the user's own messages, beside a script.

The script does what somebody would do by hand for the same 20 steps: it loads the tokenizer with ``transformers``,
renders the small conversation without and with each step's messages, and encodes both. *First* is a page whose renders
nobody asked for yet. Prints figures and ratios of one run; asserts counts and sizes, no time.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from django.core.cache import cache
from django.test import Client
from django.urls import reverse

from rollout_inspector.streams.strategies.appending import dummy_conversation
from rollout_inspector.streams.trajectory import Request, Step, Trajectory
from rollouts.jobs.diagnosis import diagnose_run
from tests.people import make_member
from tests.web.long_rows import real_text
from tests.web.trajectory_samples import TOOLS, Maker

pytestmark = [pytest.mark.bench, pytest.mark.django_db]

TOKENS, REPLY, ANSWER, ROUNDS = 100_000, 400, 1_600, 9
N_DELTAS = 20


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def long_conversation(make: Maker) -> Trajectory:
    """Steps that extend each other; each reads an answer of a tool, as the chat template writes it."""
    words = make.ids(real_text())
    question = [{"role": "user", "content": "Read the project, and say what it does."}]
    stream = make.ids(f"<|im_start|>user\n{question[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    head, end = "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    messages: list[dict[str, Any]] = question
    steps: list[Step] = []
    at = 0
    while len(stream) < TOKENS:
        completion = np.concatenate([words[at : at + REPLY], make.ids("<|im_end|>")])
        steps.append(Step(stream, completion, None, "", "stop", request=Request(tuple(messages), TOOLS)))
        text = make.tokenizer.decode(words[at + REPLY : at + REPLY + ANSWER]).strip()
        call = {"type": "function", "function": {"name": "calculator", "arguments": {}}}
        answer = {"role": "tool", "name": "calculator", "content": text}
        messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]
        stream = np.concatenate([stream, completion, make.ids(head + text + end)])
        at = (at + REPLY + ANSWER) % (len(words) - REPLY - ANSWER)
    return Trajectory("long", tuple(steps), group="g")


def test_the_page_of_a_long_trajectory(corpus: Path) -> None:
    folder = corpus / "tokenizers" / "qwen3"
    make = Maker(folder)
    whole = long_conversation(make)
    run = make.run([whole])
    list(diagnose_run(run))
    address = reverse("trajectory-deltas", args=[run.trajectories.get().code])
    member, client = make_member("bench"), Client(headers={"Accept-Encoding": "gzip"})
    plain = Client()
    for each in (client, plain):
        each.force_login(member)
    client.get(address)  # what a process loads once

    def first() -> None:
        cache.clear()
        client.get(address)

    def script() -> None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(folder))
        for step in whole.steps[1 : N_DELTAS + 1]:
            told = [dict(step.request.messages[-1])]
            before = dummy_conversation(told, {})
            for conversation, goes_on in ((before, False), ([*before, *told], True)):
                text = loaded.apply_chat_template(
                    conversation, tools=list(TOOLS), add_generation_prompt=goes_on, tokenize=False
                )
                loaded.encode(text, add_special_tokens=False)

    page = plain.get(address).content
    n_deltas = page.count(b'class="delta-card"')
    by_script = median(seconds(script) for _ in range(3))
    cold, warm = (median(seconds(work) for _ in range(ROUNDS)) for work in (first, lambda: client.get(address)))
    print(f"\n{sum(len(s.completion_ids) for s in whole.steps) + len(whole.steps[-1].prompt_ids):,} tokens, "
          f"{len(whole.steps)} steps; {n_deltas} deltas on a page of {len(page):,} bytes")
    print(f"first {1000 * cold:.0f} ms, again {1000 * warm:.0f} ms, the script {1000 * by_script:.0f} ms: "
          f"{by_script / cold:.1f} and {by_script / warm:.1f} times as fast")
    assert n_deltas == min(N_DELTAS, len(whole.steps) - 1)
    assert len(page) < 250_000
