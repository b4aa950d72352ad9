"""From an empty install to the faulty token of every case of the gallery: at most four actions, keys and visible text.

An action is the press of something that has a name on the screen and is reached by the tab key. Nothing is known of a
page but that it marks tokens: a fault is seen when a marked token lies inside the window and nothing lies over it.
"""

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import TimeoutError, expect

from rollouts.store.models import Run

pytestmark = pytest.mark.django_db(transaction=True)

MOST = 4
NAME = "() => document.activeElement.innerText?.trim() ?? ''"
IN_TAB_ORDER = "link => link.tabIndex === 0 || !!link.closest('nav')?.querySelector('[tabindex=\"0\"]')"
MARKED = ".toks :is(.f, .fi, .k, .w, .gap, del, ins)"
SEES_FAULT = """marked => [...document.querySelectorAll(marked)].some(token =>
  [...token.getClientRects()].some(box => {
    if (!box.width || box.top < 0 || box.bottom > innerHeight) return false;
    const on_top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    return on_top && (token === on_top || token.contains(on_top) || on_top.contains(token));
  }))"""


def tab_to(page: Any, name: str) -> None:
    """Press the tab key until what has the focus is called ``name``."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(NAME) == name:
            return
    raise AssertionError(f"the tab key reaches nothing called “{name}” on {page.url}")


def tab_stops(page: Any) -> dict[str, str]:
    """Name and address of the links that the tab key reaches."""
    stops = {}
    for _ in range(400):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement === document.body"):
            return stops
        stops.setdefault(page.evaluate(NAME), page.evaluate("() => document.activeElement.href"))
    raise AssertionError("the tab key never leaves the page")


def press(page: Any, name: str) -> None:
    """Press the link with a name, which the tab key reaches; in a row of tabs it reaches one, and arrows the others."""
    link = page.locator("main").get_by_role("link", name=name, exact=True).first
    expect(link).to_be_visible()
    assert link.evaluate(IN_TAB_ORDER)
    link.focus()
    with page.expect_navigation():
        page.keyboard.press("Enter")


def sees_fault(page: Any, title: str) -> bool:
    """Marked tokens, or on the conversation the message that the fault is about."""
    page.wait_for_load_state()
    if page.url.partition("?")[0].endswith("/record"):
        return bool(page.locator("main").get_by_text(title).first.is_visible())
    try:
        page.wait_for_function(SEES_FAULT, arg=MARKED, timeout=1500)
    except TimeoutError:
        return False
    return True


def test_every_faulty_token_is_seen_after_four_actions_at_most(open_page: Callable[..., Any]) -> None:
    page = open_page("/")
    tab_to(page, "See what breaks")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    titles = [entry["title"] for entry in page.request.get(page.url + ".json").json()["entries"]]
    stops = tab_stops(page)
    assert set(titles) <= set(stops) and Run.objects.get().n_trajectories > len(titles) > 50
    too_far = {}
    for title in titles:
        page.goto(stops[title])
        actions = ["See what breaks", title]
        while not (is_seen := sees_fault(page, title)) and len(actions) < MOST:
            actions.append("Conversation")
            press(page, "Conversation")
        if not is_seen:
            too_far[title] = actions
    assert too_far == {}
