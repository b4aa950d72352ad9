import random
from fractions import Fraction
from typing import Any

import pytest

from rollouts.sampling.environments import ENVIRONMENTS, Outcome, Task
from rollouts.sampling.environments.arithmetic import is_held_out, random_problem
from rollouts.sampling.environments.calculator import last_number
from rollouts.sampling.environments.expressions import evaluate, format_value


@pytest.fixture
def environment() -> Any:
    return ENVIRONMENTS["calculator"]()


def a_task(answer: str | None = "84") -> Task:
    return Task(messages=[{"role": "user", "content": "What is 12*(3+4)?"}], tools=None, answer=answer, index=0)


def a_call(function: object) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def calculate(expression: object) -> dict[str, Any]:
    return a_call({"name": "calculator", "arguments": {"expression": expression}})


def says(text: object) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_tasks_repeat_with_the_seed_and_differ_without(environment: Any) -> None:
    tasks = environment.tasks(30, seed=3)
    assert tasks == environment.tasks(30, seed=3)
    assert tasks[:10] == environment.tasks(10, seed=3)
    assert tasks != environment.tasks(30, seed=4)
    assert [task.index for task in tasks] == list(range(30))
    assert all(task.tools[0]["function"]["name"] == "calculator" for task in tasks)
    assert len({task.messages[-1]["content"] for task in tasks}) > 25


def test_problems_answer_themselves() -> None:
    rng = random.Random(5)
    problems = [random_problem(rng) for _ in range(2000)]
    for problem in problems:
        assert problem.results == tuple(format_value(evaluate(text)) for text in problem.expressions)
        assert Fraction(problem.answer).denominator == 1
    two = sum(len(problem.expressions) == 2 for problem in problems) / len(problems)
    assert 0.25 < two < 0.45
    held_out = sum(map(is_held_out, problems)) / len(problems)
    assert 0.05 < held_out < 0.25


def test_a_whole_episode(environment: Any) -> None:
    episode = environment.start(a_task())
    outcome = episode.step(calculate("12*(3+4)"))
    assert outcome == Outcome(messages=[{"role": "tool", "name": "calculator", "content": "84"}], done=False)
    outcome = episode.step(says("The answer is 84."))
    assert (outcome.done, outcome.reward, outcome.stop_reason, outcome.messages) == (True, 1.0, "answered", [])
    assert outcome.reward_parts == {"correct": 1.0, "called_tool": 1.0}


@pytest.mark.parametrize(
    ("text", "reward", "reason"),
    [
        ("The answer is 84.", 1.0, "no_tool_call"),
        ("12*(3+4) = 84", 1.0, "no_tool_call"),
        ("The answer is 48.", 0.0, "no_tool_call"),
        ("84 is not it, 85 is.", 0.0, "no_tool_call"),
        ("I do not know.", 0.0, "no_answer"),
        ("", 0.0, "no_answer"),
        (None, 0.0, "no_answer"),
        (17, 0.0, "no_answer"),
    ],
)
def test_answers_without_a_call(environment: Any, text: object, reward: float, reason: str) -> None:
    outcome = environment.start(a_task()).step(says(text))
    assert (outcome.done, outcome.reward, outcome.stop_reason) == (True, reward, reason)
    assert outcome.reward_parts["called_tool"] == 0.0


def test_several_calls_are_answered_in_order(environment: Any) -> None:
    message = calculate("1+1")
    message["tool_calls"] += calculate("1/0")["tool_calls"]
    contents = [reply["content"] for reply in environment.start(a_task()).step(message).messages]
    assert contents == ["2", "error: division by zero"]


@pytest.mark.parametrize(
    "function",
    [
        "{oops",
        None,
        3,
        [],
        {},
        {"name": "calculator"},
        {"name": "calculator", "arguments": None},
        {"name": "calculator", "arguments": "12"},
        {"name": "calculator", "arguments": {"expression": 12}},
        {"name": "weather", "arguments": {"expression": "1+1"}},
        {"name": ["calculator"], "arguments": {}},
        {"name": "calculator", "arguments": {"expression": "12*"}},
    ],
)
def test_a_bad_call_is_answered_with_an_error(environment: Any, function: object) -> None:
    outcome = environment.start(a_task()).step(a_call(function))
    assert not outcome.done
    (reply,) = outcome.messages
    assert reply["role"] == "tool" and reply["content"].startswith("error: ")
    assert isinstance(reply["name"], str)


def test_truncation_scores_zero_with_the_loops_reason(environment: Any) -> None:
    episode = environment.start(a_task())
    episode.step(calculate("12*7"))
    outcome = episode.truncated("length")
    assert (outcome.done, outcome.reward, outcome.stop_reason) == (True, 0.0, "length")
    assert outcome.reward_parts == {"correct": 0.0, "called_tool": 1.0}


def test_a_task_without_answer_scores_zero(environment: Any) -> None:
    assert environment.start(a_task(None)).step(says("84")).reward == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is -12.", -12),
        ("-12", -12),
        ("5-12", 12),
        ("(5)-12", 12),
        ("1,234,567.", 1234567),
        ("2.5", Fraction(5, 2)),
        ("answer: 84.", 84),
        ("none", None),
    ],
)
def test_last_number(text: str, number: object) -> None:
    assert last_number(text) == number
