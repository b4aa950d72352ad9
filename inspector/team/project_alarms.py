"""`/projects/<code>/alarms`: the limits of a project, and the webhook that is told of its alarms. For its admins."""

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.runs.training.alarms_page import LimitLine
from inspector.team.accounts import of_project
from inspector.web.twins import Page, page, told, wants_json
from rollout_inspector.refusal import Refusal
from rollouts.store.models import Project, ProjectAlarms, Role
from rollouts.store.runs.alarms import alarms_of_project, limits_of_project, set_webhook, webhook_key


@dataclass(frozen=True)
class ProjectAlarmsPage(Page):
    """What holds in the runs of a project that have no limits of their own, and where it is told."""

    code: str
    """Of the project."""
    name: str
    """Of the project."""
    limits: list[LimitLine]
    """The project's limits, and the defaults where it has none."""
    webhook: str
    """The address that is told; empty = none."""
    key: str | None
    """The key of the signatures; null without a webhook."""
    delivered_at: datetime | None
    """When the webhook took an alarm last."""
    failing: str
    """Why the last try failed; empty = it did not."""
    next_try_at: datetime | None
    """When the webhook is asked again; null = it does not fail."""
    hosts: list[str]
    """The hosts that this server may tell."""
    errors: dict[str, list[str]]
    """Field of the form -> what is wrong with it."""


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
@of_project(Role.ADMIN)
def alarms(request: HttpRequest, project: Project) -> HttpResponse:
    """The page; a POST sets the ``webhook``, empty = none."""
    errors: dict[str, list[str]] = {}
    if request.method == "POST":
        try:
            set_webhook(project, request.POST.get("webhook", ""))
        except Refusal as refusal:
            errors = {refusal.field: [str(refusal)]}
        if not errors and not wants_json(request):
            sentence = "The webhook is set." if request.POST.get("webhook") else "Nobody is told."
            return told(request, sentence, "project-alarms", project.code)
    delivery = alarms_of_project(project) or ProjectAlarms()
    failing = delivery.error if delivery.n_failures else ""
    data = ProjectAlarmsPage(
        project.code, project.name, [LimitLine.of(limit, True) for limit in limits_of_project(project)],
        delivery.webhook, webhook_key(delivery) if delivery.webhook else None, delivery.delivered_at, failing,
        delivery.next_try_at if failing else None, list(settings.WEBHOOK_HOSTS), errors,
    )
    typed = request.POST.get("webhook", "") if errors else data.webhook
    return page(request, "team/alarms.html", data, 422 if errors else 200, typed=typed)
