"""Evaluates arithmetic that a model wrote: walks over a syntax tree, with limits on everything that can grow."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 200
MAX_DEPTH = 24
MAX_EXPONENT = 64
MAX_DIGITS = 60

_ALLOWED = re.compile(r"[0-9+\-*/%(). ]*")


class ExpressionError(ValueError):
    """The expression has no value here. The message says why, in words for the model to read."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression over ``+ - * / // % **`` and parentheses. Raises :class:`ExpressionError`."""
    text = " ".join(expression.split())
    if not text:
        raise ExpressionError("the expression is empty")
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"the expression is longer than {MAX_LENGTH} characters")
    allowed = _ALLOWED.match(text)
    if allowed is None or allowed.end() < len(text):
        raise ExpressionError("only numbers, + - * / // % ** and parentheses are allowed")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError("the expression cannot be read") from None
    return _value(tree.body, 0, text)


def format_value(value: Fraction) -> str:
    """The value as text: an integer without a point, other values with at most ten significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}"


def _value(node: ast.expr, depth: int, text: str) -> Fraction:
    if depth > MAX_DEPTH:
        raise ExpressionError("the expression is nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # From the source text instead of the float, so that 0.1 is exactly one tenth.
        literal = ast.get_source_segment(text, node) or ""
        try:
            number = Fraction(literal)
        except ValueError:
            raise ExpressionError("the expression cannot be read") from None
        return _bounded(number)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        operand = _value(node.operand, depth + 1, text)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        operands = _value(node.left, depth + 1, text), _value(node.right, depth + 1, text)
        try:
            return _bounded(Fraction(_OPERATIONS[type(node.op)](*operands)))
        except ZeroDivisionError:
            raise ExpressionError("division by zero") from None
    raise ExpressionError("the expression cannot be read")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("the exponent must be a whole number")
    if abs(exponent) > MAX_EXPONENT:
        raise ExpressionError(f"the exponent is larger than {MAX_EXPONENT}")
    # The operands are bounded, so the power has at most MAX_DIGITS * MAX_EXPONENT digits before the check refuses it.
    return Fraction(base**exponent.numerator)


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: _power,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}


def _bounded(value: Fraction) -> Fraction:
    limit = 10**MAX_DIGITS
    if abs(value.numerator) >= limit or value.denominator >= limit:
        raise ExpressionError(f"the number has more than {MAX_DIGITS} digits")
    return value
