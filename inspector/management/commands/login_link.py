"""Print a link that logs one browser in, once, as one account."""

from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from inspector.server.paths import running_url
from inspector.web.login import make_token
from rollouts.management import TerminalCommand
from rollouts.store.people.accounts import LOCAL_USER, active_user


class Command(TerminalCommand):
    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--user", help=f"the account (default: {LOCAL_USER}; in team mode it must be named)")
        parser.add_argument("--url", help="the server's address, where it is not one started by `make run`")

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["user"] or ("" if settings.TEAM_MODE else LOCAL_USER)
        if not name:
            raise CommandError("In team mode each login has a name: login_link --user NAME. createsuperuser makes one.")
        if active_user(name) is None:
            raise CommandError(f"No account that may log in is called {name!r}. manage.py createsuperuser makes one.")
        url = options["url"] or running_url(settings.INSPECTOR_DATA)
        if not url:
            raise CommandError(
                f"No server runs on {settings.INSPECTOR_DATA}. Start one with `make run`, which prints a link; "
                "for a server that was started otherwise, name its address with --url."
            )
        self.stdout.write(f"{url.rstrip('/')}/login?token={make_token(name)}")
