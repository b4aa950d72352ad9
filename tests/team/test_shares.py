"""Share links in team mode: to some tokens alone, counted, limited, seen and revoked by whom they concern."""

from typing import Any

import pytest
from django.test import Client

from inspector.team.shares import MAX_SHARED_TOKENS
from rollouts.store.models import AuditEvent, Job, Project, Role, Run, ShareLink, StoredTrajectory
from rollouts.store.people.members import set_role
from tests.team.conftest import person
from tests.web.samples import stored_run

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(ours: Project) -> Run:
    run = stored_run(2, "the run")
    Run.objects.filter(pk=run.pk).update(project=ours)
    run.refresh_from_db()
    return run


@pytest.fixture
def trajectory(run: Run) -> StoredTrajectory:
    found = run.trajectories.order_by("index").first()
    assert found is not None
    return found


def share(client: Client, target: str, code: str, **more: Any) -> str:
    answer = client.post("/shares.json", {"target": target, "code": code, **more})
    assert answer.status_code == 201, answer.content
    return str(answer.json()["share"]["link"]).removeprefix("http://testserver")


def test_a_link_to_tokens_shows_these_and_nothing_else(admin: Client, run: Run, trajectory: StoredTrajectory) -> None:
    link = share(admin, "trajectory", trajectory.code, query="t=3-5", only="1", note="look")
    visitor = Client()
    page = visitor.get(link)
    assert page.status_code == 200 and page["Referrer-Policy"] == "no-referrer" and "noindex" in page["X-Robots-Tag"]
    for secret in (trajectory.code, trajectory.external_id, run.code, "the run", "ada", "maths"):
        assert secret not in page.content.decode(), secret
    twin = visitor.get(f"{link}.json").json()
    assert [(one["index"], one["id"]) for one in twin["tokens"]] == [(3, 4), (4, 5)]
    assert set(twin) == {"note", "expires_at", "start", "stop", "tokens"} and twin["note"] == "look"
    for path in (
        f"/trajectories/{trajectory.code}", f"/trajectories/{trajectory.code}.json",
        f"/trajectories/{trajectory.code}/record.json", f"/trajectories/{trajectory.code}/compare.json",
        f"/runs/{run.code}.json", f"/runs/{run.code}/export",
    ):
        assert visitor.get(path).status_code in (302, 401), path
    admin.post(f"/shares/{ShareLink.objects.get().pk}/revoke")
    assert visitor.get(link).status_code == 410 and visitor.get(f"{link}.json").status_code == 410


@pytest.mark.parametrize("query", ["", "t=99-120", "t=x", "row=7&t=1-2", "t=5-3"])
def test_only_marked_tokens_take_a_mark_that_is_there(
    admin: Client, trajectory: StoredTrajectory, run: Run, query: str
) -> None:
    asked = {"target": "trajectory", "code": trajectory.code, "only": "1", "query": query}
    refused = admin.post("/shares", asked)
    assert refused.status_code == 422 and f"{MAX_SHARED_TOKENS:,}" in refused.content.decode()
    assert admin.post("/shares", {**asked, "target": "run", "code": run.code}).status_code == 422
    assert not ShareLink.objects.exists()


def test_tokens_of_a_trajectory_that_grows_are_not_shared_alone(admin: Client, trajectory: StoredTrajectory) -> None:
    """Its rows are arranged anew with each step, so that the link could come to show other tokens."""
    StoredTrajectory.objects.filter(pk=trajectory.pk).update(status=StoredTrajectory.Status.RUNNING)
    asked = {"target": "trajectory", "code": trajectory.code, "only": "1", "query": "t=3-5"}
    refused = admin.post("/shares", asked)
    assert refused.status_code == 422 and "when it has ended" in refused.content.decode()
    assert not ShareLink.objects.exists()


def test_openings_are_counted_and_written_down(admin: Client, run: Run) -> None:
    link = share(admin, "run", run.code)
    for _ in range(3):
        Client().get(link, REMOTE_ADDR="10.1.1.1")
    line = admin.get("/shares.json").json()["shares"][0]
    assert line["n_opened"] == 3 and line["opened_at"] and "3×" in admin.get("/shares").content.decode()
    event = AuditEvent.objects.filter(action="share link opened").first()
    assert event is not None and (event.address, event.user_name, event.project) == ("10.1.1.1", "", run.project)
    assert AuditEvent.objects.filter(action="share link made", user_name="ada", detail__contains="the run").exists()


def test_guesses_are_limited(admin: Client, run: Run) -> None:
    link = share(admin, "run", run.code)
    found = [Client().get(f"/s/guess{n}", REMOTE_ADDR="10.7.7.7").status_code for n in range(32)]
    assert found == [404] * 31 + [429] and Client().get(link, REMOTE_ADDR="10.7.7.7").status_code == 429
    assert Client().get(link, REMOTE_ADDR="10.7.7.6").status_code == 302


def test_links_are_seen_in_their_project_and_revoked_by_their_maker_or_an_admin(
    ours: Project, theirs: Project, admin: Client, run: Run
) -> None:
    _, bob = person("bob", ours, Role.MEMBER)
    _, eve = person("eve", ours, Role.MEMBER)
    _, vic = person("vic", ours, Role.VIEWER)
    _, stranger = person("sid", theirs, Role.ADMIN)
    share(bob, "run", run.code)
    pk = ShareLink.objects.get().pk
    assert len(eve.get("/shares.json").json()["shares"]) == 1 and stranger.get("/shares.json").json()["shares"] == []
    assert [client.post(f"/shares/{pk}/revoke").status_code for client in (stranger, vic, eve)] == [404, 403, 403]
    assert stranger.post("/shares", {"target": "run", "code": run.code}).status_code == 404
    assert vic.post("/shares", {"target": "run", "code": run.code}).status_code == 403
    assert ShareLink.objects.get().revoked_at is None
    assert admin.post(f"/shares/{pk}/revoke").status_code == 302 and ShareLink.objects.get().revoked_at is not None
    share(bob, "run", run.code)
    assert bob.post(f"/shares/{ShareLink.objects.latest('pk').pk}/revoke").status_code == 302


def test_the_links_of_one_object(
    admin: Client, run: Run, trajectory: StoredTrajectory, theirs: Project, django_assert_max_num_queries: Any
) -> None:
    other = stored_run(1, "other")
    Run.objects.filter(pk=other.pk).update(project=run.project_id)
    for target, code in (("run", run.code), ("trajectory", trajectory.code), ("run", other.code)):
        share(admin, target, code)

    def kinds(target: str, code: str) -> list[str]:
        return [one["name"] for one in admin.get("/shares.json", {"target": target, "code": code}).json()["shares"]]

    assert kinds("run", run.code) == [trajectory.external_id, "the run"] == kinds("trajectory", trajectory.code)
    assert kinds("run", other.code) == ["other"]
    assert admin.get("/shares?target=run&code=zzzzzzzzzzzz").status_code == 404
    assert admin.get("/shares?target=user&code=1").status_code == 404
    with django_assert_max_num_queries(4):
        admin.get("/shares")


def test_who_has_a_role_needs_no_grant_and_a_stranger_with_an_account_does(
    ours: Project, theirs: Project, admin: Client, run: Run
) -> None:
    link = share(admin, "run", run.code)
    _, stranger = person("sid", theirs, Role.ADMIN)
    admin.get(link)
    stranger.get(link)
    assert "shares" not in admin.session and stranger.get(f"/runs/{run.code}.json").status_code == 200
    assert stranger.post(f"/runs/{run.code}/delete", {"sure": "yes"}).status_code == 404


def test_a_visitor_learns_no_name_of_an_account_and_leaves_no_referrer(admin: Client, run: Run) -> None:
    bob, _ = person("bartholomew")
    Run.objects.filter(pk=run.pk).update(created_by=bob)
    Job.objects.create(run=run, kind="export", created_by=bob)
    visitor = Client()
    visitor.get(share(admin, "run", run.code))
    for path in (f"/runs/{run.code}", f"/runs/{run.code}.json", f"/runs/{run.code}/cost"):
        answer = visitor.get(path)
        assert answer.status_code == 200 and answer["Referrer-Policy"] == "no-referrer"
        assert b"bartholomew" not in answer.content and b"maths" not in answer.content
    assert admin.get(f"/runs/{run.code}.json").json()["jobs"][0]["created_by"] == "bartholomew"
    part = visitor.get(f"/runs/{run.code}", headers={"HX-Request": "true", "HX-Target": "run-jobs"})
    assert part.status_code == 200 and b"bartholomew" not in part.content


def test_a_link_ends_with_the_role_of_its_maker(ours: Project, admin: Client, run: Run, root: Client) -> None:
    user, bob = person("bob", ours, Role.MEMBER)
    link, visitor = share(bob, "run", run.code), Client()
    page = f"/runs/{run.code}.json"
    assert visitor.get(link).status_code == 302 and visitor.get(page).status_code == 200
    for change in ({"role": "viewer"}, {"role": "none"}):
        assert admin.post(f"/projects/{ours.code}/members/{user.pk}", change).status_code == 302
        assert visitor.get(page).status_code == visitor.get(link).status_code == 410
        assert admin.get("/shares.json").json()["shares"][0]["state"] == "maker left"
    assert "maker left" in admin.get("/shares").content.decode()
    set_role(ours, user, Role.MEMBER)
    assert visitor.get(link).status_code == 302, "the role is back, and so is the link"
    root.post(f"/accounts/{user.pk}", {"change": "close"})
    assert visitor.get(page).status_code == visitor.get(link).status_code == 410
    of_root = share(root, "run", run.code)
    assert Client().get(of_root).status_code == 302, "an admin of the server needs no role"
