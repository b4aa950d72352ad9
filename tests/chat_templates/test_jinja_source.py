"""Every template is read without a gap, and as the sandbox reads it."""

import random
import re
from pathlib import Path

import pytest
from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.lexer import newline_re

from rollout_inspector.text.chat_templates.jinja_source.scan import switches
from rollout_inspector.text.chat_templates.jinja_source.tokens import LEXER, Piece, pieces, top_level
from rollout_inspector.text.chat_templates.sandbox.worker import rendering
from tests.samples.damaged_templates import damaged

MADE = [
    "",
    "\n",
    "plain text\n\n",
    "  {%- if x -%}  a  {%- endif -%}  \n",
    "a\n  {% if x %}\n\n  b\n  {%+ endif +%}\n c",
    '{#- a {{ comment }} -#}\n\t{# {% if %} #}\n{{- \'x %} }}\' ~ "y\\"}}" -}}\n\n',
    "{{ {'a': {'b': 1}}['a'] }}{{ f((x or [y, {}])) }}",
    "a {%- raw -%}\n {{ not one }} {% endif %} \n{%- endraw -%}\n b {% raw %} x\n {% endraw %}\n",
    "one\r\ntwo {% set x = 1 %}\r\n{{ x }}\rthree\r\n",
    "{% for m in messages %}\n{{ m }}\n{% endfor %}",
    "{{ '\u2028漢字 \\N{EM DASH}' }}\u2028\n{%- if x %} \u3000{%- endif %}",
    "{% generation %}a{% endgeneration %}",
]
MALFORMED = [
    "{% if",
    "{{",
    "{#",
    "{% %}",
    "%}{{ '",
    "a{# b",
    "{% raw %}x",
    "{{ (] }}",
    "a {{ b }} {{ ' }}",
    "{{ ? }}\n",
]


def check_cover(template: str) -> tuple[Piece, ...]:
    """Pieces join to the template; so do the tokens of a tag, its braces and white space."""
    found = pieces(template)
    assert "".join(piece.source for piece in found) == template
    at, line = 0, 1
    for piece in found:
        assert piece.source and piece.start == at
        at, here = at + len(piece.source), line
        line += len(newline_re.findall(piece.source))
        if piece.kind in ("data", "unread"):
            assert piece.written in newline_re.sub("\n", piece.source) and not piece.tokens
            continue
        assert piece.source.startswith(piece.opening) and piece.source.endswith(piece.closing)
        assert piece.line == here
        inside = template[piece.start + len(piece.opening) : at - len(piece.closing)]
        if piece.kind in ("raw", "endraw"):
            assert re.fullmatch(r"\{%[-+]?\s*(end)?raw\s*[-+]?%\}", piece.source)
            continue
        place = 0
        for token in piece.tokens:
            offset = token.start - piece.start - len(piece.opening)
            assert not inside[place:offset].strip() and template[token.start : token.stop] == token.text
            place = offset + len(token.text)
        assert not inside[place:].strip()
    return found


def lexed(template: str) -> list[str]:
    """Every token that Jinja's lexer finds, white space aside."""
    return [value.strip() for _, kind, value in LEXER.tokeniter(template, None) if kind != "data" and value.strip()]


def check_as_read(template: str) -> None:
    """Nothing is lost or made up beside what the lexer finds, and what is written is what the sandbox writes."""
    found = check_cover(template)
    ours = []
    for piece in found:
        inner = [newline_re.sub("\n", token.text).strip() for token in piece.tokens]
        shown = [piece.opening, *inner, piece.closing] if piece.closing else [piece.source]
        ours += [one for one in shown if one and piece.kind != "data"]
    assert ours == lexed(template)
    tree = rendering.PLAIN.parse(template)
    written = [node.data for node in tree.find_all(nodes.TemplateData)]
    assert "".join(piece.written for piece in found) == "".join(written)


def test_the_templates_of_the_corpus(corpus: Path) -> None:
    templates = [path.read_text(encoding="utf-8") for path in sorted((corpus / "templates").glob("*.jinja"))]
    assert len(templates) > 25
    for template in templates:
        assert "unread" not in {piece.kind for piece in pieces(template)}
        for same in (template, template.replace("\n", "\r\n")):
            check_as_read(same)


@pytest.mark.parametrize("template", MADE)
def test_made_templates(template: str) -> None:
    check_as_read(template)


@pytest.mark.parametrize("template", MALFORMED)
def test_what_jinja_cannot_read_is_kept_as_one_piece(template: str) -> None:
    check_cover(template)
    if template != "{% %}":  # the lexer takes it, the parser does not
        assert pieces(template)[-1].kind == "unread"
    assert "".join(piece.source for piece in pieces("x{{ y }}" + template)[:2]) == "x{{ y }}"


def test_damaged_templates_are_covered(corpus: Path) -> None:
    chance = random.Random(5)
    read = 0
    for path in sorted((corpus / "templates").glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        for _ in range(8):
            broken = damaged(text, chance)
            found = check_cover(broken)
            try:
                rendering.PLAIN.parse(broken)
            except TemplateSyntaxError:
                continue
            read += 1
            assert found[-1].kind != "unread"
            check_as_read(broken)
    assert read > 40


def test_the_top_level_of_an_expression() -> None:
    (output,) = pieces("{{ a and (b or [c, {'d': (e)}]) if 'f and g' else h[i] }}")
    shown = [output.tokens[n].text for n in top_level(output.tokens)]
    assert shown == ["a", "and", "if", "'f and g'", "else", "h"]
    assert output.text(output.tokens[2:5]) == "(b or" and output.text(()) == ""


@pytest.mark.parametrize(
    ("template", "known"),
    [
        ("{% if terse %}a{% endif %}{{ bos_token }}{{ messages[0].content | trim }}", {"terse": ()}),
        ("{% if terse is defined and terse is false %}a{% endif %}", {"terse": (False,)}),
        ("{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}", {"effort": ()}),
        ("{% if 'high' == effort or effort == 'max' %}a{% endif %}", {"effort": ("high", "max")}),
        ("{% for p in plugins %}{{ p == 'a' and p != 'b' }}{% endfor %}", {"plugins": (["a"], ["b"], ["a", "b"])}),
        ("{% if 'maps' in plugins %}a{% endif %}", {"plugins": (["maps"],)}),
        ("{% set x = y %}{{ x }}{% for k, v in tools|items if k != 'a' %}{{ k.z }}{% endfor %}", {"y": ()}),
        ("{% macro f(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ f(1, b=2) }}{{ namespace(c=1).c is d }}", {}),
        ("{# terse #}{{ 'terse' }}{{ raise_exception('terse') }}", {}),
        ("{% if terse", {}),
    ],
)
def test_the_switches_of_a_template_are_the_names_that_it_takes(template: str, known: dict[str, object]) -> None:
    assert switches(template) == known
