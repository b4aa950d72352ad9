"""`/tokens`: make, list and revoke the tokens by which programs push, read and launch."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self, cast

from django import forms
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from inspector.web.access import access, chosen_project, may_write, sees_several_projects
from inspector.web.forms import PlainForm
from inspector.web.twins import Page, error_page, from_columns, page, told
from rollouts.store.models import ApiToken, Role
from rollouts.store.people import shares
from rollouts.store.people.shares import api_key_by_pk, api_key_state, create_api_key, newest_api_keys

MAX_LISTED = 200
DEFAULT_DAYS = 90
SCOPES = {
    ApiToken.Scope.PUSH: "make runs to push to, and push trajectories",
    ApiToken.Scope.READ: "read what the project holds",
    ApiToken.Scope.LAUNCH: "launch, import, export, check, cancel",
}
"""Scope -> what a key with it may do."""


class ApiKeyForm(PlainForm):
    """What will use a token, what it may do, and for how long."""

    name = forms.CharField(
        max_length=200, required=False, label="What will use it", help_text="A name, to tell keys apart.",
        widget=forms.TextInput(attrs={"placeholder": "e.g. the trainer on node 7", "autocomplete": "off"}),
    )
    scopes = forms.MultipleChoiceField(
        choices=[(one.value, f"{one.value}: {SCOPES[one]}") for one in ApiToken.Scope], required=False,
        widget=forms.CheckboxSelectMultiple, initial=[ApiToken.Scope.PUSH], label="It may",
    )
    days = forms.TypedChoiceField(
        choices=[("7", "7 days"), ("30", "30 days"), ("90", "90 days"), ("365", "a year"), ("0", "until revoked")],
        coerce=int, required=False, empty_value=None, initial=str(DEFAULT_DAYS), label="Works for",
    )

    def offer(self, scope: ApiToken.Scope) -> None:
        """Offer this scope alone, chosen already."""
        field = cast(forms.MultipleChoiceField, self.fields["scopes"])
        field.choices = [(scope.value, f"{scope.value}: {SCOPES[scope]}")]
        self.initial["scopes"] = [scope.value]

    def clean_name(self) -> str:
        return str(self.cleaned_data["name"]).replace("\0", "")

    def clean_days(self) -> int:
        days = self.cleaned_data["days"]
        return DEFAULT_DAYS if days is None else int(days)

    def clean_scopes(self) -> list[str]:
        return self.cleaned_data["scopes"] or [ApiToken.Scope.PUSH.value]


@dataclass(frozen=True)
class TokenLine(Page):
    """What a token opens, as a line of a list: an API key, a share link or an invitation. The token is not kept."""

    id: int
    """Names it in addresses."""
    hint: str
    """First characters of its token."""
    made_by: str
    """Who made it."""
    created_at: datetime
    """When it was made."""
    state: str
    """`live`, `revoked` or `expired`. An invitation may be `used`. Of a share link `maker left`: who made it is no
    longer a member of the project."""


@dataclass(frozen=True)
class ApiKeyLine(TokenLine):
    """An API key as a line of the list."""

    name: str
    """What uses it."""
    project: str
    """Name of the one project that it works in."""
    scopes: list[str]
    """What it may do: `push`, `read`, `launch`."""
    last_used_at: datetime | None
    """To the minute."""
    expires_at: datetime | None
    """Until when it works; None = until it is revoked."""
    revoked_at: datetime | None
    """When it was revoked."""
    may_revoke: bool
    """Whether the reader of the page may revoke it."""
    token: str | None = None
    """The key itself, shown once: where this request made it."""

    @classmethod
    def of(cls, record: ApiToken, request: HttpRequest, token: str | None = None) -> Self:
        """The record with its maker and project."""
        return from_columns(
            cls, record, made_by=record.created_by.get_username(), project=record.project.name,
            state=api_key_state(record), may_revoke=may_revoke(request, record), token=token,
        )


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The list of tokens, newest first; a POST makes one and shows it, once."""
    form = ApiKeyForm(request.POST) if request.method == "POST" else ApiKeyForm()
    if request.method != "POST" and not may_write(request):
        form.offer(ApiToken.Scope.READ)
    # A viewer's token may read; one that changes something takes a member.
    writes = request.method == "POST" and form.is_valid() and set(form.cleaned_data["scopes"]) != {"read"}
    choice = chosen_project(request, Role.MEMBER if writes else Role.VIEWER)
    only_html = {
        "form": form, "choice": choice, "several": sees_several_projects(request),
        "address": request.build_absolute_uri("/").rstrip("/"),
    }
    if request.method != "POST" or not form.is_valid():
        data: dict[str, Any] = {"tokens": _lines(request), "errors": form.sentences()}
        return page(request, "team/api_keys.html", data, 422 if form.errors else 200, **only_html)
    fields = form.cleaned_data
    record, token = create_api_key(
        request.user, fields["name"], project=choice.chosen, scopes=fields["scopes"], days=fields["days"] or None
    )
    data = {"tokens": _lines(request), "errors": {}, "made": ApiKeyLine.of(record, request, token)}
    return page(request, "team/api_keys.html", data, 201, **only_html)


def may_revoke(request: HttpRequest, record: ApiToken) -> bool:
    """Whether the user of a request may revoke an API key: its maker, and an admin of its project."""
    return bool(request.user.pk == record.created_by_id or access(request).may(record.project_id, Role.ADMIN))


def _lines(request: HttpRequest) -> list[ApiKeyLine]:
    records = newest_api_keys(access(request), request.user, MAX_LISTED)
    return [ApiKeyLine.of(record, request) for record in records]


@require_POST
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    """From now on the token is refused."""
    record = api_key_by_pk(pk)
    if record is None or not (may_revoke(request, record) or access(request).role_in(record.project_id)):
        raise Http404("There is no such API key.")
    if not may_revoke(request, record):
        sentence = "Only its maker or an admin of its project revokes an API key. Ask them, or use manage.py api_token."
        return error_page(request, 403, "This key is not yours", sentence)
    shares.revoke(record)
    sentence = f"The token {record.hint}… was revoked; a program that still uses it is told so."
    return told(request, sentence, "api-tokens", twin=ApiKeyLine.of(record, request))
