"""The trajectory page in a real browser: keys, card, selection, copies, lenses, windows, reading without scripts."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.streams.trajectory import NO_IDS, Row
from rollouts.store import models
from tests.web.trajectory_samples import HOSTILE, Maker, own_row

pytestmark = pytest.mark.django_db(transaction=True)

MARKED = "#pane .sel"


@pytest.fixture
def stored(make: Maker) -> models.StoredTrajectory:
    broken, found = make.broken("b")
    run = make.run([make.conversation("a", turns=6, hostile=True), broken, make.conversation("c")], [[], found, []])
    return run.trajectories.get(index=0)


def path(trajectory: models.StoredTrajectory, query: str = "") -> str:
    return f"/trajectories/{trajectory.code}{query}"


def says(page: Any, words: str | re.Pattern[str]) -> None:
    expect(page.locator("#pane-status")).to_have_text(words)


def at(page: Any, end: str) -> None:
    expect(page).to_have_url(re.compile(f"{re.escape(end)}$"))


def test_a_token_shows_its_card_and_a_click_pins_it(open_page, stored, make):
    page = open_page(path(stored, "?view=tokens"))
    card = page.locator("#token-card")
    page.hover("#pane i.o1 >> nth=2")
    page.click("#tab-token")  # without it open, a token under the pointer changes nothing
    expect(card).to_be_hidden()
    page.hover("#pane i.o1 >> nth=3")
    card.wait_for()
    step = make.conversation("a", turns=6, hostile=True).steps[0]
    offset = len(step.prompt_ids) + 3
    words = card.inner_text()
    assert f"token {offset}" in words
    assert str(int(step.completion_ids[3])) in words
    assert make.table.token_bytes(step.completion_ids[3:4])[0].hex(" ") in words
    for field in ("sampled", "under the gradient", f"{step.logprobs[3]:.4f}", "step 0, completion 3 of", "turn 2"):
        assert field in words, field
    page.click("#pane i.o1 >> nth=3")
    page.hover("#pane i.o1 >> nth=4")
    expect(card.locator(".card-title")).to_have_text(f"token {offset}")
    # The next token is free to be pressed: nothing floats over it.
    page.click("#pane i.o1 >> nth=4", modifiers=["Shift"])
    at(page, f"t={offset}-{offset + 2}")
    page.click("#tab-findings")
    page.click("#pane i.o1 >> nth=6")
    expect(card.locator(".card-title")).to_have_text(f"token {offset + 3}")
    page.keyboard.press("Escape")
    card.wait_for(state="hidden")


def test_a_pinned_card_shows_the_alternatives_as_text(open_page, make):
    """Of hostile tokens too."""
    value = make.conversation("a")
    step = value.steps[0]
    n, hostile = len(step.completion_ids), make.ids("<script>alert(1)</script>\u202e")
    values = np.resize(np.linspace(-1.5, -6, len(hostile), dtype=np.float32), n * len(hostile))
    told = replace(
        step, alternative_ids=np.resize(hostile, values.size), alternative_logprobs=values, entropy=-values[:n]
    )
    at = next(i for i, one in enumerate(step.completion_ids) if one not in hostile)
    value = replace(value, steps=(told, *value.steps[1:]))
    asked = []
    page = open_page(path(make.run([value]).trajectories.get(), "?view=tokens"))
    page.click("#tab-token")
    page.on("request", lambda request: asked.append(request.url) if "alternatives.json" in request.url else None)
    page.hover(f"#pane i.o1 >> nth={at}")
    card = page.locator("#token-card")
    expect(card.locator(".card-alternatives")).to_contain_text("press the token")
    assert not asked
    page.click(f"#pane i.o1 >> nth={at}")
    expect(card.locator("tbody tr")).to_have_count(len(hostile) + 1)
    assert len(asked) == 1
    expect(card.locator("script")).to_have_count(0)
    for line, token_id in zip(card.locator("tbody tr").all(), hostile.tolist(), strict=False):
        assert str(token_id) in line.inner_text()
        expect(line.locator("rect")).to_have_count(1)
    last = card.locator("tbody tr >> nth=-1")
    expect(last).to_contain_text("sampled")
    expect(last).to_contain_text(str(int(step.completion_ids[at])))
    expect(page.locator("#announcer")).to_contain_text("the sampled token is not among them")
    expect(page.locator("#selection output")).to_contain_text("mean entropy")
    page.keyboard.press("Escape")
    page.hover(".turn.prompt i >> nth=2")
    expect(card.locator(".card-title")).to_have_text("token 2")
    expect(card.locator(".card-alternatives")).to_be_hidden()


def test_a_pinned_card_names_what_the_token_could_be_drawn_from(open_page, make):
    """As text, hostile tokens too, and without a list of alternatives. Of large sets it says that ids are missing."""
    value = make.conversation("a", turns=2)
    first, second = value.steps
    hostile = make.ids("<script>alert(1)</script>")[:3]
    n = len(first.completion_ids)
    small = replace(first, kept_set=np.full(n, 3, np.float32), kept_ids=np.resize(hostile, n * 3))
    large = replace(second, kept_set=np.full(len(second.completion_ids), 900, np.float32))
    page = open_page(path(make.run([replace(value, steps=(small, large))]).trajectories.get(), "?view=tokens"))
    page.click("#tab-token")
    card = page.locator("#token-card .card-alternatives")
    page.hover("#pane i.o1 >> nth=1")
    expect(card).to_have_text("The engine told more here: press the token to see it.")
    page.click("#pane i.o1 >> nth=1")
    expect(card).to_contain_text("sampling could draw from 3 tokens: ")
    for token_id in hostile.tolist():
        expect(card).to_contain_text(f"({token_id})")
    expect(card.locator("table, script")).to_have_count(0)
    expect(page.locator("#announcer")).to_contain_text("sampling could draw from 3 tokens")
    page.keyboard.press("Escape")
    page.click(f"#pane i.o1 >> nth={n + 1}")
    expect(card).to_have_text("Of this token the engine told how many tokens it could draw from, and not which.")


def test_tokens_are_reached_by_keyboard(open_page, stored):
    page = open_page(path(stored, "?view=tokens"))
    expect(page.locator("#pane i[tabindex='0']")).to_have_count(1)
    page.locator("#pane i[tabindex='0']").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#token-card .card-title")).to_have_text("token 3")
    page.keyboard.press("Enter")
    at(page, "t=3-4")
    page.keyboard.press("Shift+ArrowRight")
    at(page, "t=3-5")
    expect(page.locator("#pane i[tabindex='0']")).to_have_count(1)


def test_y_copies_the_link_to_the_selection(open_page, stored):
    page = open_page(path(stored, "?view=tokens&lens=origin"))
    page.click("#pane i.o1 >> nth=2")
    page.click("#pane i.o1 >> nth=6", modifiers=["Shift"])
    expect(page.locator(MARKED)).to_have_count(5)
    page.keyboard.press("y")
    says(page, re.compile("link to tokens .* copied"))
    copied = page.evaluate("navigator.clipboard.readText()")
    assert re.search(r"view=tokens&lens=origin&t=\d+-\d+$", copied)
    a, b = map(int, copied.rsplit("=", 1)[1].split("-"))
    assert b - a == 5
    again = open_page(copied.split("/", 3)[3].join(["/", ""]))
    expect(again.locator("#pane .k")).to_have_count(5)
    expect(again.locator("#pane .k").first).to_be_visible()


def test_the_copied_text_is_the_sampled_text(open_page, stored, make):
    page = open_page(path(stored, "?view=tokens"))
    page.evaluate(
        """() => {
          const range = document.createRange();
          const box = document.querySelectorAll('#pane .toks')[1];
          range.selectNodeContents(box);
          getSelection().removeAllRanges();
          getSelection().addRange(range);
        }"""
    )
    page.keyboard.press("Control+c")
    step = make.conversation("a", turns=6, hostile=True).steps[0]
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == make.tokenizer.decode(step.completion_ids)
    assert HOSTILE in copied


def test_a_gap_leads_to_both_sides_and_belongs_to_no_token_and_no_copy(open_page, make):
    broken, (finding,) = make.broken("b")
    missing = replace(finding, stop=finding.start, actual_ids=NO_IDS)
    page = open_page(path(make.run([broken], [[missing]]).trajectories.get(), "?view=tokens"))
    # The card of the token behind the gap, and a copy over the gap.
    page.click("#pane .k")
    expect(page.locator("#token-card .card-title")).to_have_text(f"token {finding.start}")
    page.keyboard.press("Escape")
    page.evaluate("getSelection().selectAllChildren(document.querySelectorAll('#pane .toks')[1])")
    page.keyboard.press("Control+c")
    prompt = make.tokenizer.decode(broken.steps[1].prompt_ids)
    reply = prompt[prompt.index("<|im_start|>assistant") : prompt.index("<|im_start|>tool")]
    assert page.evaluate("navigator.clipboard.readText()") == reply
    # A key or a press leads to the card, and chooses no token.
    page.evaluate("getSelection().removeAllRanges()")
    page.mouse.move(0, 0)  # the page scrolls, and a token below the pointer would open its card
    page.locator("#pane .gap").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#finding-1:target .token-diff")).to_be_visible()
    expect(page.locator("#token-card")).to_be_hidden()
    # The map is for the pointer; the list of turns has the same places for the keyboard.
    expect(page.locator(".outline a")).not_to_have_count(0)
    expect(page.locator(".minimap a:not([tabindex='-1'])")).to_have_count(0)


def test_a_trained_token_that_was_not_sampled_has_its_sign_in_both_views(open_page, make):
    found = [Finding(Axis.ROW, "observation_trained", Severity.ERROR, row=0, start=10, stop=12, evidence="Odd.")]
    stored = make.run([own_row()], [found]).trajectories.get()
    for view in ("tokens", "runs"):
        page = open_page(path(stored, f"?view={view}"))
        drawn = "getComputedStyle(document.querySelector('#pane .w'), '::before').content"
        assert page.evaluate(drawn).startswith('"≠"'), view


def test_keys_walk_turns_findings_siblings_and_lenses(open_page, stored):
    page = open_page(path(stored))
    page.keyboard.press("j")
    page.keyboard.press("j")
    says(page, "turn 2")
    page.keyboard.press("k")
    says(page, "turn 1")
    page.keyboard.press("m")
    expect(page.locator("#pane")).to_have_attribute("data-lens", "origin")
    page.wait_for_url("**lens=origin**")
    page.keyboard.press("n")
    says(page, "no findings")
    page.keyboard.press("v")
    page.wait_for_selector("#pane[data-view=tokens]")
    page.wait_for_url("**lens=origin**")
    page.keyboard.press("l")
    page.wait_for_selector("h1:has-text('b')")
    page.wait_for_load_state()  # the keys' script runs once the page is parsed
    expect(page.locator("#pane")).to_have_attribute("data-view", "tokens")
    page.wait_for_selector("#pane .k")  # it opens at its finding, in row 1
    page.keyboard.press("n")
    says(page, "finding 1 of 1")
    page.keyboard.press("h")
    page.wait_for_selector("h1:has-text('a')")


def test_n_stays_on_the_page_for_a_finding_in_no_row_and_enter_opens_it(open_page, make):
    value = make.conversation("a")
    where = len(value.steps[0].prompt_ids)
    evidence = {"evidence": "Drifts.", "remedy": "Keep the ids."}
    found = [
        Finding(Axis.ROW, "row_not_sampled", Severity.ERROR, row=0, start=5, stop=8, **evidence),
        Finding(Axis.STREAM, "noncanonical_sampling", Severity.INFO, step=0, start=where, stop=where + 2, **evidence),
    ]
    row = Row(value.steps[-1].stream, np.arange(len(value.steps[-1].stream)) > where)
    stored = make.run([replace(value, rows=(row,))], [found]).trajectories.get()
    page = open_page(path(stored))
    page.keyboard.press("n")
    page.keyboard.press("n")
    said = [page.locator("#pane-status").inner_text()]
    page.keyboard.press("n")
    said.append(page.locator("#pane-status").inner_text())
    assert any("in no row" in words for words in said), said
    page.locator("a.finding-jump[data-row='']").focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/compare\?step=0$"))


@pytest.mark.parametrize("view", ["runs", "tokens"])
def test_a_page_opens_where_its_worst_finding_is_seen(open_page, make, view):
    long = make.conversation("late", 4, 400)
    _, (finding,) = make.broken("b")
    start = len(long.steps[-1].stream) - 6
    late = replace(finding, step=3, start=start, stop=start + 2)
    record = make.run([long], [[late]]).trajectories.get()
    page = open_page(path(record, f"?view={view}"))
    mark = page.locator("#pane .k").first
    mark.wait_for()
    expect(mark).to_be_in_viewport()
    assert page.evaluate("scrollY") > 0, "at the top of the page the mark is out of sight"
    page.evaluate("scrollTo(0, 1e6)")
    head, card = page.locator("header.top").bounding_box(), page.locator(".finding").bounding_box()
    assert card["y"] > head["y"] + head["height"], "the head covers no card, also at the end of the page"


def test_keys_are_off_while_typing(open_page, stored):
    page = open_page(path(stored))
    page.keyboard.press("/")
    page.keyboard.type("jm compute")
    expect(page.locator("#pane")).to_have_attribute("data-lens", "mask")
    page.locator("#find input").fill("compute")
    page.keyboard.press("Enter")
    expect(page.locator("#find output")).to_have_text(re.compile("^1 of "))
    page.keyboard.press("Enter")
    expect(page.locator("#find output")).to_have_text(re.compile("^2 of "))
    assert page.evaluate("getSelection().toString()") == "compute"


def test_t_goes_to_a_token(open_page, stored):
    page = open_page(path(stored, "?view=tokens"))
    page.keyboard.press("t")
    page.keyboard.type("40-44")
    page.keyboard.press("Enter")
    expect(page.locator("#pane .k")).to_have_count(4)
    page.wait_for_url("**view=tokens**")


def test_a_lens_is_chosen_without_a_request(open_page, stored):
    page = open_page(path(stored, "?view=tokens"))
    # The cards' data, which the page fetches when it is idle, is there when a card says what it says.
    page.click("#pane i.o1 >> nth=3")
    expect(page.locator("#token-card")).to_contain_text("under the gradient")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    before = page.evaluate(
        "getComputedStyle(document.querySelector('#pane i.q6, #pane i.q5, #pane i.q4')).backgroundColor"
    )
    page.click(".lens-menu summary")
    page.click("a[data-lens-choice=logprob]")
    after = page.evaluate(
        "getComputedStyle(document.querySelector('#pane i.q6, #pane i.q5, #pane i.q4')).backgroundColor"
    )
    assert before != after
    assert [name for name in requests if "favicon" not in name] == []
    expect(page.locator(".lens-menu summary b")).to_have_text("logprob")
    page.click(".legend-menu summary")
    expect(page.locator(".legend [data-for=logprob]")).to_be_visible()
    expect(page.locator(".legend [data-for=mask]")).to_be_hidden()


def test_the_next_window_is_swapped_in_and_has_cards(open_page, make):
    stored = make.run([make.conversation("long", turns=2, size=5000)]).trajectories.get()
    page = open_page(path(stored, "?view=tokens"))
    page.evaluate("window.kept = true")
    page.keyboard.press("]")
    page.wait_for_selector("#pane[data-a='4096'] i[tabindex='0']")  # swapped in, and read by the page's script
    assert page.evaluate("window.kept") is True
    page.wait_for_url("**w=4096**")
    page.click("#pane i >> nth=0")
    expect(page.locator("#token-card .card-title")).to_have_text("token 4,096")
    page.keyboard.press("[")
    page.wait_for_selector("#pane[data-a='0']")


def test_the_run_view_fetches_what_did_not_fit(open_page, make, monkeypatch):
    monkeypatch.setattr("inspector.trajectories.tokens.reader.RUNS_BYTES", 30_000)
    stored = make.run([make.conversation("long", turns=8, size=3000)]).trajectories.get()
    page = open_page(path(stored))
    text = make.tokenizer.decode(make.conversation("long", turns=8, size=3000).steps[-1].stream)
    # One look and one act in the page itself: the marker may be replaced between two calls from here.
    reach = "() => { const more = document.querySelector('#pane .more'); more?.scrollIntoView(); return !more; }"
    page.wait_for_function(reach, polling=50, timeout=120_000)
    drawn = page.evaluate("[...document.querySelectorAll('#pane .toks')].map((box) => box.textContent).join('')")
    assert drawn == text


# How often the page's turn to ask came and it did not, because it is being read.
COUNT_HELD = """() => {
  window.held = 0;
  document.addEventListener("htmx:beforeRequest", (event) => { window.held += event.defaultPrevented; });
}"""


def test_a_live_page_grows_and_keeps_a_pinned_card(open_page, stored):
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(status="running")
    page = open_page(path(stored, "?view=tokens"))
    assert "running" in page.locator(".properties").inner_text()
    page.evaluate(COUNT_HELD)
    page.click("#pane i.o1 >> nth=3")
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(status="done", stop_reason="answered", n_tokens=1)
    page.wait_for_function("() => window.held > 1")
    expect(page.locator("#token-card")).to_be_visible()
    assert "running" in page.locator(".properties").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.locator(".properties:has-text('answered')").wait_for()
    expect(page.locator("#live[hx-trigger]")).to_have_count(0)
    page.locator("#pane i[tabindex='0']").wait_for()  # the new tokens have been read by the page's script
    page.mouse.move(5, 400)
    page.click("#pane i.o1 >> nth=3")
    page.locator("#token-card:not([hidden])").wait_for()


def test_an_answer_that_comes_while_a_card_is_pinned_changes_nothing(open_page, stored):
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(status="running")
    page = open_page(path(stored, "?view=tokens"))
    page.evaluate(
        """() => {
          const pin = () => { document.querySelectorAll("#pane i.o1")[3].click(); };
          document.addEventListener("htmx:beforeOnLoad", pin, { once: true });
        }"""
    )
    page.evaluate(COUNT_HELD)
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(status="done", stop_reason="answered")
    page.wait_for_function("() => window.held > 0")
    expect(page.locator("#token-card")).to_be_visible()
    expect(page.locator("#pane .sel")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.locator(".properties:has-text('answered')").wait_for()


def test_everything_reads_without_scripts(open_page, stored):
    page = open_page(path(stored, "?view=tokens&t=40-44"), javascript=False)
    expect(page.locator("#pane .k")).to_have_count(4)
    page.click(".legend-menu summary")
    expect(page.locator(".legend [data-for=mask]")).to_be_visible()
    for section in ("findings", "turns"):  # one behind the other
        expect(page.locator(f"#{section}")).to_be_visible()
    # What only JavaScript does is not offered.
    for dead in ("#find", "[data-copy-link]", "[data-theme-toggle]", "#token", ".panel-tabs"):
        expect(page.locator(dead)).to_be_hidden()
    page.click(".lens-menu summary")
    page.click("a[data-lens-choice=origin]")
    expect(page.locator("#pane")).to_have_attribute("data-lens", "origin")
    page.click("text=Side by side")
    expect(page.locator("#side-by-side")).to_be_visible()


def test_the_first_difference_is_in_view_and_keys_jump(open_page, stored):
    broken = models.StoredTrajectory.objects.get(run=stored.run, index=1)
    page = open_page(f"/trajectories/{broken.code}/compare", height=500)
    site = page.locator("tr.site").first
    box = site.bounding_box()
    assert 0 <= box["y"] < 500
    page.keyboard.press("n")
    says(page, "difference 1 of 1")


@pytest.mark.parametrize("page_name", ["", "/compare", "/deltas", "/mask"])
@pytest.mark.parametrize("width", [1400, 700, 400])
def test_no_page_is_wider_than_its_window(open_page, stored, page_name, width):
    page = open_page(f"/trajectories/{stored.code}{page_name}", width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
