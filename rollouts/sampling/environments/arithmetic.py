"""Arithmetic problems in words, for the environment's tasks and for the demo policy's training dialogues. A hash of the
calculation alone puts a problem into the held-out part or into the training part. So the demo policy is never trained
on any wording of a held-out calculation."""

import hashlib
import random
from dataclasses import dataclass

from rollouts.sampling.environments.expressions import evaluate, format_value

HELD_OUT_PARTS = 8  # One problem in so many is held out.


@dataclass(frozen=True)
class Problem:
    """A question and the calculator calls that answer it."""

    question: str
    expressions: tuple[str, ...]  # The calls in order, each as it is sent: results of earlier calls are filled in.
    results: tuple[str, ...]  # The calculator's answer to each call.

    @property
    def answer(self) -> str:
        return self.results[-1]


def is_held_out(problem: Problem) -> bool:
    """Whether a problem is kept for the environment. All others are for training."""
    digest = hashlib.sha256(" ; ".join(problem.expressions).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_PARTS == 0


def random_problem(rng: random.Random) -> Problem:
    """One problem. About a third of the problems need two calls."""
    draw = rng.random()
    if draw < 0.34:
        return _two_calls(rng)
    if draw < 0.72:
        pieces = _expression(rng)
        return _problem(rng.choice(_DIRECT).format(_as_written(rng, pieces)), "".join(pieces))
    return _filled(rng, *rng.choice(_WORDS if draw < 0.88 else _STORIES))


def _number(rng: random.Random, most_digits: int = 4) -> int:
    digits = rng.choices((1, 2, 3, 4)[:most_digits], (30, 40, 22, 8)[:most_digits])[0]
    return rng.randint(2 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


_DIRECT = (
    "What is {}?", "What is {}?", "What's {}?", "Compute {}.", "Calculate {}.", "Calculate {}, please.",
    "Please compute {}.", "Please work out {}.", "Evaluate {}.", "Work out {}.", "How much is {}?",
    "Find the value of {}.", "Tell me {}.", "Can you compute {}?", "Can you tell me what {} is?",
    "I need the value of {}.", "Could you work out {} for me?", "{} = ?", "{}", "Give me the result of {}.",
    "What does {} come to?",
)
_SPOKEN = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def _expression(rng: random.Random) -> list[str]:
    """The pieces of an expression with one to three operators."""
    if rng.random() < 0.06:
        divisor, quotient = _number(rng, 2), _number(rng, 3)
        return [str(divisor * quotient), "/", str(divisor)]
    n_operators = rng.choices((1, 2, 3), (45, 38, 17))[0]
    operators = [rng.choices("+-*", (35, 30, 35))[0] for _ in range(n_operators)]
    most_digits = 4 if "*" not in operators else 3 if operators.count("*") == 1 else 2
    pieces = [str(_number(rng, most_digits))]
    for operator in operators:
        pieces += [operator, str(_number(rng, most_digits))]
    if n_operators > 1 and rng.random() < 0.45:
        start = 2 * rng.randrange(n_operators)
        pieces[start : start + 3] = ["(", *pieces[start : start + 3], ")"]
    return pieces


def _as_written(rng: random.Random, pieces: list[str]) -> str:
    """The expression as a user types it: with spaces, without spaces, or (if it has no parentheses) in words."""
    draw = rng.random()
    if draw < 0.3:
        return "".join(pieces)
    if draw < 0.75 or "(" in pieces:
        return " ".join(pieces).replace("( ", "(").replace(" )", ")")
    return " ".join(_SPOKEN.get(piece, piece) for piece in pieces)


_WORDS: tuple[tuple[str, str], ...] = (
    ("Add {a} and {b}.", "{a}+{b}"),
    ("Add {a} to {b}.", "{b}+{a}"),
    ("What is the sum of {a} and {b}?", "{a}+{b}"),
    ("Find the total of {a}, {b} and {c}.", "{a}+{b}+{c}"),
    ("Add up {a}, {b} and {c}, please.", "{a}+{b}+{c}"),
    ("Subtract {a} from {b}.", "{b}-{a}"),
    ("Take {a} away from {b}.", "{b}-{a}"),
    ("What is the difference between {a} and {b}?", "{a}-{b}"),
    ("What is {a} less {b}?", "{a}-{b}"),
    ("Multiply {a} by {b}.", "{a}*{b}"),
    ("What is the product of {a} and {b}?", "{a}*{b}"),
    ("What do you get when you multiply {a} and {b}?", "{a}*{b}"),
    ("Double {a}.", "2*{a}"),
    ("Multiply the sum of {a} and {b} by {c}.", "({a}+{b})*{c}"),
    ("Increase {a} by {b}.", "{a}+{b}"),
    ("Decrease {a} by {b}.", "{a}-{b}"),
)
_STORIES: tuple[tuple[str, str], ...] = (
    ("A box holds {a} pens. How many pens are in {b} boxes?", "{a}*{b}"),
    ("Tom has {a} apples and buys {b} more. How many does he have?", "{a}+{b}"),
    ("A train has {a} seats and {b} are taken. How many are free?", "{a}-{b}"),
    ("There are {a} rows of {b} chairs and {c} more at the back. How many chairs are there?", "{a}*{b}+{c}"),
    ("One ticket costs {a} coins. What do {b} tickets cost?", "{a}*{b}"),
    ("Anna read {a} pages on Monday, {b} on Tuesday and {c} on Friday. How many in all?", "{a}+{b}+{c}"),
    ("A shop had {a} lamps, sold {b} and then received {c}. How many are left?", "{a}-{b}+{c}"),
    ("A farmer packs {a} crates with {b} eggs each and breaks {c} eggs. How many eggs remain?", "{a}*{b}-{c}"),
)


def _filled(rng: random.Random, question: str, expression: str) -> Problem:
    most_digits = 3 if "*" in expression else 4
    numbers = {name: _number(rng, most_digits) for name in "abc"}
    return _problem(question.format(**numbers), expression.format(**numbers))


_FIRST: tuple[tuple[str, str], ...] = (
    ("compute {a} * {b}", "{a}*{b}"),
    ("compute {a} + {b}", "{a}+{b}"),
    ("compute {a} - {b}", "{a}-{b}"),
    ("calculate {a}*{b}", "{a}*{b}"),
    ("work out {a} + {b}", "{a}+{b}"),
    ("work out {a} * {b}", "{a}*{b}"),
    ("work out {a} * {b} - {c}", "{a}*{b}-{c}"),
    ("add {a} and {b}", "{a}+{b}"),
    ("multiply {a} by {b}", "{a}*{b}"),
    ("subtract {a} from {b}", "{b}-{a}"),
    ("find the sum of {a} and {b}", "{a}+{b}"),
    ("find the product of {a} and {b}", "{a}*{b}"),
    ("take {a} times {b}", "{a}*{b}"),
)
_THEN: tuple[tuple[str, str], ...] = (
    ("add {d} to the result", "{r}+{d}"),
    ("add {d}", "{r}+{d}"),
    ("subtract {d} from the result", "{r}-{d}"),
    ("subtract {d} from it", "{r}-{d}"),
    ("take away {d}", "{r}-{d}"),
    ("multiply the result by {d}", "{r}*{d}"),
    ("multiply that by {d}", "{r}*{d}"),
    ("multiply it by {d}", "{r}*{d}"),
    ("subtract the result from {e}", "{e}-{r}"),
)
_JOINED = (
    "First {}, then {}.", "First {}. Then {}.", "{}, then {}.", "{} and then {}.", "{}. After that, {}.",
    "Please {}, then {}.", "Please {} first and {} afterwards.", "Step one: {}. Step two: {}.",
    "In two steps: {}, then {}.", "I want you to {} and then to {}.",
)


def _two_calls(rng: random.Random) -> Problem:
    first_text, first = rng.choice(_FIRST)
    then_text, then = rng.choice(_THEN)
    most_digits = 3 if "*" in first else 4
    numbers = {name: _number(rng, most_digits) for name in "abc"}
    numbers["d"] = _number(rng, 2 if "*" in then else 3)
    numbers["e"] = _number(rng, 4)
    first = first.format(**numbers)
    result = format_value(evaluate(first))
    if result.startswith("-") and not then.startswith("{r}"):
        then_text, then = _THEN[0]  # "5--3" is a sum that few users mean
    joined = rng.choice(_JOINED).format(first_text.format(**numbers), then_text.format(**numbers))
    question = joined[0].upper() + joined[1:]
    return _problem(question, first, then.format(r=result, **numbers))


def _problem(question: str, *expressions: str) -> Problem:
    return Problem(question, expressions, tuple(format_value(evaluate(text)) for text in expressions))
