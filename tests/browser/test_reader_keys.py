"""The keys of the tokens page: each does what the list of keys says, keeps the place, and never loses the focus."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from rollout_inspector.streams.trajectory import Row
from rollouts.store import models
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db(transaction=True)

TITLE = "#token-card .card-title"
IN_VIEW = """(css) => {
  const box = document.querySelector(css).getBoundingClientRect();
  const bar = document.querySelector(".reader-bar").getBoundingClientRect();
  return box.top >= bar.bottom - 2 && box.top < innerHeight;
}"""
AT_THE_END = "() => { const { b, n } = document.getElementById('pane').dataset; return b === n; }"
# As by keyboard: the pointer would have to scroll up to the tabs first.
OPEN_TAB = """(name) => {
  const tab = [...document.querySelectorAll(".tabs a")].find((link) => link.textContent.trim() === name);
  tab.focus({ preventScroll: true });
  tab.click();
}"""
FOCUS = "() => document.activeElement.tagName"
# The row offset at the top of the window: of the first token whose line is below the bars.
TOP = """() => {
  const line = document.querySelector(".reader-bar").getBoundingClientRect().bottom + 32;
  for (const box of document.querySelectorAll("#pane .toks")) {
    let at = Number(box.dataset.a);
    for (const part of box.querySelectorAll(":scope > i, :scope > span")) {
      if (part.getBoundingClientRect().bottom > line) return Number(part.dataset.a ?? at);
      at += 1;
    }
  }
}"""


def stay(page: Any) -> None:
    page.evaluate("window.kept = true")


def stayed(page: Any) -> bool:
    return page.evaluate("window.kept === true")


@pytest.fixture
def long(make: Maker) -> models.StoredTrajectory:
    broken, found = make.broken("b")
    run = make.run([make.conversation("a", turns=12, size=220), broken], [[], found])
    return run.trajectories.get(index=0)


def path(trajectory: models.StoredTrajectory, query: str = "") -> str:
    return f"/trajectories/{trajectory.code}{query}"


def test_f_shows_the_turn_one_is_on_and_esc_leaves_it(open_page, long):
    page = open_page(path(long))
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("f")
    solo = page.locator("#pane .turn:visible")
    expect(solo).to_have_count(1)
    expect(solo).to_have_id("turn-3")
    page.keyboard.press("j")
    expect(solo).to_have_id("turn-4")
    page.keyboard.press("k")
    expect(solo).to_have_id("turn-3")
    assert page.evaluate(FOCUS) == "A"
    # The address says so: the other view and a reload show the turn alone too.
    assert "solo=3" in page.url
    page.keyboard.press("v")
    page.wait_for_selector("#pane[data-view=tokens]")
    expect(solo).to_have_id("turn-3")
    page.reload()
    expect(solo).to_have_count(1)
    page.keyboard.press("j")
    expect(solo).to_have_id("turn-4")
    page.keyboard.press("Escape")
    assert "solo" not in page.url
    page.keyboard.press("f")
    expect(solo).to_have_count(1)
    page.keyboard.press("Escape")
    assert page.locator("#pane .turn:visible").count() > 10 and page.evaluate(FOCUS) == "A"
    # `g i` is a key of every page, and `g g` one of this.
    page.keyboard.press("g")
    page.keyboard.press("g")
    expect(page.locator("#pane-status")).to_have_text("start of the row")
    page.keyboard.press("g")
    page.keyboard.press("n")
    page.wait_for_url("**/runs/new")


def test_arrows_go_on_from_the_token_that_was_asked_for(open_page, long):
    page = open_page(path(long, "?view=tokens"))
    page.keyboard.press("t")
    page.keyboard.type("160")
    page.keyboard.press("Enter")
    page.wait_for_url("**t=160**")
    page.wait_for_load_state()
    page.keyboard.press("ArrowRight")
    expect(page.locator(TITLE)).to_have_text("token 161")
    page.keyboard.press("Shift+ArrowRight")
    expect(page).to_have_url(re.compile("t=161-163$"))
    page.click("#pane i >> nth=165", modifiers=["Shift"])
    expect(page.locator("#pane .sel")).to_have_count(5)
    # One press ends the card and its range.
    page.keyboard.press("Escape")
    expect(page.locator("#pane .sel")).to_have_count(0)
    expect(page.locator("#token-card")).to_be_hidden()
    assert page.evaluate(FOCUS) == "I"
    page.click(".share summary")
    page.locator(".share input[name=note]").focus()
    page.keyboard.press("Escape")
    expect(page.locator(".share")).not_to_have_attribute("open", "")
    assert page.evaluate(FOCUS) == "SUMMARY"


def test_every_lens_and_view_keeps_the_place(open_page, make):
    value = make.conversation("a", turns=12, size=220)
    stream = value.steps[-1].stream
    columns = {"advantages": np.linspace(-1, 1, len(stream)).astype(np.float32)}
    row = Row(stream, np.arange(len(stream)) % 3 == 0, columns=columns)
    stored = make.run([replace(value, rows=(row,))]).trajectories.get()
    page = open_page(path(stored, "?t=1200-1210"))
    stay(page)
    page.locator("#pane .k").first.wait_for()
    page.mouse.wheel(0, 160)
    page.wait_for_timeout(100)
    before = page.evaluate(TOP)
    assert before > 600
    seen = []
    for _ in range(4):
        lens = page.locator("a[data-lens-choice][aria-current]").get_attribute("data-lens-choice")
        seen.append(lens)
        page.keyboard.press("m")
        expect(page.locator(f"a[data-lens-choice={lens}][aria-current]")).to_have_count(0)
        expect(page.locator("#reader[aria-busy]")).to_have_count(0)
    assert seen == ["mask", "origin", "logprob", "advantages"]
    assert page.evaluate(FOCUS) != "BODY"
    page.keyboard.press("v")
    page.wait_for_selector("#pane[data-view=tokens]")
    expect(page).to_have_url(re.compile("t=1200-1210"))
    page.wait_for_timeout(100)
    assert abs(page.evaluate(TOP) - before) < 250
    assert page.evaluate(FOCUS) == "I"
    page.keyboard.press("v")
    page.wait_for_selector("#pane[data-view=runs]")
    assert stayed(page) and page.evaluate(FOCUS) != "BODY"
    # Back goes through what was seen, without a new page.
    page.go_back()
    page.wait_for_selector("#pane[data-view=tokens]")
    assert stayed(page)


def test_windows_and_the_end_of_the_row_keep_the_focus(open_page, make, monkeypatch):
    stored = make.run([make.conversation("long", turns=4, size=2600)]).trajectories.get()
    page = open_page(path(stored, "?view=tokens"))
    stay(page)
    page.keyboard.press("]")
    page.wait_for_selector("#pane[data-a='4096'] i[tabindex='0']")
    assert page.evaluate(FOCUS) == "I"
    page.keyboard.press("[")
    page.wait_for_selector("#pane[data-a='0'] i[tabindex='0']")
    assert page.evaluate(FOCUS) == "I"
    # Find sees the whole row: the second answer of the tool lies in the next window.
    page.keyboard.press("/")
    page.keyboard.type("84<|IM")
    for number in (1, 2):
        page.keyboard.press("Enter")
        expect(page.locator("#find output")).to_have_text(f"{number} of 3")
    expect(page.locator("#pane")).to_have_attribute("data-a", "4096")
    assert page.evaluate("getSelection().toString()") == "84<|im" and "find=84" in page.url
    page.keyboard.press("Escape")
    assert page.evaluate(FOCUS) == "I"
    # The list of turns was drawn with the first window: its links lead there from every other one.
    page.click("#tab-turns")
    page.locator(".outline a >> nth=0").click()
    page.wait_for_selector("#pane[data-a='0'] #turn-1")
    assert stayed(page)
    page.keyboard.press("G")
    page.wait_for_function(AT_THE_END)
    expect(page.locator("#pane-status")).to_have_text("end of the row")
    assert stayed(page) and page.evaluate(FOCUS) != "BODY"
    page.keyboard.press("t")
    page.keyboard.type("4200-4204")
    page.keyboard.press("Enter")
    page.wait_for_url("**t=4200-4204**")
    assert "find=84" in page.url, "what is searched for goes along"
    monkeypatch.setattr("inspector.trajectories.tokens.reader.RUNS_BYTES", 20_000)
    page.goto(page.url.split("?")[0])
    assert not page.evaluate(AT_THE_END)
    page.keyboard.press("G")
    page.wait_for_function(AT_THE_END)


def test_n_lights_the_range_and_keeps_the_card_in_view(open_page, make):
    _, (finding,) = make.broken("b")
    whole = make.conversation("b", 8, 300)
    places = [40, 200, 700, 900, 1200]
    wordy = "A long sentence of evidence, so that a card is tall. " * 6
    found = [replace(finding, step=7, start=at, stop=at + 3, evidence=wordy) for at in places]
    stored = make.run([whole], [found]).trajectories.get()
    page = open_page(path(stored, "?row=0&w=0"), height=700)
    for at in places:
        page.keyboard.press("n")
        lit = page.locator("#pane .at")
        expect(lit).to_have_count(1)
        assert int(lit.get_attribute("data-a")) == at
        assert lit.evaluate("(run) => getComputedStyle(run).outlineStyle") == "solid"
        expect(lit).to_be_in_viewport()
        expect(page.locator(".finding-jump[aria-current]")).to_be_in_viewport(ratio=1)


def test_few_stops_lie_before_the_first_token(open_page, long):
    page = open_page(path(long, "?view=tokens"))
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate(FOCUS) == "I"
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.evaluate("document.querySelector('.brand').focus()")
    stops = 0
    while page.evaluate("!document.activeElement.closest('#pane')"):
        page.keyboard.press("Tab")
        stops += 1
        assert stops <= 25, page.evaluate("document.activeElement.outerHTML")


def test_the_bar_is_one_line_and_covers_no_head(open_page, long):
    for width, height in ((1400, 900), (700, 900)):
        page = open_page(path(long, "?view=tokens"), width=width, height=height)
        tall = page.locator(".reader-bar").evaluate("(bar) => bar.getBoundingClientRect().height")
        assert tall < 50
        page.evaluate("document.getElementById('turn-6').scrollIntoView(); scrollBy(0, 60)")
        bar, head = page.evaluate(
            """() => {
              const bar = document.querySelector(".reader-bar").getBoundingClientRect().bottom;
              const head = document.querySelector("#turn-6 .turn-head").getBoundingClientRect();
              return [bar, head.top];
            }"""
        )
        assert bar > 0 and head >= bar - 1.5
        top = page.evaluate(TOP)
        page.keyboard.press("y")
        expect(page.locator("#pane-status")).to_have_text(re.compile("copied"))
        assert page.evaluate(TOP) == top


@pytest.mark.parametrize(("width", "height"), [(700, 900), (700, 450)])
def test_tokens_begin_on_the_first_screen(open_page, long, width, height):
    broken = models.StoredTrajectory.objects.get(run=long.run, index=1)
    page = open_page(path(broken, "?row=0&w=0"), width=width, height=height)
    assert page.locator("#pane .toks").first.bounding_box()["y"] < height - 20


def test_runs_of_tokens_have_words_and_the_card_is_announced(open_page, long):
    broken = models.StoredTrajectory.objects.get(run=long.run, index=1)
    page = open_page(path(broken, "?view=tokens&row=1&w=0"))
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    said = [node["name"]["value"] for node in tree if node["role"]["value"] == "StaticText" and "name" in node]
    runs = [words for words in said if re.search("trained(, finding)?: $", words)]
    assert "prompt, not trained: " in runs and "sampled, trained: " in runs
    assert any("finding" in words for words in runs)
    assert len(runs) < 12, "one for each run of tokens, not for each token"
    assert "·" not in said and "↵" not in said
    page.locator("#pane i[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#announcer")).to_have_text(re.compile("token 1, prompt, not trained"))


def test_forced_colours_keep_mask_finding_and_origin_apart(open_page, long):
    broken = models.StoredTrajectory.objects.get(run=long.run, index=1)
    page = open_page(path(broken, "?view=tokens&row=1&w=0&lens=origin"), forced_colors="active")
    look = """(css) => {
      const style = getComputedStyle(document.querySelector(css));
      const names = ["borderTopColor", "borderTopStyle", "borderBottomColor"];
      names.push("textDecorationStyle", "textDecorationLine");
      return names.map((name) => style[name]);
    }"""
    plain = page.evaluate(look, "#pane i:not(.m):not(.f):not(.o1):not(.o2):not(.o3)")
    trained = page.evaluate(look, "#pane i.m:not(.f)")
    found = page.evaluate(look, "#pane i.f")
    assert plain[0] == plain[2], "neither a line above nor one below"
    assert trained[0] == plain[0] and trained[2] != plain[2]
    assert found[0] != plain[0] and found[1] == "double"
    assert plain[4] == "none" and trained[4] == "underline"
    lined = page.evaluate("[...document.querySelectorAll('.tabs a')].map((a) => getComputedStyle(a).borderBottomStyle)")
    assert lined == ["solid", *["none"] * (len(lined) - 1)], "the line below tells the tab that one is on"


def test_a_selection_has_figures_and_is_copied_in_four_ways(open_page, long, make):
    step = make.conversation("a", turns=12, size=220).steps[0]
    start = len(step.prompt_ids) - 2
    page = open_page(path(long, f"?view=tokens&t={start}-{start + 6}"))
    mean = float(step.logprobs[:4].mean())
    figures = f"6 tokens · 4 trained · mean log-probability {mean:.3f} over 4 · perplexity {np.exp(-mean):.3f}"
    bar = page.locator("#selection")
    expect(bar.locator("output")).to_have_text(figures)
    ids = step.stream[start : start + 6].tolist()

    def copied(how: str) -> str:
        page.click(f"[data-copy-as={how}]")
        expect(page.locator("#pane-status")).to_have_text(f"{how} of 6 tokens copied")
        return page.evaluate("navigator.clipboard.readText()")

    assert copied("text") == make.tokenizer.decode(step.stream[start : start + 6])
    assert copied("ids") == str(ids)
    assert copied("link").endswith(f"t={start}-{start + 6}")
    names: dict[str, Any] = {}
    exec(copied("python"), names)
    assert names["ids"] == ids and names["loss_mask"] == [0, 0, 1, 1, 1, 1] and names["logprobs"][:2] == [None, None]
    page.keyboard.press("Escape")
    expect(bar).to_be_hidden()
    page.goto(page.url.partition("?")[0] + f"?view=tokens&t={start}-{start + 6}")
    bar.locator("[data-search]").click()
    expect(page.locator(".found-place a >> nth=0")).to_have_text(f"a: row 0, tokens {start} to {start + 5}")
    expect(page.locator("#search-q")).to_have_value(" ".join(map(str, ids)))


def test_a_comments_on_the_selection_and_it_stands_at_its_range_until_it_is_resolved(open_page, long):
    page = open_page(path(long, "?view=tokens&t=160-163"))
    page.keyboard.press("a")
    expect(page.locator("#comment-text")).to_be_focused()
    expect(page.locator("#comment-range")).to_have_value("160-163")
    page.keyboard.type("Is this sampled?")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"t=160-163#comment-\w+$"))
    card = page.locator(".comment:target")
    expect(card).to_contain_text("Is this sampled?")
    sign = page.locator("#pane .gap.said")
    expect(sign).to_have_attribute("aria-label", "Comment by reader. Read it.")
    # The next character behind the sign is the first of the range.
    assert sign.evaluate("e => getSelection().isCollapsed && e.textContent === ''")
    sign.focus()
    page.keyboard.press("Enter")
    expect(card).to_be_in_viewport()
    card.get_by_role("button", name="Resolve").press("Enter")
    expect(page.locator(".comments-resolved")).to_contain_text("resolved by reader")
    expect(sign).to_have_count(0)


def test_tabs_and_back_lead_to_the_place(open_page, long):
    page = open_page(path(long, "?lens=origin"))
    page.mouse.move(900, 600)
    page.mouse.wheel(0, 1300)
    page.wait_for_timeout(100)
    page.wait_for_function("() => history.state?.place")
    before = page.evaluate(TOP)
    assert before > 300
    page.evaluate(OPEN_TAB, "Mask, explained")
    page.wait_for_url("**/mask?place=**")
    page.evaluate(OPEN_TAB, "Side by side")
    page.wait_for_url("**/compare?place=**")
    page.evaluate(OPEN_TAB, "Tokens")
    page.wait_for_url("**lens=origin**")
    page.wait_for_load_state()
    page.wait_for_function("() => history.state?.place")
    assert abs(page.evaluate(TOP) - before) <= 2  # where a run ends just there, a part of a pixel decides
    page.evaluate(OPEN_TAB, "Conversation")
    page.wait_for_url("**/record**")
    page.go_back()
    page.wait_for_load_state()
    page.wait_for_timeout(100)
    assert abs(page.evaluate(TOP) - before) <= 2
    # `c` leads to the message at the place, and from a message back to its tokens.
    page.keyboard.press("c")
    page.wait_for_url("**/record?**#here")
    page.wait_for_load_state()
    message = page.locator("article[aria-current=location]")
    expect(message).to_have_count(1)
    place = message.locator("a[data-tokens]").first.get_attribute("href")
    page.wait_for_function("() => document.activeElement?.id === 'here'")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.matches('.chat:not(#here)')")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement === document.getElementById('here')")
    page.keyboard.press("c")
    page.wait_for_url(f"**{place}")
    expect(page.locator("#pane[data-view=tokens] .k").first).to_be_visible()


def made_link(page: Any) -> str:
    """The address of a link that the Share button makes of what is on the screen."""
    page.locator("details.share > summary").dispatch_event("click")
    page.locator("details.share button[type=submit]").dispatch_event("click")
    page.wait_for_selector(".made input")
    return page.input_value(".made input")


def test_a_share_link_opens_the_view_it_was_made_on(open_page, long, browser):
    """Lens and find changed without a request, the place by scrolling, a fold of *Side by side* by its link."""
    stranger = browser.new_context(viewport={"width": 1400, "height": 900})
    seen = stranger.new_page()
    try:
        page = open_page(path(long, "?view=tokens"))
        page.keyboard.press("m")
        page.keyboard.press("/")
        page.keyboard.type("tool")
        page.keyboard.press("Enter")
        expect(page.locator("#find output")).to_have_text(re.compile("^1 of"))
        page.keyboard.press("Escape")
        page.mouse.move(900, 600)
        page.mouse.wheel(0, 1100)
        page.wait_for_timeout(300)
        before = page.evaluate(TOP)
        assert before > 300
        seen.goto(made_link(page))
        seen.wait_for_function("() => history.state?.place")
        assert abs(seen.evaluate(TOP) - before) < 40
        expect(seen.locator("#pane[data-view=tokens][data-lens=origin]")).to_have_count(1)
        expect(seen.locator("#find input")).to_have_value("tool")
        # An address without a place opens at the worst finding. So does the link, also when its view is another.
        broken = long.run.trajectories.get(index=1)
        page = open_page(path(broken))
        marked = page.locator("#pane .k").first.text_content()
        page.keyboard.press("v")
        page.wait_for_selector("#pane[data-view=tokens]")
        drawn = page.locator("#pane .k").all_text_contents()
        assert marked and drawn
        seen.goto(made_link(page))
        assert seen.locator("#pane[data-view=tokens] .k").all_text_contents() == drawn
        page = open_page(path(long, "/compare?step=1"))
        page.locator("tr.fold a >> nth=0").click()
        page.wait_for_url("**open=**")
        folds = page.locator("tr.fold").all_text_contents()
        seen.goto(made_link(page))
        assert "/compare?" in seen.url and seen.locator("tr.fold").all_text_contents() == folds
    finally:
        stranger.close()
