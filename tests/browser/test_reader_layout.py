"""Where things stand on the tokens page: the tokens first, the panel beside them, and nothing over them."""

import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from rollout_inspector.streams.trajectory import Row
from rollouts.store import models
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db(transaction=True)

FIRST_TOKEN = "() => document.querySelector('#pane .toks').getBoundingClientRect().top + scrollY"
LINES = """() => {
  const seen = new Set();
  for (const token of document.querySelectorAll("#pane .toks i")) {
    const { top, bottom } = token.getBoundingClientRect();
    if (top > 0 && bottom <= innerHeight) seen.add(Math.round(top / 4));
  }
  return seen.size;
}"""
OVERLAP = """() => {
  const panel = document.getElementById("panel").getBoundingClientRect();
  return [...document.querySelectorAll("#pane .toks i")].filter((token) => {
    const box = token.getBoundingClientRect();
    return box.right > panel.left + 1 && box.left < panel.right && box.bottom > panel.top + 1 && box.top < panel.bottom;
  }).length;
}"""


@pytest.fixture
def stored(make: Maker) -> models.StoredTrajectory:
    """A trajectory of two rows with three findings of one kind, and a second one with the kind."""
    broken, (finding,) = make.broken("b")
    later, found = make.broken("later")
    others = [replace(finding, start=at, stop=at + 2, evidence=f"At {at}.") for at in (30, 35)]
    run = make.run([broken, make.conversation("a"), later], [[*others, finding], [], found])
    return run.trajectories.get(index=0)


def long_one(make: Maker) -> models.StoredTrajectory:
    return make.run([make.conversation("long", turns=2, size=3000)]).trajectories.get()


def path(trajectory: models.StoredTrajectory, query: str = "") -> str:
    return f"/trajectories/{trajectory.code}{query}"


@pytest.mark.parametrize(("width", "height", "most"), [(1400, 900, 230), (1000, 800, 230), (400, 800, 260)])
def test_the_first_token_stands_high(open_page, stored, width, height, most):
    page = open_page(path(stored, "?row=0&w=0"), width=width, height=height)
    assert page.evaluate(FIRST_TOKEN) <= most


@pytest.mark.parametrize("width", [1400, 1000, 700, 400, 360])
def test_a_long_name_and_a_filter_keep_the_head_in_the_window(open_page, stored, width):
    name = "agent/" + "long-name-" * 19
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(external_id=name, group="g" * 90)
    page = open_page(path(stored, "?finding=unclassified&severity=error&sort=-reward&row=0&w=0"), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Share", "Export", "More"):
        box = page.locator(f".traj-moves summary:has-text('{name}')").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    title = page.locator("h1").bounding_box()
    assert title["width"] > 40 and title["height"] < 40


def test_many_lines_of_tokens_are_in_view(open_page, make):
    page = open_page(path(long_one(make), "?view=tokens"))
    page.evaluate("scrollTo(0, 0)")
    assert page.evaluate(LINES) >= 24


SHIFTS = """() => new Promise((done) => {
  let sum = 0;
  new PerformanceObserver((list) => { for (const entry of list.getEntries()) sum += entry.value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(sum), 100);
})"""


@pytest.mark.parametrize("view", ["runs", "tokens"])
def test_nothing_moves_while_the_page_is_drawn(open_page, stored, view):
    page = open_page(path(stored, f"?row=0&w=0&view={view}"))
    page.wait_for_load_state("networkidle")
    assert page.evaluate(SHIFTS) < 0.01


def test_scripts_come_in_few_requests(open_page, stored):
    page = open_page(path(stored))
    names = page.evaluate("performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname)")
    assert 0 < len([name for name in names if name.endswith(".js")]) <= 4


@pytest.mark.parametrize("side", ["right", "below"])
def test_the_panel_covers_no_token_and_keeps_its_size_and_side(open_page, make, side):
    page = open_page(path(long_one(make), "?view=tokens"))
    if side == "below":
        page.click("[data-panel-side]")
        assert page.locator("#panel").bounding_box()["width"] > 1200
    page.click("#pane i >> nth=3")
    expect(page.locator("#token-card .card-title")).to_have_text("token 3")
    if side == "right":
        assert page.evaluate(OVERLAP) == 0
    # What is chosen comes into view above a panel that lies below.
    page.keyboard.press("t")
    page.keyboard.type("900")
    page.keyboard.press("Enter")
    page.wait_for_url("**t=900**")
    page.wait_for_function("() => document.activeElement.matches('#pane i')")
    token, panel = page.locator("#pane i:focus").bounding_box(), page.locator("#panel").bounding_box()
    assert token["x"] < panel["x"] if side == "right" else token["y"] + token["height"] <= panel["y"]
    grip = page.locator(".panel-grip")
    before = int(grip.get_attribute("aria-valuenow"))
    grip.focus()
    page.keyboard.press("ArrowUp")
    expect(grip).to_have_attribute("aria-valuenow", str(before + 2))
    box = grip.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(800, 500)
    page.mouse.up()
    size = page.locator("#panel").bounding_box()["width" if side == "right" else "height"]
    again = open_page(path(models.StoredTrajectory.objects.get(), "?view=tokens"))
    expect(again.locator(".panel-grip")).to_have_attribute("aria-valuenow", grip.get_attribute("aria-valuenow"))
    assert abs(again.locator("#panel").bounding_box()["width" if side == "right" else "height"] - size) < 12
    again.evaluate("localStorage.clear()")


def test_on_a_phone_the_panel_is_a_line_of_tabs_until_it_is_asked(open_page, stored):
    page = open_page(path(stored, "?view=tokens&row=0&w=0"), width=400, height=800)
    panel = page.locator("#panel")
    assert panel.bounding_box()["height"] < 50
    expect(page.locator("#findings")).to_be_hidden()
    page.click("#tab-findings")
    expect(page.locator("#findings .finding")).to_be_visible()
    page.click("#tab-findings")
    expect(page.locator("#findings")).to_be_hidden()
    page.click("#pane i >> nth=8")
    expect(page.locator("#token-card .card-title")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#token-card")).to_be_hidden()


def test_every_lens_is_reached_on_a_narrow_window(open_page, make):
    value = make.conversation("a")
    stream = value.steps[-1].stream
    columns = {name: np.linspace(-1, 1, len(stream)).astype(np.float32) for name in ("advantages", "returns", "values")}
    row = Row(stream, np.arange(len(stream)) % 3 == 0, columns=columns)
    page = open_page(path(make.run([replace(value, rows=(row,))]).trajectories.get()), width=360, height=640)
    page.click(".lens-menu summary")
    for link in page.locator("a[data-lens-choice]").all():
        link.scroll_into_view_if_needed()
        box = link.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 640
    page.keyboard.press("Escape")
    expect(page.locator(".lens-menu")).not_to_have_attribute("open", "")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_equal_findings_share_a_card_whose_place_in_the_run_is_told(open_page, stored):
    page = open_page(path(stored))
    cards = page.locator("#findings .finding")
    expect(cards).to_have_count(1)
    expect(cards.locator(".finding-same summary")).to_have_text("3 of these")
    expect(cards.locator(".finding-jump")).to_have_count(3)
    expect(cards.locator(".in-run")).to_contain_text("2 of 3 trajectories in this run")
    for number in (2, 3, 1):  # the page opens at the first
        page.keyboard.press("n")
        expect(page.locator("#pane-status")).to_have_text(f"finding {number} of 3")
    page.click("[data-copy-markdown]")
    expect(page.locator("#pane-status")).to_have_text("finding copied as Markdown")
    text = page.evaluate("navigator.clipboard.readText()")
    for part in ("`unclassified`", stored.run.code, "Remedy: Extend by ids.", "](http://localhost"):
        assert part in text, text
    page.click(".in-run-next")
    page.wait_for_url("**finding=unclassified**")
    page.wait_for_selector("h1:has-text('later')")


def test_split_view_shows_what_was_sampled_beside_what_is_trained(open_page, make):
    value = make.conversation("a", turns=6, size=200)
    stream = value.steps[-1].stream.copy()
    at = len(value.steps[-1].prompt_ids) + 2
    stream[at] += 1
    row = Row(stream, np.arange(len(stream)) >= at, step_indices=tuple(range(len(value.steps))))
    page = open_page(path(make.run([replace(value, rows=(row,))]).trajectories.get(), "?row=0&w=0"))
    page.keyboard.press("d")
    expect(page.locator("#split .side-by-side")).to_be_visible()
    expect(page.locator("#split tr.site").first).to_be_in_viewport()
    expect(page.locator("#pane")).to_be_hidden()
    page.keyboard.press("n")
    expect(page.locator("#pane-status")).to_have_text(re.compile("^difference 1 of "))
    page.locator("#split tr.fold a >> nth=0").click()
    page.wait_for_function("() => document.querySelector('#split').dataset.at.includes('open=')")
    page.keyboard.press("Escape")
    expect(page.locator("#pane")).to_be_visible()
    expect(page.locator("#split")).to_have_count(0)
    page.reload()
    page.keyboard.press("d")
    expect(page.locator("#split .side-by-side")).to_be_visible()


def answer_nothing(route: Any) -> None:
    route.abort("connectionrefused")


def busy(route: Any) -> None:
    route.fulfill(status=503, headers={"Retry-After": "1"}, body="busy")


@pytest.mark.parametrize("away", [answer_nothing, busy])
def test_a_server_that_is_away_for_a_moment_loses_no_place(open_page, make, away):
    stored = make.run([make.conversation("long", turns=2, size=5000)]).trajectories.get()
    page = open_page(path(stored, "?view=tokens"), is_away=True)
    is_away = threading.Event()
    page.route("**/trajectories/**", lambda route: away(route) if is_away.is_set() else route.continue_())
    page.reload()  # so every later request goes through the route
    page.evaluate("window.kept = true")
    is_away.set()
    page.keyboard.press("]")
    line = page.locator("#away")
    expect(line).to_have_text("The server is not reachable. Trying again.")
    expect(page.locator("#pane[data-a='0']")).to_have_count(1)
    is_away.clear()
    page.wait_for_selector("#pane[data-a='4096']")
    expect(line).to_have_count(0)
    assert page.evaluate("window.kept") is True


def test_a_live_page_keeps_what_is_open_in_the_panel_and_what_is_typed(open_page, stored):
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(status="running")
    page = open_page(path(stored, "?row=0&w=0"), width=800)
    page.evaluate("window.swaps = 0; document.addEventListener('htmx:afterSettle', () => { window.swaps += 1; })")
    page.click("#tab-comments")
    page.click(".comment-new summary")
    page.fill("#comment-text", "Is it")
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(n_tokens=7)
    page.wait_for_timeout(2500)
    expect(page.locator("#comment-text")).to_have_value("Is it")
    assert page.evaluate("window.swaps") == 0
    page.keyboard.press("Escape")
    page.wait_for_function("() => window.swaps > 0")
    expect(page.locator("#tab-comments")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#comments")).to_be_visible()
    page.click("#tab-comments")
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(n_tokens=8)
    page.wait_for_function("() => window.swaps > 1")
    expect(page.locator("#comments")).to_be_hidden()


def test_a_live_page_says_that_the_server_is_away_and_goes_on(open_page, stored):
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(status="running")
    page = open_page(path(stored, "?row=0&w=0"), is_away=True)
    page.route("**/trajectories/**", busy)
    expect(page.locator("#away")).to_be_visible()
    page.unroute("**/trajectories/**")
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(status="done", stop_reason="answered", n_tokens=1)
    page.locator(".properties:has-text('answered')").wait_for()
    expect(page.locator("#away")).to_have_count(0)
