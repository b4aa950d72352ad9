"""Hostile templates: none claims a line for what another line wrote (L14), and none leaves Jinja."""

import pytest

from rollout_inspector.text.chat_templates.sandbox.client import Rendered, RenderJob, render


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


ESCAPES = (
    "''.__class__.__mro__[1].__subclasses__()",
    "''['__class__']",
    "'' | attr('__class__') | string",
    "[''] | map(attribute='__class__') | list",
    "[''] | groupby('__class__') | list",
    "[{}] | sum(attribute='__class__', start='')",
    "'{0.__class__.__mro__}'.format('')",
    "'{0.__class__}' | attr('format') | string",
    "['{0.__class__}'] | map('format', '') | list",
    "'{x.__class__}'.format_map({'x': ''})",
    "('%(x)s' | format(x=cycler.__init__)) ",
    "cycler.__init__.__globals__.os.environ",
    "lipsum.__globals__['os'].popen('id').read()",
    "joiner.__init__.__globals__",
    "namespace.__init__.__globals__",
    "raise_exception.__globals__",
    "strftime_now.__self__",
    "strftime_now.__func__.__globals__",
    "range.__class__.__base__.__subclasses__()",
    "dict.__base__",
    "self._TemplateReference__context",
    "self.__init__.__globals__",
    "messages.__class__.__init__.__globals__",
    "messages._render.messages",
    "(messages | attr('_render')).text",
    "messages | map(attribute='_render') | list",
    "messages.append({})",
    "messages[0].update({'content': 1})",
    "(messages | map('upper')).gi_frame.f_globals",
    "(messages | map('upper') | attr('gi_frame')).f_back",
    "(messages | map('upper') | attr('gi_code')).co_consts",
    "macro.__call__.__func__.__globals__",
    "macro._func.__globals__",
    "macro._environment.globals",
    "(macro | attr('_environment')).filters",
    "caller.__globals__ if caller is defined else macro.__init__",
    "environment.filters",
    "undefined_name.__init__.__globals__",
    "undefined_name._undefined_hint.__class__",
    "1 | tojson(default=cycler)",
    "'x'.__doc__.__class__",
    "().__class__.__bases__[0]",
    "0 .__class__.__base__",
    "none.__class__",
    "true.__reduce_ex__(2)",
    "'a'.encode().__class__",
    "'a'.join.__self__.__class__",
    "'a'.join.__call__",
)
"""Ways out of Jinja, each an expression."""


@pytest.mark.parametrize("lines", [False, True], ids=["plain", "with lines"])
def test_no_expression_leaves_jinja(lines: bool) -> None:
    messages = [{"role": "user", "content": "hello"}]
    macro = "{% macro macro() %}a{% endmacro %}{% for m in messages %}{{ m.role }}{% endfor %}"
    for escape in ESCAPES:
        (found,) = render(macro + "{{ " + escape + " }}", [RenderJob({"messages": messages}, lines=lines)])
        said = found.text + found.error
        assert found.kind in ("", "forbidden", "raises"), escape
        assert not any(word in said for word in ("<class", "<module", "<frame", "<code", "os.environ", "uid=")), (
            escape,
            said,
        )
