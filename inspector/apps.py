from django.apps import AppConfig
from django.contrib.staticfiles.apps import StaticFilesConfig


class InspectorConfig(AppConfig):
    """Pages, commands and checks; no models."""

    name = "inspector"

    def ready(self) -> None:
        from inspector.server import system_checks, team_checks  # noqa: F401  registers the checks
        from inspector.web import login  # noqa: F401  notes each login
        from rollouts.jobs import job_kinds  # noqa: F401  registers the kinds of jobs, before what follows lists them


class InspectorStaticFiles(StaticFilesConfig):
    """Static files without the second of the two viewers that come with the API's library."""

    ignore_patterns = [*StaticFilesConfig.ignore_patterns, "redoc*"]
