"""Projects, who is in them with which role, and invitations. A refusal raises ``Refusal``."""

import secrets
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.db import IntegrityError, transaction
from django.db.models import Count, Exists, OuterRef, ProtectedError, Q, QuerySet
from django.utils import timezone

from rollout_inspector.refusal import Refusal
from rollouts.store.models import DEFAULT_PROJECT, Invitation, Membership, Project, Role, default_project
from rollouts.store.people.access import Access, access_of
from rollouts.store.people.shares import token_hash
from rollouts.store.text import storable_text

MAX_LISTED = 500


def key_of(project: Project | None) -> int:
    """The key of a project; None = of the default one, which takes what notebooks and tests make without a project."""
    return default_project() if project is None else project.pk


def project_or_default(project: Project | None = None) -> Project:
    """The project itself; None = the default one."""
    return project or Project.objects.get(pk=default_project())


def find_project(code: str) -> Project | None:
    """The project with that code."""
    return Project.objects.filter(code=code).first()


def find_project_named(text: str) -> Project | None:
    """The project with that code, else the project with that name."""
    projects = Project.objects.filter(Q(code=text) | Q(name=text))
    return max(projects, key=lambda project: project.code == text, default=None)


def listed_projects(access: Access) -> list[Project]:
    """The projects that somebody may see, by name, each with ``n_members``."""
    counted = Project.objects.annotate(n_members=Count("memberships"))
    return list(access.limit(counted.order_by("name"), "pk")[:MAX_LISTED])


def project_names(limit: int) -> list[str]:
    """The first names of projects, for who may see all."""
    return list(Project.objects.order_by("name").values_list("name", flat=True)[:limit])


def lock_project(project: Project) -> None:
    """Let others that lock the project wait until the transaction ends."""
    Project.objects.select_for_update().get(pk=project.pk)


MAX_NAME = 100
MAX_INVITATION_DAYS = 90


def make_project(name: str) -> Project:
    """Make a project. Nobody has a role in it yet."""
    return rename_project(Project(), name)


def rename_project(project: Project, name: str) -> Project:
    """Give a project another name. Raises :class:`Refusal` for a name that is taken, or is none."""
    before, project.name = project.name, " ".join(storable_text(name).split())
    problem = ""
    if not project.name:
        problem = "Write a name for the project."
    elif len(project.name) > MAX_NAME:
        problem = f"Write at most {MAX_NAME} characters; these are {len(project.name)}."
    else:
        try:
            with transaction.atomic():
                project.save()
            return project
        except IntegrityError:
            problem = f"There is a project “{project.name}” already, or there was one a moment ago. Take another name."
    project.name = before
    raise Refusal(problem)


def delete_project(project: Project) -> None:
    """Delete an empty project with its roles, invitations, API keys and share links. The first project stays."""
    if project.code == DEFAULT_PROJECT:
        raise Refusal("This project takes what names no other one, so that it stays. Rename it instead.")
    try:
        Project.objects.get(pk=project.pk).delete()
    except ProtectedError as error:
        contents = ", one ".join(sorted({str(record._meta.verbose_name) for record in error.protected_objects}))
        raise Refusal(
            f"The project “{project.name}” is not empty: it holds at least one {contents}. Delete these first."
        ) from None


def set_role(project: Project, user: Any, role: Role) -> Membership:
    """Give a user a role in a project. The last admin of a project stays one."""
    with transaction.atomic():
        lock_project(project)  # two admins must not remove each other at once
        if role != Role.ADMIN:
            _keep_an_admin(project, user)
        return Membership.objects.update_or_create(project=project, user=user, defaults={"role": role})[0]


def remove_member(project: Project, user: Any) -> None:
    """Take a user out of a project. The last admin of a project stays in it."""
    with transaction.atomic():
        lock_project(project)  # two admins must not remove each other at once
        _keep_an_admin(project, user)
        Membership.objects.filter(project=project, user=user).delete()


def _keep_an_admin(project: Project, user: Any) -> None:
    admins = Membership.objects.filter(project=project, role=Role.ADMIN)
    if admins.filter(user=user).exists() and not admins.exclude(user=user).filter(user__is_active=True).exists():
        raise Refusal("This is the last admin of the project. Make somebody else an admin first.")


def invite(project: Project, role: Role, by: Any, days: int, note: str = "") -> tuple[Invitation, str]:
    """Make a link by which one person joins with this role. Returns the record and the token, which is not kept."""
    token = secrets.token_urlsafe(24)
    record = Invitation.objects.create(
        token_sha256=token_hash(token),
        hint=token[:6],
        project=project,
        role=role,
        note=storable_text(note)[:200],
        created_by=by,
        expires_at=timezone.now() + timedelta(days=min(max(days, 1), MAX_INVITATION_DAYS)),
    )
    return record, token


def invitation_fault(record: Invitation) -> str:
    """Why an invitation lets nobody in, in a sentence; empty when it does."""
    if record.used_at is not None:
        return "This invitation was used. Each one is for one person: ask for another."
    if record.revoked_at is not None:
        return "This invitation was revoked. Ask the person who sent it."
    if record.expires_at <= timezone.now():
        return "This invitation has expired. Ask the person who sent it for another."
    maker = record.created_by
    if not maker.is_active:
        return "The account of the person who made this invitation is closed. Ask another admin of the project."
    is_admin = getattr(record, "maker_is_admin", None)  # a list of invitations asks for it with the record
    if not (access_of(maker).may(record.project_id, Role.ADMIN) if is_admin is None else is_admin):
        return "The person who made this invitation is no longer an admin of the project. Ask one who is."
    return ""


def revoke_invitation(record: Invitation) -> None:
    """From now on the invitation lets nobody in. One that was used stays as it is."""
    Invitation.objects.filter(pk=record.pk, used_at=None, revoked_at=None).update(revoked_at=timezone.now())


def join(record: Invitation, user: Any) -> Membership:
    """Use an invitation: the user gets its role, unless the user has a higher one. Once, whoever asks at once. Raises
    ``Refusal`` when the invitation is over."""
    with transaction.atomic():
        # Under the lock, because somebody may take the maker's role away in this moment.
        lock_project(record.project)
        if fault := invitation_fault(Invitation.objects.select_related("created_by").get(pk=record.pk)):
            raise Refusal(fault)
        now = timezone.now()
        unused = Invitation.objects.filter(pk=record.pk, used_at=None, revoked_at=None, expires_at__gt=now)
        if not unused.update(used_at=now, used_by=user):
            record.refresh_from_db()
            raise Refusal(invitation_fault(record) or "This invitation is over.")
        membership = Membership.objects.filter(project=record.project, user=user).first()
        order = list(Role)
        if membership is not None and order.index(Role(membership.role)) >= order.index(Role(record.role)):
            return membership
        return Membership.objects.update_or_create(project=record.project, user=user, defaults={"role": record.role})[0]


def set_account(user: Any, *, is_active: bool | None = None, is_superuser: bool | None = None) -> None:
    """Open or close an account, or say whether it is an admin of the server. The last one stays. A closed account can
    neither log in nor use what it has: its sessions and API keys are refused from now on."""
    accounts = get_user_model().objects
    with transaction.atomic():
        admins = list(accounts.select_for_update().filter(is_superuser=True, is_active=True).order_by("pk"))
        if (is_active is False or is_superuser is False) and [admin.pk for admin in admins] == [user.pk]:
            raise Refusal("This is the last admin of the server. Make somebody else one first.")
        changes: dict[str, bool] = {}
        if is_active is not None:
            changes["is_active"] = is_active
        if is_superuser is not None:
            changes |= {"is_superuser": is_superuser, "is_staff": is_superuser}
        accounts.filter(pk=user.pk).update(**changes)
    user.refresh_from_db()


def members_of(project: Project) -> list[Membership]:
    """The members of a project by name, each with its account."""
    memberships = Membership.objects.filter(project=project).select_related("user")
    return list(memberships.order_by("user__username")[:MAX_LISTED])


def memberships_of(user: Any) -> list[Membership]:
    """The projects that a user is in, by name."""
    return list(Membership.objects.filter(user=user).select_related("project").order_by("project__name"))


def newest_invitations(project: Project) -> list[Invitation]:
    """The invitations to a project, newest first."""
    return list(_invitations().filter(project=project).order_by("-pk")[:MAX_LISTED])


def find_invitation(**column: Any) -> Invitation | None:
    """The invitation with that ``pk`` or that ``token_sha256``, with its project and its maker."""
    return _invitations().filter(**column).first()


def _invitations() -> QuerySet[Invitation]:
    """Invitations with their project, maker and user, and with ``maker_is_admin``."""
    admins = Membership.objects.filter(project=OuterRef("project"), user=OuterRef("created_by"), role=Role.ADMIN)
    invitations = Invitation.objects.select_related("project", "created_by", "used_by")
    return invitations.annotate(maker_is_admin=Q(created_by__is_superuser=True) | Exists(admins))
