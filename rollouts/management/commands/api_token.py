"""Make a token by which a program works, and print it, once; or list or revoke tokens."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.outputs import line_of
from rollouts.management import TerminalCommand
from rollouts.management.arguments import add_project_option, project_named
from rollouts.store.models import ApiToken
from rollouts.store.people.accounts import LOCAL_USER, account_named
from rollouts.store.people.shares import all_api_keys, api_key_by_pk, create_api_key, find_api_key, revoke

MAX_DAYS = 3650


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", default="", help="what will use the token, e.g. the trainer's name")
        parser.add_argument("--user", default=LOCAL_USER, help=f"the user who pushes with it (default: {LOCAL_USER})")
        add_project_option(parser)
        parser.add_argument(
            "--scope", action="append", choices=ApiToken.Scope.values, help="what it may do; more than once (push)"
        )
        parser.add_argument("--days", type=int, help="days that it works (default: until it is revoked)")
        parser.add_argument("--list", action="store_true", help="list the tokens")
        parser.add_argument("--revoke", metavar="ID", type=int, help="the id of a token to refuse from now on")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *_: Any, **options: Any) -> None:
        if options["list"]:
            self._list(options["json"])
        elif options["revoke"] is not None:
            record = api_key_by_pk(options["revoke"])
            if record is None:
                raise CommandError(f"There is no token with the id {options['revoke']}; --list shows them.")
            revoke(record)
            data = {"id": record.pk, "revoked_at": str(record.revoked_at)}
            self.print_result(options["json"], data, f"{record.name} is revoked.")
        else:
            self._make(options)

    def _make(self, options: dict[str, Any]) -> None:
        name = options["user"]
        user = account_named(name)
        if user is None:
            raise CommandError(f"There is no user {name!r}; manage.py createsuperuser creates one.")
        if options["days"] is not None and not 1 <= options["days"] <= MAX_DAYS:
            raise CommandError(f"--days takes 1 to {MAX_DAYS}.")
        project = project_named(options["project"])
        record, token = create_api_key(
            user, options["name"], project=project, scopes=options["scope"] or ["push"], days=options["days"]
        )
        if find_api_key(token) is None:
            self.stderr.write(
                f"{user.get_username()} has no role in this project yet; until then the token is refused."
            )
        self.print_result(options["json"], {"id": record.pk, "name": record.name, "token": token}, token)
        if not options["json"]:
            self.stderr.write(
                "The token is shown only once. Keep it where the trainer finds it, e.g. ROLLOUT_INSPECTOR_TOKEN."
            )

    def _list(self, as_json: bool) -> None:
        times = ("expires_at", "created_at", "last_used_at", "revoked_at")
        keys = [
            {
                "id": record.pk,
                "name": record.name,
                "hint": record.hint,
                "user": record.created_by.get_username(),
                "project": record.project.name,
                "scopes": record.scopes,
                **{name: at and at.isoformat() for name in times for at in [getattr(record, name)]},
            }
            for record in all_api_keys()
        ]
        self.print_result(as_json, keys, map(_line, keys) if keys else "There are no tokens.")


def _line(key: dict[str, Any]) -> str:
    used = f"last used {key['last_used_at'] or 'never'}"
    state = f"revoked {key['revoked_at']}" if key["revoked_at"] else used
    until = f", until {key['expires_at']}" if key["expires_at"] else ""
    return (
        f"{key['id']:>5}  {key['hint']}…  {line_of(str(key['name']))}  "
        f"by {key['user']} in {line_of(str(key['project']))} ({', '.join(key['scopes'])}), {state}{until}"
    )
