"""The lanes of a trajectory on its page and in its twin: words, links, queries and size."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.html import escape

from inspector.trajectories.tokens import lane_tree
from rollout_inspector.diagnose import diagnose
from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array
from rollout_inspector.text.chat_templates import renderer
from rollouts.store import models
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary
from tests.counting import growth
from tests.samples.lanes import SUMMARY, compacted
from tests.samples.planted.plant import PLANTERS, ModelSetup
from tests.web.samples import one_line
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


@pytest.fixture
def setup(make: Maker) -> ModelSetup:
    codec = make.tokenizer
    return ModelSetup("demo", codec, renderer(codec, codec.chat_template or ""), random.Random(3))


def stored(make: Maker, setup: ModelSetup, value: Trajectory, findings: list[Finding] | None = None) -> Any:
    found = diagnose(value, setup.codec, lambda sha: setup.renderer) if findings is None else findings
    return make.run([value], [found]).trajectories.get()


def page_of(web: Client, trajectory: models.StoredTrajectory, query: str = "") -> str:
    response = web.get(reverse("trajectory", args=[trajectory.code]) + query)
    assert response.status_code == 200
    return response.content.decode()


def twin_of(web: Client, trajectory: models.StoredTrajectory) -> Any:
    return web.get(reverse("trajectory", args=[trajectory.code]) + ".json").json()


def links(html: str) -> list[tuple[str, str, str]]:
    """Address, name and label of each lane."""
    found = re.findall(
        r'<a href="([^"]*)" data-keeps-lens(?: aria-current="true")?>\s*<span class="lane-name">(.*?)</span>\s*'
        r"<strong>(.*?)</strong>",
        html,
    )
    return [(url.replace("&amp;", "&"), name, label) for url, name, label in found]


def test_a_sub_agent_is_a_lane_that_links_to_its_row_at_the_place_where_it_leaves(web, make, setup) -> None:
    trajectory = stored(make, setup, PLANTERS["subagent_interleaved"](setup).trajectory)
    html = page_of(web, trajectory)
    (_, first, main), (url, name, label) = links(html)
    assert (first, main, name, label) == ("row 0", "first lane", "row 1", "branch")
    tree = twin_of(web, trajectory)["lanes"]
    leaves = tree["items"][1]["leaves"]
    assert (leaves["lane"], leaves["step"], leaves["part"]) == (0, 0, "prompt")
    assert "row=1" in url and f"t={leaves['offset']}-{leaves['offset'] + 1}" in url
    sentence = (
        "5 engine calls made 2 rows: the first lane of 3 calls and one branch of 2 calls whose answer no later step is "
        "known to read."
    )
    assert tree["sentence"] == sentence and sentence in one_line(web.get(f"/trajectories/{trajectory.code}"))
    there = page_of(web, trajectory, "?" + url.partition("?")[2])
    assert re.search(r'aria-current="true">\s*<span class="lane-name">row 1<', there)
    assert "leaves row 0 in the prompt of step 0" in html


def test_a_branch_whose_answer_a_later_step_reads_is_called_a_sub_agent(web, make, setup) -> None:
    value = PLANTERS["subagent_interleaved"](setup).trajectory
    steps = list(value.steps)
    answer = "The ferry leaves from the third pier of the old harbour."
    steps[3] = replace(steps[3], reply={"role": "assistant", "content": answer})
    request = steps[4].request
    assert request is not None
    told = (*request.messages[:-1], {"role": "user", "content": f"It says: {answer}"})
    steps[4] = replace(steps[4], request=replace(request, messages=told))
    trajectory = stored(make, setup, replace(value, steps=tuple(steps)))
    assert [label for _, _, label in links(page_of(web, trajectory))] == ["first lane", "branch, a sub-agent"]
    tree = twin_of(web, trajectory)["lanes"]
    assert tree["items"][1]["read_by"] == 4 and "step 4 reads its answer" in tree["items"][1]["words"]
    assert tree["sentence"].endswith("the first lane of 3 calls and one sub-agent of 2 calls.")


@pytest.mark.parametrize(
    ("extra", "words"),
    [({"line": {"agent": "<b>explore"}}, "agent “<b>explore”; step"),
     ({"agent": "plan" * 40}, f"agent “{'plan' * 20}”"), ({"line": {"agent": ["x"]}}, ""),
     ({"line": 5, "agent": None}, "")],
)
def test_a_lane_has_the_name_of_the_sub_agent_that_its_source_noted(web, make, setup, extra: Any, words: str) -> None:
    value = PLANTERS["subagent_interleaved"](setup).trajectory
    steps = [replace(step, extra=extra) if n else step for n, step in enumerate(value.steps)]
    trajectory = stored(make, setup, replace(value, steps=tuple(steps)))
    (main, lane), html = twin_of(web, trajectory)["lanes"]["items"], page_of(web, trajectory)
    assert main["agent"] == "" and lane["words"].startswith(f"branch: {words or 'step'}")
    assert ("<b>explore" not in html) and (escape(words) in html)


def test_a_compaction_says_whether_its_summary_was_accepted(web, make, setup) -> None:
    accepted = stored(make, setup, compacted(setup, aside=True))
    assert [label for _, _, label in links(page_of(web, accepted))] == [
        "first lane", "summary call, summary accepted", "compaction, summary accepted",
    ]
    tree = twin_of(web, accepted)["lanes"]
    assert tree["items"][2]["summary"] == {"step": 2, "outcome": "accepted", "taken_by": 3}
    assert "one side call whose summary was accepted and one compaction whose summary was accepted" in tree["sentence"]
    discarded = stored(make, setup, compacted(setup, taken=False))
    assert "no later prompt holds the summary that step 2 wrote" in page_of(web, discarded)
    assert twin_of(web, discarded)["lanes"]["items"][-1]["summary"]["outcome"] == "discarded"


def test_a_summary_beyond_what_is_read_is_not_called_discarded(web, make, setup, monkeypatch) -> None:
    monkeypatch.setattr(lane_tree, "MAX_READ_CHARACTERS", len(SUMMARY) + 200)
    value = compacted(setup, taken=False, aside=True)
    long = {"role": "user", "content": "word " * 400}
    last = value.steps[-1]
    assert last.request is not None
    last = replace(last, request=replace(last.request, messages=(*last.request.messages, long)))
    steps = [*value.steps[:-1], last]
    # The side call reads the whole conversation, so it is shortened for the limit of this test.
    asked = steps[2].request
    assert asked is not None
    short = (asked.messages[0], {"role": "user", "content": "Summarise."})
    steps[2] = replace(steps[2], request=replace(asked, messages=short))
    trajectory = stored(make, setup, replace(value, steps=tuple(steps)))
    lane = next(one for one in twin_of(web, trajectory)["lanes"]["items"] if one["summary"])
    assert lane["summary"]["outcome"] is None and "not all later messages could be read" in lane["words"]


def test_one_chain_and_text_alone_draw_no_lanes(web, make) -> None:
    one = make.run([make.conversation("one")]).trajectories.get()
    text = make.run([Trajectory("t", tuple(Step(ids_array([]), ids_array([])) for _ in range(3)))]).trajectories.get()
    rows = make.run([Trajectory("r", rows=(Row(ids_array([1, 2]), np.ones(2, bool)),))]).trajectories.get()
    assert 'class="lanes"' not in page_of(web, one) + page_of(web, rows)
    for trajectory in (one, text, rows):
        assert twin_of(web, trajectory)["lanes"] is None


def test_a_growing_trajectory_draws_lanes_without_names(web, make, setup, monkeypatch) -> None:
    trajectory = stored(make, setup, compacted(setup), findings=[])
    trajectory.rows.all().delete()
    models.StoredTrajectory.objects.filter(pk=trajectory.pk).update(status="running", n_rows=0)
    # No message is read while nothing is diagnosed.
    monkeypatch.setattr(lane_tree.trajectory_parts, "said_of_steps", None)
    html = page_of(web, trajectory)
    assert "made 2 rows so far" in html and "not diagnosed yet" in html


def forked(n: int) -> Trajectory:
    """A main conversation of three calls, and ``n`` side calls."""
    main = [Step(ids_array([1, 2]), ids_array([3]))]
    sides = [Step(ids_array([1, 100 + k]), ids_array([5])) for k in range(n)]
    return Trajectory("forked", (*main, *sides, Step(ids_array([1, 2, 3, 4]), ids_array([6]))))


def test_three_lanes_and_three_hundred_ask_the_same_and_fold(web, make, setup) -> None:
    few, many = (stored(make, setup, forked(n)) for n in (2, 300))
    page_of(web, few)
    with CaptureQueriesContext(connection) as first:
        small = page_of(web, few)
    with CaptureQueriesContext(connection) as second:
        large = page_of(web, many)
    assert len(first) == len(second)
    one = make.run([make.conversation("one")]).trajectories.get()
    with CaptureQueriesContext(connection) as alone:
        page_of(web, one)
    assert len(alone) <= len(first) <= len(alone) + 3  # findings' ids, the messages of the lanes, columns
    assert len(links(small)) == 3 and "lanes-folded" not in small
    assert len(links(large)) == lane_tree.MAX_DRAWN
    assert len(re.findall(r'<section class="lanes".*?</section>', large, re.DOTALL)[0]) < lane_tree.MAX_DRAWN * 900
    assert "188 lanes more" in large and "and 101 more" in large
    folded = page_of(web, many, "?row=150")
    assert re.search(r'<details class="lanes-folded" open>', folded)


def test_rows_of_the_source_that_join_lanes_are_linked_by_their_row(web, make, setup) -> None:
    value = forked(1)
    ids = ids_array([1, 2, 3, 4, 6, 1, 100, 5])
    row = Row(ids, np.ones(len(ids), bool), step_indices=(0, 1, 2))
    trajectory = stored(make, setup, replace(value, rows=(row,)))
    html = page_of(web, trajectory)
    assert "3 engine calls form 2 lanes; the source holds 1 row" in html
    assert [(name, "t=" in url) for url, name, _ in links(html)] == [("row 0", False), ("lane 1", False)]


def shown_of(n: int) -> Callable[[], Any]:
    """The lists of lanes of a trajectory with n steps, each in a lane of its own."""
    steps = [StepSummary(0, 0, 0, None, 0, 0, 10, 5, "stop")]
    steps += [StepSummary(n, n, n, n - 1, 12, 15, 20, 5, "stop") for n in range(1, n)]
    rows = [RowSummary(n, 25, 5, frozenset([n]), last_step=n, key=n) for n in range(n)]
    trajectory = models.StoredTrajectory(code="x", status="done", run=models.Run(code="r"))
    def drawn() -> tuple[dict[str, Any], Any]:
        lanes = lane_tree.read_lanes(trajectory, rows, steps, [])
        shown = lane_tree.drawn_lanes(trajectory, lanes, rows, lambda lane: "")
        return shown, lane_tree.lane_tree(trajectory, lanes, rows)

    return drawn


def test_five_thousand_steps_are_drawn_small() -> None:
    shown, value = shown_of(5000)()
    assert shown["n"] == 5000 and "5,000 rows" in shown["sentence"]
    assert len(shown["open"] + shown["folded"]) == lane_tree.MAX_DRAWN
    assert value.n_lanes == 5000 and len(value.items) == lane_tree.MAX_LISTED


def test_drawing_lanes_is_linear_work() -> None:
    assert growth(shown_of, 400) < 1.1
