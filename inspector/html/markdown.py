"""Markdown as HTML, by markdown-it-py: what a model wrote, and the docs. HTML in it is text, in both. A link of a
hostile text leads to http or https, and is text otherwise. No picture is fetched from an address."""

import re
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.text import slugify
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from rollout_inspector.text.html.text import text_html

MAX_CHARACTERS = 20_000  # A longer hostile text stays text: nesting and links cost more time than its length says.
MAX_HTML = 1_000_000  # The most characters of HTML that it becomes: many links can share one long address.
MAX_CELLS = 10_000
"""The most cells of a hostile table, as if all lines were as long as the longest: the parser fills them up."""
MAX_DEPTH = 18  # The deepest nesting of lists and quotes that the parser reads whole.
MAX_PICTURE = 200_000  # The most characters of a picture that stands in the text itself.
_PICTURE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True)
class Heading:
    """A heading of a text."""

    level: int  # 1 for `#`.
    text: str
    anchor: str  # Its id in the page, once in the text.


def web_address(address: str) -> str:
    """The address where a link of a hostile text may lead; empty: the link is shown as text."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    return address if parts.scheme in ("http", "https") and parts.netloc else ""


def held_picture(address: str, draws: Callable[[int], bool] = MAX_PICTURE.__ge__) -> str:
    """A picture that the text itself holds, of a type that browsers only draw; empty: its words stand for it."""
    return address if _PICTURE.fullmatch(address) and draws(len(address)) else ""


def n_characters(text: str) -> int:
    """The length of a text without the pictures that it holds."""
    return len(_PICTURE.sub("", text)) if len(text) <= MAX_CHARACTERS + 4 * MAX_PICTURE else len(text)


def hostile_markdown(text: str, draws: Callable[[int], bool] = MAX_PICTURE.__ge__) -> SafeString | None:
    """What a model wrote, its `#` a heading of the fourth level, without ids. None: it has to be shown as text.
    Invisible characters are marked as they are in a text. ``draws`` is asked for each picture, with its characters."""
    plain = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # a page holds no lone surrogate
    lines = plain.split("\n")
    if n_characters(plain) > MAX_CHARACTERS or max(line.count("|") for line in lines) * len(lines) > MAX_CELLS:
        return None
    tokens = _PARSER.parse(plain)
    if any(token.level >= MAX_DEPTH for token in tokens):  # the parser leaves out what lies deeper
        return None
    html = _rendered(tokens, web_address, partial(held_picture, draws=draws), 4, text_html, None)
    return html if len(html) <= MAX_HTML + len(plain) else None


def markdown(
    text: str, address: Callable[[str], str] = web_address, picture: Callable[[str], str] = held_picture
) -> tuple[SafeString, list[Heading]]:
    """A text of ours as HTML, and its headings, which have anchors. ``address``, ``picture``: what an address in the
    text becomes. Where these return an empty text, the words of the link or of the picture stand alone."""
    headings: list[Heading] = []
    return _rendered(_PARSER.parse(text), address, picture, 1, escape, headings), headings


def _rendered(tokens: list[Token], address: Callable[[str], str], picture: Callable[[str], str], first_level: int,
              escaped: Callable[[str], str], headings: list[Heading] | None) -> SafeString:
    names: set[str] = set()
    for place, token in enumerate(tokens):
        if token.type in ("heading_open", "heading_close"):
            level = int(token.tag[1])
            token.tag = f"h{min(level + first_level - 1, 6)}"
            if headings is not None and token.nesting == 1:
                headings.append(_heading(level, tokens[place + 1], names))
                token.attrSet("id", headings[-1].anchor)
        elif token.type in ("th_open", "td_open"):
            style = str(token.attrs.pop("style", ""))  # the policy of the pages takes no style in the HTML
            if style:
                token.attrSet("class", style.replace("text-align:", "align-"))
        elif token.type == "inline":
            _resolve_links(token.children or [], address)
    # Every rule of the renderer escapes, and the parser hands on no HTML.
    return mark_safe(_PARSER.renderer.render(tokens, _PARSER.options, {"picture": picture, "escaped": escaped}))


def _heading(level: int, inline: Token, names: set[str]) -> Heading:
    words = "".join(child.content for child in inline.children or [] if child.type in ("text", "code_inline"))
    slug = anchor = slugify(words) or "section"
    while anchor in names:
        anchor = f"{slug}-{sum(name.rpartition('-')[0] == slug for name in names) + 1}"
    names.add(anchor)
    return Heading(level, words, anchor)


def _resolve_links(children: Sequence[Token], address: Callable[[str], str]) -> None:
    """Let each link lead to its address; one that has none shows the address behind its words. Links do not nest."""
    refused = ""
    for token in children:
        if token.type == "link_open":
            stated = str(token.attrGet("href") or "")
            target = address(stated)
            refused = "" if target else stated
            token.attrs = {"href": target} if target else {}
            if web_address(target):
                token.attrs["rel"] = "nofollow noopener noreferrer"
            token.hidden = not target
        elif token.type == "link_close":
            token.hidden, token.meta = bool(refused), {"refused": refused}


class _Parser(MarkdownIt):
    """It takes every address for a link. What becomes of one is decided by the page."""

    def validateLink(self, url: str) -> bool:
        return True


class _Renderer(RendererHTML):
    """Rules of the tokens that hold text of others, or an address."""

    def text(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return str(env["escaped"](tokens[idx].content))

    def code_inline(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return f"<code>{env['escaped'](tokens[idx].content)}</code>"

    def code_block(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        # The escaping of a hostile text marks each end of a line; in code they are seen as they are.
        lines = "\n".join(env["escaped"](line) for line in tokens[idx].content.split("\n"))
        return f'<pre tabindex="0"><code>{lines}</code></pre>\n'

    fence = code_block

    def link_close(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        token = tokens[idx]
        refused = token.meta.get("refused")
        return f" <code>{env['escaped'](refused)}</code>" if refused else "" if token.hidden else "</a>"

    def image(self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]) -> str:
        token = tokens[idx]
        words = self.renderInlineAsText(token.children, options, env) if token.children else ""
        source = env["picture"](str(token.attrGet("src") or ""))
        if source:
            return format_html('<img src="{}" alt="{}" loading="lazy">', source, words)
        return f"<span class=no-picture>{env['escaped'](words) or 'a picture'}</span>"


# "commonmark" nests at most 20 deep and reads no tables; "js-default" reads them, and nests 100 deep.
_PARSER = _Parser("commonmark", {"html": False}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
