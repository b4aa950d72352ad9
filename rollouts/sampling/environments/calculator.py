"""The calculator: arithmetic questions, one tool that evaluates an expression, a reward if the last number is right."""

import random
import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import islice
from typing import Any

from rollouts.sampling.environments.arithmetic import Problem, is_held_out, random_problem
from rollouts.sampling.environments.expressions import ExpressionError, evaluate, format_value
from rollouts.sampling.environments.protocol import Outcome, Task

SYSTEM = "You answer arithmetic questions with the calculator."

CALCULATOR_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates one arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}

# A minus belongs to the number unless the text before it is something to subtract from.
_NUMBER = re.compile(r"(?<![\d)])-?\d+(?:,\d{3})*(?:\.\d+)?|\d+(?:,\d{3})*(?:\.\d+)?")


def calculator_reply(expression: str) -> str:
    """The tool's answer: a number, or ``error: `` and a reason."""
    try:
        return format_value(evaluate(expression))
    except ExpressionError as error:
        return f"error: {error}"


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None when there is none."""
    numbers = _NUMBER.findall(text)
    return Fraction(numbers[-1].replace(",", "")) if numbers else None


class CalculatorEpisode:
    """One trajectory with the calculator. Tool calls are answered; the first turn without a call is the answer."""

    def __init__(self, task: Task) -> None:
        self._answer = None if task.answer is None else Fraction(task.answer)
        self._called = False

    def step(self, message: Mapping[str, Any]) -> Outcome:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            self._called = True
            return Outcome(messages=[_tool_message(call) for call in calls], done=False)
        content = message.get("content")
        number = last_number(content) if isinstance(content, str) else None
        correct = number is not None and number == self._answer
        if number is None:
            reason = "no_answer"
        else:
            reason = "answered" if self._called else "no_tool_call"
        return self._end(correct, reason)

    def truncated(self, reason: str) -> Outcome:
        return self._end(False, reason)

    def _end(self, correct: bool, reason: str) -> Outcome:
        parts = {"correct": float(correct), "called_tool": float(self._called)}
        return Outcome(messages=[], done=True, reward=float(correct), reward_parts=parts, stop_reason=reason)


class CalculatorEnvironment:
    """Questions that one or two calls of the calculator answer."""

    name = "calculator"

    def tasks(self, n: int, seed: int) -> list[Task]:
        """Returns ``n`` held-out problems. None of them can occur in the demo policy's training dialogues."""
        rng = random.Random(f"calculator tasks {seed}")
        held_out = filter(is_held_out, iter(lambda: random_problem(rng), None))
        return [_task(problem, index) for index, problem in enumerate(islice(held_out, n))]

    def start(self, task: Task) -> CalculatorEpisode:
        return CalculatorEpisode(task)


def _task(problem: Problem, index: int) -> Task:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]
    return Task(messages=messages, tools=[CALCULATOR_TOOL], answer=problem.answer, index=index)


def _tool_message(call: object) -> dict[str, Any]:
    """The tool's message for one parsed call. The model wrote the call, so it may have any shape."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return _reply("calculator", 'error: a call is a JSON object with "name" and "arguments"')
    name, arguments = function.get("name"), function.get("arguments")
    if name != "calculator":
        return _reply(name if isinstance(name, str) else "unknown", "error: unknown tool; the only one is calculator")
    expression = arguments.get("expression") if isinstance(arguments, Mapping) else None
    if not isinstance(expression, str):
        return _reply("calculator", 'error: the arguments need one text named "expression"')
    return _reply("calculator", calculator_reply(expression))


def _reply(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": content}
