"""Markdown as HTML: hostile text runs nothing, leads nowhere it should not and stays small."""

import pytest

from inspector.html.markdown import MAX_CHARACTERS, MAX_PICTURE, Heading, hostile_markdown, markdown

PNG = "data:image/png;base64,iVBORw0KGgo="


def test_it_draws_what_markdown_means() -> None:
    text = "# Plan\n\n**bold** `x < 1`\n\n```python\nprint('a')\n```\n\n* one\n\n| a |\n|--:|\n| 1 |\n"
    html = hostile_markdown(text) or ""
    assert "<h4>Plan</h4>" in html and "<strong>bold</strong> <code>x &lt; 1</code>" in html
    assert '<pre tabindex="0"><code>print(&#x27;a&#x27;)\n</code></pre>' in html
    assert "<li>one</li>" in html and '<td class="align-right">1</td>' in html
    assert "style=" not in html  # the policy of the pages refuses it


@pytest.mark.parametrize("address", [
    "javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html;base64,AAAA", "vbscript:x", "file:///etc/passwd",
    "/runs/1/delete", "//evil.example/x", "http:", "https:///x", "mailto:a@b.example",
])  # fmt: skip
@pytest.mark.parametrize("form", ["[words](<{}>)", "[words][1]\n\n[1]: <{}>"])
def test_a_link_leads_to_the_web_or_is_text(form: str, address: str) -> None:
    html = hostile_markdown(form.format(address)) or ""
    assert "<a" not in html and "href" not in html
    assert "words <code>" in html  # and it says where it would lead


def test_a_link_to_the_web_tells_the_other_host_nothing() -> None:
    html = hostile_markdown("[words](https://example.org/?a=1&b=2)") or ""
    rel = "nofollow noopener noreferrer"
    assert html == f'<p><a href="https://example.org/?a=1&amp;b=2" rel="{rel}">words</a></p>\n'


@pytest.mark.parametrize("address", [
    "http://example.org/a.png", "/static/a.png", "data:image/svg+xml;base64,AAAA", "data:text/html;base64,AAAA",
    "data:image/png;base64,A\"x", "data:image/png;base64," + "A" * MAX_PICTURE,
])  # fmt: skip
def test_a_picture_of_another_place_is_its_words(address: str) -> None:
    html = hostile_markdown(f"![the *words*](<{address}>)") or ""
    assert "<img" not in html and "the words" in html and len(html) < 200


def test_a_picture_in_the_text_is_drawn() -> None:
    assert hostile_markdown(f"![a dot]({PNG})") == f'<p><img src="{PNG}" alt="a dot" loading="lazy"></p>\n'


@pytest.mark.parametrize("text", [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a <b onclick=x>b</b>", "<!-- c -->", "&lt;script&gt;",
    "```\"><script>\nx\n```", "`<script>`", "# <script>", "| <script> |\n|--|\n| <script> |", "![\"><script>](x)",
    "[\"><script>](https://a.example/\"><script>)", "    <script>", "[a]: <script> \"<script>\"\n\n[a]",
])  # fmt: skip
def test_html_in_it_is_text(text: str) -> None:
    html = hostile_markdown(text) or ""
    assert "<script" not in html and "<b " not in html.replace("<b class=", "") and "<!--" not in html
    assert "<img" not in html


def test_invisible_characters_are_marked() -> None:
    html = hostile_markdown("a\u202eb `c\u200bd` \ud800") or ""
    assert "<bdi class=c data-x=202E>" in html and "<bdi class=c data-x=200B>" in html
    html.encode()  # no lone surrogate


@pytest.mark.parametrize("text", [
    "a" * (MAX_CHARACTERS + 1),
    "|a" * 3000 + "\n" + "|-" * 3000 + "\n" + "|\n" * 4000,  # 12 million cells
    "[a]: " + "x" * 5000 + "\n\n" + "[a]" * 5000,  # 25 MB of addresses
    "> " * 25 + "what lies deeper than the parser reads",
    "".join("  " * depth + "- a\n" for depth in range(12)),
])  # fmt: skip
def test_what_would_cost_too_much_or_be_left_out_stays_text(text: str) -> None:
    assert hostile_markdown(text) is None


def test_a_text_without_anything_is_nothing() -> None:
    assert hostile_markdown("") == hostile_markdown("\n\n") == ""


def test_headings_of_a_document_have_anchors_of_their_own() -> None:
    html, headings = markdown("# Guard\n## `mend` it\n## Set up\n## Set up\n## Set up\n## ⚠\n")
    assert headings == [
        Heading(1, "Guard", "guard"), Heading(2, "mend it", "mend-it"), Heading(2, "Set up", "set-up"),
        Heading(2, "Set up", "set-up-1"), Heading(2, "Set up", "set-up-2"), Heading(2, "⚠", "section"),
    ]  # fmt: skip
    assert '<h2 id="set-up-1">Set up</h2>' in html


def test_the_page_of_a_document_decides_where_its_links_lead() -> None:
    places = {"guard.md": "/docs/guard", "a.png": "/static/a.png"}
    html, _ = markdown("[Guard](guard.md) [x](gone.md) ![p](a.png)", lambda a: places.get(a, ""), lambda a: places[a])
    assert '<a href="/docs/guard">Guard</a> x <code>gone.md</code>' in html
    assert '<img src="/static/a.png" alt="p" loading="lazy">' in html
