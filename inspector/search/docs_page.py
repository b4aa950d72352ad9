"""`/docs/`: the pages of the folder `docs`, drawn. Nobody has to log in to read them, as it is with the help."""

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from inspector.html.markdown import Heading, markdown, web_address
from inspector.web.twins import page

FOLDER: Path = settings.WEB_FILES / "docs"  # In a wheel it lies inside the package: pyproject.toml says so.
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_LINE = re.compile(r"^\| \[(.+?)\]\((?!\.\./)(.+?)\.md\) \| (.+) \|$", re.MULTILINE)


class DocsLine(NamedTuple):
    """A page in the list of all pages: its name in addresses, and what it says in a line."""

    name: str
    title: str
    about: str
    url: str


@cache
def docs_files() -> dict[str, Path]:
    """Name in addresses -> file, of every page. The index has the empty name."""
    return {_page_name(path.relative_to(FOLDER).as_posix()): path for path in sorted(FOLDER.rglob("*.md"))}


def docs_url(name: str) -> str:
    """The address of a page, a picture or, with the empty name, the index."""
    return reverse("docs", args=[name]) if name else reverse("docs-index")


@cache
def docs_sections() -> list[tuple[str, list[DocsLine]]]:
    """The sections of the index, with the pages that each names."""
    _, *parts = _SECTION.split(docs_files()[""].read_text("utf-8"))
    return [
        (title, [DocsLine(name := line[2].removesuffix("/README"), line[1], line[3], docs_url(name))
                 for line in _LINE.finditer(text)])
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    ]


@cache
def docs_titles() -> dict[str, str]:
    """Name -> title of every page, those that the index lists first."""
    titles = {line.name: line.title for _, lines in docs_sections() for line in lines}
    texts = {name: path.read_text("utf-8").splitlines() for name, path in docs_files().items()}
    return {name: next(line[2:] for line in lines if line[:2] == "# ") for name, lines in texts.items()} | titles


def _page_name(path: str) -> str:
    """The name of the page that a file, its path inside the folder, would be."""
    return path.removesuffix(".md").removesuffix("README").rstrip("/")


@cache
def drawn(name: str) -> tuple[dict[str, str], SafeString, list[Heading]]:
    """``name``, ``title`` and ``text`` (Markdown) of a page, its HTML, and its headings below the title. Raises
    ``KeyError`` for an unknown name."""
    path = docs_files()[name]
    # The head and the comments are for other programs.
    text = re.sub(r"\A---\n.*?\n---\n|^<!--.*?-->\n", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    here = path.relative_to(FOLDER).parent.as_posix()

    def address(link: str) -> str:
        file, mark, anchor = link.partition("#")
        target = _page_name(posixpath.normpath(posixpath.join(here, file)))
        return link if not file else docs_url(target) + mark + anchor if target in docs_files() else web_address(link)

    def picture(link: str) -> str:
        target = posixpath.normpath(posixpath.join(here, link))
        return docs_url(target) if target in _pictures() else ""

    html, headings = markdown(text, address, picture)
    title = next((heading.text for heading in headings if heading.level == 1), name)
    below = [heading for heading in headings if heading.level in (2, 3)]
    return {"name": name, "title": title, "text": text}, html, below


@cache
def _pictures() -> dict[str, Path]:
    return {path.relative_to(FOLDER).as_posix(): path for path in sorted(FOLDER.rglob("*.png"))}


@login_not_required
@require_safe
def docs(request: HttpRequest, name: str = "") -> HttpResponse:
    """A page of the docs, or a picture of one. `NAME.md` leads to the page, as a reader of the files writes it."""
    if name in _pictures():
        return HttpResponse(_pictures()[name].read_bytes(), content_type="image/png")
    if (page_name := _page_name(name)) not in docs_files():
        raise Http404("There is no such page in the docs. The list of all pages is at /docs/.")
    if page_name != name:
        return redirect(docs_url(page_name))
    value, html, headings = drawn(name)
    return page(request, "docs.html", value, html=html, headings=headings, sections=docs_sections())
