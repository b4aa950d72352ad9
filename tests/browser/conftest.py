"""A real Chromium on the live server, logged in. A test that leaves an error in the browser's console fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore

from rollouts.store.models import Membership, Role, default_project
from tests.web.trajectory_samples import Maker

PATIENCE_MS = 30_000
"""How long a page may take to show what a test waits for: a slow machine under load must pass too."""


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def contexts(browser: Any) -> Callable[..., Any]:
    """`contexts(**options)` gives the one context with these options. Each test closes its pages and clears cookies.

    A context of its own is a window of its own, and costs Chromium a second of processor time.
    """
    known: dict[str, Any] = {}

    def get(**options: Any) -> Any:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = browser.new_context(**options)
            known[key].new_page()  # it keeps the window open: the pages of the tests are tabs beside it
        return known[key]

    return get


# What htmx writes as errors when a page is left before its answer came. A request that fails writes sendError or
# responseError beside them.
LEFT_PAGE = ("htmx:afterRequest,", "htmx:sendAbort,")


def is_complaint(message: Any) -> bool:
    return message.type == "error" and not message.text.startswith(LEFT_PAGE)


@pytest.fixture
def open_page(contexts: Any, live_server: Any, django_user_model: Any, settings: Any) -> Iterator[Callable[..., Any]]:
    """`open_page("/path")` gives a page that has loaded; `javascript=False` and `color_scheme` are the context's."""
    user, _ = django_user_model.objects.get_or_create(username="reader")
    Membership.objects.get_or_create(user=user, project_id=default_project(), defaults={"role": Role.ADMIN})
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save()
    opened: list[Any] = []
    complaints: list[str] = []

    def start(
        path: str, javascript: bool = True, width: int = 1400, height: int = 900, is_away: bool = False, **options: Any
    ) -> Any:
        """``is_away``: the test takes the server away for a moment, which the browser's console then says."""
        context = contexts(java_script_enabled=javascript, viewport={"width": width, "height": height}, **options)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=live_server.url)
        context.add_cookies(
            [{"name": settings.SESSION_COOKIE_NAME, "value": session.session_key, "url": live_server.url}]
        )
        page = context.new_page()
        opened.append(page)
        if not is_away:
            page.on("console", lambda message: complaints.append(message.text) if is_complaint(message) else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.set_default_timeout(PATIENCE_MS)
        page.goto(live_server.url + path)
        return page

    yield start
    for page in opened:
        page.context.clear_cookies()
        for one in page.context.pages[1:]:
            one.close()
    assert complaints == []


@pytest.fixture
def make(transactional_db: None, tiny_tokenizer: Path) -> Maker:
    return Maker(tiny_tokenizer)
