"""No template can claim a line that did not write a text (L14)."""

import pytest

from rollouts.chat_templates.sandbox.client import Rendered, RenderJob, render


def lines_of(template: str) -> list[tuple[str, int | None]]:
    """Each stretch of the text with its line. The worker must say the lines, and none may lie outside the template."""
    (written,) = render(template, [RenderJob({"n": 7}, lines=True)])
    plain: Rendered = render(template, [RenderJob({"n": 7})])[0]
    assert written.or_raise().text == plain.or_raise().text
    assert sum(length for length, _ in written.lines) == len(written.text)
    assert all(0 <= line <= template.count("\n") + 1 for _, line in written.lines)
    found, start = [], 0
    for length, line in written.lines:
        found.append((written.text[start : start + length], line))
        start += length
    return found


FORGERIES: dict[str, tuple[str, list[tuple[str, int]]]] = {
    "another number": ("{% set x %}a{% endset %}{{ x|replace('L1;','L99999;') }}", [("a", 1)]),
    "any number": ("{% set x %}a{% endset %}{{ x|replace('1','2') }}", [("a", 1)]),
    "every digit": (
        """{% set x %}a{% endset %}
{% set ns = namespace(x=x) %}{% for d in '0123456789' %}{% set ns.x = ns.x|replace(d, '9') %}{% endfor %}
{{ ns.x }}""",
        [("a", 3)],
    ),
    "a guessed mark": ("{{ '\\x00L3;0123456789abcdef\\x00a' }}", [("\x00L3;0123456789abcdef\x00a", 1)]),
    "half a mark": ("{% set x %}a{% endset %}\n{{ x[:2]|replace('a', '') }}b", [("b", 2)]),
    "the other half": ("{% set x %}a{% endset %}\n{{ x[-3:] }}b", [("ab", 2)]),
    "a whole mark before another text": (
        "{% set x %}a{% endset %}\n{% set mark = x|replace('a', '') %}\n{{ mark ~ 'b' }}{{ 'b' ~ mark }}c",
        [("bbc", 3)],
    ),
    "another text behind its mark": ("{% macro m() %}a{% endmacro %}\n{{ m()|replace('a', 'evil') }}", [("evil", 2)]),
    "a longer text": ("{% macro m() %}a{% endmacro %}\n{{ m() ~ 'evil' }}", [("a", 1), ("evil", 2)]),
    "another case": ("{% macro m() %}a{% endmacro %}\n{{ m()|upper }}", [("A", 2)]),
    "text of two lines": (
        "{% macro m() %}a{% endmacro %}\n{% macro k() %}b{% endmacro %}\n{{ k()|replace('b', m()) }}{{ k() ~ m() }}",
        [("a", 1), ("b", 2), ("a", 1)],
    ),
    "a recursive loop": (
        """{% for x in [[1]] recursive %}
{% if x is iterable %}{{ loop(x)|replace('L1;', 'L77;')|replace('L2;', 'L77;') }}{% endif %}y{% endfor %}""",
        [("yy", 2)],
    ),
    "a block": ("{% block b %}a{% endblock %}\n{{ self.b()|replace('L1;', 'L77;') }}", [("aa", 1)]),
    "a call": (
        "{% macro m() %}{{ caller()|replace('L2;', 'L99;') }}{% endmacro %}\n{% call m() %}a{% endcall %}",
        [("a", 2)],
    ),
    "a filter": ("{% if true %}\n{% filter replace('L2;', 'L99;') %}a{% endfilter %}{% endif %}", [("a", 2)]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_line_is_claimed_only_for_what_it_wrote(name: str) -> None:
    template, expected = FORGERIES[name]
    assert lines_of(template) == expected
