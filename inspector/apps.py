from django.apps import AppConfig


class InspectorConfig(AppConfig):
    """Pages, commands and checks; no models."""

    name = "inspector"

    def ready(self) -> None:
        from inspector.server import system_checks  # noqa: F401  registers the checks
