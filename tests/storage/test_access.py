"""Roles: what a user and a token may do in a project."""

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser

from rollouts.store.models import ApiToken, Membership, Project, Role, Run, default_project
from rollouts.store.people.access import Access, access_of, access_of_api_key

pytestmark = pytest.mark.django_db


def member(project: Project, role: Role, name: str = "ada") -> Any:
    user, _ = get_user_model().objects.get_or_create(username=name)
    Membership.objects.create(project=project, user=user, role=role)
    return user


def test_each_role_may_do_what_the_one_before_may() -> None:
    project = Project.objects.create(name="maths")
    may = {}
    for role in Role:
        access = access_of(member(project, role, name=role))
        may[role.value] = [least.value for least in Role if access.may(project.pk, least)]
    assert may == {"viewer": ["viewer"], "member": ["viewer", "member"], "admin": ["viewer", "member", "admin"]}


def test_a_foreign_project_is_hidden() -> None:
    ours, theirs = Project.objects.create(name="ours"), Project.objects.create(name="theirs")
    access = access_of(member(ours, Role.ADMIN))
    kept = Run.objects.create(name="a", kind="import", project=ours)
    Run.objects.create(name="b", kind="import", project=theirs)
    assert list(access.limit(Run.objects.all())) == [kept] and access.projects() == [ours]
    assert access.role_in(theirs.pk) is None and not access.may(theirs.pk, Role.VIEWER)


def test_who_may_do_nothing_and_who_everything() -> None:
    project = Project.objects.create(name="ours")
    user = member(project, Role.ADMIN)
    user.is_active = False
    for nobody in (None, AnonymousUser(), user):
        assert access_of(nobody) == Access() and access_of(nobody).projects() == []
    admin = get_user_model().objects.create_superuser("root")
    assert access_of(admin).may(project.pk, Role.ADMIN)


def test_a_token_may_do_what_its_maker_may_do_in_its_project_alone() -> None:
    ours, other = Project.objects.create(name="ours"), Project.objects.create(name="other")
    user = member(ours, Role.MEMBER)
    Membership.objects.create(project=other, user=user, role=Role.ADMIN)
    token = ApiToken.objects.create(created_by=user, project=ours, scopes=["push"], token_sha256="1")
    assert access_of_api_key(token).may(ours.pk, Role.MEMBER) and not access_of_api_key(token).may(ours.pk, Role.ADMIN)
    assert access_of_api_key(token).role_in(other.pk) is None
    token.scopes = ["read"]
    assert access_of_api_key(token).role_in(ours.pk) is Role.VIEWER
    Membership.objects.filter(project=ours).delete()
    assert access_of_api_key(token).role_in(ours.pk) is None


def test_what_names_no_project_is_in_the_default_one() -> None:
    run = Run.objects.create(name="a", kind="import")
    assert run.project_id == default_project() and run.project.name == "Default"
