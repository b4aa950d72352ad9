"""Synthetic calculator dialogues that the demo policy is trained on, made from the training part of the problems."""

import random
from dataclasses import dataclass
from typing import Any

from rollouts.sampling.environments.arithmetic import Problem, is_held_out, random_problem
from rollouts.sampling.environments.calculator import SYSTEM, calculator_reply

SYSTEMS: tuple[str | None, ...] = (SYSTEM, SYSTEM, SYSTEM, SYSTEM, None, "You are a helpful assistant.")
"""The system texts, repeated by how often they occur. ``None`` is a dialogue without one."""


@dataclass(frozen=True)
class Dialogue:
    """The messages after the system text, and which assistant turns the policy learns from."""

    messages: list[dict[str, Any]]
    learned: list[bool]
    """One per assistant message. A mistake that only shows how to recover is False: it is read, not imitated."""


_ANSWERS = (
    ("The answer is {}.", 45),
    ("The result is {}.", 20),
    ("That makes {}.", 10),
    ("It is {}.", 10),
    ("You get {}.", 8),
    ("{}", 2),
)
_PREAMBLES = ("Let me compute that.", "I will use the calculator.", "First the calculation.", "One moment.")
_NEXT = ("Now the second step.", "Next I use that result.", "That was the first step.")
_LONG = (
    "I have used the calculator for this, because long numbers are easy to get wrong in the head. ",
    "The calculator was asked for {expression} and it gave back {result}. ",
    "To be sure, I have read the question once more, and the numbers in it are the ones I used. ",
    "Nothing is left to add, nothing is left to take away, and no step of the question was forgotten. ",
    "If you need another calculation, send it to me and I will work it out in the same way. ",
    "The numbers were copied one digit after the other, as they stand in your question. ",
    "When there is more than one operation, products come before sums and parentheses come before both. ",
)


def random_dialogue(rng: random.Random) -> Dialogue:
    """One dialogue about a problem that is not held out."""
    if rng.random() < 0.015:
        return _no_value(rng)
    problem = training_problem(rng)
    # Sometimes the policy answers without the calculator: at temperature 1 it will do so too, and be wrong.
    if rng.random() < 0.03:
        return Dialogue([_user(problem.question), _say(_answer(rng, problem))], [True])
    messages = [_user(problem.question)]
    learned: list[bool] = []
    for index, (expression, result) in enumerate(zip(problem.expressions, problem.results, strict=True)):
        if rng.random() < 0.08:
            broken = _broken(rng, expression)
            messages += [_call(broken), _tool(calculator_reply(broken))]
            learned.append(False)
        preamble = ""
        if rng.random() < 0.12:
            preamble = rng.choice(_PREAMBLES if index == 0 else _NEXT)
        messages += [_call(expression, preamble), _tool(result)]
        learned.append(True)
    messages.append(_say(_answer(rng, problem)))
    return Dialogue(messages, [*learned, True])


def training_problem(rng: random.Random) -> Problem:
    """A problem of the training part."""
    while True:
        problem = random_problem(rng)
        if not is_held_out(problem):
            return problem


def _answer(rng: random.Random, problem: Problem) -> str:
    texts, weights = zip(*_ANSWERS, strict=True)
    short = str(rng.choices(texts, weights)[0]).format(problem.answer)
    if rng.random() < 0.06:
        # Some answers ramble. A small token limit cuts them, as it cuts real ones.
        parts = rng.sample(_LONG, rng.randint(2, 5))
        return "".join(parts).format(expression=problem.expressions[-1], result=problem.answer) + short
    return short


def _broken(rng: random.Random, expression: str) -> str:
    """The expression with one slip. The calculator refuses nearly all of them."""
    match rng.randrange(5):
        case 0:
            return expression + ")"
        case 1:
            return "(" + expression
        case 2:
            return expression + rng.choice("+-*/")
        case 3:
            return expression + "/0"
        case _:
            return expression + "="


def _no_value(rng: random.Random) -> Dialogue:
    """A division by zero that the user asked for."""
    number, zero = rng.randint(2, 999), rng.randint(2, 99)
    expression = rng.choice((f"{number}/0", f"{number}/({zero}-{zero})"))
    question = rng.choice(("What is {}?", "Compute {}.", "Calculate {}, please.")).format(expression)
    answer = rng.choice(
        ("That cannot be computed: it divides by zero.", "There is no answer, because it divides by zero.")
    )
    return Dialogue(
        [_user(question), _call(expression), _tool(calculator_reply(expression)), _say(answer)], [True, True]
    )


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(expression: str, content: str = "") -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "calculator", "content": content}
