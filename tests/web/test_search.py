"""The pages that search: parts that follow each other, the twin, what is refused, the places of a row."""

import re
import threading
from typing import Any

import pytest
from django.test import Client

from inspector.search import search_page, views
from rollout_inspector.streams.trajectory import Step, Trajectory
from rollouts.jobs.search import patterns
from rollouts.store.models import Run
from rollouts.store.people.shares import create_share
from tests.web.samples import one_line
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(make: Maker) -> Run:
    broken, findings = make.broken("broken")
    return make.run([make.conversation("<b>first", hostile=True), broken], [[], findings])


def test_the_page_shows_places_that_open(web: Client, run: Run) -> None:
    html = one_line(web.get("/search?q=naïve"))
    assert "1 place in all. 2 trajectories searched." in html and "<b>first" not in html
    link = re.search(r'href="(/trajectories/[^"]+)">&lt;b&gt;first: row 0, tokens? ', html)
    assert link is not None and 'id="search-stop"' in html and "Stop<" not in html
    assert web.get(link[1].replace("&amp;", "&")).status_code == 200
    found = web.get(f"/runs/{run.code}/search.json?q=naïve").json()
    (one,) = found["results"]
    assert found["complete"] and found["next"] is None and found["total"] == 2 and "naïve" in one["text"]
    assert one["url"] == link[1].replace("&amp;", "&")
    assert f'href="/runs/{run.code}/search?group=g0"' in one_line(web.get(f"/runs/{run.code}?group=g0"))


def test_parts_follow_each_other_until_the_end(web: Client, run: Run, monkeypatch: Any) -> None:
    whole = web.get("/search.json?q=the").json()["results"]
    monkeypatch.setattr(search_page.search_page, "__defaults__", ("", 3, ""))
    html = one_line(web.get("/search?q=the"))
    found, parts, headers = [], 0, {"HX-Request": "true", "HX-Target": "search-more"}
    while following := re.search(r'<div id="search-more"[^>]* hx-get="([^"]+)"', html):
        part = web.get(f"/search{following[1].replace('&amp;', '&')}", headers=headers)
        parts, html = parts + 1, one_line(part)
        assert "<html" not in html and ("hx-swap-oob" in html) == (f"{len(whole)} places in all" in html)
    assert f"{len(whole)} places in all" in html and parts == -(-len(whole) // 3) - 1
    cursor = ""
    while cursor is not None:
        answer = web.get("/search.json", {"q": "the", "cursor": cursor}).json()
        found, cursor = found + answer["results"], answer["next"]
        assert answer["complete"] == (cursor is None)
    assert found == whole and len(whole) > 6


def test_a_search_stops_and_goes_on(web: Client, run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(search_page.search_page, "__defaults__", ("", 3, ""))
    html = one_line(web.get("/search?q=the"))
    assert ">Stop<" in html
    cursor = re.search(r'name="cursor" value="([^"]+)"', html)
    assert cursor is not None
    asked = {"q": "the", "cursor": cursor[1], "shown": "3", "stop": "1", "on": "1"}
    stopped = one_line(web.get("/search", asked, headers={"HX-Request": "true", "HX-Target": "search-more"}))
    assert "Stopped after 3 places" in stopped and "found-place" not in stopped and "hx-trigger" not in stopped
    assert '<span id="search-stop" hx-swap-oob="true"> </span>' in stopped  # the button goes
    assert "found-place" not in one_line(web.get("/search", asked)) and "Search on" in stopped
    monkeypatch.setattr(views, "SHOWN", 6)
    paused = one_line(web.get("/search", {**asked, "stop": ""}))
    assert "Stopped after 6 places" in paused and "found-place" in paused


def test_a_busy_process_is_asked_again(web: Client, run: Run, monkeypatch: Any) -> None:
    def busy(*_: object, **__: object) -> None:
        raise search_page.SearchBusy

    monkeypatch.setattr(views, "search_page", busy)
    answer = web.get("/search.json?q=the")
    assert (answer.status_code, answer["Retry-After"]) == (503, "2")
    monkeypatch.setattr(search_page, "_places", threading.BoundedSemaphore(0))
    assert web.get(f"/trajectories/{run.trajectories.get(index=0).code}/find?q=a").status_code == 503
    assert "load delay:1s" in one_line(web.get("/search?q=the"))


def test_what_makes_no_sense_stands_at_the_form(web: Client, run: Run) -> None:
    answer = web.get("/search?by=regex&q=(a")
    html = answer.content.decode()
    assert answer.status_code == 422 and "at character 3: missing )" in html and 'aria-invalid="true"' in html
    assert 'value="(a"' in html and web.get("/search.json?by=ids&q=%60zz%60").status_code == 422
    assert "cursor" in web.get("/search.json?q=a&cursor=AAAA").json()["error"]
    assert "found-title" not in one_line(web.get("/search"))


def test_an_expression_that_takes_too_long_is_told_on_page_and_row(
    web: Client, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "REGEX_SECONDS", 0.05)
    slow = Trajectory("slow", (Step(make.ids("a" * 3000), make.ids("<|im_end|>")),))
    run = make.run([slow, make.conversation("after")])
    asked = {"by": "regex", "q": r"(?:a|aa|aaa)+b"}
    html = one_line(web.get("/search", asked))
    assert "The expression took too long in “slow”, and was stopped there. Make it more specific." in html
    assert "Search on" in html and "every 15s" not in html  # the reader decides whether to go on
    told = web.get("/search.json", asked).json()
    assert (told["complete"], told["results"], told["done"]) == (False, [], 1) and told["next"]
    row = web.get(f"/trajectories/{run.trajectories.get(index=0).code}/find", asked)
    assert row.status_code == 422 and "took too long" in row.json()["error"]


def test_filters_narrow_a_search(web: Client, run: Run) -> None:
    code = f"/runs/{run.code}/search"
    found = web.get(f"{code}.json?finding=unclassified").json()
    assert [(one["external_id"], one["kind"]) for one in found["results"]] == [("broken", "unclassified")]
    narrowed = web.get(f"{code}.json?q=84&finding=unclassified").json()["results"]
    assert {one["external_id"] for one in narrowed} == {"broken"}
    html = one_line(web.get(f"{code}?q=84&min=0.5"))
    assert "<b>min 0.5</b>" in html and 'type="hidden" name="min" value="0.5"' in html and "broken: row" not in html
    named = web.get("/search.json?by=metadata&q=sample").json()
    assert [one["code"] for one in named["runs"]] == [run.code]


def test_the_number_of_queries_is_fixed(web: Client, run: Run, django_assert_max_num_queries: Any) -> None:
    # Session, user, roles, total, runs, trajectories twice, steps, rows, and the projects of the form.
    with django_assert_max_num_queries(12):
        web.get("/search?q=84")


def test_the_places_of_a_row(web: Client, visitor: Client, member: Any, run: Run, make: Maker) -> None:
    trajectory = run.trajectories.get(index=0)
    address = f"/trajectories/{trajectory.code}/find"
    found = web.get(address, {"q": "check"}).json()
    all_of = web.get(f"/runs/{run.code}/search.json?q=check").json()["results"]
    assert found["places"] == [[one["start"], one["stop"]] for one in all_of if one["trajectory"] == trajectory.code]
    assert found["complete"] and found["row"] == 0 and len(found["places"]) >= 3
    end = make.tokenizer.token_id("<|im_end|>")
    by_ids = web.get(address, {"by": "ids", "q": f"* {end}"}).json()["places"]
    assert by_ids == web.get(address, {"by": "regex", "q": r"(?s).<\|im_end\|>"}).json()["places"] != []
    assert web.get(address, {"q": "check", "row": "9"}).status_code == 404
    for wrong in ({}, {"by": "regex", "q": "("}, {"by": "metadata", "q": "a"}, {"by": "ids", "q": "`zzz`"}):
        assert web.get(address, wrong).status_code == 422
    _, token = create_share(member, trajectory)
    visitor.get(f"/s/{token}")
    assert visitor.get(address, {"q": "check"}).json() == found
    assert visitor.get(f"/runs/{run.code}/search").status_code == 302
