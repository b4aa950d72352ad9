"""The reader in Chromium: another window, another lens, find, and first paint beside a page with a span per token.

Prints figures of one run; asserts no time. Times in the browser end after the frame that shows the change. The server
of the tests answers in the same process, so what it takes is measured apart, without a browser.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from rollouts import selectors, services
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
  const answered = performance.getEntriesByType("navigation")[0].responseStart;
  window.painted = [first - answered, performance.now() - answered];
})));"""
LOADED = (
    "async () => { while (!window.painted) await new Promise((done) => setTimeout(done, 20)); return window.painted; }"
)


def milliseconds(work: Callable[[], object]) -> float:
    """The median of some calls, after one that fills caches."""
    work()
    spent = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        spent.append((time.perf_counter() - began) * 1000)
    return median(spent)


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
    asked = {"HX-Request": "true", "HX-Target": "reader"}
    for n, row in rows.items():
        page = reverse("trajectory", args=[row.code])
        place = f"?view=tokens&w={n // 2 // 4096 * 4096}"
        window, card = client.get(page + place, headers=asked), client.get(f"{page}/card.json{place}")
        took = milliseconds(lambda page=page, place=place: client.get(page + place, headers=asked))
        weight = f"{len(window.content) / 1000:.1f} kB, cards {len(card.content) / 1000:.1f} kB"
        print(f"\n{n:,} tokens: a window {took:.0f} ms, {weight}")
        for words in ("TokenPainter", "no such words", "e"):
            took = milliseconds(lambda page=page, words=words: client.get(f"{page}/find.json?row=0&q={words}"))
            found = plain.get(f"{page}/find.json?row=0&q={words}").json()["n"]
            print(f"  find {words!r}: {took:.0f} ms, {found:,} places")


def test_windows_and_lenses(rows: dict[int, Any], open_page: Any) -> None:  # noqa: F811
    for n, row in rows.items():
        page = open_page(f"/trajectories/{row.code}?view=tokens&w=8192")
        page.wait_for_load_state("networkidle")
        swaps = []
        for _ in range(ROUNDS):
            swaps.append(page.evaluate(SWAP))
            page.wait_for_load_state("networkidle")
        whole, browser_part = (median(one[i] for one in swaps) for i in (0, 1))
        print(f"\n{n:,} tokens: another window {whole:.0f} ms, of it in the browser {browser_part:.0f} ms")
        print(f"  lens in the token view {lens_switch(page):.0f} ms")
        page = open_page(f"/trajectories/{row.code}?view=runs")
        page.wait_for_load_state("networkidle")
        print(f"  lens in the run view {lens_switch(page):.0f} ms")


def lens_switch(page: Any) -> float:
    return median(page.evaluate(LENS, ("origin", "mask")[i % 2]) for i in range(2 * ROUNDS))


def test_first_paint_beside_a_span_per_token(rows: dict[int, Any], open_page: Any, live_server: Any) -> None:  # noqa: F811
    row = rows[300_000]
    window = selectors.row_window(row, 0, 0, 300_000)
    table = services.byte_table(row.run.tokenizer.files_sha256)
    columns = (window.ids.tolist(), window.origin.tolist(), window.loss_mask.tolist(), table.token_bytes(window.ids))
    spans = []
    for i, (token_id, origin, trained, piece) in enumerate(zip(*columns, strict=True)):
        text = html.escape(piece.decode("utf-8", "replace"))
        spans.append(f'<span class="o{origin}{" m" * trained}" data-i="{i}" title="{token_id}">{text}</span>')
    style = ".toks { white-space: pre-wrap } .m { background: #d3e4ff }"
    body = f"<!doctype html><meta charset=utf-8><style>{style}</style><div class=toks>{''.join(spans)}</div>"
    ours, theirs = [], []
    for _ in range(3):
        page = open_page("/help")
        page.add_init_script(WATCH)
        page.goto(f"{live_server.url}/trajectories/{row.code}?view=runs")
        ours.append(page.evaluate(LOADED))
        page.route("**/span-per-token", lambda route: route.fulfill(body=body, content_type="text/html"))
        page.goto(f"{live_server.url}/span-per-token")
        theirs.append(page.evaluate(LOADED))
        page.close()
    for name, i in (("first contentful paint", 0), ("whole page painted", 1)):
        mine, other = median(one[i] for one in ours), median(one[i] for one in theirs)
        print(f"\n{name} of 300,000 tokens: {mine:.0f} ms, with a span per token {other:.0f} ms: {other / mine:.0f}x")
