"""Pages of work under way: a stopped run resumed, strategies replayed, a trajectory that a real worker goes on with."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect

from rollouts.jobs import launch
from rollouts.jobs.launch import LaunchSettings
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.runs.runs import cancel_run, fail_run
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker import run_rollouts
from rollouts.worker.jobs import do_job
from tests.conftest import wait_until
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db(transaction=True)
Open = Callable[..., Any]


def test_a_run_that_stopped_is_resumed_by_its_button(open_page: Open, engines: None, sent: list[int]) -> None:
    run = launch.launch(LaunchSettings(prompts=3, group=1, seed=2), enqueue=False)
    fail_run(run, "The engine broke.")
    page = open_page(f"/runs/{run.code}")
    assert "The engine broke." in page.inner_text("#run-live")
    page.click("#resume")
    page.wait_for_selector("#run-live .status-queued")
    assert sent == [run.pk]
    expect(page.locator("#resume")).to_be_hidden()
    page.locator(".crumbs a").first.focus()
    run_rollouts.work_on(run.pk)
    page.wait_for_selector("#run-live .status-done")
    # The page has loaded itself again, and the focus is where it was.
    page.wait_for_function("() => document.activeElement.matches('.crumbs a')")
    run.refresh_from_db()
    assert (run.status, run.n_finished, run.n_failed) == ("done", 3, 0)


def test_strategies_appear_when_a_worker_has_replayed_them_and_two_are_compared(
    open_page: Open, make: Maker, sent: list[int]
) -> None:
    whole = make.conversation("a")
    # Cut by a limit: one end-of-sequence token is put behind it by one of the strategies alone.
    cut = replace(whole.steps[-1], completion_ids=whole.steps[-1].completion_ids[:-1], logprobs=None)
    stored = make.run([replace(whole, steps=(*whole.steps[:-1], cut))]).trajectories.get()
    page = open_page(f"/trajectories/{stored.code}")
    page.click("nav >> text=Strategies")
    page.wait_for_selector("#strategies .status-queued")
    (job,) = sent
    do_job(job)
    page.wait_for_selector("#strategies table.strategies")
    expect(page.locator("#strategies[hx-trigger]")).to_have_count(0)
    page.select_option("#pair-left", "tool_delta")
    page.select_option("#pair-right", "single_message")
    page.click("button:has-text('Compare')")
    page.wait_for_url("**right=single_message**")
    expect(page.locator("#side-by-side td.right i.o4")).to_have_count(1)
    expect(page.locator("#side-by-side td.left i.o4")).to_have_count(0)
    page.keyboard.press("n")
    expect(page.locator("#pane-status")).to_have_text(re.compile(r"difference 1 of [1-9]"))


def test_a_trajectory_grows_on_its_page_while_a_real_worker_samples_it(
    open_page: Open, celery_worker_process: Callable[..., subprocess.Popen[bytes]], slow_model: dict[str, str]
) -> None:
    worker = celery_worker_process("engine.demo", env=slow_model)
    run = launch.launch(LaunchSettings(prompts=64, group=1, temperature=0.0, seed=3))
    going_on: list[models.StoredTrajectory] = []

    def is_held_in_the_middle_of_one() -> bool:
        """Hold the worker and its storage process while a trajectory has called a tool and has yet to answer."""
        if not run.trajectories.filter(status="running", n_steps=1).exists():
            return False
        os.killpg(worker.pid, signal.SIGSTOP)
        for record in run.trajectories.filter(status="running", n_steps=1):
            (step,) = load_trajectory(record).steps
            if (step.reply or {}).get("tool_calls"):
                going_on.append(record)
                return True
        os.killpg(worker.pid, signal.SIGCONT)
        return False

    wait_until(is_held_in_the_middle_of_one, 120, "a trajectory waits for its second step")
    (record,) = going_on
    try:
        page = open_page(f"/trajectories/{record.code}")
        assert "running" in page.inner_text(".properties")
        turns = page.locator("#pane .turn-head").count()
        page.evaluate("() => { window.kept = true; }")
    finally:
        os.killpg(worker.pid, signal.SIGCONT)
    page.wait_for_selector("#live:not([hx-trigger])", state="attached", timeout=120_000)
    assert page.evaluate("() => window.kept") is True
    assert page.locator("#pane .turn-head").count() > turns > 0
    record.refresh_from_db()
    assert record.status == "done" and record.n_steps > 1
    drawn = page.evaluate("() => [...document.querySelectorAll('#pane .toks')].map((box) => box.textContent).join('')")
    assert run.tokenizer is not None
    stream = load_trajectory(record).steps[-1].stream
    assert drawn == load_tokenizer(run.tokenizer.files_sha256).decode(stream)
    cancel_run(run)
