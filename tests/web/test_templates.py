"""Templates and style sheets are read by people: no line of a template is long, a CSS line holds one declaration."""

import re

import pytest
from django.conf import settings

MAX_LINE = 140

TEMPLATES = sorted((settings.BASE_DIR / "templates").rglob("*.html"))
STYLES = sorted((settings.BASE_DIR / "static" / "css").glob("*.css"))


def long_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > MAX_LINE]


def crowded_lines(css: str) -> list[str]:
    """Lines with two declarations, or with a declaration beside a brace."""
    code = re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
    return [line for line in code.splitlines() if re.search(r"[;{].*[^\s;{}].*;|;\s*}", line)]


@pytest.mark.sqlite_only
def test_no_line_of_a_template_is_long() -> None:
    assert not long_lines("a" * MAX_LINE) and long_lines("a" * (MAX_LINE + 1))
    assert TEMPLATES and {path.name: found for path in TEMPLATES if (found := long_lines(path.read_text()))} == {}


@pytest.mark.sqlite_only
def test_a_line_of_css_holds_one_declaration() -> None:
    assert not crowded_lines("a {\n  color: red;\n}\n/* x: y; z: w; */\n@media (width > 1px) {\n")
    for bad in ("a { color: red; }", "  color: red; top: 0;", "  top: 0; }"):
        assert crowded_lines(bad), bad
    assert STYLES and {path.name: found for path in STYLES if (found := crowded_lines(path.read_text()))} == {}
