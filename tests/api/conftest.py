"""A project with a run, its trajectories and findings; and callers with different roles, tokens and scopes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from rollouts.store.models import ApiToken, Membership, Project, Role, Run, default_project
from rollouts.store.people.shares import create_api_key
from tests.web.trajectory_samples import Maker

Ask = Callable[..., Any]
ALL_SCOPES = tuple(ApiToken.Scope.values)


@pytest.fixture
def make(db: None, tiny_tokenizer: Path) -> Maker:
    return Maker(tiny_tokenizer)


@pytest.fixture
def run(db: None, make: Maker) -> Run:
    """A whole trajectory, and one with a finding."""
    broken, findings = make.broken("broken")
    return make.run([make.conversation("whole"), broken], [[], findings])


def member_of(project: int, name: str, role: str) -> Any:
    user = get_user_model().objects.create_user(name)
    Membership.objects.create(project_id=project, user=user, role=role)
    return user


def token_for(user: Any, project: int, scopes: Any = ALL_SCOPES) -> str:
    record, token = create_api_key(user, "test")
    ApiToken.objects.filter(pk=record.pk).update(project=project, scopes=list(scopes))
    return token


@pytest.fixture
def callers(db: None) -> dict[str, str]:
    """Name of a caller -> the token: roles in the default project, single scopes, and a member of another project."""
    ours, theirs = default_project(), Project.objects.create(name="Theirs").pk
    ann = member_of(ours, "ann", Role.MEMBER)
    return {
        "viewer": token_for(member_of(ours, "vic", Role.VIEWER), ours),
        "member": token_for(ann, ours),
        "admin": token_for(member_of(ours, "ada", Role.ADMIN), ours),
        "reader": token_for(ann, ours, ["read"]),
        "launcher": token_for(ann, ours, ["launch"]),
        "foreign": token_for(member_of(theirs, "fay", Role.ADMIN), theirs),
    }


@pytest.fixture
def ask(client: Client, callers: dict[str, str]) -> Ask:
    """`ask("/runs", "member", method="post", body={...}, accept=...)`: the answer to a request of a caller."""

    def send(path: str, caller: str = "member", method: str = "get", body: Any = None, **headers: str) -> Any:
        content = {} if body is None else {"data": body, "content_type": "application/json"}
        if caller:
            headers["authorization"] = f"Bearer {callers[caller]}"
        return getattr(client, method)(f"/api/v1{path}", headers=headers, **content)

    return send
