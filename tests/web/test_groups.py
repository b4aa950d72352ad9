"""The page of a group: siblings by reward, advantages, where their samples diverge; and the list's lines and totals."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from django.test import Client

from inspector.runs import live_parts
from inspector.runs.group_page import group_url
from inspector.trajectories import frame
from rollout_inspector.streams.trajectory import Request, Row, Step, Trajectory, ids_array
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run, end_run
from rollouts.store.trajectories.groups import group_advantages
from rollouts.store.trajectories.previews import stored_preview
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectory_list import count_before, count_trajectories
from tests.web.samples import HOSTILE, finding, one_line, stored_run
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


def sibling(name: str, reward: float | None, sampled: list[int], group: str = "a/b c") -> Trajectory:
    asked = Request(({"role": "user", "content": f"{HOSTILE}\nmore"},))
    step = Step(ids_array([1, 2]), ids_array(sampled), request=asked, reply={"content": f"{name} said"})
    return Trajectory(name, (step,), reward=reward, group=group)


def stored(values: list[Trajectory], **fields: Any) -> Run:
    run = create_run("import", "grouped", **fields)
    save_trajectories(run, values, [[finding()] if n == 1 else [] for n in range(len(values))])
    end_run(run, Run.Status.DONE)
    run.refresh_from_db()
    return run


def test_a_group_is_shown_by_reward_with_advantages_and_shared_tokens(web: Client) -> None:
    run = stored([sibling("low", 0.0, [5, 6, 7]), sibling("best", 1.0, [5, 6, 8, 9]), sibling("none", None, [4])])
    assert (
        web.get(f"/runs/{run.code}.json").json()["trajectories"][0]["group_url"] == f"/runs/{run.code}/groups/a/b%20c"
    )
    body = web.get(f"/runs/{run.code}/groups/a/b%20c.json").json()
    lines = {line["external_id"]: line for line in body["siblings"]}
    assert list(lines) == ["best", "low", "none"] and body["reference"] == lines["best"]["code"]
    assert [line["shared"] for line in lines.values()] == [4, 2, 0]
    assert [line["advantage"] for line in lines.values()] == [
        pytest.approx(0.7071, abs=1e-4),
        pytest.approx(-0.7071, abs=1e-4),
        None,
    ]
    assert body["advantages"] == "computed" and body["scored"] == 2 and not body["zero_variance"]
    assert lines["best"]["kinds"] == {"boundary_merge": "error"} and body["prompt_line"].startswith("<script>")
    page = one_line(web.get(f"/runs/{run.code}/groups/a/b%20c?to={lines['low']['code']}"))
    assert "<script>alert" not in page and "computed here from the rewards as GRPO does it" in page
    chosen = re.findall(r'name="(left|right)" value="(\w+)" aria-label="[^"]*" checked', page)
    assert chosen == [("left", lines["low"]["code"]), ("right", lines["none"]["code"])], "two, so that one press aligns"
    assert 'width="120.0"' in page and "2 of 4" in page and "low said" in page
    assert f'href="/runs/{run.code}/groups/a/b%20c.json?to=' in page
    for nothing in ("nothing", "%00", "%FF", "a/b%20c/"):
        assert web.get(f"/runs/{run.code}/groups/{nothing}").status_code == 404


def test_two_of_a_group_are_aligned_and_a_wrong_choice_is_told(web: Client) -> None:
    run = stored([sibling("a", 0.0, [5]), sibling("b", 0.0, [5])])
    one, two = run.trajectories.order_by("index")
    here = f"/runs/{run.code}/groups/a/b%20c"
    answer = web.get(f"{here}?left={one.code}&right={two.code}")
    assert answer.status_code == 302 and answer["Location"] == f"/trajectories/{one.code}/compare?with={two.code}"
    for query in (f"left={one.code}", f"left={one.code}&right={one.code}", "left=x&right=y"):
        assert "Choose two different trajectories" in one_line(web.get(f"{here}?{query}"))
    page = one_line(web.get(f"{here}?to=zzz"))
    assert "is no trajectory of this group" in page and 'id="zero-variance"' in page
    fields = one_line(web.get(f"/trajectories/{one.code}"))
    assert f'href="{here}"' in fields and "all rewards 0" in fields


def test_advantages_of_the_trainer_come_first(web: Client) -> None:
    mask = np.array([0, 1, 1], bool)
    values = [
        Trajectory(
            name, rows=(Row(ids_array(ids), mask, columns={"advantages": np.float32([9, n, n])}),), reward=n, group="g"
        )
        for name, n, ids in (("x", 0.5, [1, 2, 3]), ("y", -0.5, [1, 2, 4]))
    ]
    body = web.get(f"/runs/{stored(values).code}/groups/g.json").json()
    assert body["advantages"] == "stored" and [line["advantage"] for line in body["siblings"]] == [0.5, -0.5]
    assert [line["shared"] for line in body["siblings"]] == [2, 1]


def test_a_group_of_256_asks_and_weighs_little(web: Client, django_assert_max_num_queries: Any) -> None:
    run = stored([sibling(f"s{n}", n % 5 / 5, [5] * (n % 9) + [n], "g") for n in range(256)])
    with django_assert_max_num_queries(11) as few:
        page = web.get(f"/runs/{run.code}/groups/g")
    assert page.content.count(b'class="row-link') == 256 and len(page.content) < 700_000
    small = stored([sibling(f"t{n}", n / 2, [5], "g") for n in range(2)])
    with django_assert_max_num_queries(len(few)):
        web.get(f"/runs/{small.code}/groups/g")
    one = run.trajectories.first()
    assert one is not None
    assert web.get(f"/trajectories/{one.code}/compare").content.count(b"?with=") == 255


def test_grpo_advantages() -> None:
    assert group_advantages([1.0, 1.0, None]) == [0.0, 0.0, None]
    assert group_advantages([1.0, None]) == [None, None]
    assert sum(filter(None, group_advantages([0.1, 0.4, 0.9]))) == pytest.approx(0)


def test_a_name_that_no_address_holds_leads_to_the_list() -> None:
    for odd in ("..", "a//b", "x.json", "a\nb", "/a"):
        assert group_url("abcd", odd).startswith("/runs/abcd?group=")


def test_the_list_shows_prompt_and_answer(web: Client) -> None:
    run = stored([sibling("a", 1.0, [5], ""), sibling("b", 0.0, [6], "")])
    page = one_line(web.get(f"/runs/{run.code}"))
    assert "&lt;script&gt;alert(1)" in page and "a said" in page and "<script>alert" not in page
    assert [line["answer_line"] for line in web.get(f"/runs/{run.code}.json").json()["trajectories"]] == [
        "a said",
        "b said",
    ]


def test_lines_are_read_from_ids_where_the_source_has_no_text(make: Maker) -> None:
    whole, table = make.conversation("a"), make.table
    told = ("What is 12 * 7?", "I compute 12 * 7 with the tool and check the result.")
    bare = [replace(step, request=None) for step in whole.steps]
    assert stored_preview(whole.steps, (), table) == stored_preview(bare, (), table) == told
    first, last = bare[0], bare[-1]
    row = Row(last.stream, np.arange(len(last.stream)) >= len(last.prompt_ids))
    assert stored_preview((), [row], table).answer == told[1]
    odd = np.concatenate([ids_array([-1, 10**9]), first.prompt_ids])
    assert stored_preview([replace(first, prompt_ids=odd)], (), table) == told
    nothing = replace(first, prompt_ids=ids_array([]), completion_ids=ids_array([]))
    assert stored_preview([nothing], (), table) == ("", "")


def test_totals_stand_under_the_filter(web: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(60)
    here = f"/runs/{run.code}"
    assert "1 to 50 of 60 trajectories" in one_line(web.get(here))
    body = web.get(f"{here}.json").json()
    second = web.get(f"{here}.json", {"after": body["next"]}).json()
    assert (body["total"], body["first"], second["total"], second["first"]) == (60, 1, 60, 51)
    flawed = web.get(f"{here}.json?finding=boundary_merge&min=1&sort=-reward").json()
    assert flawed["total"] == 30
    assert "30 trajectories that pass the filter, of 60 in the run: 50.0 %" in one_line(
        web.get(f"{here}?finding=boundary_merge")
    )
    third = run.trajectories.get(index=5)
    page = one_line(web.get(f"/trajectories/{third.code}?finding=boundary_merge"))
    assert '<span class="move-at">3 of 30</span>' in page
    assert '<span class="move-at">6 of 60</span>' in one_line(web.get(f"/trajectories/{third.code}"))
    assert "not in the filtered list" in one_line(web.get(f"/trajectories/{third.code}?max=0"))
    best = one_line(web.get(f"/trajectories/{third.code}?sort=-reward&finding=boundary_merge"))
    assert '<span class="move-at">3 of 30</span>' in best
    for module in (frame, live_parts):
        monkeypatch.setattr(module, "MAX_COUNTED", 10)
    for function in (count_trajectories, count_before):
        monkeypatch.setattr(function, "__defaults__", (10,))
    assert web.get(f"{here}.json?min=1").json()["total"] is None
    assert "of more than 10" in one_line(web.get(f"{here}?min=1"))
    late = run.trajectories.get(index=59)
    assert '<span class="move-at">of more than 10</span>' in one_line(web.get(f"/trajectories/{late.code}?min=1"))


def test_heads_sort_and_say_how_it_is_sorted(web: Client) -> None:
    here = f"/runs/{stored_run(4).code}"
    page = one_line(web.get(f"{here}?finding=boundary_merge"))
    assert f'aria-sort="ascending"> <a href="{here}?finding=boundary_merge&amp;sort=-index#' in page
    assert page.count("aria-sort") == 1
    page = one_line(web.get(f"{here}?sort=-reward"))
    assert f'<a href="{here}?sort=reward#' in page and 'aria-sort="descending"' in page
