"""Going to a place by its name: what is found, who sees it, and how much is asked of the database."""

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from inspector.search.views import EACH
from rollouts.store.models import Project, Role
from tests.people import make_member
from tests.web.samples import HOSTILE, stored_run

pytestmark = pytest.mark.django_db
LIST = {"HX-Request": "true", "HX-Target": "go-list"}


def titles(web: Client, q: str) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for place in web.get("/go.json", {"q": q}).json()["places"]:
        groups.setdefault(place["group"], []).append(place["title"])
    return groups


def test_runs_trajectories_pages_docs_and_findings_are_found_by_name(web: Client) -> None:
    run = stored_run(12, "calculator, warm", model="qwen")
    assert titles(web, "")["Runs"] == ["calculator, warm"] and "New run" in titles(web, "")["Pages"]
    assert titles(web, "WARM") == {"Runs": ["calculator, warm"]}
    assert titles(web, "T003")["Trajectories"] == ["t003"]
    assert titles(web, run.trajectories.get(index=7).code)["Trajectories"] == ["t007"]
    assert titles(web, "loss weights")["Docs"] == ["Weights in the loss"]
    assert titles(web, "merged boundary") == {"Findings, explained": ["Tokens merged across a boundary"]}
    assert titles(web, "chat temp")["Pages"] == ["Chat templates"]
    assert titles(web, "no such name \0 %") == {}
    assert all(len(group) <= EACH for q in ("t", "t0", "a", "") for group in titles(web, q).values())


def test_a_hidden_project_has_no_places(web: Client) -> None:
    theirs = Project.objects.create(name="theirs")
    make_member("bob", Role.ADMIN, theirs)
    run = stored_run(3, "hidden run", project=theirs)
    assert titles(web, "hidden") == {} and titles(web, run.code) == {}
    assert titles(web, run.trajectories.get(index=0).code) == {}


def test_a_viewer_is_led_to_no_form(db: Any) -> None:
    viewer = Client()
    viewer.force_login(make_member("eve", Role.VIEWER))
    assert not {"New run", "Import"} & set(titles(viewer, "")["Pages"])


def test_the_queries_do_not_grow_with_runs_or_trajectories(web: Client) -> None:
    counts = []
    for n in (1, 12):
        for i in range(n):
            stored_run(n, f"sample {n} {i}")
        with CaptureQueriesContext(connection) as asked:
            web.get("/go", {"q": "t0"}, headers=LIST)
        counts.append(len(asked))
    assert counts[0] == counts[1] <= 8


def test_what_the_dialog_gets_is_the_list_alone_and_escaped(web: Client) -> None:
    stored_run(1, HOSTILE)
    html = web.get("/go", {"q": "alert"}, headers=LIST).content.decode()
    assert html.lstrip().startswith('<div id="go-list"') and "&lt;script&gt;" in html and "<script" not in html
    assert 'role="option"' in html and 'role="listbox"' in html
    page = web.get("/go", {"q": "alert"}).content.decode()
    assert "&lt;script&gt;" in page and '<input id="go-q"' in page
    none = web.get("/go", {"q": HOSTILE + "x"}, headers=LIST).content.decode()
    assert "Nothing is called" in none and "<script" not in none
