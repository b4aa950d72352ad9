"""Who may see what: a login sees everything, a share link one target, nobody else anything."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.test import Client
from django.utils import timezone
from django.utils.html import escape

from inspector.web.access import GRANTS_COOKIE, MAX_GRANTS
from rollouts.store.models import AuditEvent, Run, ShareLink, StoredTrajectory
from rollouts.store.runs.runs import delete_run, start_run
from tests.samples.pages import share
from tests.web.samples import stored_run

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/runs.json",
        "/runs/new",
        "/import",
        "/tokenizers",
        "/shares",
        "/shares.json",
        "/runs/{code}",
        "/runs/{code}.json",
    ],
)
def test_without_a_login_nothing_is_shown(visitor: Client, path: str) -> None:
    run = stored_run(1, "secret name")
    answer = visitor.get(path.format(code=run.code))
    assert answer.status_code in (302, 401) and b"secret name" not in answer.content
    assert answer.status_code == 401 or answer["Location"].startswith("/login?next=")


def test_a_stranger_cannot_tell_a_code_that_exists_from_one_that_does_not(visitor: Client) -> None:
    run = stored_run(1)
    real, made_up = visitor.get(f"/runs/{run.code}.json"), visitor.get("/runs/zzzzzzzzzzzz.json")
    assert real.status_code == made_up.status_code == 401 and real.content == made_up.content


@pytest.mark.parametrize(
    "path", ["/runs/new", "/import", "/tokenizers", "/shares", "/runs/{code}/cancel", "/runs/{code}/delete"]
)
def test_without_a_login_nothing_is_changed(visitor: Client, path: str) -> None:
    run = stored_run(1)
    answer = visitor.post(path.format(code=run.code), {"sure": "yes"})
    assert answer.status_code in (302, 401) and Run.objects.count() == 1 and not ShareLink.objects.exists()


def test_a_link_opens_its_run_its_trajectories_and_nothing_else(web: Client, visitor: Client) -> None:
    run, other = stored_run(2, "shared"), stored_run(1, "other")
    inside, outside = run.trajectories.first(), other.trajectories.first()
    assert inside is not None and outside is not None
    link = share(web, "run", run.code, query="finding=boundary_merge", note="look at t001")
    opened = visitor.get(link)
    assert opened.status_code == 302 and opened["Location"] == f"/runs/{run.code}?finding=boundary_merge"
    page = visitor.get(opened["Location"])
    assert page.status_code == 200 and "look at t001" in page.content.decode()
    assert visitor.get(f"/runs/{run.code}.json").status_code == 200
    assert visitor.get(f"/trajectories/{inside.code}").status_code == 200
    assert visitor.get(f"/trajectories/{inside.code}.json").status_code == 200
    assert visitor.get(f"/runs/{other.code}.json").status_code == 401
    assert visitor.get(f"/trajectories/{outside.code}.json").status_code == 401
    assert visitor.get("/runs.json").status_code == 401


def test_the_note_of_a_link_stands_on_every_page_it_opens(web: Client, visitor: Client) -> None:
    run = stored_run(2)
    trajectory = run.trajectories.get(external_id="t001")
    note = "look at <the> colon"
    visitor.get(share(web, "trajectory", trajectory.code, note=note))
    for page in ("", "/compare", "/mask"):
        html = visitor.get(f"/trajectories/{trajectory.code}{page}").content.decode()
        assert html.count("look at &lt;the&gt; colon") == 2  # the bar on top, and its title
    assert "colon" not in web.get(f"/trajectories/{trajectory.code}").content.decode()
    # The bar cuts a long one, so the head has it.
    stranger = Client()
    stranger.get(share(web, "trajectory", trajectory.code, note="long " * 30 + "end"))
    assert stranger.get(f"/trajectories/{trajectory.code}").content.decode().count("long end") == 2


def test_a_link_to_a_trajectory_does_not_open_its_run(web: Client, visitor: Client) -> None:
    run = stored_run(2)
    first, second = run.trajectories.order_by("index")
    opened = visitor.get(share(web, "trajectory", first.code, query="?t=2-4"))
    assert opened["Location"] == f"/trajectories/{first.code}?t=2-4"
    assert visitor.get(opened["Location"]).status_code == 200
    assert visitor.get(f"/trajectories/{second.code}.json").status_code == 401
    assert visitor.get(f"/runs/{run.code}.json").status_code == 401


def test_the_visitor_of_a_link_sees_nothing_that_writes(web: Client, visitor: Client) -> None:
    run = stored_run(2)
    start_run(run)
    assert '<form method="post"' in web.get(f"/runs/{run.code}").content.decode()
    visitor.get(share(web, "run", run.code))
    page = visitor.get(f"/runs/{run.code}").content.decode()
    assert (
        'method="post"' not in page
        and "hx-post" not in page
        and "Log out" not in page
        and "Share" not in page.split("<main")[1].split("Shared run")[1]
    )
    assert "Read-only link" in page
    assert visitor.post(f"/runs/{run.code}/cancel").status_code == 302
    run.refresh_from_db()
    assert not run.cancel_requested


def test_no_way_back_of_a_shared_trajectory_leads_to_the_login(web: Client, visitor: Client) -> None:
    run = stored_run(2)
    inside = run.trajectories.first()
    assert inside is not None
    visitor.get(share(web, "run", run.code))

    def crumbs(client: Client) -> list[str]:
        page = client.get(f"/trajectories/{inside.code}").content.decode()
        return re.findall(r'href="([^"]*)"', page.split('<nav class="crumbs"')[1].split("</nav>")[0])

    assert crumbs(visitor) == [f"/runs/{run.code}"] == crumbs(web)
    assert all(visitor.get(href).status_code == 200 for href in crumbs(visitor))


@pytest.mark.parametrize(
    ("query", "opens", "words"),
    [
        ("page=compare&step=1&side=prompt&open=3&open=9", "/compare?step=1&side=prompt&open=3&open=9",
         "side by side, step 1, its prompt and what it should have been, 2 folds open"),
        ("row=1&view=tokens&t=2-4&lens=origin", "?row=1&view=tokens&t=2-4&lens=origin",
         "row 1, token view, tokens 2-4, lens origin"),
        ("find=a+%3Cb%3E&solo=2&top=9", "?find=a+%3Cb%3E&solo=2&top=9", "find “a <b>”, turn 2 alone"),
        ("page=nowhere", "", ""),
    ],
)
def test_a_link_opens_its_view_and_the_list_says_it_in_words(
    web: Client, visitor: Client, query: str, opens: str, words: str
) -> None:
    trajectory = stored_run(1).trajectories.get()
    opened = visitor.get(share(web, "trajectory", trajectory.code, query=query))
    assert opened["Location"] == f"/trajectories/{trajectory.code}{opens}"
    assert visitor.get(opened["Location"]).status_code == 200
    (line,) = web.get("/shares.json").json()["shares"]
    assert line["view"] == words and line["query"] == query
    page = web.get("/shares").content.decode()
    assert escape(words) in page and "page=" not in page.split("<tbody>")[1].split("</tbody>")[0].replace(opens, "")


def test_the_share_button_of_a_page_of_a_trajectory_names_the_page(web: Client) -> None:
    trajectory = stored_run(1).trajectories.get()
    page = web.get(f"/trajectories/{trajectory.code}/mask?row=0&place=view%3Dtokens").content.decode()
    assert 'name="query" value="page=mask&amp;row=0&amp;place=view%3Dtokens"' in page and 'name="only"' not in page
    page = web.get(f"/trajectories/{trajectory.code}/compare?step=1&place={'x' * 400}&open={'1' * 90}").content.decode()
    (shared,) = re.findall(r'name="query" value="(page=[^"]*)"', page)
    assert shared.startswith("page=compare&amp;step=1&amp;place=xxx") and "open=111" not in shared


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_a_link_that_is_over_says_so_also_to_a_browser_that_used_it(web: Client, visitor: Client, end: str) -> None:
    run = stored_run(1, "secret name")
    path = share(web, "run", run.code)
    visitor.get(path)
    assert visitor.get(f"/runs/{run.code}").status_code == 200
    link = ShareLink.objects.get()
    if end == "revoked":
        assert web.post(f"/shares/{link.pk}/revoke").status_code == 302
    else:
        ShareLink.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    for address in (path, f"/runs/{run.code}"):
        answer = visitor.get(address)
        assert answer.status_code == 410 and b"secret name" not in answer.content
        assert "This link has expired or was revoked" in answer.content.decode()
    assert visitor.get(f"/runs/{run.code}.json").status_code == 410
    assert web.get("/shares.json").json()["shares"][0]["state"] == end


def test_a_link_that_never_was_is_not_found(visitor: Client) -> None:
    answer = visitor.get("/s/nothing-like-that")
    assert answer.status_code == 404 and "no such share link" in answer.content.decode()


def test_the_token_is_shown_once_and_not_kept(web: Client) -> None:
    run = stored_run(1)
    token = share(web, "run", run.code).removeprefix("/s/")
    assert token not in web.get("/shares").content.decode()
    assert token not in str(ShareLink.objects.values().get())


def test_the_list_of_links_says_who_made_what(web: Client) -> None:
    run = stored_run(1, "the run")
    share(web, "run", run.code, note="a note", days="7")
    line = web.get("/shares.json").json()["shares"][0]
    assert (line["made_by"], line["name"], line["kind"], line["note"]) == ("ada", "the run", "run", "a note")
    left = ShareLink.objects.get().expires_at - timezone.now()
    assert timedelta(days=6, hours=23) < left <= timedelta(days=7)
    page = web.get("/shares").content.decode()
    assert "the run" in page and "Revoke" in page and "ada" in page


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"target": "user"}, 422),
        ({"code": "../../etc"}, 422),
        ({"days": "0"}, 422),
        ({"days": "4000"}, 422),
        ({"note": "x" * 501}, 422),
        ({"code": "zzzzzzzzzzzz"}, 404),
    ],
)
def test_a_share_that_makes_no_sense_is_refused(web: Client, wrong: dict[str, str], status: int) -> None:
    run = stored_run(1)
    asked = {"target": "run", "code": run.code, **wrong}
    assert web.post("/shares", asked).status_code == status
    assert web.post("/shares.json", asked).status_code == status
    assert not ShareLink.objects.exists()


def test_the_share_button_answers_with_the_link_alone_when_htmx_asks(web: Client) -> None:
    run = stored_run(1)
    answer = web.post("/shares", {"target": "run", "code": run.code}, headers={"HX-Request": "true"})
    page = answer.content.decode()
    assert answer.status_code == 201 and "<html" not in page and "http://testserver/s/" in page


def test_a_browser_keeps_its_latest_grants_only(web: Client, visitor: Client) -> None:
    run = stored_run(1)
    for _ in range(MAX_GRANTS + 2):
        visitor.get(share(web, "run", run.code))
    grants = visitor.cookies[GRANTS_COOKIE]
    assert len(grants.value.partition(":")[0].split(".")) == MAX_GRANTS
    assert grants["httponly"] and grants["samesite"] == "Lax"


def test_an_opened_link_stores_one_row_and_a_forged_cookie_opens_nothing(web: Client, visitor: Client) -> None:
    """Whoever opens a link without a cookie makes no session: the one row is that of the audit log."""
    run = stored_run(1)
    link = share(web, "run", run.code)
    sessions, events = Session.objects.count(), AuditEvent.objects.count()
    for _ in range(5):
        answer = Client().get(link, follow=True)
        assert answer.status_code == 200 and run.name in answer.content.decode()
    assert Session.objects.count() == sessions and AuditEvent.objects.count() == events + 5
    visitor.get(link)
    value = visitor.cookies[GRANTS_COOKIE].value
    for forged in (value.partition(":")[0], value[:-1] + ("A" if value[-1] != "A" else "B"), "1.2:x:y", ""):
        stranger = Client()
        stranger.cookies[GRANTS_COOKIE] = forged
        assert stranger.get(f"/runs/{run.code}").status_code == 302


def test_someone_logged_in_needs_no_grant(web: Client) -> None:
    run = stored_run(1)
    web.get(share(web, "run", run.code))
    assert GRANTS_COOKIE not in web.cookies


def test_a_grant_costs_two_queries_more_than_a_target_no_more(
    web: Client, visitor: Client, django_assert_max_num_queries: Any
) -> None:
    run = stored_run(3)
    visitor.get(share(web, "run", run.code))
    with django_assert_max_num_queries(19):
        assert visitor.get(f"/runs/{run.code}").status_code == 200


def test_a_deleted_target_takes_its_links_along(web: Client, visitor: Client) -> None:
    run = stored_run(2)
    trajectory = StoredTrajectory.objects.order_by("index").first()
    assert trajectory is not None
    paths = [share(web, "run", run.code), share(web, "trajectory", trajectory.code)]
    delete_run(run)
    assert [visitor.get(path).status_code for path in paths] == [404, 404]
    assert web.get("/shares").status_code == 200
