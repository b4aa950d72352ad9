"""Make an admin of the server; a line in the audit log says so."""

from typing import Any

from django.contrib.auth.management.commands import createsuperuser

from rollouts.store.people.accounts import server_admins
from rollouts.store.people.activity_log import Action, Actor, acting, record


class Command(createsuperuser.Command):
    def handle(self, *arguments: Any, **options: Any) -> None:
        before = server_admins()
        super().handle(*arguments, **options)
        with acting(lambda: Actor(detail="command")):
            for name in server_admins() - before:
                record(Action.ACCOUNT_MADE, detail=f"{name}: admin of the server")
