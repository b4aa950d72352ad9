"""How every page writes numbers, times, states and links."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlencode

from django import template
from django.conf import settings
from django.db.models import Model
from django.template.context import Context
from django.urls import reverse
from django.utils.encoding import escape_uri_path
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from inspector.web.access import access, is_logged_in, may_remove, may_write, project_name, project_of
from rollout_inspector.diagnose.kinds import KINDS, FindingKind, title_of
from rollout_inspector.streams.figures import percent_of
from rollouts.gallery import EXAMPLES, Example
from rollouts.store.models import Role, Run, StoredTrajectory, TemplateCheck
from rollouts.store.runs.gallery import KEY
from rollouts.store.runs.logprob_columns import shows_gap
from rollouts.store.runs.policy_versions import has_versions
from rollouts.store.runs.runs import tags_of
from rollouts.store.runs.training_steps import has_training_steps

register = template.Library()

STATUS_GLYPHS = {"queued": "○", "running": "◐", "done": "✓", "failed": "✕", "cancelled": "⊘", "live": "●"}
SEVERITY_GLYPHS = {"error": "▲", "warning": "◆", "info": "●"}
NO_VALUE = "–"


@register.filter
def number(value: Any) -> str:
    """`12345` as `12,345`; a dash for nothing."""
    if value is None or value == "":
        return NO_VALUE
    try:
        return f"{int(value):,}"
    except (TypeError, ValueError, OverflowError):
        return str(value)


@register.filter
def decimal(value: Any, places: int = 3) -> str:
    """A float with at most `places` decimals and no trailing zeros; a dash for nothing or not-a-number."""
    if value is None or value == "":
        return NO_VALUE
    try:
        amount = float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)
    if math.isnan(amount):
        return NO_VALUE
    if math.isinf(amount):
        return "∞" if amount > 0 else "−∞"
    if amount and (abs(amount) >= 1e9 or abs(amount) < 10**-places):
        return f"{amount:.{places}g}".replace("-", "−")
    text = f"{amount:,.{places}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text.replace("-", "−")


@register.filter
def size(value: Any) -> str:
    """Bytes in the largest unit of which there is at least one."""
    amount = float(value or 0)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:,.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:,.1f} {unit}"
        amount /= 1000
    return ""


@register.filter
def duration(seconds: Any) -> str:
    """Seconds as `12 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds is None or seconds == "":
        return NO_VALUE
    total = max(0, round(float(seconds)))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


@register.filter
def when(value: datetime | None) -> SafeString | str:
    """A moment in UTC, to the minute. `datetime=` has the seconds. app.js adds how long ago it was."""
    if value is None:
        return NO_VALUE
    moment = value.astimezone(UTC)
    return format_html(
        '<time datetime="{}">{}</time>', moment.isoformat(timespec="seconds"), f"{moment:%Y-%m-%d %H:%M}"
    )


@register.filter
def day(value: datetime | None) -> SafeString | str:
    """The day of a moment, for an expiry. app.js does not change it."""
    if value is None:
        return NO_VALUE
    moment = value.astimezone(UTC)
    exact = moment.isoformat(timespec="seconds")
    return format_html('<time datetime="{}" title="{}" data-exact>{}</time>', exact, exact, f"{moment:%Y-%m-%d}")


@register.filter
def setting_words(value: Any) -> str:
    """The value of a setting of a run; None: the run does not record it."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(", ".join(map(str, value)) if isinstance(value, list) else value) if value or value == 0 else "none"


@register.filter
def status_chip(status: str) -> SafeString:
    """A state as a word with a glyph, so that colour is never the only sign."""
    return format_html(
        '<span class="chip status-{}"><span aria-hidden="true">{}</span> {}</span>', status,
        STATUS_GLYPHS.get(status, "·"), status,
    )


@register.filter
def severity_glyph(severity: str) -> str:
    return SEVERITY_GLYPHS.get(severity, "·")


@register.filter
def kind_words(kind: str) -> str:
    """`boundary_merge` as `boundary merge`: a slug that the browser may break into lines."""
    return str(kind).replace("_", " ")


@register.filter
def finding_title(kind: str) -> str:
    """`bos_mismatch` as `BOS doubled or missing`."""
    return title_of(kind)


@register.filter
def kinds_besides(counts: Mapping[str, int], kind: str) -> str:
    """The findings of the other kinds, as `Chat template drift 3; BOS doubled or missing 1`."""
    return "; ".join(
        f"{finding_title(other_kind)} {number(count)}" for other_kind, count in counts.items() if other_kind != kind
    )


@register.filter
def finding_meaning(kind: str) -> str:
    """One sentence that says what happened; empty for a kind of a later version."""
    finding_kind = KINDS.get(kind)
    return finding_kind.meaning if finding_kind else ""


@register.filter
def finding_consequence(kind: str) -> str:
    """What it does to training; empty for a kind of a later version."""
    finding_kind = KINDS.get(kind)
    return finding_kind.consequence if finding_kind else ""


@register.filter
def shown_in_gallery(trajectory: StoredTrajectory) -> FindingKind | Example | None:
    """What a trajectory of the gallery shows; None for any other trajectory."""
    name = trajectory.external_id
    return KINDS.get(name) or EXAMPLES.get(name) if KEY in trajectory.run.settings else None


@register.filter
def plural(count: Any, noun: str) -> str:
    """`3 trajectories`, `1 step`: a count with its noun. Write an irregular plural as `trajectory,trajectories`."""
    singular, _, many = noun.partition(",")
    amount = int(count or 0)
    return f"{amount:,} {singular if amount == 1 else many or singular + 's'}"


register.filter_function(percent_of)


@register.simple_tag(takes_context=True)
def theme_attribute(context: Context) -> SafeString:
    """` data-theme="dark"` from the cookie, so that the first paint has the right colours."""
    request = context.get("request")
    theme = request.COOKIES.get("theme", "") if request else ""
    # The value is one of two constants.
    return mark_safe(f' data-theme="{theme}"') if theme in ("light", "dark") else mark_safe("")


@register.simple_tag(takes_context=True)
def can_write(context: Context) -> bool:
    """Whether the user may change the object of the page, or make something where the page is about none."""
    request = context.get("request")
    return request is not None and may_write(request)


@register.simple_tag(takes_context=True, name="may_remove")
def offers_removal(context: Context, maker: str | None) -> bool:
    """Whether the user may take back or delete what the account of this name made in the project of the page."""
    request = context.get("request")
    return request is not None and may_remove(request, maker)


@register.simple_tag(takes_context=True)
def logged_in(context: Context) -> bool:
    """True for a user, False for the visitor of a share link."""
    request = context.get("request")
    return request is not None and is_logged_in(request)


@register.simple_tag(takes_context=True)
def project_of_page(context: Context, target: Run | StoredTrajectory | TemplateCheck) -> str:
    """The name of the project of an object, for a user who sees several; else empty."""
    request = context.get("request")
    return (request is not None and project_name(request, project_of(target))) or ""


@register.inclusion_tag("runs/_run_head.html", takes_context=True)
def run_head(context: Context, here: str) -> dict[str, Any]:
    """Name, actions and tabs of the run that the page is about. A tab that could hold nothing is left out. ``here``:
    the name of the page's address. At most four queries."""
    run, values = context["request"].target, context["run"]
    tags = context["tags"] if "tags" in context else tags_of([run]).get(run.pk, [])
    offered = {"run"}
    if values.trajectories:
        has_steps = has_training_steps(run)
        may_hold = {
            "run-training": has_steps or has_versions(run), "run-alarms": has_steps, "run-columns": run.n_tokens,
            "run-gap": shows_gap(run), "run-cost": run.n_steps or values.findings,
        }
        offered |= {name for name, has in may_hold.items() if has}
    parent: dict[str, Any] = context.flatten()  # type: ignore[assignment]
    return parent | {"here": here, "target": run, "tabs": offered | {here}, "tags": tags}


MAX_SHARED_QUERY = 500
SHARED_KINDS = {"run": "run", "storedtrajectory": "trajectory", "templatecheck": "check"}


@register.inclusion_tag("shares/_button.html", takes_context=True)
def share_button(context: Context, target: Model, query: str | None = None, page: str = "") -> dict[str, Any]:
    """The Share button of a run, trajectory or check; draws nothing for the visitor of a share link. `query` is the
    view that the link opens. The default is the query of the page. `page` is the slug of a tab."""
    request = context.get("request")
    if request is None or not may_write(request):
        return {"writer": False}
    view = request.META.get("QUERY_STRING", "") if query is None else query
    return {
        "writer": True,
        "request": request,
        "csrf_token": context.get("csrf_token"),
        "kind": SHARED_KINDS[target._meta.model_name or ""],
        "code": target.code,  # type: ignore[attr-defined]
        "query": _shared_query(view, page),
        "has_marks": isinstance(target, StoredTrajectory) and not page,
    }


def _shared_query(query: str, page: str) -> str:
    """The query of a share link, with the page that it opens. What does not fit is left out, the last first."""
    pairs = [("page", page)] * bool(page) + [pair for pair in parse_qsl(query.removeprefix("?")) if pair[0] != "page"]
    while len(shared := urlencode(pairs)) > MAX_SHARED_QUERY:
        pairs.pop()
    return shared


@register.simple_tag(takes_context=True)
def team_member(context: Context) -> str:
    """The name of the account that is logged in; empty in local mode, where there is one owner. No query."""
    request = context.get("request")
    return request.user.get_username() if settings.TEAM_MODE and request is not None and is_logged_in(request) else ""


@register.simple_tag(takes_context=True)
def people(context: Context) -> dict[str, bool]:
    """Which pages of people the reader may open."""
    reader = access(context["request"])
    return {
        "is_server_admin": reader.is_server_admin,
        "sees_audit": reader.is_server_admin or Role.ADMIN in reader.roles.values(),
    }


@register.simple_tag(takes_context=True)
def json_twin(context: Context) -> str:
    """The address of this page's JSON twin, query included; empty on a page that has none."""
    request = context.get("request")
    match = getattr(request, "resolver_match", None)
    if request is None or match is None or not getattr(match.func, "has_json_twin", False):
        return ""
    query = request.META.get("QUERY_STRING", "")
    path = "/runs" if request.path == "/" else escape_uri_path(request.path)
    return f"{path}.json{'?' + query if query else ''}"


@register.simple_tag(takes_context=True)
def template_probe(context: Context, kind: str, run: Run, trajectory: StoredTrajectory, step: int | None) -> str:
    """The check of the step's template, tools and kwargs, at the probe of that kind; empty without a probe."""
    request, probe = context.get("request"), KINDS[kind].probe if kind in KINDS else ""
    if not probe or run.chat_template_id is None or request is None or not may_write(request):
        return ""
    return f"{reverse('templates')}?{urlencode({'trajectory': trajectory.code, 'step': step or 0, 'probe': probe})}"
