"""Change the password of an account; a line in the audit log says so."""

import getpass
from typing import Any

from django.contrib.auth.management.commands import changepassword

from rollouts.store.people.activity_log import Action, Actor, acting, record


class Command(changepassword.Command):
    def handle(self, *arguments: Any, **options: Any) -> str | None:
        message = super().handle(*arguments, **options)
        with acting(lambda: Actor(detail="command")):
            record(Action.PASSWORD_CHANGED, detail=options["username"] or getpass.getuser())
        return message
