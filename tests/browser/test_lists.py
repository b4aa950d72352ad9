"""The lists: a press anywhere on a line opens it, and what was chosen stays chosen while a run works."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from inspector.search import search_page, views
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run, start_run, take_figures
from rollouts.store.runs.training_steps import take_training_steps
from tests.samples.training_steps import of_versions, save, world
from tests.web.samples import stored_run
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db(transaction=True)
Open = Callable[..., Any]


def test_a_line_opens_its_trajectory_and_two_of_a_group_are_aligned(open_page: Open) -> None:
    run = stored_run(4)
    page = open_page(f"/runs/{run.code}?sort=-reward")
    cell = page.locator("#run-list tbody tr").nth(1).locator("td[data-label=Tokens]")
    cell.click(position={"x": 3, "y": 3}, force=True)
    page.wait_for_url("**/trajectories/**")
    expect(page.locator(".move-at")).to_have_text("2 of 4")
    page.click(".traj-moves summary >> text=More")
    page.click(".more-facts >> text=g1")
    page.wait_for_url("**/groups/g1**")
    page.locator("input[name=right]").last.check()
    page.click("text=Align the two chosen")
    page.wait_for_url("**/compare?with=**")


def top_of(page: Any, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    assert box is not None, selector
    return float(box["y"])


@pytest.mark.parametrize(("width", "most"), [(1400, 460), (1000, 520), (400, 760)])
def test_the_list_of_a_run_stands_high_and_before_its_figures(open_page: Open, width: int, most: int) -> None:
    """In the order of reading, too, so that the tab key meets the list first."""
    run = stored_run(30)
    page = open_page(f"/runs/{run.code}", width=width)
    assert top_of(page, "#run-list tbody tr") <= most
    parts = page.evaluate("[...document.querySelectorAll('#run-list, #run-figures')].map(part => part.id)")
    assert parts == ["run-list", "run-figures"]
    if width == 1400:
        assert abs(top_of(page, "#run-figures") - top_of(page, "#trajectories")) < 20
    else:
        page.click("text=Findings, rewards, ends")
        assert top_of(page, "#run-figures") < 400
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_line_of_the_runs_is_about_40_pixels_high(open_page: Open) -> None:
    for n in range(6):
        stored_run(6, f"training run with a longer name {n}", model="demo")
    page = open_page("/")
    heights = page.evaluate("[...document.querySelectorAll('.runs-table tbody tr')].map(row => row.offsetHeight)")
    assert len(heights) == 6 and all(36 <= height <= 44 for height in heights), heights


@pytest.mark.parametrize("width", [1400, 1160, 1000, 400])
def test_the_head_shows_every_page_or_lets_it_be_scrolled_to(open_page: Open, width: int) -> None:
    page = open_page("/help", width=width)
    cut = page.evaluate("(nav => nav.scrollWidth - nav.clientWidth)(document.querySelector('.main-nav'))")
    assert cut <= (0 if width > 960 else 400)
    assert page.locator(".top-inner").bounding_box()["height"] <= (60 if width > 960 else 100)


def test_what_is_chosen_stays_chosen_while_a_run_works(open_page: Open) -> None:
    done = stored_run(1, "done")
    live = create_run("launch", "live", model="demo")
    start_run(live)
    page = open_page("/")
    page.check(f"#pick-{done.code}")
    Run.objects.filter(pk=live.pk).update(n_tokens=12345)
    expect(page.locator("#runs")).to_contain_text("12,345", timeout=10_000)
    expect(page.locator(f"#pick-{done.code}")).to_be_checked()
    expect(page.locator(f"#pick-{live.code}")).not_to_be_checked()
    page.click("text=Rename, tag or delete")
    page.wait_for_url(re.compile("/runs/change"))
    expect(page.locator(f"input[name=name-{done.code}]")).to_have_value("done")


def test_a_search_goes_on_below_what_it_found(open_page: Open, make: Maker, monkeypatch: Any) -> None:
    monkeypatch.setattr(search_page.search_page, "__defaults__", ("", 3, ""))
    monkeypatch.setattr(views, "SHOWN", 3)
    run = make.run([make.conversation("first")])
    page = open_page(f"/runs/{run.code}/search?q=the")
    expect(page.locator("#search-more")).to_contain_text("Stopped after 3 places")
    expect(page.locator("#search-stop a")).to_have_count(0)
    page.click("#search-more a")
    expect(page.locator("#search-more")).not_to_contain_text("Stopped after 3 places")
    assert page.locator(".found-place").count() > 3
    # A press of Stop while a part is under way: that part is still shown, and nothing is written to the console.
    monkeypatch.setattr(views, "SHOWN", 500)
    monkeypatch.setattr(search_page.search_page, "__defaults__", ("", 1, ""))
    asked: list[str] = []

    def late(route: Any) -> None:
        asked.append(route.request.url)
        if "stop=1" not in route.request.url:
            page.wait_for_timeout(150)
        route.continue_()

    page.route("**/search?*cursor=*", late)
    page.goto(page.url)
    with page.expect_request("**/search?*cursor=*"):
        pass
    page.click("#search-stop a")
    expect(page.locator("#search-more")).to_contain_text("Stopped after")
    expect(page.locator("#search-stop a")).to_have_count(0)
    assert any("stop=1" in url for url in asked)
    n = page.locator(".found-place").count()
    page.wait_for_timeout(400)
    expect(page.locator(".found-place")).to_have_count(n)


def test_charts_over_training_are_drawn_narrowed_together_and_lead_to_a_step(open_page: Open) -> None:
    run = create_run(Run.Kind.IMPORT, "steps")
    save(run, world(6))
    take_training_steps(run)
    page = open_page(f"/runs/{run.code}/training")
    plots = page.locator(".plot")
    expect(page.locator(".plot canvas")).to_have_count(plots.count())
    over = page.locator("#plot-broken .u-over").bounding_box()
    assert over is not None
    page.mouse.move(over["x"] + over["width"] * 0.35, over["y"] + 40)
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] * 0.85, over["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"training_min=2&training_max=4"))
    page.reload()
    expect(page.locator(".tab-head .sub")).to_contain_text("3 training steps of those chosen")
    page.locator("#plot-gap .u-over").click(position={"x": 3, "y": 40})
    page.wait_for_url(re.compile(rf"/runs/{run.code}\?training_min=2&training_max=2"))
    expect(page.locator("#run-list tbody tr")).to_have_count(4)


def test_pressing_twice_shows_all_steps_again_also_where_the_address_names_some(open_page: Open) -> None:
    run = create_run(Run.Kind.IMPORT, "steps")
    save(run, world(6))
    take_training_steps(run)
    page = open_page(f"/runs/{run.code}/training?training_min=2&training_max=4")
    expect(page.locator(".tab-head .sub")).to_contain_text("3 training steps of those chosen")
    page.locator("#plot-gap .u-over").dblclick(position={"x": 40, "y": 40})
    expect(page.locator(".tab-head .sub")).to_contain_text("6 training steps")
    assert page.url.endswith(f"/runs/{run.code}/training")
    expect(page.locator("#plot-gap canvas")).to_be_visible()
    page.locator("#plot-gap .u-over").dblclick(position={"x": 40, "y": 40})
    page.wait_for_timeout(600)  # longer than a single press waits for a second one
    assert page.url.endswith(f"/runs/{run.code}/training")


def test_two_runs_are_drawn_on_the_same_axes(open_page: Open) -> None:
    for n in (4, 6):
        run = create_run(Run.Kind.IMPORT, f"of {n} steps")
        save(run, world(n))
        take_training_steps(run)
    page = open_page(f"/runs/{run.code}/training")
    page.click("text=Compare >> visible=true")
    page.wait_for_url(re.compile("/runs/compare"))
    expect(page.locator(".plot canvas")).to_have_count(page.locator(".plot").count())
    plot = page.locator("section", has_text="sampler: mean").first
    expect(plot.locator(".u-legend")).to_contain_text("of 6 steps")
    expect(plot.locator(".u-legend")).to_contain_text("of 4 steps")
    plot.locator("summary").click()
    expect(plot.locator("tbody tr").last).to_contain_text("–")


def test_versions_are_named_on_the_axis(open_page: Open) -> None:
    run = create_run(Run.Kind.IMPORT, "versions")
    save(run, of_versions(world(4), lambda one: f"weights-{one.training_step}"))
    take_figures(run)
    page = open_page(f"/runs/{run.code}/training?by=version")
    expect(page.locator(".plot canvas")).to_have_count(page.locator(".plot").count())
    over = page.locator("#plot-gap .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.34, box["y"] + 40)
    expect(page.locator("#plot-gap .u-legend")).to_contain_text("weights-1")
    over.click(position={"x": 3, "y": 40})
    page.wait_for_url(re.compile(rf"/runs/{run.code}\?policy=weights-0&from=0&to=3"))
    expect(page.locator("#run-list tbody tr")).to_have_count(4)
