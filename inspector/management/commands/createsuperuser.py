"""`manage.py createsuperuser`: Django's command, with a line in the audit log."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.management.commands import createsuperuser

from rollouts.selectors.people import server_admins
from rollouts.services.activity_log import Action, Actor, acting, record


class Command(createsuperuser.Command):
    def handle(self, *arguments: Any, **options: Any) -> None:
        before = server_admins()
        super().handle(*arguments, **options)
        with acting(lambda: Actor(detail="command")):
            for name in server_admins() - before:
                record(Action.ACCOUNT_MADE, detail=f"{name}: admin of the server")
