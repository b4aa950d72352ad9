from django.apps import AppConfig


class RolloutsConfig(AppConfig):
    """What happened, token by token: storage, engines, strategies, diagnosis."""

    name = "rollouts"
    default_auto_field = "django.db.models.BigAutoField"
