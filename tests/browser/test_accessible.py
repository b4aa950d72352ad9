"""axe-core looks at every page of the site, light and dark, and at what opens on them: no violation of any impact.

The pages are those of the table of addresses, so that a new page is looked at without a line here. They are drawn by
Django's test client in this process and handed to the browser at its door: no server runs, no network is asked.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.contrib.staticfiles import finders
from django.db import connections
from django.test import Client

from rollouts.jobs import gallery
from rollouts.store.models import StepTokens, StoredStep
from tests.samples.places import Places, page_of, routes
from tests.web.access_table import ROWS

pytestmark = pytest.mark.django_db

SITE = "http://inspector.test"
WRONG = '<input><p style="color: #999; background: #fff">hard to read</p>'
IN_ALL, IN_DARK = {"resultTypes": ["violations"]}, {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}


SETTLED = """async () => {
  for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
  const late = new Promise(go => setTimeout(go, 500));
  await Promise.race([late, Promise.allSettled(document.getAnimations().map(one => one.finished))]);
}"""
"""The colours of a scheme stand when scripts have heard of it and transitions have ended."""


CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


@pytest.fixture(scope="module")
def client(places: Places, django_db_blocker: Any) -> Iterator[Client]:
    """An admin of the server, who sees every page."""
    with django_db_blocker.unblock():
        yield places.people["server"]


@pytest.fixture(scope="module")
def page(client: Client, browser: Any) -> Iterator[Any]:
    """A browser page whose every request is answered by Django's test client or by a file of ``static/``."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, bypass_csp=True)
    ours = connections["default"]
    ours.inc_thread_sharing()
    # A thread, because Django keeps another connection inside the loop of the browser's driver.
    thread = ThreadPoolExecutor(1, initializer=lambda: connections.__setitem__("default", ours))

    def answer(route: Any) -> None:
        url = urlsplit(route.request.url)
        if url.path.startswith("/static/"):
            route.fulfill(path=finders.find(url.path.removeprefix("/static/")))
            return
        address = url.path + ("?" + url.query if url.query else "")
        found = thread.submit(client.get, address, headers=route.request.headers).result()
        assert found.status_code != 302 or "/login" not in found["location"]
        headers = {name: value for name, value in found.items() if name != "Content-Disposition"}  # a file is shown too
        route.fulfill(status=found.status_code, headers=headers, body=found.content)

    context.route("**/*", answer)
    yield context.new_page()
    context.close()
    thread.shutdown()
    ours.dec_thread_sharing()


def violations(page: Any, what: str) -> list[str]:
    """What axe says of the page as it stands, in light, and of its colours in dark."""
    said = []
    for scheme, options in (("light", IN_ALL), ("dark", IN_DARK)):
        page.emulate_media(color_scheme=scheme)
        page.evaluate(SETTLED)
        found = page.evaluate("options => axe.run(options)", options)
        said += [
            f"{what}, {scheme}: {one['id']} ({one['impact']}) at {node['target']}: {node['failureSummary'][:200]}"
            for one in found["violations"]
            for node in one["nodes"][:3]
        ]
    return said


def addresses(places: Places) -> Iterator[str]:
    """Every address of the table that is read."""
    for route in routes():
        if page_of(route) == route:
            for row in ROWS[route]:
                if row.verb == "GET":
                    yield places.url(route) + ("?" + places.fill(row.query) if row.query else "")


def look(page: Any, address: str) -> list[str]:
    """What axe says of a page with every fold open: what a closed fold shows is still there then."""
    page.goto(SITE + address)
    if page.locator("#api-operations").count():  # a script of a library draws it
        page.locator(".opblock-tag >> nth=5").wait_for()
    page.evaluate(AXE_SCRIPT)
    page.evaluate("() => document.querySelectorAll('details').forEach(one => { one.open = true; })")
    return violations(page, address)


def test_no_page_has_a_violation(page: Any, client: Client, places: Places) -> None:
    said, seen = [], 0
    for address in addresses(places):
        found = client.get(address)
        if found.get("content-type", "").startswith("text/html") and "location" not in found:
            seen += 1
            said += look(page, address)
    assert seen > 40
    assert not said, "\n".join(said)


def test_no_fault_of_the_gallery_is_shown_with_a_violation(page: Any, client: Client) -> None:
    run = gallery.load()
    said = look(page, f"/runs/{run.code}")
    codes = list(run.trajectories.order_by("index").values_list("code", flat=True))
    for code in codes[::8]:
        said += look(page, f"/trajectories/{code}")
    for rest in ("/compare", "/mask", "?view=tokens&lens=logprob"):
        said += look(page, f"/trajectories/{codes[0]}{rest}")
    assert not said, "\n".join(said)


def test_what_opens_on_a_page_has_no_violation(page: Any, client: Client) -> None:
    code = gallery.load().trajectories.order_by("index").first().code
    step = StoredStep.objects.select_related("tokens").get(trajectory__code=code, index=0)
    ids, logprobs = np.repeat(step.tokens.completion_ids, 2), np.tile([-0.5, -1.5], step.completion_length)
    StepTokens.objects.filter(pk=step.pk).update(alternative_ids=ids, alternative_logprobs=logprobs)
    StoredStep.objects.filter(pk=step.pk).update(n_alternatives=2)
    page.goto(f"{SITE}/trajectories/{code}?view=tokens")
    page.evaluate(AXE_SCRIPT)
    page.keyboard.press("?")
    page.locator("#keys").wait_for()
    said = violations(page, "the sheet of keys")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.locator("#go-list a").first.wait_for()
    said += violations(page, "the dialog Go to")
    page.keyboard.press("Escape")
    page.click("#pane i.o1 >> nth=1")
    page.locator("#token-card table").wait_for()
    said += violations(page, "the card of a token")
    assert not said, "\n".join(said)


def test_glyphs_lines_and_bars_are_seen_on_every_ground(page: Any, client: Client) -> None:
    """axe judges text alone. The pane gets a token of each class under each lens, in the page's own style sheets."""
    code = gallery.load().trajectories.order_by("index").first().code
    page.goto(f"{SITE}/trajectories/{code}?view=tokens")
    page.locator("#pane i b.n").first.wait_for()  # the pane draws glyphs as the tokens of this test do
    for name in ("pages", "check"):
        page.add_style_tag(url=f"/static/css/{name}.css")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.evaluate(SETTLED)
        seen = page.evaluate(CONTRAST)
        assert seen["count"] > 1500 and not seen["found"], f"{scheme}: " + "; ".join(seen["found"][:20])
    page.add_style_tag(content=".toks b::before { opacity: 0.2 !important }")
    assert page.evaluate(CONTRAST)["found"]


def test_a_violation_is_found(page: Any, client: Client) -> None:
    page.goto(f"{SITE}/help")
    page.evaluate(AXE_SCRIPT)
    page.evaluate("main => document.querySelector('main').insertAdjacentHTML('beforeend', main)", WRONG)
    assert {one.split(": ")[1].split()[0] for one in violations(page, "help")} >= {"label", "color-contrast"}
