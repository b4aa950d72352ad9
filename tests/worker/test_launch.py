"""Launching in this process: what is stored before the work, what the work leaves, and what ends it."""

import io
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from celery.worker import WorkController
from django.core.management import CommandError, call_command
from django.utils import timezone
from kombu import Queue

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.strategies.replay import replay
from rollout_inspector.text import tokenizers
from rollouts.jobs import warm_engines
from rollouts.jobs.diagnosis import diagnose_run
from rollouts.jobs.launch import LaunchRefused, LaunchSettings, can_resume, launch, resume, served_models
from rollouts.jobs.replays import replay_context
from rollouts.management.jobs import is_served
from rollouts.sampling.engines import Engine, EngineError, Generation
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.scripted import ScriptedEngine
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.models import Retokenized, Run, StoredTrajectory, TemplateCheck
from rollouts.store.runs import launched_runs
from rollouts.store.runs.runs import cancel_run, create_run
from rollouts.store.trajectories.launched_trajectories import fail_trajectory, lease_trajectories, release_trajectories
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker import run_rollouts
from rollouts.worker.heartbeat import queues_of
from tests.conftest import Take, wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines")]

SMALL: dict[str, Any] = {"prompts": 3, "group": 2, "seed": 7, "temperature": 1.0}


def serve_with(monkeypatch: pytest.MonkeyPatch, build: Callable[[], Engine]) -> None:
    """For one test every model is served by an engine of the test's own, in this process."""
    monkeypatch.setattr(warm_engines, "_engines", {})
    monkeypatch.setattr(warm_engines, "new_owner", lambda *_: EngineThread(build))


def done_run(**changes: Any) -> Run:
    run = launch(LaunchSettings(**(SMALL | changes)), enqueue=False)
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    return run


class TestWhatIsQueued:
    def test_a_row_for_each_trajectory_with_its_task_and_seed(self) -> None:
        run = launch(LaunchSettings(**SMALL), enqueue=False)
        assert (run.status, run.n_expected, run.engine, run.model) == ("queued", 6, "transformers", "demo")
        assert run.tokenizer is not None and run.chat_template is not None
        rows = list(run.trajectories.order_by("index").select_related("task"))
        assert [(row.external_id, row.group, row.status) for row in rows[:3]] == [
            ("0-0", "0", "queued"), ("0-1", "0", "queued"), ("1-0", "1", "queued"),
        ]
        assert rows[0].task_id == rows[1].task_id != rows[2].task_id
        assert len({row.seed for row in rows}) == 6
        assert json.loads(rows[0].task.body)["messages"][0]["role"] == "system"

    def test_the_same_seed_asks_for_the_same(self) -> None:
        first, second = (launch(LaunchSettings(**SMALL), enqueue=False) for _ in range(2))
        ask = [list(run.trajectories.order_by("index").values_list("task_id", "seed")) for run in (first, second)]
        assert ask[0] == ask[1]
        drawn = [launch(LaunchSettings(**(SMALL | {"seed": None})), enqueue=False).settings["seed"] for _ in range(2)]
        assert drawn[0] != drawn[1]

    @pytest.mark.parametrize(
        ("changes", "field", "words"),
        [
            ({"model": "gpt-9"}, "model", "choose one of demo"),
            ({"engine": "warp"}, "engine", "no engine named"),
            ({"engine": "vllm_server"}, "engine", 'set {"url": "http://HOST:PORT"} in INSPECTOR_MODELS'),
            ({"environment": "chess"}, "environment", "calculator"),
            ({"strategy": "hope"}, "strategy", "tool_delta"),
            ({"prompts": 0}, "prompts", "from 1 to"),
            ({"prompts": 20_000, "group": 1000}, "group", "at most 100000"),
            ({"temperature": -1}, "temperature", "from 0"),
            ({"temperature": 2.5, "engine": "vllm"}, "temperature", "from 0.01 to 2"),
            ({"temperature": 0.001, "engine": "vllm"}, "temperature", "from 0.01 to 2"),
            ({"top_p": 0}, "top_p", "above 0"),
            ({"max_turns": 0}, "max_turns", "from 1"),
            ({"seed": -3}, "seed", "2147483647"),
        ],
    )
    def test_what_cannot_be_launched_is_said_by_field(self, changes: dict[str, Any], field: str, words: str) -> None:
        assert words in LaunchSettings(**changes).problems()[field]
        with pytest.raises(LaunchRefused):
            launch(LaunchSettings(**changes), enqueue=False)
        assert not Run.objects.exists()

    def test_the_defaults_can_be_launched(self) -> None:
        assert LaunchSettings().problems() == {}

    def test_a_model_without_a_tokenizer_is_a_sentence(self, settings: Any, tmp_path: Path) -> None:
        settings.INSPECTOR_MODELS = {"empty": {"engine": "transformers", "path": str(tmp_path)}}
        with pytest.raises(LaunchRefused, match="tokenizer of empty"):
            launch(LaunchSettings(model="empty"), enqueue=False)

    def test_a_server_on_a_host_that_is_not_allowed_is_not_asked(self, settings: Any, tiny_tokenizer: Path) -> None:
        options = {"url": "http://10.0.0.1:8000"}
        settings.INSPECTOR_MODELS = {
            "far": {"engine": "sglang_server", "path": str(tiny_tokenizer), "options": options}
        }
        with pytest.raises(LaunchRefused, match=r"host 10\.0\.0\.1 is not allowed.*INSPECTOR_ENGINE_HOSTS"):
            launch(LaunchSettings(model="far"), enqueue=False)

    def test_a_broker_that_does_not_answer_fails_the_run_in_words(self, no_broker: None) -> None:
        run = launch(LaunchSettings(**SMALL))
        assert run.status == "failed" and "Redis does not answer" in run.error
        assert set(run.trajectories.values_list("status", flat=True)) == {"failed"} and run.n_failed == 6


class TestTheWork:
    def test_more_trajectories_are_under_way_than_the_engine_takes_at_once(self) -> None:
        model = replace(served_models()["demo"], options={"max_live": 8})
        assert warm_engines.live_trajectories(model, "transformers") == 10
        assert warm_engines.live_trajectories(model, "vllm_server") == 8  # the server's own batch is not known here
        owner = warm_engines.new_owner(model, "transformers")
        assert owner.call(attrgetter("_max_live")).result(60) == 8
        owner.close()

    def test_every_trajectory_is_stored_token_by_token(self) -> None:
        run = done_run(temperature=0.0)
        assert (run.status, run.error, run.n_finished, run.n_failed) == ("done", "", 6, 0)
        assert run.started_at is not None and run.finished_at is not None
        for record in run.trajectories.all():
            trajectory = load_trajectory(record)
            assert record.status == "done" and record.reward is not None and record.stop_reason
            assert record.n_steps == len(trajectory.steps) > 0 and record.n_rows == 1
            for before, after in pairwise(trajectory.steps):
                assert after.prompt_ids[: len(before.stream)].tolist() == before.stream.tolist()
            for step in trajectory.steps:
                assert step.logprobs is not None and len(step.logprobs) == len(step.completion_ids)
                assert step.engine.startswith("transformers ") and step.logprobs_mode == "processed"
        assert run.n_sampled == sum(record.n_sampled for record in run.trajectories.all()) > 0
        assert Retokenized.objects.filter(trajectory__run=run).count() == 6

    def test_a_run_says_how_calls_are_read(self) -> None:
        said = done_run(prompts=1, group=1).settings
        assert said["tool_calls"] == "the tokenizer's response template" and said["tool_calls_note"] == ""

    @pytest.mark.sqlite_only  # the engine and the templates ask no database
    def test_a_parser_that_cannot_be_had_ends_the_run_with_a_sentence(
        self, settings: Any, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = {"engine": "transformers", "path": str(tiny_tokenizer), "options": {"tool_call_parser": "hermes"}}
        settings.INSPECTOR_MODELS = {"demo": entry}
        for name in [one for one in sys.modules if one.startswith("vllm.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "vllm", None)
        run = done_run(prompts=1, group=1)
        assert run.status == "failed" and "lacks the package vllm" in run.error

    @pytest.mark.sqlite_only  # the engine and the templates ask no database
    def test_a_run_is_repeatable_by_its_seed(self) -> None:
        def streams(run: Run) -> list[list[list[int]]]:
            return [
                [step.stream.tolist() for step in load_trajectory(record).steps]
                for record in run.trajectories.order_by("index")
            ]

        first, second, other = done_run(), done_run(), done_run(seed=8)
        assert streams(first) == streams(second) != streams(other)

    def test_a_second_delivery_changes_nothing(self) -> None:
        run = done_run()
        before = list(run.trajectories.values())
        run_rollouts.work_on(run.pk)
        run_rollouts.work_on(10**9)
        run_again = Run.objects.get(pk=run.pk)
        assert list(run.trajectories.values()) == before and run_again.finished_at == run.finished_at

    def test_two_deliveries_at_once_share_the_trajectories(self) -> None:
        run = launch(LaunchSettings(**(SMALL | {"prompts": 8})), enqueue=False)
        threads = [threading.Thread(target=_work_and_close, args=(run.pk,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        run.refresh_from_db()
        assert (run.status, run.n_finished, run.n_failed) == ("done", 16, 0)
        assert set(run.trajectories.values_list("attempt", flat=True)) == {1}

    def test_an_engine_that_cannot_be_loaded_fails_the_run_with_the_reason(
        self, settings: Any, tiny_tokenizer: Path, tmp_path: Path
    ) -> None:
        for file in tiny_tokenizer.iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        settings.INSPECTOR_MODELS = {"hollow": {"engine": "transformers", "path": str(tmp_path)}}
        run = done_run(model="hollow")
        assert run.status == "failed" and "could not load the model" in run.error
        assert set(run.trajectories.values_list("status", "error")) == {("failed", run.error)}
        assert run.n_failed == 6

    def test_an_engine_that_dies_again_and_again_fails_the_run_which_says_why(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rollouts.sampling.engines.engine_owner.PAUSES", (0.01,) * 5)

        class Dying(ScriptedEngine):
            def step(self) -> list[Generation]:
                raise MemoryError("no block is free")

        serve_with(monkeypatch, lambda: Dying(vocab_size=1200))
        run = done_run()
        assert run.status == "failed" and "MemoryError: no block is free" in run.error
        assert set(run.trajectories.values_list("status", flat=True)) == {"failed"}

    @pytest.mark.sqlite_only  # the engine and the templates ask no database
    def test_a_template_that_is_not_prefix_preserving_is_refused_before_anything_is_sampled(self) -> None:
        run = launch(LaunchSettings(**SMALL), enqueue=False)
        assert run.chat_template is not None
        broken = run.chat_template.text.replace("{%- for message in messages -%}", BREAKS_ON_TOOL, 1)
        run.chat_template = register_chat_template(broken, "broken")
        run.save()
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        assert run.status == "failed" and "not prefix-preserving" in run.error and "repair" in run.error
        assert run.n_steps == 0 and run.finding_counts == {"template_not_append_only": 6}
        finding = run.findings.order_by("pk")[0]
        assert (finding.step_index, finding.row_index, finding.severity) == (None, None, "error")
        assert finding.expected_text != finding.actual_text and "<think>" in finding.actual_text
        assert "repaired template" in finding.remedy and finding.trajectory.worst_severity == "error"

    @pytest.mark.sqlite_only  # the engine and the templates ask no database
    def test_the_worker_asks_for_the_repair_of_a_refused_template(self, sent: list[int]) -> None:
        run = launch(LaunchSettings(**SMALL), enqueue=False)
        assert run.chat_template is not None
        broken = run.chat_template.text.replace("{%- for message in messages -%}", TOGGLES, 1)
        run.chat_template = register_chat_template(broken, "toggles")
        run.save()
        run_rollouts.run_rollouts(run.pk)
        check = TemplateCheck.objects.get(job__in=sent)
        assert (check.chat_template_id, check.tokenizer_id) == (run.chat_template_id, run.tokenizer_id)
        assert check.job.options == {"repair": True}
        run.refresh_from_db()
        assert run.finding_counts == {"empty_think_toggled": 6}
        run_rollouts.run_rollouts(launch(LaunchSettings(**SMALL), enqueue=False).pk)
        assert len(sent) == 1

    @pytest.mark.sqlite_only  # the engine and the templates ask no database
    def test_rows_of_another_template_hold_the_sampled_tokens_and_its_scaffold(self) -> None:
        own = launch(LaunchSettings(**SMALL), enqueue=False).chat_template
        assert own is not None
        other = register_chat_template(own.text.replace("<tool_response>", "<tool_said>"), "rows")
        run = done_run(rows_chat_template=other.sha256, temperature=0.0)
        assert (run.status, run.chat_template, run.rows_chat_template) == ("done", own, other)
        assert "row_not_sampled" not in run.finding_counts
        codec = load_tokenizer(run.tokenizer.files_sha256)  # type: ignore[union-attr]
        several = 0
        for record in run.trajectories.all():
            trajectory = load_trajectory(record)
            (row,) = trajectory.rows
            several += len(trajectory.steps) > 1
            sampled = np.concatenate([step.completion_ids for step in trajectory.steps])
            assert row.ids[row.loss_mask].tolist() == sampled.tolist()
            assert row.logprobs is not None and np.isfinite(row.logprobs[row.loss_mask]).all()
            written = codec.decode(row.ids)
            assert ("<tool_said>" in written) is (len(trajectory.steps) > 1) and "<tool_response>" not in written
            assert "<tool_said>" not in codec.decode(trajectory.steps[-1].stream)
            made = replay(trajectory, STRATEGIES["tool_delta"], replay_context.context_of(run)[0])
            assert [one.ids.tolist() for one in made.rows] == [row.ids.tolist()]
        assert several

    @pytest.mark.sqlite_only  # the engine and the templates ask no database
    def test_a_template_of_the_rows_that_rewrites_is_refused_by_name(self) -> None:
        own = launch(LaunchSettings(**SMALL), enqueue=False).chat_template
        assert own is not None
        broken = own.text.replace("{%- for message in messages -%}", BREAKS_ON_TOOL, 1)
        run = done_run(rows_chat_template=register_chat_template(broken, "broken").sha256)
        assert run.status == "failed" and "The chat template of the rows: " in run.error and run.n_steps == 0
        assert run.finding_counts == {"template_not_append_only": 6}

    @pytest.mark.sqlite_only  # the engine and the templates ask no database
    def test_retokenize_asks_for_generation_tags_where_its_rows_come_from(self) -> None:
        own = launch(LaunchSettings(**SMALL), enqueue=False).chat_template
        assert own is not None and "{%- generation -%}" in own.text
        bare = own.text.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
        prompts = register_chat_template(bare, "no tags").sha256
        assert "generation" in done_run(strategy="retokenize", chat_template=prompts).error
        run = done_run(strategy="retokenize", chat_template=prompts, rows_chat_template=own.sha256)
        assert (run.status, run.n_failed) == ("done", 0)

    @pytest.mark.sqlite_only  # the engine and the templates ask no database
    @pytest.mark.parametrize(("mode", "found"), [("strict", True), ("ignore_whitespace", False), ("off", False)])
    def test_a_finished_stream_is_compared_in_the_mode_of_its_launch(self, mode: str, found: bool) -> None:
        """A template that writes the reply with one space more: text that a render has and the stream has not."""
        own = launch(LaunchSettings(**SMALL), enqueue=False).chat_template
        assert own is not None
        spaced = own.text.replace("{{- said -}}", "{{- said ~ ' ' if said else '' -}}", 1)
        assert spaced != own.text
        chosen = register_chat_template(spaced, "spaced").sha256
        run = done_run(chat_template=chosen, compare=mode, temperature=0.0)
        told = run.findings.filter(evidence__startswith="At its end")
        assert (run.status, told.exists()) == ("done", found)
        if found:
            assert set(told.values_list("severity", flat=True)) <= {"info", "warning"}
            assert sum(map(len, diagnose_run(run))) == 6 and told.exists()

    def test_a_cancelled_run_stops_and_keeps_what_it_has(self) -> None:
        run = launch(LaunchSettings(**(SMALL | {"prompts": 200, "group": 4})), enqueue=False)
        thread = threading.Thread(target=_work_and_close, args=(run.pk,))
        thread.start()
        wait_until(lambda: StoredTrajectory.objects.filter(run=run, status="done").exists(), 240, "one is done")
        cancel_run(Run.objects.get(pk=run.pk))
        thread.join(120)
        run.refresh_from_db()
        statuses = set(run.trajectories.values_list("status", flat=True))
        assert run.status == "cancelled" and statuses == {"done", "cancelled"}
        assert run.finished_at is not None

    def test_a_worker_that_stops_hands_back_and_the_next_one_finishes(self) -> None:
        run = launch(LaunchSettings(**(SMALL | {"prompts": 40, "group": 4})), enqueue=False)
        thread = threading.Thread(target=_work_and_close, args=(run.pk,))
        thread.start()
        try:
            wait_until(lambda: StoredTrajectory.objects.filter(run=run, status="done").exists(), 240, "one is done")
            run_rollouts.shutting_down.set()
            thread.join(120)
        finally:
            run_rollouts.shutting_down.clear()
        run.refresh_from_db()
        assert run.status == "running" and run.heartbeat_at is None
        assert not run.trajectories.filter(status="running").exists()
        begun = {
            record.pk: [step.stream.tolist() for step in load_trajectory(record).steps]
            for record in run.trajectories.filter(status="queued", n_steps__gt=0)
        }
        assert [orphan.pk for orphan in launched_runs.adopt_orphans(["demo"])] == [run.pk]
        assert launched_runs.adopt_orphans(["demo"]) == []  # one worker gets it
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        assert (run.status, run.n_finished, run.n_failed) == ("done", 160, 0)
        for key, streams in begun.items():  # no stored step is lost or made anew
            record = StoredTrajectory.objects.get(pk=key)
            assert [s.stream.tolist() for s in load_trajectory(record).steps][: len(streams)] == streams


class TestOrphans:
    @pytest.mark.parametrize(
        ("status", "age", "heartbeat", "adopted"),
        [
            ("running", 0, None, True),
            ("running", 300, 40, True),
            ("running", 300, 12, True),
            ("running", 300, 5, False),
            ("queued", 5, None, False),
            ("queued", 300, None, True),
            ("queued", 300, 10, False),
            ("queued", 300, 20, True),
            ("done", 300, None, False),
        ],
    )
    def test_which_runs_have_lost_their_worker(
        self, status: str, age: int, heartbeat: int | None, adopted: bool
    ) -> None:
        now = timezone.now()
        run = create_run("launch", "x", model="demo")
        create_run("launch", "y", model="other")
        Run.objects.filter(pk=run.pk).update(
            status=status,
            created_at=now - timedelta(seconds=age),
            heartbeat_at=None if heartbeat is None else now - timedelta(seconds=heartbeat),
        )
        assert [one.pk for one in launched_runs.adopt_orphans(["demo"])] == ([run.pk] if adopted else [])

    def test_a_silent_run_is_taken_over_when_there_is_something_to_take(self) -> None:
        run = launch(LaunchSettings(**SMALL), enqueue=False)
        first, *rest = run.trajectories.order_by("index")

        def adopted(seconds: float) -> bool:
            """Is it, with the last heartbeat and a lease of 20 seconds taken so long ago?"""
            then = timezone.now() - timedelta(seconds=seconds)
            Run.objects.filter(pk=run.pk).update(status="running", heartbeat_at=then)
            run.trajectories.filter(status="running").update(lease_until=then + timedelta(seconds=20))
            return bool(launched_runs.adopt_orphans(["demo"]))

        assert not adopted(5) and adopted(12)  # nobody holds what is queued
        run.trajectories.update(status="running")
        assert not adopted(12) and adopted(21)  # the leases have to run out
        run.trajectories.update(status="done", lease_until=None)
        assert adopted(12)  # all are done, and nobody is left to say so
        run.trajectories.filter(pk=first.pk).update(status="running")
        assert not adopted(12) and adopted(21) and rest


def _queues_read_by(hostname: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Queue]:
    """The queues that Celery lets a worker with ``-Q engine.demo`` consume, by name."""
    from inspector.celery import app

    monkeypatch.setattr(app.amqp, "queues", app.amqp.Queues(app.conf.task_queues))
    worker = WorkController.__new__(WorkController)
    worker.app, worker.hostname = app, hostname
    worker.setup_queues("engine.demo")
    return dict(app.amqp.queues.consume_from)


class TestSharing:
    """A run that more than one worker is at."""

    def test_a_worker_that_cannot_go_on_leaves_the_run_to_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> Engine:
            raise MemoryError("no block is free")

        serve_with(monkeypatch, broken)
        run = launch(LaunchSettings(**SMALL), enqueue=False)
        (held,) = lease_trajectories(run, 1, 60)  # by another worker
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        held.refresh_from_db()
        assert (run.status, run.error, held.status) == ("running", "", "running")
        assert run.trajectories.filter(status="queued").count() == 5
        release_trajectories([held])
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        assert run.status == "failed" and "no block is free" in run.error and run.n_failed == 6

    def test_a_run_that_the_worker_is_at_is_not_begun_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = launch(LaunchSettings(**SMALL), enqueue=False)
        monkeypatch.setattr(run_rollouts, "_working", {run.pk})
        assert run_rollouts.work_on(run.pk) is False
        run.refresh_from_db()
        assert run.status == "queued" and run.started_at is None

    def test_an_idle_worker_asks_for_a_run_with_more_in_its_queue_than_is_under_way(
        self, monkeypatch: pytest.MonkeyPatch, broker: Take
    ) -> None:
        sent: list[tuple[str, int]] = []
        broker(lambda queue, key: sent.append((queue, key)))
        monkeypatch.setattr(run_rollouts, "_left", set())
        run = launch(LaunchSettings(**(SMALL | {"prompts": 21, "group": 4})), enqueue=False)
        assert warm_engines.live_trajectories(served_models()["demo"], run.engine) == 80
        assert run_rollouts.ask_to_share(["demo"], "idle@test.dq") is None  # nobody has begun it
        Run.objects.filter(pk=run.pk).update(status="running", heartbeat_at=timezone.now())
        assert run_rollouts.ask_to_share(["other"], "idle@test.dq") is None
        assert run_rollouts.ask_to_share(["demo"], "idle@test.dq") == run and sent == [("idle@test.dq", run.pk)]
        lease_trajectories(run, 4, 60)
        assert (
            run_rollouts.ask_to_share(["demo"], "idle@test.dq") is None
        )  # the one that is at it has room for the rest
        run.trajectories.update(status="queued")
        cancel_run(run)
        assert run_rollouts.ask_to_share(["demo"], "idle@test.dq") is None
        Run.objects.filter(pk=run.pk).update(cancel_requested=False)
        run_rollouts._left.add(run.pk)
        assert run_rollouts.ask_to_share(["demo"], "idle@test.dq") is None and len(sent) == 1

    def test_an_idle_worker_sends_itself_to_a_run_and_no_busy_one_can_take_the_message(
        self, monkeypatch: pytest.MonkeyPatch, broker: Take
    ) -> None:
        """A busy worker with free places took every message from the queue of the model, and ignored it."""
        sent: list[tuple[str, int]] = []
        broker(lambda queue, key: sent.append((queue, key)))
        monkeypatch.setattr(run_rollouts, "_left", set())
        monkeypatch.setattr(run_rollouts, "repeat", lambda name, seconds, do: do())
        run = launch(LaunchSettings(**(SMALL | {"prompts": 21, "group": 4})), enqueue=False)
        Run.objects.filter(pk=run.pk).update(status="running", heartbeat_at=timezone.now())
        busy, idle = _queues_read_by("busy@test", monkeypatch), _queues_read_by("idle@test", monkeypatch)
        consumer = SimpleNamespace(
            hostname="idle@test",
            controller=SimpleNamespace(concurrency=4),
            task_consumer=SimpleNamespace(queues=list(idle.values())),
        )
        assert queues_of(consumer) == ["engine.demo"]
        run_rollouts._adopt_in_background(consumer)
        ((queue, key),) = sent
        assert key == run.pk and queue in idle and queue not in busy


@pytest.mark.sqlite_only  # the engine and the templates ask no database
class TestCommand:
    def call(self, *arguments: str) -> tuple[Any, str]:
        out, err = io.StringIO(), io.StringIO()
        call_command("launch_rollouts", *arguments, stdout=out, stderr=err)
        return out.getvalue(), err.getvalue()

    def test_wait_without_a_broker_works_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("REDIS_URL", raising=False)
        out, err = self.call("--prompts", "4", "--group", "1", "--temperature", "0", "--seed", "1", "--wait", "--json")
        result = json.loads(out)
        assert (result["status"], result["trajectories"], result["rewards"]["n"]) == ("done", 4, 4)
        assert result["tokens"] > result["sampled"] > 0 and Run.objects.get(code=result["run"])
        assert "made in this process" in err

    def test_wait_leaves_the_work_to_a_worker_that_answers(self, monkeypatch: pytest.MonkeyPatch, broker: Take) -> None:
        from celery.app.control import Inspect

        def take(queue: str, key: int) -> None:
            assert queue == "engine.demo"
            Run.objects.filter(pk=key).update(status="done")

        monkeypatch.delenv("REDIS_URL", raising=False)
        broker(take)
        other = {"w1@here": [{"name": "default"}]}
        monkeypatch.setattr(Inspect, "active_queues", lambda _: other)
        assert not is_served("demo")
        monkeypatch.setattr(Inspect, "active_queues", lambda _: {**other, "w2@here": [{"name": "engine.demo"}]})
        assert is_served("demo") and not is_served("unheard")
        out, err = self.call("--prompts", "1", "--group", "1", "--wait", "--json")
        assert json.loads(out)["status"] == "done" and not err

    def test_templates_and_the_rest_of_the_sampling_are_options(
        self, tmp_path: Path, tiny_tokenizer: Path, broker: Take
    ) -> None:
        broker(lambda *_: None)
        text = (tiny_tokenizer / "chat_template.jinja").read_text()
        (tmp_path / "rows.jinja").write_text(text + "{# rows #}")
        out, _ = self.call("--rows-chat-template", str(tmp_path / "rows.jinja"), "--stop", "</x>", "--stop", "</y>",
                           "--compare", "strict", "--template-kwargs", '{"a": 1}', "--environment-seconds", "5",
                           "--prompts", "1", "--group", "1", "--json")
        run = Run.objects.select_related("rows_chat_template").get(code=json.loads(out)["run"])
        assert run.rows_chat_template is not None
        assert run.rows_chat_template.names.get().label == "rows"
        kept = {name: run.settings[name] for name in ("stop", "compare", "template_kwargs", "environment_seconds")}
        assert kept == {
            "stop": ["</x>", "</y>"], "compare": "strict", "template_kwargs": {"a": 1}, "environment_seconds": 5.0,
        }
        assert json.loads(out)["rows_chat_template"] == run.rows_chat_template_id
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        for wrong, words in (
            (str(tmp_path / "none"), "cannot be read"),
            (str(tmp_path / "bytes"), "is not UTF-8 text"),
        ):
            with pytest.raises(CommandError, match=words):
                self.call("--chat-template", wrong)
        with pytest.raises(CommandError, match="not JSON"):
            self.call("--template-kwargs", "{")

    def test_a_wrong_option_is_a_sentence(self) -> None:
        with pytest.raises(CommandError, match="--prompts: Choose a number from 1"):
            self.call("--prompts", "0", "--wait")

    def test_a_failed_run_is_an_error_after_its_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def build() -> Engine:
            raise EngineError("The weights are gone.")

        monkeypatch.delenv("REDIS_URL", raising=False)
        serve_with(monkeypatch, build)
        with pytest.raises(CommandError, match="The weights are gone"):
            self.call("--prompts", "1", "--group", "1", "--wait")


TOGGLES = (
    "{%- if messages[-1].role != 'tool' -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
)
BREAKS_ON_TOOL = "{%- if messages[-1].role == 'tool' -%}{{- '<think>' -}}{%- endif -%}{%- for message in messages -%}"


def _work_and_close(run_id: int) -> None:
    from django.db import connection

    try:
        run_rollouts.work_on(run_id)
    finally:
        connection.close()


@pytest.mark.sqlite_only  # the engine and the templates ask no database
def test_ids_are_stored_as_they_were_sampled() -> None:
    """The stored arrays are the loop's, not a text's: decode and encode would give others for some samples."""
    run = done_run(temperature=1.5, prompts=6)
    codec = load_tokenizer(run.tokenizer.files_sha256)  # type: ignore[union-attr]
    odd = 0
    for record in run.trajectories.all():
        for step in load_trajectory(record).steps:
            again = codec.encode(codec.decode(step.completion_ids))
            odd += not np.array_equal(again, step.completion_ids)
    assert odd > 0


def test_a_run_cancelled_while_its_model_loads_ends_before_the_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, loaded = threading.Event(), threading.Event()

    def build() -> Engine:
        loading.set()
        assert loaded.wait(300)
        return ScriptedEngine(vocab_size=1200)

    serve_with(monkeypatch, build)
    run = launch(LaunchSettings(**SMALL), enqueue=False)
    thread = threading.Thread(target=_work_and_close, args=(run.pk,))
    thread.start()
    try:
        assert loading.wait(120)
        cancel_run(run)
        thread.join(120)
        assert not thread.is_alive()
        run.refresh_from_db()
        assert run.status == "cancelled" and set(run.trajectories.values_list("status", flat=True)) == {"cancelled"}
        assert not loaded.is_set()
    finally:
        loaded.set()
        thread.join(120)


@pytest.mark.sqlite_only  # the engine and the templates ask no database
def test_a_template_whose_turns_begin_otherwise_puts_no_prompt_into_the_replies() -> None:
    text = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    run = done_run(chat_template=register_chat_template(text).sha256, temperature=0.0)
    assert "response template" not in run.settings["tool_calls"]
    assert run.tokenizer is not None
    codec = load_tokenizer(run.tokenizer.files_sha256)
    for record in run.trajectories.all():
        for step in load_trajectory(record).steps:
            said = codec.decode(step.completion_ids).removesuffix("<|im_end|>").strip()
            assert step.reply is not None and step.reply["content"].strip() in said
    assert "engine_ids_inconsistent" not in run.finding_counts


def _streams(run: Run) -> list[list[list[int]]]:
    loaded = [load_trajectory(one) for one in run.trajectories.order_by("index")]
    return [[step.stream.tolist() for step in one.steps] for one in loaded]


class TestResume:
    def test_a_run_that_no_broker_took_is_made_after_all(self, broker: Take, client: Any) -> None:
        def refuse(*_: Any) -> None:
            raise ConnectionError("refused")

        broker(refuse)
        run = launch(LaunchSettings(**SMALL))
        assert run.status == "failed" and "resume the run" in run.error and can_resume(run)
        broker(lambda *_: None)
        assert resume(run) == 6
        assert (run.status, run.error, run.n_failed) == ("queued", "", 0) and not can_resume(run)
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        assert (run.status, run.n_finished, run.n_failed) == ("done", 6, 0)
        with pytest.raises(ValueError, match="nothing to resume"):
            resume(run)

    def test_a_cancelled_run_goes_on_with_the_steps_it_has(self, broker: Take) -> None:
        broker(lambda *_: None)
        run = launch(LaunchSettings(**(SMALL | {"prompts": 40, "group": 4})), enqueue=False)
        thread = threading.Thread(target=_work_and_close, args=(run.pk,))
        thread.start()
        wait_until(lambda: StoredTrajectory.objects.filter(run=run, status="done").exists(), 240, "one is done")
        cancel_run(run)
        thread.join(120)
        kept = {
            record.pk: [step.stream.tolist() for step in load_trajectory(record).steps]
            for record in run.trajectories.filter(n_steps__gt=0)
        }
        run.refresh_from_db()
        assert run.status == "cancelled"
        assert resume(run) == 160 - run.n_finished
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        assert (run.status, run.n_finished, run.n_failed) == ("done", 160, 0)
        for key, streams in kept.items():
            record = StoredTrajectory.objects.get(pk=key)
            assert [s.stream.tolist() for s in load_trajectory(record).steps][: len(streams)] == streams

    def test_the_trajectories_that_failed_in_a_run_that_is_done_are_made_anew(self, broker: Take) -> None:
        broker(lambda *_: None)
        whole = _streams(done_run())
        run = launch(LaunchSettings(**SMALL), enqueue=False)
        (lost,) = lease_trajectories(run, 1, 60)
        fail_trajectory(TrajectoryEnd(lost.pk, lost.attempt, error="The engine died."))
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        assert (run.status, run.n_finished, run.n_failed) == ("done", 5, 1)
        assert can_resume(run) and resume(run) == 1
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        assert (run.status, run.n_finished, run.n_failed) == ("done", 6, 0) and not can_resume(run)
        assert _streams(run) == whole

    def test_which_runs_offer_it(self) -> None:
        run = launch(LaunchSettings(**SMALL), enqueue=False)
        assert not can_resume(run)  # it has only just been queued
        old = timezone.now() - timedelta(minutes=2)
        Run.objects.filter(pk=run.pk).update(status="running", heartbeat_at=old, started_at=old)
        run.refresh_from_db()
        assert can_resume(run)
        run.heartbeat_at = timezone.now()
        assert not can_resume(run)


@pytest.mark.sqlite_only  # the engine and the templates ask no database
def test_a_launched_run_renders_with_the_date_of_its_launch(tiny_tokenizer: Path) -> None:
    launched: Any = SimpleNamespace(
        pk=0, created_at=datetime(2026, 11, 22, 8, 30, tzinfo=UTC),
        chat_template=SimpleNamespace(text="It is {{ strftime_now('%Y-%m-%d') }}."),
        rows_chat_template=None,
    )
    context = run_rollouts._context(launched, tokenizers.load(tiny_tokenizer))
    assert context.renderer.render_text(Conversation([{"role": "user", "content": "a"}])) == "It is 2026-11-22."
