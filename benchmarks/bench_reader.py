"""The reader in Chromium: another window, another lens, find, and first paint beside a page with a span per token.

Prints figures of one run; asserts no time. Times in the browser end after the frame that shows the change. The server
of the tests answers in the same process, so what it takes is measured apart, without a browser. Processor time is that
of one thread: of the server's, or of the page's in Chromium. Other programs change it less than the time of the clock.

The page with a span per token is written by a Django template on the same server, from the same row.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.template import engines
from django.test import Client
from django.urls import path, reverse

from inspector.urls import urlpatterns as pages
from rollouts.store.chat_templates.tokenizers import byte_table
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories.rows import row_window
from tests.browser.conftest import browser, contexts, open_page  # noqa: F401
from tests.people import make_member
from tests.web.long_rows import long_trajectory
from tests.web.trajectory_samples import Maker

pytestmark = [pytest.mark.bench, pytest.mark.sqlite_only, pytest.mark.django_db(transaction=True)]

ROUNDS = 7
PAINTED = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
SWAP = f"""async () => {{
  const began = performance.now();
  const before = document.getElementById("pane");
  document.querySelector("[data-go=next]").click();
  while (document.getElementById("pane") === before) await new Promise((done) => setTimeout(done));
  const shown = await {PAINTED};
  const asked = performance.getEntriesByType("resource").filter((entry) => entry.name.includes("w=")
    && !entry.name.includes("card.json")).at(-1);
  return [shown - began, shown - asked.responseEnd];
}}"""
LENS = f"""async (lens) => {{
  const began = performance.now();
  document.querySelector(`a[data-lens-choice=${{lens}}]`).click();
  return await {PAINTED} - began;
}}"""
WATCH = """addEventListener("load", () => requestAnimationFrame(() => setTimeout(() => {
  const first = performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? performance.now();
  const page = performance.getEntriesByType("navigation")[0];
  window.painted = [first - page.requestStart, first - page.responseStart, performance.now() - page.responseStart];
})));"""
LOADED = (
    "async () => { while (!window.painted) await new Promise((done) => setTimeout(done, 20)); return window.painted; }"
)
TIMES = (
    "from the request to the first contentful paint",
    "from the first byte to the first contentful paint",
    "from the first byte to the whole page painted",
)
SPANS = engines["django"].from_string(
    "{% load static %}<!doctype html><meta charset=utf-8><link rel=icon href=\"{% static 'favicon.svg' %}\">"
    "<pre>{% for id, origin, trained, text in tokens %}"
    '<span class="o{{ origin }}{% if trained %} m{% endif %}" data-i="{{ forloop.counter0 }}" title="{{ id }}">'
    "{{ text }}</span>{% endfor %}</pre>"
)


def span_per_token(request: HttpRequest, code: str) -> HttpResponse:
    """A whole row with an element per token, as a template loop writes it."""
    row = StoredTrajectory.objects.select_related("run__tokenizer").get(code=code)
    window = row_window(row, 0, 0, row.n_tokens)
    pieces = byte_table(row.run.tokenizer.files_sha256).token_bytes(window.ids)
    texts = [piece.decode("utf-8", "replace") for piece in pieces]
    columns = (window.ids.tolist(), window.origin.tolist(), window.loss_mask.tolist(), texts)
    return HttpResponse(SPANS.render({"tokens": zip(*columns, strict=True)}))


urlpatterns = [*pages, path("span-per-token/<str:code>", span_per_token)]


def milliseconds(work: Callable[[], object]) -> str:
    """The median time of some calls, and of the processor, after one call that fills caches."""
    work()
    spent = []
    for _ in range(ROUNDS):
        began = time.perf_counter(), time.thread_time()
        work()
        spent.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
    clock, processor = (median(1000 * one[i] for one in spent) for i in (0, 1))
    return f"{clock:.0f} ms (processor {processor:.0f})"


@pytest.fixture
def rows(transactional_db: None, corpus: Path) -> dict[int, Any]:
    """Length -> a trajectory of that many tokens, of a real tokenizer."""
    make = Maker(corpus / "tokenizers" / "qwen3")
    return {n: make.run([long_trajectory(make.ids, n)]).trajectories.get() for n in (300_000, 1_000_000)}


def test_the_server(rows: dict[int, Any]) -> None:
    client = Client(headers={"Accept-Encoding": "gzip"})
    client.force_login(member := make_member("bench"))
    plain = Client()
    plain.force_login(member)
    asked = {"HX-Request": "true", "HX-Target": "window"}
    for n, row in rows.items():
        page = reverse("trajectory", args=[row.code])
        place = f"?view=tokens&w={n // 2 // 4096 * 4096}"
        window, card = client.get(page + place, headers=asked), client.get(f"{page}/card.json{place}")
        took = milliseconds(lambda page=page, place=place: client.get(page + place, headers=asked))
        weight = f"{len(window.content) / 1000:.1f} kB, cards {len(card.content) / 1000:.1f} kB"
        print(f"\n{n:,} tokens: a window {took}, {weight}")
        for words in ("Valkey", "no such words", "e"):
            took = milliseconds(lambda page=page, words=words: client.get(f"{page}/find.json?row=0&q={words}"))
            found = plain.get(f"{page}/find.json?row=0&q={words}").json()["n"]
            print(f"  find {words!r}: {took}, {found:,} places")


def test_windows_and_lenses(rows: dict[int, Any], open_page: Any) -> None:  # noqa: F811
    for n, row in rows.items():
        page = open_page(f"/trajectories/{row.code}?view=tokens&w=8192")
        page.wait_for_load_state("networkidle")
        figures = page.context.new_cdp_session(page)
        figures.send("Performance.enable", {"timeDomain": "threadTicks"})
        swaps = []
        for _ in range(ROUNDS):
            before = processor_time(figures)
            swaps.append([*page.evaluate(SWAP), processor_time(figures) - before])
            page.wait_for_load_state("networkidle")
        whole, browser_part, busy = (median(one[i] for one in swaps[1:]) for i in (0, 1, 2))
        print(
            f"\n{n:,} tokens: another window {whole:.0f} ms, of it in the browser {browser_part:.0f} ms "
            f"(least {min(one[1] for one in swaps):.0f}, processor {busy:.0f})"
        )
        print(f"  lens in the token view {lens_switch(page):.0f} ms")
        page = open_page(f"/trajectories/{row.code}?view=runs")
        page.wait_for_load_state("networkidle")
        print(f"  lens in the run view {lens_switch(page):.0f} ms")


def processor_time(figures: Any) -> float:
    """Milliseconds that the thread of the page has computed."""
    found = figures.send("Performance.getMetrics")["metrics"]
    return next(1000 * one["value"] for one in found if one["name"] == "TaskDuration")


def lens_switch(page: Any) -> float:
    return median(page.evaluate(LENS, ("origin", "mask")[i % 2]) for i in range(2 * ROUNDS))


def test_first_paint_beside_a_span_per_token(
    rows: dict[int, Any],
    open_page: Any,  # noqa: F811
    live_server: Any,
    settings: Any,
) -> None:
    settings.ROOT_URLCONF = __name__
    row = rows[300_000]
    ours, theirs = [], []
    for n in range(3):
        # The number makes each address new, so that no page comes from the browser's cache.
        for found, address in (
            (ours, f"trajectories/{row.code}?view=runs&n={n}"),
            (theirs, f"span-per-token/{row.code}"),
        ):
            page = open_page("/help")
            page.set_default_timeout(120_000)
            page.add_init_script(WATCH)
            page.goto(f"{live_server.url}/{address}")
            found.append(page.evaluate(LOADED))
            page.close()
    for i, name in enumerate(TIMES):
        took, other = (median(one[i] for one in found) for found in (ours, theirs))
        print(f"\n{name}, 300,000 tokens: {took:.0f} ms, with a span per token {other:.0f} ms: {other / took:.1f}x")
