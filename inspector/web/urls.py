"""Addresses of the rest: tokenizers, workers, the push API, help and health."""

from django.urls import path

from inspector.api import push_views as push
from inspector.chat_templates import tokenizers_page as tokenizers
from inspector.runs import gallery_page as gallery
from inspector.runs import workers_page as workers
from inspector.server import health_view as health
from inspector.server import metrics_view as metrics
from inspector.web import errors
from inspector.web.twins import twins

urlpatterns = [
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
