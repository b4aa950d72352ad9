"""Every address, for a member, a visitor of a share link and a stranger: headers, no 500, and no path of the server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Run
from rollouts.store.people.accounts import local_user
from rollouts.store.people.shares import create_share
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


def routes(patterns: Any = None, before: str = "") -> Iterator[str]:
    """Every address of the program with its placeholders."""
    for one in get_resolver().url_patterns if patterns is None else patterns:
        if isinstance(one, URLResolver):
            yield from routes(one.url_patterns, before + str(one.pattern))
        elif isinstance(one, URLPattern):
            yield before + str(one.pattern)


@pytest.fixture
def places(tiny_tokenizer: Path) -> tuple[Run, dict[str, str]]:
    """A run with everything, and the code to fill in for each beginning of an address."""
    make = Maker(tiny_tokenizer)
    trajectory, (finding,) = make.broken("x")
    run = make.run([trajectory], [[finding]])
    template = register_chat_template("{{ messages }}")
    job = ask_job(run, "export", {"format": "own_jsonl"}, None)[0]
    check, _ = template_checks.ask(run.tokenizer, template, None, None, local_user(), None, False)
    return run, {
        "runs": run.code,
        "trajectories": run.trajectories.get().code,
        "templates": check.code,
        "jobs": job.code,
    }


def filled(route: str, codes: dict[str, str]) -> str:
    code = codes.get(route.partition("/")[0], "z" * 12)
    for placeholder, value in (
        ("<code:code>", code), ("<int:number>", "1"), ("<int:pk>", "1"), ("<str:kind>", "jinja"), ("<str:token>", "x"),
    ):
        route = route.replace(placeholder, value)
    return "/" + route


def test_every_address_answers_privately_and_names_no_path(
    places: tuple[Run, dict[str, str]], admin_client: Client, settings: Any
) -> None:
    run, codes = places
    _, token = create_share(local_user(), run, query="", note="", days=1)
    visitor = Client()
    visitor.get(f"/s/{token}")
    addresses = sorted({filled(route, codes) for route in routes()})
    assert len(addresses) > 60
    hidden = [str(settings.INSPECTOR_DATA), str(settings.BASE_DIR)]
    for client in (admin_client, visitor, Client()):
        for address in addresses:
            answer = client.get(address)
            assert answer.status_code < 500 or address.startswith("/health"), address
            assert answer["X-Robots-Tag"] == "noindex, nofollow", address
            cached = set(answer.get("Cache-Control", "").split(", "))
            assert cached & {"private", "no-store"} and "public" not in cached, (address, cached)
            assert answer["Referrer-Policy"] in ("same-origin", "no-referrer"), address
            assert answer["X-Content-Type-Options"] == "nosniff" and answer["X-Frame-Options"] == "DENY", address
            assert "default-src 'none'" in answer["Content-Security-Policy"], address
            body = b"".join(answer) if answer.streaming else answer.content
            assert not [path for path in hidden if path.encode() in body], address


def test_a_stranger_learns_nothing_from_any_address(places: tuple[Run, dict[str, str]]) -> None:
    run, codes = places
    # Metrics are open to this machine alone; the schema of the API and the docs say nothing of what is stored.
    opened = {
        "/api/v1/openapi.json",
        "/docs",
        "/docs.json",
        "/docs/",
        "/help",
        "/help/findings",
        "/help/findings.json",
        "/health",
        "/login",
        "/metrics",
        "/robots.txt",
        "/s/x",
    }
    for route in routes():
        known, unknown = filled(route, codes), filled(route, {})
        answers = [Client().get(address) for address in (known, unknown)]
        assert answers[0].status_code == answers[1].status_code, known
        if answers[0].status_code == 200:
            assert known in opened, known
        assert run.name not in answers[0].content.decode(errors="replace") or known in opened, known


def test_a_number_that_no_database_takes_is_not_found(places: tuple[Run, dict[str, str]], admin_client: Client) -> None:
    _, codes = places
    for number in ("0", "2", "9" * 25, "9" * 4000, "9" * 5000):
        assert admin_client.get(f"/trajectories/{codes['trajectories']}/findings/{number}.py").status_code == 404
        for noun in ("shares", "tokens"):
            assert admin_client.post(f"/{noun}/{number}/revoke").status_code == 404
