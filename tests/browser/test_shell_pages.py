"""The shell in a real browser: theme, keys, live runs, dropping files, sharing, narrow windows, no JavaScript."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from rollouts.store.models import Run, ShareLink
from rollouts.store.people.shares import revoke
from rollouts.store.runs.runs import create_run, end_run, start_run
from tests.web.samples import HOSTILE, stored_run

pytestmark = pytest.mark.django_db(transaction=True)
Open = Callable[..., Any]


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (700, "dark"), (360, "light")])
def test_no_page_is_wider_than_its_window(open_page: Open, width: int, scheme: str) -> None:
    page = open_page("/", width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the first page, without a run"
    run = stored_run(12, f"{HOSTILE} {'long' * 30}", model="a-very-long-model-name-" * 4)
    for path in ("/", "/runs/new", "/import", "/tokenizers", "/shares", "/help", f"/runs/{run.code}", "/gallery",
                 "/go?q=long", "/docs/", "/docs/pages", "/docs/formats", "/docs/api", "/docs/benchmarks"):
        page.goto(page.url.split("/", 3)[0] + "//" + page.url.split("/")[2] + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_the_theme_is_kept_and_drawn_by_the_server(open_page: Open) -> None:
    page = open_page("/help", color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("[data-theme-toggle]")  # light
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    assert page.evaluate(background) == light
    page.click("[data-theme-toggle]")  # dark
    assert page.evaluate(background) != light
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.click("[data-theme-toggle]")  # as the system has it
    page.reload()
    expect(page.locator("html")).not_to_have_attribute("data-theme", re.compile(""))
    assert page.evaluate(background) == light


def test_the_list_of_keys_opens_with_a_key_and_not_while_typing(open_page: Open) -> None:
    page = open_page("/runs/new")
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.focus("#id_name")
    page.keyboard.press("?")
    expect(page.locator("dialog#keys")).to_be_hidden()
    expect(page.locator("#id_name")).to_have_value("?")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    expect(page.locator("dialog#keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog#keys")).to_be_hidden()
    page.keyboard.press("g")
    page.keyboard.press("i")
    page.wait_for_url("**/import")


def test_a_place_is_reached_by_its_name_with_keys_alone(open_page: Open) -> None:
    run = stored_run(4, "calculator, warm")
    stored_run(2, "calculator, cold")
    page = open_page("/help")
    field, options = page.locator("#go-field"), page.locator("#go-list a[role=option]")
    page.keyboard.press("Control+k")
    expect(field).to_be_focused()
    page.keyboard.type("calculator")
    expect(options).to_have_count(2)
    expect(page.locator("#announcer")).to_have_text("2 places")
    expect(field).to_have_attribute("aria-activedescendant", options.first.get_attribute("id"))
    page.keyboard.press("ArrowDown")
    assert [option.get_attribute("aria-selected") for option in options.all()] == ["false", "true"]
    page.keyboard.press("ArrowDown")
    expect(options.first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowUp")
    expect(field).to_have_attribute("aria-activedescendant", options.last.get_attribute("id"))
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{run.code}")
    page.keyboard.press("Control+k")
    page.keyboard.type("t00")
    page.keyboard.press("Escape")
    expect(field).to_be_hidden()
    # Enter, pressed before the answer has come, goes to the first place of what is typed, and to no earlier one.
    page.keyboard.press("Control+k")
    page.keyboard.type("gap")
    page.keyboard.press("Enter")
    page.wait_for_url("**/docs/gap")


def test_a_place_is_reached_by_its_name_without_javascript(open_page: Open) -> None:
    run = stored_run(4, "calculator, warm")
    page = open_page("/help", javascript=False)
    page.click("text=Go to")
    page.fill("#go-q", "warm")
    page.click("main button:has-text('Find')")
    page.click("main >> text=calculator, warm")
    page.wait_for_url(f"**/runs/{run.code}")


def test_a_run_is_followed_to_its_end_without_reloading_by_hand(open_page: Open) -> None:
    run = create_run("launch", "live", model="demo", n_expected=2)
    start_run(run)
    page = open_page(f"/runs/{run.code}")
    assert "running" in page.inner_text("#run-live .progress-line")
    expect(page.locator("#cancel")).to_be_visible()
    Run.objects.filter(pk=run.pk).update(n_finished=1)
    page.wait_for_selector("text=1 of 2 done")
    end_run(run, Run.Status.FAILED, "The engine broke.")
    page.wait_for_selector("text=Why it failed")
    assert "The engine broke." in page.inner_text("#run-live")
    expect(page.locator("#cancel")).to_be_hidden()


def test_a_tab_that_nobody_looks_at_asks_rarely(open_page: Open) -> None:
    run = create_run("launch", "live", model="demo", n_expected=2)
    start_run(run)
    page = open_page(f"/runs/{run.code}")
    polls: list[str] = []
    page.on("request", lambda request: polls.append(request.url) if "have=" in request.url else None)
    page.clock.install()
    page.reload()

    def minute(hidden: bool) -> int:
        page.evaluate("value => Object.defineProperty(document, 'hidden', { value, configurable: true })", hidden)
        polls.clear()
        for _ in range(30):
            page.clock.run_for(2000)
            expect(page.locator(".htmx-request")).to_have_count(0)
        return len(polls)

    assert 2 <= minute(hidden=True) <= 4
    assert minute(hidden=False) > 20


def test_cancel_is_pressed_on_the_page(open_page: Open) -> None:
    run = create_run("launch", "live", model="demo", n_expected=2)
    page = open_page(f"/runs/{run.code}")
    page.click("#cancel")
    page.wait_for_selector(".status-cancelled")
    run.refresh_from_db()
    assert run.status == Run.Status.CANCELLED


def test_files_are_dropped_onto_the_box(open_page: Open) -> None:
    page = open_page("/import")
    drop = """() => {
        for (const name of ["one.jsonl", "two.jsonl"]) {
            const data = new DataTransfer();
            data.items.add(new File(["{}\\n"], name));
            document.querySelector("[data-drop]").dispatchEvent(
                new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
        }
    }"""
    page.evaluate(drop)
    assert page.inner_text("[data-files]").split("\n") == ["one.jsonl · 1 kB", "two.jsonl · 1 kB"]
    assert page.evaluate("document.querySelector('#id_files').files.length") == 2


@pytest.mark.parametrize("width", [1400, 700, 420])
def test_the_share_menu_lies_within_the_page(open_page: Any, width: int) -> None:
    page = open_page(f"/runs/{stored_run(3).code}", width=width)
    page.locator("details.share summary").click()
    menu = page.locator("details.share .menu-body").bounding_box()
    assert menu["x"] >= 0 and menu["x"] + menu["width"] <= width


def test_a_link_is_made_copied_and_opened_by_somebody_else(open_page: Open, browser: Any) -> None:
    run = stored_run(3, "shared run")
    page = open_page(f"/runs/{run.code}?finding=boundary_merge")
    page.click("summary:has-text('Share')")
    page.fill("input[name=note]", "look here")
    page.click("text=Make the link")
    page.wait_for_selector(".made")
    page.wait_for_load_state()
    page.click("button:has-text('Copy')")
    expect(page.locator("#announcer")).to_have_text("Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.input_value(".made input")
    stranger = browser.new_context()
    try:
        seen = stranger.new_page()
        seen.goto(link)
        assert seen.url.endswith(f"/runs/{run.code}?finding=boundary_merge")
        assert "look here" in seen.content() and "t001" in seen.content() and "t000" not in seen.content()
        revoke(ShareLink.objects.get())
        answer = seen.reload()
        assert answer.status == 410 and "has expired or was revoked" in seen.inner_text("h1")
    finally:
        stranger.close()


def test_without_javascript_everything_reads_and_a_link_can_be_made(open_page: Open) -> None:
    run = stored_run(3, "plain")
    page = open_page(f"/runs/{run.code}", javascript=False)
    assert "t002" in page.inner_text("#run-list") and "Tokens merged across a boundary" in page.inner_text(
        "#run-figures"
    )
    page.click("summary:has-text('Share')")
    page.click("text=Make the link")
    assert "/s/" in page.input_value(".made input")
    expect(page.locator("[data-theme-toggle]")).to_be_hidden()
