"""`/projects`: the projects, and who is in each of them with which role."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from django import forms
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from inspector.runs.muted import MutedValues
from inspector.team.accounts import AccountLine, for_server_admins, of_project
from inspector.team.api_keys import TokenLine
from inspector.web.access import access
from inspector.web.forms import PlainForm
from inspector.web.twins import Page, error_page, from_columns, json_page, page, told, wants_json
from rollout_inspector.refusal import Refusal
from rollouts.store.models import Invitation, Project, Role
from rollouts.store.people import activity_log, members
from rollouts.store.people.accounts import find_account
from rollouts.store.people.activity_log import Action
from rollouts.store.people.members import (
    MAX_INVITATION_DAYS, MAX_NAME, delete_project, invitation_fault, listed_projects, make_project, members_of,
    newest_invitations, rename_project
)
from rollouts.store.runs.muted import rules_of_project

ROLES = {
    Role.VIEWER: "reads everything of the project",
    Role.MEMBER: "also launches, imports, checks, exports and shares",
    Role.ADMIN: "also deletes what others made, and says who is in the project",
}
"""Role -> what it may do, each more than the one before."""


@dataclass(frozen=True)
class ProjectLine(Page):
    """A project as a line of the list."""

    code: str
    """Names it in addresses."""
    name: str
    """Unique on the server."""
    role: str
    """What the reader of the page may do in it."""
    members: int
    """How many accounts have a role in it."""


@dataclass(frozen=True)
class InvitationLine(TokenLine):
    """An invitation as a line of the list."""

    role: str
    """The role of whoever joins by it."""
    note: str
    """For whom it is."""
    expires_at: datetime
    """Until when it works."""
    used_by: str
    """Who used it; empty as long as nobody did."""
    link: str | None = None
    """The whole address, shown once: where this request made it."""

    @classmethod
    def of(cls, record: Invitation, link: str | None = None) -> Self:
        """The invitation with its maker and its user."""
        used_by = record.used_by.get_username() if record.used_by else ""
        over = "used" if record.used_at else "revoked" if record.revoked_at else "expired"
        state = over if invitation_fault(record) else "live"
        made_by = record.created_by.get_username()
        return from_columns(cls, record, made_by=made_by, used_by=used_by, state=state, link=link)


@dataclass(frozen=True)
class ProjectPage(Page):
    """One project and its people."""

    code: str
    """Names it in addresses."""
    name: str
    """Unique on the server."""
    role: str
    """What the reader of the page may do in it."""
    members: list[AccountLine]
    """By name."""
    invitations: list[InvitationLine]
    """Newest first; empty for a reader who is no admin."""
    muted: list[MutedValues]
    """The rules that mute kinds of findings in its runs, newest first."""
    made: InvitationLine | None = None
    """The invitation that this request made."""
    errors: dict[str, list[str]] | None = None
    """Field of the form of invitations -> what is wrong with it."""


class NameForm(PlainForm):
    """The name of a project."""

    name = forms.CharField(max_length=MAX_NAME, label="Name", widget=forms.TextInput(attrs={"autocomplete": "off"}))


class InviteForm(PlainForm):
    """Whom an invitation is for, as what, and how long it works."""

    role = forms.ChoiceField(choices=[(one.value, f"{one.value}: {ROLES[one]}") for one in Role], initial=Role.MEMBER)
    days = forms.TypedChoiceField(
        choices=[("1", "1 day"), ("7", "7 days"), ("30", "30 days"), (str(MAX_INVITATION_DAYS), "90 days")],
        coerce=int, initial="7", required=False, empty_value=None, label="Works for",
    )
    note = forms.CharField(max_length=200, required=False, help_text="For whom it is, to tell invitations apart.")

    def clean_days(self) -> int:
        return self.cleaned_data["days"] or 7


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The projects; a POST of an admin of the server makes one."""
    form = NameForm(request.POST) if request.method == "POST" else NameForm()
    if request.method == "POST":
        response = _make(request, form)
        if isinstance(response, HttpResponse):
            return response
    return _list(request, form, 422 if form.errors else 200)


@for_server_admins
def _make(request: HttpRequest, form: NameForm) -> Any:
    if not form.is_valid():
        return None
    try:
        project = make_project(form.cleaned_data["name"])
    except Refusal as refusal:
        form.add_error("name", str(refusal))
        return None
    activity_log.record(Action.PROJECT_MADE, project)
    return json_page(_page(request, project), 201) if wants_json(request) else redirect("project", project.code)


def _list(request: HttpRequest, form: NameForm, status: int) -> HttpResponse:
    reader = access(request)
    lines = [
        ProjectLine(project.code, project.name, str(reader.role_in(project.pk)), project.n_members)  # type: ignore[attr-defined]
        for project in listed_projects(reader)
    ]
    data = {"projects": lines, "may_make": reader.is_server_admin, "errors": form.sentences()}
    return page(request, "team/projects.html", data, status, form=form)


def _page(request: HttpRequest, project: Project, **more: Any) -> ProjectPage:
    role = access(request).role_in(project.pk)
    lines = [AccountLine.of_member(member) for member in members_of(project)]
    invitations = [InvitationLine.of(record) for record in newest_invitations(project)] if role == Role.ADMIN else []
    muted = [MutedValues.of(record, True, record.run) for record in rules_of_project(project)]
    return ProjectPage(project.code, project.name, str(role), lines, invitations, muted, **more)


def _draw(request: HttpRequest, shown: ProjectPage, status: int = 200, form: InviteForm | None = None) -> HttpResponse:
    only_html = {"is_admin": shown.role == Role.ADMIN, "roles": [(role.value, ROLES[role]) for role in Role]}
    return page(request, "team/project.html", shown, status, form=form or InviteForm(), **only_html)


@require_safe
@never_cache
@of_project(Role.VIEWER)
def detail(request: HttpRequest, project: Project) -> HttpResponse:
    """A project: its members for all of them, its invitations for its admins."""
    return _draw(request, _page(request, project))


@require_POST
@of_project(Role.ADMIN)
def rename(request: HttpRequest, project: Project) -> HttpResponse:
    """Give a project another name."""
    before = project.name
    rename_project(project, request.POST.get("name", ""))
    activity_log.record(Action.PROJECT_RENAMED, project, detail=f"before: {before}")
    return told(request, f"The project is called “{project.name}” now.", "project", project.code)


@require_POST
@of_project(Role.ADMIN)
def delete(request: HttpRequest, project: Project) -> HttpResponse:
    """Delete an empty project."""
    try:
        delete_project(project)
    except Refusal as refusal:
        return error_page(request, 409, "The project was not deleted", str(refusal))
    activity_log.record(Action.PROJECT_DELETED, detail=f"{project.code} {project.name}")
    return told(request, f"The project “{project.name}” was deleted.", "projects")


@require_POST
@of_project(Role.ADMIN)
def member(request: HttpRequest, project: Project, pk: int) -> HttpResponse:
    """Give a member the role that the form names, or remove the member when it names `none`."""
    user = find_account(pk)
    if user is None or not any(membership.user_id == pk for membership in members_of(project)):
        raise Http404("This project has no such member. The list may be old: load the page again.")
    role = request.POST.get("role", "")
    if role not in (*Role.values, "none"):
        return error_page(request, 422, "Nothing was changed", "Choose one of the roles, or Remove.")
    try:
        if role == "none":
            members.remove_member(project, user)
        else:
            members.set_role(project, user, Role(role))
    except Refusal as refusal:
        return error_page(request, 409, "Nothing was changed", str(refusal))
    name = user.get_username()
    if role == "none":
        activity_log.record(Action.MEMBER_REMOVED, project, detail=name)
    else:
        activity_log.record(Action.ROLE_CHANGED, project, detail=f"{name} is {role}")
    sentence = f"{name} is no longer in this project." if role == "none" else f"{name} has the role {role} now."
    # Who took the role from themselves may not see this project any more.
    return told(request, sentence, *(["projects"] if user.pk == request.user.pk else ["project", project.code]))


@require_POST
@never_cache
@of_project(Role.ADMIN)
def invite(request: HttpRequest, project: Project) -> HttpResponse:
    """Make an invitation and show its link, once."""
    form = InviteForm(request.POST)
    if not form.is_valid():
        return _draw(request, _page(request, project, errors=form.sentences()), 422, form)
    fields = form.cleaned_data
    record, token = members.invite(project, Role(fields["role"]), request.user, fields["days"], fields["note"])
    activity_log.record(Action.INVITED, record, detail=f"role {record.role}")
    link = request.build_absolute_uri(f"/join/{token}")
    return _draw(request, _page(request, project, made=InvitationLine.of(record, link)), 201)


@require_POST
@of_project(Role.ADMIN)
def revoke_invitation(request: HttpRequest, project: Project, pk: int) -> HttpResponse:
    """From now on the invitation lets nobody in."""
    record = next((invitation for invitation in newest_invitations(project) if invitation.pk == pk), None)
    if record is None:
        raise Http404("This project has no such invitation.")
    members.revoke_invitation(record)
    activity_log.record(Action.INVITATION_REVOKED, record)
    return told(request, f"The invitation {record.hint}… was revoked.", "project", project.code)
