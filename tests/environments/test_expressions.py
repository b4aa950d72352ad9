import pytest
from hypothesis import given, strategies as st

from rollouts.sampling.environments.expressions import ExpressionError, evaluate, format_value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*(3+4)", "84"),
        (" 1 +  2 ", "3"),
        ("7-10", "-3"),
        ("-5*-2", "10"),
        ("84/4", "21"),
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        ("17//5", "3"),
        ("17%5", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("9" * 60, "9" * 60),
        ("(" * 90 + "1" + ")" * 90, "1"),  # parentheses leave no node behind
        ("999999*999999", "999998000001"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert format_value(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"),
        ("1/0", "division by zero"),
        ("5%(3-3)", "division by zero"),
        ("0**-1", "division by zero"),
        ("12*(3+4", "cannot be read"),
        ("12*", "cannot be read"),
        ("012", "cannot be read"),
        ("1,2", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("x+1", "only numbers"),
        ("1e9", "only numbers"),
        ("3(4)", "cannot be read"),
        ("()", "cannot be read"),
        ("1" * 201, "longer"),
        ("9" * 61, "digits"),
        ("9**9**9", "exponent"),
        ("10**64", "digits"),
        ("2**0.5", "whole number"),
        ("-" * 60 + "1", "nested"),
    ],
)
def test_refused(expression: str, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/%(). \n\tax_,", max_size=80))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    try:
        value = evaluate(text)
    except ExpressionError as error:
        assert str(error)
    else:
        assert len(format_value(value)) <= 70


@given(st.text(max_size=60))
def test_hostile_text_has_a_reason(text: str) -> None:
    try:
        value = evaluate(text)
    except ExpressionError as error:
        assert str(error)
    else:
        assert len(format_value(value)) <= 70
