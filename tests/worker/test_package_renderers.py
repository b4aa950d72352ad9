"""Launches and replays under ``renderer:NAME``: the rows, who reads the replies, and what is refused in which words."""

import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.text import chat_templates, tokenizers
from rollouts.jobs import warm_engines
from rollouts.jobs.diagnosis import diagnose_run
from rollouts.jobs.launch import LaunchRefused, LaunchSettings, launch
from rollouts.jobs.replays import trajectory_replays
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.scripted import ScriptedEngine
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.models import ProjectTemplate, Run, StoredTrajectory
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker import run_rollouts
from rollouts.worker.jobs import do_job
from tests.conftest import missing

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines", "installed")]

CALL = """<think>
I add.
</think>

<tool_call>
{"name": "calculator", "arguments": {"expression": "1+1"}}
</tool_call>"""


@pytest.fixture
def installed() -> None:
    if importlib.util.find_spec("renderers") is None:
        missing("the package renderers is not installed (tests/formats/requirements-trainers.txt)")


@pytest.fixture
def small(corpus: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model with the tokenizer of Qwen3, which calls a tool once and then answers."""
    folder = corpus / "tokenizers" / "qwen3"
    settings.INSPECTOR_MODELS = {"small": {"engine": "transformers", "path": str(folder)}}
    tokenizer = tokenizers.load(folder)

    def said(prompt: Any) -> list[int]:
        is_answered = "<tool_response>" in tokenizer.decode(prompt)
        text = "<think>\nDone.\n</think>\n\n2" if is_answered else CALL
        return list(map(int, tokenizer.encode(f"{text}<|im_end|>")))

    def build() -> ScriptedEngine:
        return ScriptedEngine(script=said, vocab_size=tokenizer.vocab_size, max_model_len=4096)

    monkeypatch.setattr(warm_engines, "_engines", {})
    monkeypatch.setattr(warm_engines, "new_owner", lambda *_: EngineThread(build))
    yield
    tokenizer.close()


def done_run(**changes: Any) -> Run:
    asked = {"model": "small", "chat_template": "renderer:qwen3", "strategy": "bridge", "max_tokens": 200, "seed": 3}
    run = launch(LaunchSettings(**(asked | {"prompts": 1, "group": 1} | changes)), enqueue=False)
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    return run


def replayed(*arguments: str) -> dict[str, dict[str, Any]]:
    out = io.StringIO()
    call_command("replay", *arguments, "--json", stdout=out)
    return {line["strategy"]: line for line in json.loads(out.getvalue())}


@pytest.mark.parametrize("strategy", ["bridge", "reconcile"])
def test_a_launch_is_rendered_and_read_by_it(small: None, strategy: str) -> None:
    run = done_run(strategy=strategy)
    assert (run.status, run.error, run.n_failed) == ("done", "", 0)
    assert run.chat_template is not None and run.tokenizer is not None
    assert run.chat_template.text == chat_templates.kept_text("renderer:qwen3")
    assert ProjectTemplate.objects.get(chat_template=run.chat_template).label == run.chat_template.text
    assert run.settings["tool_calls"] == "by the renderer"
    trajectory = load_trajectory(run.trajectories.get())
    first, second = trajectory.steps
    assert first.reply is not None and first.reply["reasoning_content"] == "I add."
    assert first.reply["tool_calls"][0]["function"]["name"] == "calculator" and first.reply["tool_calls"][0]["id"]
    renderer = chat_templates.renderer(load_tokenizer(run.tokenizer.files_sha256), "renderer:qwen3")
    assert first.request is not None
    asked = chat_templates.Conversation(first.request.messages, first.request.tools, {}, True)
    assert first.prompt_ids.tolist() == renderer.render_ids(asked).tolist()
    assert second.prompt_ids[: len(first.stream)].tolist() == first.stream.tolist()
    assert not [found for found in run.findings.all() if found.severity == Severity.ERROR]
    assert sum(map(len, diagnose_run(run))) == 1


def test_every_strategy_is_replayed_under_it(small: None, sent: list[int]) -> None:
    run = done_run(strategy="bridge")
    lines = replayed(run.code)
    refused = {slug: why for slug in lines if (why := lines[slug]["refused"])}
    assert set(lines) == set(STRATEGIES) and set(refused) == {"tool_delta", "retokenize"}
    assert refused["tool_delta"].startswith("The chat template is not prefix-preserving")  # Qwen3 drops thoughts
    assert "generation %} tags, and the chat template has none" in refused["retokenize"]
    assert lines["bridge"]["differs_at"] is None and lines["bridge"]["lost_tokens"] == 0
    record = StoredTrajectory.objects.get(run=run)
    replay, _ = trajectory_replays.ask(record)
    do_job(replay.job.pk)
    replay.refresh_from_db()
    assert replay.report is not None
    shown = {line["strategy"]: line for line in replay.report["strategies"]}
    assert {slug: shown[slug]["rows_count"] for slug in shown} == {slug: lines[slug]["rows_count"] for slug in lines}


def test_a_run_without_a_template_is_replayed_under_one_that_is_named(small: None) -> None:
    run = done_run()
    under_it = replayed(run.code)
    Run.objects.filter(pk=run.pk).update(chat_template=None)
    run.tokenizer.chat_template = None  # type: ignore[union-attr]
    named = replayed(run.code, "--chat-template", "renderer:qwen3")
    assert named["bridge"]["rows"] == under_it["bridge"]["rows"]
    call_command("diagnose", run.code, "--chat-template", "renderer:qwen3", stdout=io.StringIO())
    run.refresh_from_db()
    assert run.chat_template is not None and run.chat_template.text.startswith("renderer:qwen3 of renderers ")
    with pytest.raises(CommandError, match="has no renderer 'nobody'"):
        replayed(run.code, "--chat-template", "renderer:nobody")


def test_a_renderer_of_the_rows_alone(small: None, corpus: Path) -> None:
    run = done_run(chat_template="", rows_chat_template="renderer:qwen3")
    assert (run.status, run.error) == ("done", "")
    assert run.rows_chat_template is not None and run.chat_template is not None
    is_code = [chat_templates.is_renderer(one.text) for one in (run.chat_template, run.rows_chat_template)]
    assert is_code == [False, True]
    both = done_run(rows_chat_template="renderer:qwen3")
    assert both.rows_chat_template is None


def test_a_renderer_of_another_vocabulary_ends_the_run_before_anything_is_sampled(small: None) -> None:
    run = done_run(chat_template="renderer:deepseek-v4")
    assert (run.status, run.n_steps) == ("failed", 0)
    assert "The renderer deepseek-v4 cannot be made: " in run.error


def test_another_version_of_the_package_is_refused(small: None) -> None:
    run = done_run()
    assert run.chat_template is not None
    run.chat_template.text = "renderer:qwen3 of renderers 0.0.1"
    run.chat_template.save()
    refused = replayed(run.code)["bridge"]["refused"]
    assert "Installed is renderer:qwen3 of " in refused and "this is renderer:qwen3 of renderers 0.0.1" in refused


def test_what_cannot_be_launched_is_said_by_field(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for field in ("chat_template", "rows_chat_template"):
        with pytest.raises(LaunchRefused) as refusal:
            launch(LaunchSettings(model="small", **{field: "renderer:nobody"}), enqueue=False)
        assert "has no renderer 'nobody'. It has: deepseek-r1, " in refusal.value.problems[field]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchRefused, match="The package renderers is not installed"):
        launch(LaunchSettings(model="small", chat_template="renderer:qwen3"), enqueue=False)
    assert not Run.objects.exists()
