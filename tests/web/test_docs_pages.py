"""The docs as pages of the app: every page is drawn, every link in them and to them leads somewhere."""

import re

import pytest
from django.test import Client
from django.urls import reverse

from inspector.search.docs_page import docs_files, docs_sections, docs_titles, drawn
from tests.conftest import ROOT
from tests.samples.places import Places, page_of, routes

pytestmark = pytest.mark.django_db
DOCS_OF = {
    "": ["pages"],
    "import": ["formats", "push", "recorder", "guard", "audit"],
    "runs/new": ["launching#launching", "strategies"],
    "runs/compare": ["case-studies"],
    "runs/<code:code>": ["pages#what-was-checked", "pages#the-runs-list-of-trajectories", "formats", "mend"],
    "runs/<code:code>/cost": ["damage", "strategies"],
    "runs/<code:code>/training": ["formats#the-training-step"],
    "runs/<code:code>/columns": ["rescore"],
    "runs/<code:code>/gap": ["gap", "loss-weights"],
    "runs/<code:code>/alarms": ["alarms"],
    "runs/<code:code>/groups/<path:key>": ["pages#the-page-of-a-group"],
    "runs/<code:code>/search": ["searching#search"],
    "search": ["searching#search"],
    "trajectories/<code:code>": [],
    "trajectories/<code:code>/record": ["reading-a-trajectory#the-other-pages-of-a-trajectory"],
    "trajectories/<code:code>/compare": ["reading-a-trajectory#the-other-pages-of-a-trajectory"],
    "trajectories/<code:code>/deltas": ["reading-a-trajectory#the-other-pages-of-a-trajectory"],
    "trajectories/<code:code>/mask": ["reading-a-trajectory#the-other-pages-of-a-trajectory"],
    "trajectories/<code:code>/strategies": ["strategies"],
    "trajectories/<code:code>/parsers": ["environments#how-a-models-calls-are-read"],
    "trajectories/<code:code>/forks": ["what-if"],
    "templates": ["template-checks"],
    "templates/matrix": ["template-checks#the-matrix"],
    "templates/compare": ["template-checks#two-templates"],
    "templates/conversation": ["template-checks#a-conversation"],
    "templates/checks/<code:code>": ["template-checks"],
    "templates/checks/<code:code>/conversation": ["template-checks#a-conversation"],
    "tokenizers": ["launching#importing"],
    "workers": ["configuration#the-processes"],
    "gallery": ["reading-a-trajectory"],
    "help": ["quickstart", "reading-a-trajectory", "guard", "audit", "mend", "api", "agents", "push", "recorder"],
    "shares": ["comments-and-shares#share-links"],
    "tokens": ["push", "agents"],
    "account": ["accounts"],
    "accounts": ["accounts"],
    "audit": ["accounts"],
    "projects": ["accounts"],
    "projects/<code:code>": ["accounts"],
    "projects/<code:code>/alarms": ["alarms#the-webhook"],
    "api/docs": ["api", "agents"],
}
"""Route of a page -> pages and headings of the docs that it leads to, among others."""
ALL_OF_A_TRAJECTORY = "reading-a-trajectory"  # What the menu in the head of each of its pages leads to.
WITHOUT_DOCS = {
    "help/findings": "it explains each kind itself",
    "runs/change": "a form whose fields say all",
    "join/<str:token>": "it has one button",
    "account/password": "a form of Django",
    "go": "a list of names",
    "docs": "the docs", "docs/": "the docs", "docs/<path:name>": "the docs",
}
"""Route of a page that leads to no page of the docs -> why."""
IN_TEMPLATE = re.compile(r"\{% url 'docs' '([^']+)' %\}(?:#([\w-]+))?")


def addresses(html: str) -> list[str]:
    return re.findall(r'<(?:a|img)[^>]* (?:href|src)="([^"]+)"', html)


def test_every_page_is_drawn_for_everybody_and_its_links_lead_somewhere() -> None:
    visitor = Client()
    assert len(docs_files()) > 80
    anchors = {url_of(name): {"", *re.findall(r' id="([^"]+)"', drawn(name)[1])} for name in docs_files()}
    broken = []
    for name in docs_files():
        answer = visitor.get(url_of(name))
        assert answer.status_code == 200, name
        html = drawn(name)[1]
        assert "<h1" in html and "<script" not in html and "style=" not in html
        for address in addresses(html):
            page, _, anchor = address.partition("#")
            page = page or url_of(name)
            if page.endswith(".png"):
                assert visitor.get(page)["Content-Type"] == "image/png"
            elif not page.startswith("http") and anchor not in anchors.get(page, ()):
                broken.append((name, address))
    assert broken == []


def test_every_page_has_a_title_by_which_it_is_found() -> None:
    titles = docs_titles()
    assert titles.keys() == docs_files().keys() and titles["decisions/0028-file-storage"].startswith("0028")
    assert all(len(title) > 2 and not title.startswith(("#", "-")) for title in titles.values()), titles


def url_of(name: str) -> str:
    return reverse("docs", args=[name]) if name else reverse("docs-index")


def test_the_list_beside_a_page_names_every_page() -> None:
    """A page of a folder may stand in the README of the folder instead."""
    listed = {line.name for _, lines in docs_sections() for line in lines}
    others = {name for name in docs_files() if name and "/" not in name}
    assert others == listed
    for name in docs_files():
        folder, _, _ = name.partition("/")
        assert name == folder or url_of(name) in drawn(folder)[1], name


def test_a_page_has_headings_contents_and_escaped_code(web: Client) -> None:
    html = web.get("/docs/guard").content.decode()
    assert '<h1 id="' in html and 'aria-labelledby="docs-here"' in html and 'aria-current="page">Guard</a>' in html
    assert web.get("/docs/guard.json").json()["text"].startswith("# ")
    assert web.get("/docs.json").json()["name"] == ""
    assert "<code>/runs/&lt;code&gt;/cost</code>" in web.get("/docs/pages").content.decode()


@pytest.mark.parametrize("path", ["/docs/no-such-page", "/docs/../README", "/docs/..%2f..%2fREADME", "/docs/a%00"])
def test_an_unknown_page_says_where_the_list_is(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "no such page in the docs" in answer.content.decode()


def test_the_names_of_the_files_lead_to_the_pages(client: Client) -> None:
    for path, target in {"/docs/decisions/README.md": "/docs/decisions", "/docs/guard.md": "/docs/guard",
                         "/docs/README.md": "/docs/"}.items():
        assert client.get(path)["Location"] == target
    assert client.get("/docs").status_code == 200


def test_every_link_of_a_page_to_the_docs_leads_to_a_heading() -> None:
    links = [(path, *link) for path in (ROOT / "templates").rglob("*.html")
             for link in IN_TEMPLATE.findall(path.read_text())]
    assert len(links) >= 10
    for path, name, anchor in links:
        assert not anchor or any(heading.anchor == anchor for heading in drawn(name)[2]), (path, name, anchor)


def docs_links(html: str) -> set[str]:
    """Where the content of a page leads to in the docs, without what stands at the foot of every page."""
    content = html.partition('<main id="content"')[2].partition("</main>")[0]
    return {link for link in re.findall(r'href="/docs/([^"]*)"', content) if link}


def test_each_page_leads_to_the_docs_of_its_question(places: Places) -> None:
    """Every page of the site is either in the table of its docs, or in that of those which need none."""
    anchors = {name: {"", *re.findall(r' id="([^"]+)"', drawn(name)[1])} for name in docs_files()}
    pages, faults = set(), []
    for route in sorted({page_of(route) for route in routes()}):
        url = places.url(route)
        answer = places.people["server" if route == "accounts" else "admin"].get(url)
        html = "" if answer.streaming else answer.content.decode("utf-8", "replace")
        if answer.status_code != 200 or '<main id="content"' not in html:
            continue
        pages.add(route)
        links = docs_links(html)
        wanted = {*DOCS_OF.get(route, ())} | ({ALL_OF_A_TRAJECTORY} if route.startswith("trajectories/") else set())
        faults += [f"{url} does not lead to /docs/{link}" for link in sorted(wanted - links)]
        faults += [f"{url} leads to /docs/{link}, which is not there" for link in sorted(links) if route[:4] != "docs"
                   if link.partition("#")[2] not in anchors.get(link.partition("#")[0], ())]
    assert faults == []
    assert pages == DOCS_OF.keys() | WITHOUT_DOCS.keys() and not DOCS_OF.keys() & WITHOUT_DOCS.keys()


def test_a_page_has_at_most_200_lines() -> None:
    lines = {name: len(path.read_text("utf-8").splitlines()) for name, path in docs_files().items()}
    assert not {name: n for name, n in lines.items() if n > 200 and not name.startswith("decisions/")}


def test_comments_of_a_page_are_for_its_writers() -> None:
    assert any("<!--" in path.read_text("utf-8") for path in docs_files().values())
    assert not [name for name in docs_files() if "&lt;!--" in drawn(name)[1]]


def test_no_page_names_a_file_of_the_docs_as_text() -> None:
    named = [(path.name, found) for path in (ROOT / "templates").rglob("*.html")
             for found in re.findall(r"<code>[\w/-]*\.md</code>|docs/[\w-]+\.md", path.read_text())]
    assert named == []
