"""From a finding that a chat template causes: the trajectory under the repaired template, beside the recorded one."""

import re
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from rollout_inspector.diagnose.kinds import KINDS
from rollouts.jobs import gallery, template_checks
from rollouts.jobs.replays import trajectory_replays
from rollouts.store.jobs.jobs import cancel_job, take_job
from rollouts.store.models import Job, StoredTrajectory, TemplateCheck
from rollouts.worker.jobs import do_job
from tests.web.samples import one_line
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


def page_of(trajectory: StoredTrajectory, query: str = "?side=repair", json: bool = False) -> str:
    return reverse(f"trajectory-compare{'-json' if json else ''}", args=[trajectory.code]) + query


def press(web: Client, trajectory: StoredTrajectory, **fields: str) -> Any:
    """What the page posts as it opens, or its button."""
    return web.post(reverse("trajectory-replay", args=[trajectory.code]) + "?side=repair", fields, follow=True)


@pytest.mark.parametrize("kind", ("empty_think_toggled", "thinking_stripped"))
def test_one_press_shows_what_changes_in_the_rows(kind: str, web: Client, sent: list[int]) -> None:
    trajectory = gallery.load().trajectories.get(external_id=kind)
    card = one_line(web.get(f"/trajectories/{trajectory.code}"))
    address = unescape(re.search(r'href="([^"]*side=repair[^"]*)"[^>]*>With the repair', card)[1])  # type: ignore[index]
    before = web.get(address).content.decode()
    assert 'hx-trigger="load"' in before and "The repair was not tried on this trajectory." in before and not sent
    waiting = press(web, trajectory).content.decode()
    assert 'hx-trigger="every 1s"' in waiting and ">Cancel</button>" in waiting and len(sent) == 1
    press(web, trajectory)
    assert len(sent) == 1
    do_job(sent[0])
    report = web.get(page_of(trajectory, json=True)).json()
    repair = report["repair"]
    assert (repair["state"], repair["refused"], repair["which"]) == ("done", None, "repair")
    assert repair["rows_count"] == 1 < trajectory.n_rows and repair["lost_tokens"] == 0
    assert repair["trained_tokens"] == trajectory.n_sampled
    assert report["against"] == "repair" and report["row"] == trajectory.n_rows - 1
    assert report["comparison"]["left_changed"] == 0 < report["comparison"]["right_changed"]
    assert report["verdict"].startswith(f"{trajectory.n_rows} rows as recorded") and " added at " in report["verdict"]
    html = one_line(web.get(page_of(trajectory)))
    assert report["verdict"] in unescape(html) and "every 1s" not in html and "<ins>" in html
    assert web.get(repair["check_url"].partition("#")[0]).status_code == 200
    # The strategies of the same replay stand on their own page, and another press asks for nothing.
    assert web.get(f"/trajectories/{trajectory.code}/strategies.json").json()["state"] == "done"
    press(web, trajectory)
    assert len(sent) == 1 and web.get(page_of(trajectory)).headers["Cache-Control"] == "no-store"


def test_the_mask_of_what_stays_is_counted(web: Client, sent: list[int]) -> None:
    trajectory = gallery.load().trajectories.get(external_id="empty_think_toggled")
    press(web, trajectory)
    do_job(sent[0])
    words = web.get(page_of(trajectory, json=True)).json()["verdict"]
    assert re.search(r"Of the equal tokens \d+ more are trained\.$", words)


def test_without_a_repair_a_sentence_says_so(make: Maker, web: Client, sent: list[int]) -> None:
    safe = make.run([make.conversation("a")]).trajectories.get()
    press(web, safe)
    do_job(sent[0])
    report = web.get(page_of(safe, json=True)).json()
    assert report["comparison"] is None and report["repair"]["refused"] and report["repair"]["check"]
    html = one_line(web.get(page_of(safe)))
    assert "There is no repair to show." in html and report["repair"]["refused"] in unescape(html)
    bare = make.run([make.conversation("b")], tokenizer=None, chat_template=None).trajectories.get()
    press(web, bare)
    do_job(sent[1])
    assert "no chat template" in web.get(page_of(bare, json=True)).json()["repair"]["refused"]


def test_it_can_be_cancelled_and_asked_again(web: Client, sent: list[int]) -> None:
    trajectory = gallery.load().trajectories.get(external_id="empty_think_toggled")
    press(web, trajectory)
    html = press(web, trajectory, do="cancel").content.decode()
    assert "<b>Cancelled.</b>" in html and Job.objects.get(pk=sent[0]).status == "cancelled"
    press(web, trajectory)
    assert len(sent) == 2
    do_job(sent[1])
    assert web.get(page_of(trajectory, json=True)).json()["repair"]["state"] == "done"


def test_a_cancelled_search_is_a_failure_of_the_replay(web: Client, sent: list[int], monkeypatch: Any) -> None:
    trajectory = gallery.load().trajectories.get(external_id="empty_think_toggled")
    press(web, trajectory)
    real = template_checks.ask

    def ask_and_cancel(*arguments: Any, **options: Any) -> Any:
        check, is_new = real(*arguments, **options)
        cancel_job(check.job)
        return check, is_new

    monkeypatch.setattr(template_checks, "ask", ask_and_cancel)
    do_job(sent[0])
    report = web.get(page_of(trajectory, json=True)).json()["repair"]
    assert (report["state"], report["why"]) == ("failed", "The search for a repair was cancelled.")
    monkeypatch.setattr(template_checks, "ask", real)
    press(web, trajectory)
    do_job(sent[1])
    assert web.get(page_of(trajectory, json=True)).json()["repair"]["state"] == "done"


def test_it_waits_for_a_worker_that_searches_already(web: Client, sent: list[int], monkeypatch: Any) -> None:
    trajectory = gallery.load().trajectories.get(external_id="empty_think_toggled")
    press(web, trajectory)
    waits: list[float] = []

    def finish(seconds: float) -> None:
        """The other worker ends while this one waits."""
        job = TemplateCheck.objects.get().job
        waits.append(seconds)
        Job.objects.filter(pk=job.pk).update(status="queued")

    real = template_checks.ask

    def ask_of_another(*arguments: Any, **options: Any) -> Any:
        check, is_new = real(*arguments, **options)
        assert take_job(check.job.pk) is not None
        return check, is_new

    monkeypatch.setattr(template_checks, "ask", ask_of_another)
    monkeypatch.setattr(template_checks.time, "sleep", finish)
    do_job(sent[0])
    assert waits == [template_checks.WAIT_SECONDS]
    assert web.get(page_of(trajectory, json=True)).json()["repair"]["state"] == "done"


def test_only_findings_of_a_template_offer_it(make: Maker, web: Client) -> None:
    value, found = make.broken("b")  # a kind without a probe
    trajectory = make.run([value], [found]).trajectories.get()
    html = one_line(web.get(f"/trajectories/{trajectory.code}"))
    assert not KINDS["unclassified"].probe and "With the repair" not in html
    for query in ("?side=repair&row=99999999999999999999", "?side=repair&row=-1", "?side=repair&step=7"):
        assert web.get(page_of(trajectory, query)).status_code == 200
    assert trajectory_replays.current(trajectory) is None
