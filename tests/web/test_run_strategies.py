"""What a whole run would have cost under every strategy: made by a job, told on the cost page."""

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from django.test import Client
from django.utils import timezone

from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs.replays import replay_context, run_replays
from rollouts.store import models
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.jobs.jobs import JobLost, beat_job, take_job
from rollouts.store.models import Job, Run
from rollouts.store.people.shares import create_share
from rollouts.worker import jobs
from tests.web.samples import stored_run
from tests.web.trajectory_samples import Maker, own_row

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(make: Maker) -> Run:
    """Three that can be replayed, and one that was recorded without messages."""
    values = [make.conversation(f"t{turns}", turns=turns, size=20) for turns in (1, 2, 4)]
    return make.run([*values, make.broken("b")[0]])


def cost(web: Client, run: Run) -> dict[str, Any]:
    found: dict[str, Any] = web.get(f"/runs/{run.code}/cost.json").json()["strategies"]
    return found


def test_the_figures_of_a_run_are_the_sums_of_its_trajectories(web: Client, run: Run, sent: list[int]) -> None:
    assert cost(web, run)["lines"] == []
    assert "Replay every strategy over this run" in web.get(f"/runs/{run.code}/cost").content.decode()
    web.post(f"/runs/{run.code}/replay")
    web.post(f"/runs/{run.code}/replay")
    assert len(set(sent)) == 1 == Job.objects.count()
    live = web.get(f"/runs/{run.code}/cost").content.decode()
    assert 'hx-trigger="every 1s"' in live and "Cancel the replay" in live and "waits for a worker" in live
    jobs.do_job(sent[0])
    found = cost(web, run)
    assert found["job"]["status"] == "done" and not found["live"] and not found["stale"]
    lines = {line["strategy"]: line for line in found["lines"]}
    assert list(lines) == list(STRATEGIES)
    one, two, four, _ = run.trajectories.order_by("index")
    step_wise, merged, tool_delta = lines["step_wise"], lines["step_wise_merged"], lines["tool_delta"]
    assert (step_wise["trajectories"], step_wise["refused"], step_wise["rows"]) == (4, 0, 1 + 2 + 4 + 2)
    assert step_wise["trained"] == step_wise["sampled"] == run.n_sampled and step_wise["lost"] == 0
    assert found["recorded"] == {"rows": 5, "tokens": merged["tokens"], "trained": run.n_sampled}
    assert merged["rows"] == 5 and merged["times"] == 1.0 < step_wise["times"]
    assert step_wise["repaid"] > merged["repaid"]
    assert (tool_delta["refused"], tool_delta["replayed"], tool_delta["times"]) == (1, 3, None)
    assert (
        tool_delta["trained"] == one.n_sampled + two.n_sampled + four.n_sampled and tool_delta["percent"] == "100.0 %"
    )
    assert "without its messages" in tool_delta["why"][0]["sentence"]
    page = web.get(f"/runs/{run.code}/cost").content.decode()
    assert "every 1s" not in page and "step wise merged" in page and "without its messages" in page
    assert f"/runs/{run.code}/cost#strategies" in web.get(f"/runs/{run.code}").content.decode()


def test_what_it_follows_from_has_changed(web: Client, run: Run, sent: list[int]) -> None:
    web.post(f"/runs/{run.code}/replay")
    jobs.do_job(sent[0])
    other = register_chat_template((replay_context.template_text(run) or "") + "{# another #}")
    Run.objects.filter(pk=run.pk).update(chat_template=other)
    assert cost(web, run)["stale"]
    assert "has changed since" in web.get(f"/runs/{run.code}/cost").content.decode()
    web.post(f"/runs/{run.code}/replay")
    jobs.do_job(sent[1])
    assert not cost(web, run)["stale"] and Job.objects.count() == 2


def test_a_worker_that_is_lost_is_gone_on_with_and_counts_nothing_twice(
    web: Client, run: Run, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    web.post(f"/runs/{run.code}/replay")
    lost = take_job(sent[0])
    assert lost is not None
    lost.report = run_replays.new_report(run)
    begun = run_replays.replay_run(run, lost.report)
    reached = [next(begun), next(begun)][-1]
    beat_job(lost, n_done=2, report=lost.report, reached=reached)
    begun.close()  # it is killed here
    Job.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=10))
    assert "gives no sign of life" in web.get(f"/runs/{run.code}/cost").content.decode()
    loaded: list[int] = []
    real = replay_context.load_trajectories
    monkeypatch.setattr(
        replay_context,
        "load_trajectories",
        lambda pile: (loaded.extend(one.index for one in pile), real(pile))[1],
    )
    jobs.do_job(sent[0])
    assert loaded == [2, 3]
    whole = run_replays.new_report(run)
    assert list(run_replays.replay_run(run, whole)) == [0, 1, 2, 3]
    assert Job.objects.get().report == whole


def test_it_is_cancelled_from_the_page(
    web: Client, visitor: Client, run: Run, sent: list[int], monkeypatch: Any
) -> None:
    web.post(f"/runs/{run.code}/replay")
    job = Job.objects.get()
    taken = take_job(job.pk)
    assert taken is not None
    assert visitor.post(f"/runs/{run.code}/jobs/{job.code}/cancel").status_code in (302, 403)
    assert web.post(f"/runs/{run.code}/jobs/{job.code}/cancel")["Location"].endswith("/cost#strategies")
    monkeypatch.setattr("rollouts.store.jobs.jobs.TELL_SECONDS", 0.0)
    jobs.work_on(taken)
    job.refresh_from_db()
    assert job.status == "cancelled" and job.n_done == 0
    with pytest.raises(JobLost):
        beat_job(taken)
    assert "Cancelled after" in web.get(f"/runs/{run.code}/cost").content.decode()
    assert "Replay every strategy" in web.get(f"/runs/{run.code}/cost").content.decode()


@pytest.mark.parametrize("what", ["rows alone", "live"])
def test_what_stands_in_the_way_is_a_sentence(web: Client, make: Maker, sent: list[int], what: str) -> None:
    run = make.run([own_row()]) if what == "rows alone" else stored_run(2)
    if what == "live":
        Run.objects.update(status="running")
    page = web.get(f"/runs/{run.code}/cost").content.decode()
    words = {"rows alone": "training rows without steps", "live": "when the run has ended"}
    assert words[what] in page and "Replay every strategy" not in page
    if what == "live":
        assert web.post(f"/runs/{run.code}/replay.json").status_code == 409 and not sent


def test_a_visitor_sees_the_figures_and_no_button(
    web: Client, visitor: Client, member: Any, run: Run, sent: Any
) -> None:
    _, token = create_share(member, run)
    visitor.get(f"/s/{token}")
    assert "Log in to replay one" in visitor.get(f"/runs/{run.code}/cost").content.decode()
    web.post(f"/runs/{run.code}/replay")
    jobs.do_job(sent[0])
    page = visitor.get(f"/runs/{run.code}/cost").content.decode()
    assert (
        "step wise merged" in page
        and "<button" not in page.partition("Under another strategy")[2].partition("</section>")[0]
    )
    assert visitor.post(f"/runs/{run.code}/replay").status_code in (302, 403)


def test_the_recorded_rows_are_those_that_are_stored(run: Run) -> None:
    stored = models.StoredRow.objects.filter(trajectory__run=run)
    recorded = run_replays.new_report(run)["recorded"]
    assert recorded["rows"] == stored.count() and recorded["tokens"] == int(np.sum([row.n_tokens for row in stored]))
