import io
import json
import tracemalloc

import pytest

from rollout_inspector.refusal import Refusal
from rollouts.sampling.environments import PromptsRejected, Task, environment, read_prompts
from rollouts.sampling.environments.prompts import MAX_LINE, MAX_PROBLEMS, PromptsEpisode, matching

ASK = [{"role": "user", "content": "What is 6 * 7?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def read(*records):
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    return read_prompts(io.BytesIO(b"\n".join(lines)))


def problems(*records):
    with pytest.raises(PromptsRejected) as caught:
        read(*records)
    return caught.value.problems


def test_a_file_is_read_in_order(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(json.dumps(one) for one in ({"messages": ASK, "answer": 42, "id": "x"}, {"messages": ASK})) + "\n\n"
    )
    first, second = read_prompts(path)
    assert (first.messages, first.answer, first.tools) == (ASK, "42", None)
    assert second.answer is None


def test_tools_are_kept():
    (prompt,) = read({"messages": ASK, "tools": [TOOL]})
    assert prompt.tools == [TOOL]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'"\xff"', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"x" * (MAX_LINE + 1), "longer than 4 MiB"),
        ({}, '"messages" must be a list'),
        ({"messages": []}, '"messages" must be a list'),
        ({"messages": ["hello"]}, "messages[0] must be an object"),
        ({"messages": [{"role": "robot", "content": ""}]}, '"role" must be one of'),
        ({"messages": [{"role": "user", "content": 3}]}, '"content" must be a text'),
        ({"messages": [{"role": "user", "content": None}]}, '"content" must be a text'),
        ({"messages": [*ASK, {"role": "assistant", "content": "42"}]}, "the last message must be"),
        ({"messages": ASK, "answer": [42]}, '"answer" must be'),
        ({"messages": ASK, "answer": True}, '"answer" must be'),
        ({"messages": ASK, "tools": {}}, '"tools" must be'),
        ({"messages": ASK, "tools": [TOOL, {"function": {}}]}, "Tool 2 is not a function with a “name”"),
    ],
)
def test_a_bad_line_is_told_with_its_number(record, says):
    (sentence,) = problems({"messages": ASK}, record, {"messages": ASK})
    assert sentence.startswith("Line 2: ") and says in sentence


def test_a_call_without_text_is_a_message():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert read({"messages": [*ASK, call, {"role": "tool", "content": "42"}]})


def test_an_empty_file_says_what_a_line_is():
    assert "messages" in problems()[0]


def test_the_sentences_have_an_end():
    assert len(problems(*[b"?"] * 500)) == MAX_PROBLEMS + 1


def test_an_endless_line_is_not_kept_in_memory():
    class Endless(io.RawIOBase):
        left = 256 << 20

        def readline(self, size=-1):
            n = min(size, self.left)
            self.left -= n
            return b"x" * n

    tracemalloc.start()
    with pytest.raises(PromptsRejected):
        read_prompts(Endless())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_LINE


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("42", "42", 1),
        ("It is 42.", "42", 1),
        ("It is 42.0", "42", 1),
        ("42, or rather 43", "42", 0),
        ("1,024", "1024", 1),
        ("no idea", "42", 0),
        ("The capital is PARIS!", "Paris", 1),
        ("parisian", "Paris", 0),
        ("yes", " Yes ", 1),
        ("anything", "", 0),
        ("1/0", "1/0", 1),
    ],
)
def test_what_counts_as_the_answer(text, answer, reward):
    assert max(matching(text, answer).values()) == reward


def finish(answer, message):
    return PromptsEpisode(Task(ASK, None, answer, 0)).step(message)


def test_a_prompt_without_an_answer_has_no_reward():
    outcome = finish(None, {"role": "assistant", "content": "42"})
    assert (outcome.done, outcome.reward, outcome.reward_parts) == (True, None, {})


def test_a_prompt_with_an_answer_is_scored():
    outcome = finish("42", {"role": "assistant", "content": "6 * 7 = 42"})
    assert (outcome.reward, outcome.reward_parts) == (1.0, {"exact": 0.0, "last_number": 1.0})


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ["42"]}, {"tool_calls": [3], "content": "42"}])
def test_what_is_no_answer_gets_nothing(message):
    assert finish("42", message).reward == 0.0


def test_the_tasks_follow_the_file_and_begin_again():
    prompts = read({"messages": ASK, "answer": "42"}, {"messages": ASK, "tools": [TOOL]})
    tasks = environment("prompts", prompts).tasks(3, seed=9)
    assert [task.answer for task in tasks] == ["42", None, "42"]
    assert [task.index for task in tasks] == [0, 1, 2]


def test_without_a_file_a_sentence_asks_for_one():
    with pytest.raises(Refusal, match="needs a JSONL file"):
        environment("prompts").tasks(1, seed=0)
