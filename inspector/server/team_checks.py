"""What team mode needs before it may serve other machines. A server that lacks it does not start."""

import os
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from inspector.server.paths import LOCAL_HOSTS
from rollout_inspector.refusal import Refusal

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


class UnsafeTeamServer(Refusal):
    """A server of team mode on a public address that lacks settings; its text names each of them."""


def flaw(sentence: str, way_out: str | None, number: str) -> CheckMessage:
    """What a check of settings says. ``number``: it begins with E for an error, with W for a warning."""
    return (Error if number[0] == "E" else Warning)(sentence, hint=way_out, id=f"inspector.{number}")


def is_public(host: str = "127.0.0.1") -> bool:
    """Whether other machines may ask: the server listens for them, or answers to a name that is not this machine's."""
    return host not in LOOPBACK or bool(set(settings.ALLOWED_HOSTS) - LOCAL_HOSTS)


def team_errors(host: str = "127.0.0.1") -> list[CheckMessage]:
    """What a server in team mode lacks that listens on ``host``; empty for one that serves this machine alone."""
    if not settings.TEAM_MODE or not is_public(host):
        return []
    errors: list[CheckMessage] = []
    if not os.environ.get("SECRET_KEY", "").strip():
        errors.append(flaw("INSPECTOR_TEAM is on and other machines may ask, but SECRET_KEY is not set.",
                           "Set SECRET_KEY to a random text of 50 characters, the same on every web server.", "E020"))
    names = [name for name in settings.ALLOWED_HOSTS if name not in LOCAL_HOSTS]
    if not names or "*" in names:
        errors.append(flaw(
            "INSPECTOR_TEAM is on and other machines may ask, but ALLOWED_HOSTS does not name this server.",
            "Set ALLOWED_HOSTS to the names that people type into the browser, such as inspector.example; not *.",
            "E021",
        ))
    if not settings.HTTPS:
        errors.append(flaw(
            "INSPECTOR_TEAM is on and other machines may ask, but INSPECTOR_HTTPS is off: passwords would be readable.",
            "Put a proxy that speaks HTTPS in front, and set INSPECTOR_HTTPS=1.", "E022",
        ))
    origins = [urlsplit(origin) for origin in settings.CSRF_TRUSTED_ORIGINS]
    if not any(allowed_origin.scheme == "https" and allowed_origin.hostname for allowed_origin in origins):
        errors.append(flaw(
            "INSPECTOR_TEAM is on and other machines may ask, but CSRF_TRUSTED_ORIGINS names no https address.",
            "Set CSRF_TRUSTED_ORIGINS to the address in the browser, such as https://inspector.example.", "E023",
        ))
    return errors


def refuse_unsafe_team(host: str = "127.0.0.1") -> None:
    """Raise ``UnsafeTeamServer`` when a server that listens on ``host`` must not start."""
    if errors := team_errors(host):
        sentences = [f"{error.msg} {error.hint} ({error.id})" for error in errors]
        raise UnsafeTeamServer("\n".join(["The server does not start.", *sentences]))


@register()
def check_team(**_: Any) -> Iterable[CheckMessage]:
    """Team mode on a public address has what it needs; local mode is on this machine alone."""
    yield from team_errors()
    if not settings.TEAM_MODE and is_public():
        yield flaw(
            "Other machines may ask this server (ALLOWED_HOSTS), but it runs in local mode.",
            "Set INSPECTOR_TEAM=1: the server then checks that it is safe for that, and no login link is printed.",
            "W020",
        )


@register()
def check_provider(**_: Any) -> Iterable[CheckMessage]:
    """The settings of the sign-in through a provider belong together."""
    if not settings.OIDC_ISSUER:
        return
    if not settings.OIDC_CLIENT_ID:
        yield flaw("INSPECTOR_OIDC_ISSUER is set, but INSPECTOR_OIDC_CLIENT_ID is not.",
                   "Register this server at the provider, and set the id that it assigns.", "E024")
    address = urlsplit(settings.OIDC_ISSUER)
    if address.scheme != "https" and not (address.scheme == "http" and address.hostname in LOOPBACK):
        yield flaw("INSPECTOR_OIDC_ISSUER is no https address: whoever is in between could sign in as anybody.",
                   "Write the issuer as the provider does, such as https://login.example/realms/lab.", "E025")
