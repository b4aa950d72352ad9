"""Projects, members, invitations and accounts by their pages."""

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.utils import timezone

from inspector.server.logs import TextLineFormatter
from rollout_inspector.refusal import Refusal
from rollouts.store.models import AuditEvent, Invitation, Membership, Project, Role, Run
from rollouts.store.people.members import invite, join
from rollouts.store.runs.runs import create_run
from tests.team.conftest import PASSWORD, person

pytestmark = pytest.mark.django_db


def invitation(admin: Client, project: Project, role: str = "member") -> str:
    """The path of a new invitation, made as the page makes it."""
    answer = admin.post(f"/projects/{project.code}/invitations.json", {"role": role, "note": "for bob"})
    assert answer.status_code == 201, answer.content
    return str(answer.json()["made"]["link"]).removeprefix("http://testserver")


def test_an_admin_of_the_server_makes_renames_and_deletes_a_project(root: Client) -> None:
    assert root.post("/projects", {"name": "  maths  7 "}).status_code == 302
    project = Project.objects.get(name="maths 7")
    assert root.post("/projects", {"name": "maths 7"}).status_code == 422
    assert root.post("/projects", {"name": " "}).status_code == 422
    assert root.post("/projects", {"name": "x" * 101}).status_code == 422
    assert root.post(f"/projects/{project.code}/rename", {"name": "Default"}).status_code == 422
    assert root.post(f"/projects/{project.code}/rename", {"name": "physics"}).status_code == 302
    run = create_run(Run.Kind.IMPORT, "a")
    Run.objects.filter(pk=run.pk).update(project=project)
    refused = root.post(f"/projects/{project.code}/delete")
    assert refused.status_code == 409 and "at least one run" in refused.content.decode()
    Run.objects.all().delete()
    assert root.post(f"/projects/{project.code}/delete").status_code == 302
    assert not Project.objects.filter(pk=project.pk).exists()
    assert root.post("/projects/default/delete").status_code == 409
    assert list(AuditEvent.objects.order_by("pk").values_list("action", "detail")) == [
        ("project made", "maths 7"), ("project renamed", "physics: before: maths 7"),
        ("project deleted", f"{project.code} physics"),
    ]


def test_who_is_no_admin_of_the_server_makes_no_project(admin: Client) -> None:
    assert admin.post("/projects", {"name": "mine"}).status_code == 403 and not Project.objects.filter(name="mine")
    assert "Make a project" not in admin.get("/projects").content.decode()


def test_a_foreign_project_is_answered_like_none(admin: Client, theirs: Project) -> None:
    hidden, missing = admin.get(f"/projects/{theirs.code}"), admin.get("/projects/zzzzzzzzzzzz")
    assert hidden.status_code == missing.status_code == 404
    assert b"secret project" not in hidden.content + admin.get("/projects").content
    for verb in ("rename", "delete", "members/1", "invitations", "invitations/1/revoke"):
        assert admin.post(f"/projects/{theirs.code}/{verb}", {"name": "x", "role": "viewer"}).status_code == 404


@pytest.mark.parametrize("role", [Role.VIEWER, Role.MEMBER])
def test_members_see_each_other_and_only_admins_change_them(ours: Project, admin: Client, role: Role) -> None:
    bob, of_bob = person("bob", ours, role)
    invitation(admin, ours)
    seen = of_bob.get(f"/projects/{ours.code}.json").json()
    assert {one["name"] for one in seen["members"]} == {"ada", "bob"} and seen["invitations"] == []
    for verb in ("rename", "delete", f"members/{bob.pk}", "invitations", "invitations/1/revoke"):
        answer = of_bob.post(f"/projects/{ours.code}/{verb}", {"name": "x", "role": "admin"})
        assert answer.status_code == 403 and "ada" in answer.content.decode()
    assert Membership.objects.get(user=bob).role == role


def test_roles_change_and_the_last_admin_stays(ours: Project, admin: Client) -> None:
    bob, _ = person("bob", ours, Role.VIEWER)
    ada = get_user_model().objects.get(username="ada")
    place = f"/projects/{ours.code}/members/{bob.pk}"
    for own in ("member", "none"):
        refused = admin.post(f"/projects/{ours.code}/members/{ada.pk}", {"role": own})
        assert refused.status_code == 409 and "last admin" in refused.content.decode()
    assert admin.post(place, {"role": "emperor"}).status_code == 422
    assert admin.post(place, {"role": "admin"}).status_code == 302
    assert admin.post(f"/projects/{ours.code}/members/{ada.pk}", {"role": "viewer"}).status_code == 302
    assert admin.post(place, {"role": "none"}).status_code == 403
    assert dict(Membership.objects.values_list("user__username", "role")) == {"ada": "viewer", "bob": "admin"}
    assert admin.post(f"/projects/{ours.code}/members/999999", {"role": "viewer"}).status_code == 403


def test_an_invitation_makes_an_account_once(ours: Project, admin: Client) -> None:
    link, browser = invitation(admin, ours), Client()
    page = browser.get(link)
    assert page.status_code == 200 and "maths" in page.content.decode() and page["Referrer-Policy"] == "no-referrer"
    weak = browser.post(link, {"username": "bob", "password1": "1234567890", "password2": "1234567890"})
    assert weak.status_code == 422 and "entirely numeric" in weak.content.decode()
    alike = browser.post(link, {"username": "bobby-tables", "password1": "bobby-tables1", "password2": "bobby-tables1"})
    assert alike.status_code == 422 and not get_user_model().objects.filter(username__startswith="bob").exists()
    joined = browser.post(link, {"username": "bob", "password1": PASSWORD, "password2": PASSWORD})
    assert joined.status_code == 302 and browser.get("/projects.json").json()["projects"][0]["role"] == "member"
    for late in (Client(), browser):
        again = late.post(link, {"username": "eve", "password1": PASSWORD, "password2": PASSWORD})
        assert again.status_code == 410 and "was used" in again.content.decode()
    assert not get_user_model().objects.filter(username="eve").exists()
    line = admin.get(f"/projects/{ours.code}.json").json()["invitations"][0]
    assert (line["state"], line["used_by"], line["note"]) == ("used", "bob", "for bob")
    assert link.removeprefix("/join/") not in str(Invitation.objects.values().get())


def test_an_account_that_exists_joins_and_keeps_a_higher_role(ours: Project, admin: Client) -> None:
    bob, of_bob = person("bob")
    assert "Join as bob" in of_bob.get(link := invitation(admin, ours, "viewer")).content.decode()
    assert of_bob.post(link).status_code == 302 and Membership.objects.get(user=bob).role == "viewer"
    assert of_bob.post(invitation(admin, ours, "admin")).status_code == 302
    assert of_bob.post(invitation(admin, ours, "viewer")).status_code == 302
    assert Membership.objects.get(user=bob).role == "admin"


@pytest.mark.parametrize("end", ["revoked", "expired", "maker"])
def test_an_invitation_that_is_over_lets_nobody_in(ours: Project, admin: Client, end: str) -> None:
    link = invitation(admin, ours)
    if end == "revoked":
        record = Invitation.objects.get()
        assert admin.post(f"/projects/{ours.code}/invitations/{record.pk}/revoke").status_code == 302
    elif end == "expired":
        Invitation.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    else:
        get_user_model().objects.filter(username="ada").update(is_active=False)
    asked = {"username": "bob", "password1": PASSWORD, "password2": PASSWORD}
    for answer in (Client().get(link), Client().post(link, asked)):
        assert answer.status_code == 410 and b"maths" not in answer.content
    assert not get_user_model().objects.filter(username="bob").exists()


@pytest.mark.parametrize("role", ["viewer", "member", "none"])
def test_an_invitation_ends_with_the_role_of_its_maker(ours: Project, admin: Client, role: str) -> None:
    eve, of_eve = person("eve", ours, Role.ADMIN)
    link = invitation(of_eve, ours, "admin")
    assert admin.post(f"/projects/{ours.code}/members/{eve.pk}", {"role": role}).status_code == 302
    for browser in (of_eve, Client()):
        answer = browser.post(link, {"username": "eve2", "password1": PASSWORD, "password2": PASSWORD})
        assert answer.status_code == 410 and "no longer an admin" in answer.content.decode()
    assert list(Membership.objects.filter(project=ours, role=Role.ADMIN).values_list("user__username")) == [("ada",)]
    assert not get_user_model().objects.filter(username="eve2")


def test_nobody_gets_the_name_of_the_local_account(ours: Project, admin: Client) -> None:
    link = invitation(admin, ours)
    answer = Client().post(link, {"username": "Local", "password1": PASSWORD, "password2": PASSWORD})
    assert answer.status_code == 422 and "Choose another" in answer.content.decode()
    assert not get_user_model().objects.filter(username__iexact="local")


def test_guesses_of_invitations_are_limited(ours: Project, admin: Client) -> None:
    link = invitation(admin, ours)
    found = [Client().get(f"/join/guess-{n}", REMOTE_ADDR="10.9.9.9").status_code for n in range(32)]
    assert found == [404] * 31 + [429] and Client().get(link, REMOTE_ADDR="10.9.9.9").status_code == 429
    assert Client().get(link, REMOTE_ADDR="10.9.9.8").status_code == 200


@pytest.mark.django_db(transaction=True)
def test_two_at_once_use_an_invitation_once(ours: Project) -> None:
    ada = person("ada", ours, Role.ADMIN)[0]
    people = [person(name)[0] for name in ("bob", "eve")]
    record, _ = invite(ours, Role.MEMBER, ada, 7)

    def use(user: Any) -> bool:
        try:
            join(Invitation.objects.select_related("project", "created_by").get(pk=record.pk), user)
            return True
        except Refusal:
            return False
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(use, people)) == [False, True]
    assert Membership.objects.filter(role=Role.MEMBER).count() == 1


def test_an_admin_of_the_server_closes_and_opens_accounts(root: Client) -> None:
    bob, of_bob = person("bob")
    place = f"/accounts/{bob.pk}"
    assert of_bob.get("/account").status_code == 200
    assert root.post(place, {"change": "close"}).status_code == 302
    assert of_bob.get("/account").status_code == 302 and not Client().login(username="bob", password=PASSWORD)
    assert root.post(place, {"change": "open"}).status_code == 302 and Client().login(username="bob", password=PASSWORD)
    assert root.post(place, {"change": "admin"}).status_code == 302
    assert get_user_model().objects.get(pk=bob.pk).is_superuser
    assert root.post(place, {"change": "emperor"}).status_code == 422
    assert root.post("/accounts/999999", {"change": "close"}).status_code == 404
    names = {one["name"] for one in root.get("/accounts.json", {"text": "BO"}).json()["accounts"]}
    assert names == {"bob"}


def test_the_last_admin_of_the_server_stays(root: Client) -> None:
    user = get_user_model().objects.get(username="root")
    for change in ("close", "no-admin"):
        assert root.post(f"/accounts/{user.pk}", {"change": change}).status_code == 409
    assert root.get("/accounts").status_code == 200


def test_accounts_are_for_admins_of_the_server(admin: Client) -> None:
    assert (
        admin.get("/accounts").status_code == 403 and admin.post("/accounts/1", {"change": "close"}).status_code == 403
    )


def test_the_pages_ask_few_queries(ours: Project, root: Client, django_assert_max_num_queries: Any) -> None:
    for n in range(20):
        user = person(f"p{n}", ours, Role.MEMBER)[0]
        invite(ours, Role.VIEWER, user, 7)
    for path, most in (("/projects", 3), (f"/projects/{ours.code}", 6), ("/accounts", 3), ("/account", 4)):
        with django_assert_max_num_queries(most):
            assert root.get(path).status_code == 200


def test_no_line_of_the_log_holds_an_invitation(ours: Project, admin: Client, caplog: pytest.LogCaptureFixture) -> None:
    link = invitation(admin, ours)
    with caplog.at_level(logging.INFO):
        Client().get(link)
    lines = [TextLineFormatter().format(one) for one in caplog.records]
    assert any("path=/join/..." in line for line in lines)
    assert not any(link.removeprefix("/join/") in line for line in lines)
