"""What holds on every page: a strict CSP that the HTML keeps, escaping, JSON twins, headings, errors with a way out."""

from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from django.conf import settings
from django.test import Client, override_settings
from django.urls import path

from inspector.urls import urlpatterns as real_urls
from inspector.web.twins import jsonable
from rollouts.store.models import Rejection, Run
from rollouts.store.runs.runs import create_run, end_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from tests.web.samples import HOSTILE, finding, stored_run, trajectory

pytestmark = pytest.mark.django_db


class Page(HTMLParser):
    """What is wrong with a page's HTML, and its headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.unlabelled: list[str] = []
        self._labels: set[str] = set()
        self._controls: list[tuple[str, dict[str, str | None]]] = []
        self._script = False
        self.feed(text)
        self.unlabelled = [
            f"{tag} {attrs}"
            for tag, attrs in self._controls
            if attrs.get("id") not in self._labels
            and not attrs.get("aria-label")
            and attrs.get("type") not in ("hidden", "checkbox")
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "style" or "style" in named:
            self.faults.append(f"inline style in <{tag}>")
        if tag == "script" and "src" not in named:
            self.faults.append("inline script")
        self.faults += [
            f"{name} in <{tag}>" for name in named if name.startswith(("on", "hx-on", "hx-vals", "hx-vars"))
        ]
        if (named.get("href") or "").lower().startswith("javascript:"):
            self.faults.append("javascript: link")
        if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            self.headings.append(int(tag[1]))
        if named.get("id"):
            self.ids.append(named["id"] or "")
        if tag == "label" and named.get("for"):
            self._labels.add(named["for"] or "")
        if tag in ("input", "select", "textarea"):
            self._controls.append((tag, named))


@pytest.fixture
def hostile(web: Client) -> Run:
    """A run in which every name is hostile."""
    run = create_run("import", HOSTILE, model=HOSTILE, environment=HOSTILE[:50])
    broken = trajectory(HOSTILE, 1.0, HOSTILE, HOSTILE)
    save_trajectories(run, [broken], [[finding(kind=HOSTILE[:30])]])
    Rejection.objects.create(run=run, file=HOSTILE, line=1, reason=HOSTILE)
    end_run(run, Run.Status.FAILED, HOSTILE)
    Run.objects.filter(pk=run.pk).update(n_rejected=1)
    run.refresh_from_db()
    web.post("/shares", {"target": "run", "code": run.code, "note": HOSTILE, "query": HOSTILE})
    return run


def addresses(run: Run) -> Iterator[str]:
    yield from (
        "/",
        f"/?text={HOSTILE}",
        "/runs/new",
        "/import",
        "/tokenizers",
        "/shares",
        "/help",
        "/help/findings",
        "/gallery",
        "/nothing-here",
    )
    yield from (f"/runs/{run.code}", f"/runs/{run.code}?finding={HOSTILE}&group={HOSTILE}&text={HOSTILE}&min={HOSTILE}")


def test_no_page_has_inline_script_or_style_and_all_carry_the_policy(web: Client, hostile: Run) -> None:
    for address in addresses(hostile):
        answer = web.get(address)
        policy = answer["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "nonce" not in policy
        page = Page(answer.content.decode())
        assert page.faults == [], address
        assert "<script>alert" not in answer.content.decode()


def test_the_check_above_sees_what_it_looks_for() -> None:
    text = (
        '<h1 style="x">a</h1><script>1</script><p onclick="x"><a href="javascript:x"><style></style><b hx-on:click="1">'
    )
    assert len(Page(text).faults) == 6


def test_headings_begin_with_one_h1_and_skip_no_level(web: Client, hostile: Run) -> None:
    for address in addresses(hostile):
        levels = Page(web.get(address).content.decode()).headings
        assert levels.count(1) == 1 and levels[0] == 1, address
        assert all(after - before <= 1 for before, after in pairwise(levels)), (address, levels)


def test_every_control_has_a_label_and_every_id_is_used_once(web: Client, hostile: Run) -> None:
    for address in addresses(hostile):
        page = Page(web.get(address).content.decode())
        assert page.unlabelled == [], address
        assert len(page.ids) == len(set(page.ids)), address


def test_forms_with_errors_keep_the_policy_too(web: Client) -> None:
    for address in ("/runs/new", "/import", "/tokenizers", "/shares"):
        answer = web.post(
            address, {"name": HOSTILE, "model": HOSTILE, "folder": HOSTILE, "prompts": HOSTILE, "target": HOSTILE}
        )
        page = Page(answer.content.decode())
        assert answer.status_code == 422 and page.faults == [] and page.unlabelled == []
        assert "<script>alert" not in answer.content.decode()


def test_every_page_names_a_twin_that_answers(web: Client) -> None:
    run = stored_run(2)
    for address in (
        "/",
        "/runs/new",
        "/import",
        "/tokenizers",
        "/shares",
        f"/runs/{run.code}",
        f"/runs/{run.code}?sort=-reward",
    ):
        page = web.get(address).content.decode()
        start = page.index('class="foot"')
        twin = page[page.index('href="', start) + 6 : page.index('"', page.index('href="', start) + 6)].replace(
            "&amp;", "&"
        )
        answer = web.get(twin)
        assert ".json" in twin and answer.status_code == 200 and answer["Content-Type"] == "application/json"
        assert isinstance(answer.json(), dict)


def test_json_never_holds_what_json_has_not() -> None:
    assert jsonable({"a": float("nan"), "b": [float("inf")], 3: {1.5}}) == {"a": None, "b": [None], "3": [1.5]}


@pytest.mark.parametrize(
    ("cookie", "attribute"),
    [("dark", ' data-theme="dark"'), ("light", ' data-theme="light"'), ('x" onload="y', ""), ("", "")],
)
def test_the_theme_of_the_cookie_is_in_the_first_paint(web: Client, cookie: str, attribute: str) -> None:
    web.cookies["theme"] = cookie
    page = web.get("/").content.decode()
    assert f'<html lang="en"{attribute}>' in page


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_page_that_is_not_there_offers_a_way_out(web: Client) -> None:
    for address in ("/nothing", "/runs/zzzzzzzzzzzz", "/runs/../etc", "/runs/ABC"):
        answer = web.get(address)
        assert answer.status_code == 404 and "Go to the runs" in answer.content.decode()
    assert web.get("/runs/zzzzzzzzzzzz.json").json()["error"].startswith("There is no run with the code zzzzzzzzzzzz")


def test_an_old_form_is_explained(member: Any) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(member)
    answer = client.post("/runs/new", {})
    assert answer.status_code == 403 and "The form is too old" in answer.content.decode()


def _break(request: Any) -> None:
    raise RuntimeError("secret detail")


urlpatterns = [*real_urls, path("broken", _break)]
handler500 = "inspector.web.errors.server_error"


@override_settings(ROOT_URLCONF="tests.web.test_shell")
def test_an_error_of_ours_says_no_detail(web: Client) -> None:
    web.raise_request_exception = False
    answer = web.get("/broken")
    assert answer.status_code == 500
    assert "secret detail" not in answer.content.decode() and "Go to the runs" in answer.content.decode()


@pytest.mark.parametrize(
    "address",
    [
        "/?after=%00",
        "/?text=%00%ff",
        "/?text=%%0000",
        "/?text=%%%000000",
        "/runs/new?x=%00",
        "/shares?x=[]",
        "/tokenizers?%00=1",
    ],
)
def test_bad_parameters_are_no_errors(web: Client, address: str) -> None:
    assert web.get(address).status_code == 200


def test_the_help_needs_no_login_and_lists_the_keys(visitor: Client) -> None:
    page = visitor.get("/help").content.decode()
    assert "<kbd>?</kbd>" in page and "next, previous finding" in page and settings.LOGIN_URL not in page
    assert '<a class="brand" href="/help">' in page, "a visitor of a link finds out what this is, not a login"


def test_htmx_is_told_to_evaluate_nothing(web: Client) -> None:
    page = web.get("/").content.decode()
    assert '"allowEval":false' in page and '"includeIndicatorStyles":false' in page
