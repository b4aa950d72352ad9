"""Every address of the site, by noun. A page made by `twins` has `.json` at the same address."""

from django.urls import include, path, register_converter

from inspector.api import push_views as push
from inspector.chat_templates import tokenizers_page as tokenizers
from inspector.runs import gallery_page as gallery, workers_page as workers
from inspector.server import health, metrics_view as metrics
from inspector.web import errors
from inspector.web.twins import twins


class CodeConverter:
    """An opaque code: small letters and digits, so that `.json` is never part of it."""

    regex = "[0-9a-z]{4,64}"

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: str) -> str:
        return value


# Before the lists below are imported: their addresses name the converter.
register_converter(CodeConverter, "code")

handler400 = errors.bad_request
handler403 = errors.forbidden
handler404 = errors.not_found
handler500 = errors.server_error

urlpatterns = [
    path("", include("inspector.runs.urls")),
    path("", include("inspector.trajectories.urls")),
    path("", include("inspector.search.urls")),
    path("", include("inspector.chat_templates.urls")),
    path("", include("inspector.team.urls")),
    path("", include("inspector.api.urls")),
    *twins("tokenizers", tokenizers.index, name="tokenizers"),
    *twins("workers", workers.index, name="workers"),
    path("api/runs", push.create_run, name="api-runs"),
    path("api/runs/<code:code>/trajectories", push.push, name="api-trajectories"),
    path("robots.txt", errors.robots, name="robots"),
    *twins("gallery", gallery.index, name="gallery"),
    path("gallery/<slug:kind>", gallery.one, name="gallery-one"),
    path("help", errors.help_page, name="help"),
    *twins("help/findings", gallery.findings, name="help-findings"),
    path("health", health.health, name="health"),
    path("metrics", metrics.metrics, name="metrics"),
]
