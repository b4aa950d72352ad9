"""The strategies tab: replays are made by a worker once, shown with their figures, and two rows are aligned."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from inspector.trajectories.frame import waiting_words
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.trajectory import Row, Step, Trajectory
from rollouts.jobs.replays import replay_context, trajectory_replays
from rollouts.store import models
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.people.shares import create_share
from rollouts.store.runs.runs import delete_run
from rollouts.store.trajectories.replays import stored_rows
from rollouts.store.trajectories.trajectory_parts import step_wise_scopes
from rollouts.worker.jobs import do_job
from tests.web.samples import one_line
from tests.web.trajectory_samples import Maker, own_row

pytestmark = pytest.mark.django_db


def url(trajectory: models.StoredTrajectory, query: str = "", json: bool = False) -> str:
    return reverse(f"trajectory-strategies{'-json' if json else ''}", args=[trajectory.code]) + query


def stored(make: Maker, *values: Trajectory, **fields: Any) -> models.StoredTrajectory:
    return make.run(list(values), **fields).trajectories.order_by("index").first()


def ask(web: Client, trajectory: models.StoredTrajectory, query: str = "") -> Any:
    """Press the button of the page."""
    return web.post(reverse("trajectory-replay", args=[trajectory.code]) + query, follow=True)


def made_page(
    make: Maker, web: Client, sent: list[int], value: Trajectory
) -> tuple[models.StoredTrajectory, dict[str, Any]]:
    trajectory = stored(make, value)
    ask(web, trajectory)
    do_job(sent[-1])
    return trajectory, web.get(url(trajectory, json=True)).json()


def test_every_strategy_has_its_sentence() -> None:
    assert all(one.about.endswith(".") for one in STRATEGIES.values())


def test_opening_the_page_changes_nothing(make, web, sent) -> None:
    trajectory = stored(make, make.conversation("a"))
    with CaptureQueriesContext(connection) as asked:
        page = web.get(url(trajectory)).content.decode()
        assert web.get(url(trajectory, json=True)).json()["state"] == "unasked"
    assert all(query["sql"].startswith("SELECT") for query in asked.captured_queries)
    assert not sent and not models.Replay.objects.exists() and not models.Job.objects.exists()
    # With JavaScript the page posts by itself, without it the button does.
    assert 'hx-trigger="load"' in page and ">Replay</button>" in page


def test_the_button_sends_a_worker_once_and_its_result_is_shown(make, web, sent) -> None:
    trajectory = stored(make, make.conversation("a"))
    first = ask(web, trajectory, "?left=step_wise")
    assert first.redirect_chain[-1][0].endswith("/strategies?left=step_wise")
    assert first.status_code == 200 and 'hx-trigger="every 1s"' in first.content.decode()
    ask(web, trajectory)
    assert len(sent) == 1
    do_job(sent[0])
    page = web.get(url(trajectory)).content.decode()
    assert "every 1s" not in page
    assert all(text in page for text in STRATEGIES if text != "bridge" and text.isalpha())
    report = web.get(url(trajectory, json=True)).json()
    assert report["state"] == "done" and [one["strategy"] for one in report["strategies"]] == list(STRATEGIES)
    assert len(sent) == 1


def test_figures_and_rows_are_those_of_the_replay(make, web, sent) -> None:
    value = make.conversation("a", turns=3, size=20)
    trajectory, report = made_page(make, web, sent, value)
    sampled = sum(len(step.completion_ids) for step in value.steps)
    by_slug = {one["strategy"]: one for one in report["strategies"]}
    assert by_slug["step_wise"]["rows_count"] == 3
    assert by_slug["step_wise"]["trained_tokens"] == sampled and by_slug["step_wise"]["lost_tokens"] == 0
    rows = stored_rows(trajectory.replay, ["step_wise"])["step_wise"]
    for index, length in enumerate(rows.lengths):
        row = trajectory_replays.row_of(rows, index)
        assert len(row.ids) == len(row.loss_mask) == len(row.origin) == length
        completion = value.steps[index].completion_ids
        assert np.array_equal(row.ids[row.loss_mask], completion)


def test_the_recorded_rows_have_the_figures_that_strategies_are_compared_with(make, web, sent) -> None:
    value = make.conversation("a", turns=1, size=20)
    (step,) = value.steps
    mask = np.arange(len(step.stream)) >= len(step.prompt_ids) + 4  # four sampled tokens are masked
    trajectory, _ = made_page(make, web, sent, replace(value, rows=(Row(step.stream, mask, step_indices=(0,)),)))
    n = len(step.completion_ids)
    line = one_line(web.get(url(trajectory))).split("as recorded</span>")[1].split("</tr>")[0]
    assert ">4</td>" in "".join(line.split()) and f"{100 * (n - 4) / n:.1f} %" in line


def test_two_strategies_are_aligned_and_inserted_ids_are_marked(make, web, sent) -> None:
    whole = make.conversation("a")
    # Cut by a limit: one end-of-sequence token is put behind it by the strategy alone.
    last = replace(whole.steps[-1], completion_ids=whole.steps[-1].completion_ids[:-1], logprobs=None)
    trajectory, _ = made_page(make, web, sent, replace(whole, steps=(*whole.steps[:-1], last)))
    query = "?left=tool_delta&right=single_message"
    report = web.get(url(trajectory, query, json=True)).json()["comparison"]
    assert report["left"]["strategy"] == "tool_delta" and report["n_sites"] > 0
    assert report["left"]["origins"]["inserted"] == 0 and report["right"]["origins"]["inserted"] == 1
    page = web.get(url(trajectory, query)).content.decode()
    assert page.count('class="site"') == report["n_sites"]
    assert '<i class="o4' in page or "<i class=o4" in page
    assert 'class="by-writer"' in page
    # An equal token by chance between two others splits no difference.
    rows = trajectory.replay.rows.get(strategy="tool_delta")
    changed = rows.ids.copy()
    changed[[20, 22]] = 7
    rows.ids = changed
    rows.save(update_fields=["ids"])
    report = web.get(url(trajectory, "?left=recorded&right=tool_delta", json=True)).json()["comparison"]
    assert (report["sites"][0]["left_start"], report["sites"][0]["left_stop"]) == (20, 23)


def test_a_row_of_many_can_be_named_and_one_that_is_not_there_is_said(make, web, sent) -> None:
    trajectory, _ = made_page(make, web, sent, make.conversation("a", turns=3))
    report = web.get(url(trajectory, "?left=step_wise&left_row=0&right=step_wise&right_row=9", json=True)).json()
    assert (report["comparison"]["left"]["row"], report["comparison"]["right"]["row"]) == (0, 2)
    page = web.get(url(trajectory, "?left=step_wise&right=step_wise&right_row=9")).content.decode()
    assert "makes rows 0 to 2" in page
    page = web.get(url(trajectory, "?right=%3Cscript%3E")).content.decode()
    assert "is no strategy" in page and "<script>“" not in page and "“<script>" not in page


def test_equal_rows_are_called_equal(make, web, sent) -> None:
    trajectory, _ = made_page(make, web, sent, make.conversation("a"))
    report = web.get(url(trajectory, "?left=tool_delta&right=tool_delta", json=True)).json()
    assert report["comparison"]["n_sites"] == 0 and report["comparison"]["verdict"].startswith("The same ")


def test_what_is_missing_is_said_and_no_worker_is_sent(make, web, sent) -> None:
    trajectory = stored(make, own_row())
    report = web.get(url(trajectory, json=True)).json()
    assert report["state"] == "missing" and "without steps" in report["why"]
    assert "without steps" in web.get(url(trajectory)).content.decode()
    assert not sent


@pytest.mark.parametrize("lacking", ["a tokenizer", "messages"])
def test_strategies_that_render_nothing_need_neither_tokenizer_nor_messages(make, web, sent, lacking) -> None:
    value = make.conversation("a", turns=3)
    fields: dict[str, Any] = {"tokenizer": None, "chat_template": None}
    if lacking == "messages":
        fields = {}
        value = Trajectory("a", tuple(Step(step.prompt_ids, step.completion_ids) for step in value.steps))
    trajectory = stored(make, value, **fields)
    ask(web, trajectory)
    do_job(sent[-1])
    by_slug = {one["strategy"]: one for one in web.get(url(trajectory, json=True)).json()["strategies"]}
    assert by_slug["step_wise"]["rows_count"] == 3 and not by_slug["step_wise_merged"]["refused"]
    why = "no tokenizer" if fields else "without "
    assert all(why in one["refused"] for slug, one in by_slug.items() if not slug.startswith("step_wise"))
    assert why in web.get(url(trajectory)).content.decode()
    assert by_slug["reconcile"]["parameters"] == {"fork_threshold": 1024}


def test_a_visitor_of_a_link_sees_the_result_and_sends_nobody(make, web, visitor, member, sent) -> None:
    trajectory = stored(make, make.conversation("a"))
    _, token = create_share(member, trajectory)
    visitor.get(reverse("share-open", args=[token]))
    assert visitor.get(url(trajectory, json=True)).json()["state"] == "unasked"
    assert not sent and not models.Replay.objects.exists()
    assert "Replay</button>" not in visitor.get(url(trajectory)).content.decode()
    ask(web, trajectory)
    do_job(sent[0])
    assert visitor.get(url(trajectory, json=True)).json()["state"] == "done"
    assert visitor.post(reverse("trajectory-replay", args=[trajectory.code])).status_code in (302, 403)


def test_a_failure_is_said_and_tried_again_only_when_asked(make, web, sent, monkeypatch) -> None:
    trajectory = stored(make, make.conversation("a"))
    monkeypatch.setattr(trajectory_replays, "MAX_STEPS", 1)
    ask(web, trajectory)
    do_job(sent[0])
    page = web.get(url(trajectory)).content.decode()
    assert "too long for a worker" in page and "manage.py replay" in page
    assert "Try again" in page and "every 1s" not in page
    assert len(sent) == 1
    monkeypatch.setattr(trajectory_replays, "MAX_STEPS", 500)
    web.post(reverse("trajectory-replay", args=[trajectory.code]))
    assert len(sent) == 2
    do_job(sent[1])
    assert web.get(url(trajectory, json=True)).json()["state"] == "done"


def test_a_broker_that_does_not_answer_is_said(make, web, no_broker) -> None:
    trajectory = stored(make, make.conversation("a"))
    ask(web, trajectory)
    report = web.get(url(trajectory, json=True)).json()
    assert report["state"] == "failed" and "Redis does not answer" in report["why"]


def test_a_strategy_that_refuses_says_why_and_cannot_be_compared(make, web, sent) -> None:
    text = make.record.chat_template.text
    counting = register_chat_template("{{ messages|length }} messages\n" + text)
    trajectory = stored(make, make.conversation("a"), chat_template=counting)
    ask(web, trajectory)
    do_job(sent[0])
    report = web.get(url(trajectory, "?right=tool_delta", json=True)).json()
    by_slug = {one["strategy"]: one for one in report["strategies"]}
    assert "not prefix-preserving" in by_slug["tool_delta"]["refused"] and by_slug["retokenize"]["refused"] is None
    assert report["comparison"]["right"]["strategy"] != "tool_delta"
    page = web.get(url(trajectory, "?right=tool_delta")).content.decode()
    assert "<b>Refused.</b>" in page and "cannot be replayed here" in page


def test_rewritten_history_is_frozen_and_the_share_still_trained_is_told(make, web, sent) -> None:
    whole = make.conversation("a", turns=3)
    first, second, third = whole.steps
    summary = ({"role": "user", "content": "Summary: it is 84."},)
    compacted = replace(third, prompt_ids=first.prompt_ids, request=replace(third.request, messages=summary))
    trajectory, report = made_page(make, web, sent, replace(whole, steps=(first, second, compacted)))
    by_slug = {one["strategy"]: one for one in report["strategies"]}
    assert by_slug["tool_delta"]["frozen_steps"] == 2 and by_slug["tool_delta"]["trained_share"] == pytest.approx(1 / 3)
    assert by_slug["step_wise"]["frozen_steps"] == 0 and by_slug["step_wise"]["trained_share"] == 1
    page = one_line(web.get(url(trajectory)))
    assert "History was rewritten before step 2" in page and "33.3 %" in page and "100.0 %" in page


def test_another_chat_template_makes_the_replay_stale(make, web, sent) -> None:
    trajectory, _ = made_page(make, web, sent, make.conversation("a"))
    text = replay_context.template_text(trajectory.run)
    other = register_chat_template(text + "{# another #}")
    models.Run.objects.filter(pk=trajectory.run_id).update(chat_template=other)
    assert web.get(url(trajectory, json=True)).json()["state"] == "unasked" and len(sent) == 1
    ask(web, trajectory)
    assert web.get(url(trajectory, json=True)).json()["state"] == "queued" and len(sent) == 2


def test_a_replay_that_has_waited_for_a_whole_day_still_says_why(make, web, sent) -> None:
    trajectory = stored(make, make.conversation("a"))
    ask(web, trajectory)
    job = models.Replay.objects.get().job
    job.created_at = timezone.now() - timedelta(days=1)
    assert waiting_words(job).startswith("No worker has taken it")
    job.created_at = timezone.now()
    assert waiting_words(job) == ""


def test_a_replay_lost_with_its_worker_is_sent_again(make, web, sent) -> None:
    trajectory = stored(make, make.conversation("a"))
    ask(web, trajectory)
    models.Job.objects.update(status="running", heartbeat_at=timezone.now() - timedelta(seconds=20))
    ask(web, trajectory)
    assert len(sent) == 1
    models.Job.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=20))
    ask(web, trajectory)
    ask(web, trajectory)
    assert len(sent) == 2


def test_a_task_delivered_twice_changes_nothing(make, web, sent) -> None:
    trajectory, report = made_page(make, web, sent, make.conversation("a"))
    before = list(models.ReplayRows.objects.values_list("pk", flat=True))
    do_job(sent[0])
    assert list(models.ReplayRows.objects.values_list("pk", flat=True)) == before
    assert web.get(url(trajectory, json=True)).json() == report
    delete_run(trajectory.run)
    assert not models.Replay.objects.exists()
    do_job(sent[0])


def test_step_wise_training_is_counted_with_and_without_merging(make) -> None:
    whole, (broken, _) = make.conversation("a", turns=3), make.broken("b")
    trajectory = stored(make, whole, broken)
    own, group = step_wise_scopes(trajectory)
    streams = [len(step.stream) for step in whole.steps]
    assert (own.trajectories, own.samples, own.forwarded) == (1, 3, sum(streams))
    assert (own.samples_merged, own.forwarded_merged) == (1, streams[-1])
    # The step that breaks opens a row of its own.
    apart = [len(step.stream) for step in broken.steps]
    assert (group.trajectories, group.samples, group.samples_merged) == (2, 5, 3)
    assert group.forwarded_merged == streams[-1] + sum(apart)
    assert (group.turns_least, group.turns_most) == (2, 3)


def test_the_number_of_queries_does_not_grow_with_the_steps(make, web, sent, django_assert_max_num_queries) -> None:
    short, _ = made_page(make, web, sent, make.conversation("a", turns=2))
    long, _ = made_page(make, web, sent, make.conversation("a", turns=8))
    for trajectory in (short, long):
        with django_assert_max_num_queries(30):
            web.get(url(trajectory))
