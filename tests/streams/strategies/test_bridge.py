"""The strategy ``bridge``: a renderer is found by what it writes, extends the stream exactly, or is not there."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from rollout_inspector.streams.strategies import STRATEGIES, Context, StrategyRefused
from rollout_inspector.streams.strategies.appending import Bridge
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from rollouts.jobs.launch import LaunchSettings
from rollouts.jobs.replays import renderers_package
from tests.conftest import ROOT, missing

USER: Message = {"role": "user", "content": "What's 2+2?"}
TOOLS = renderers_package.PROBES[2][1]
CALL: Message = renderers_package.PROBES[3][0][1]
RESULT: Message = renderers_package.PROBES[3][0][2]


@pytest.fixture
def installed() -> None:
    if Bridge.missing():
        missing("the package renderers is not installed (tests/formats/requirements-trainers.txt)")


def context(corpus: Path, tokenizer: str, template: str) -> Context:
    loaded = load(corpus / "tokenizers" / tokenizer)
    bound = renderer(loaded, (corpus / "templates" / f"{template}.jinja").read_text())
    return Context(loaded, bound, loaded.stop_ids, bridge=renderers_package.bridges_of(loaded, bound))


def test_it_extends_the_stream_as_a_render_of_the_whole_would(installed: None, corpus: Path) -> None:
    made = context(corpus, "qwen3", "qwen3")
    strategy = STRATEGIES["bridge"](made)
    prompt = strategy.begin([USER], TOOLS, {})
    said = made.codec.encode('<tool_call>\n{"name": "calc", "arguments": {"expr": "2+2"}}\n</tool_call><|im_end|>')
    odd = np.concatenate([made.codec.encode(" "), said])  # no encoder would choose this
    strategy.sampled(odd, None, CALL)
    following = strategy.observe([RESULT])
    stream = np.concatenate([prompt, odd])
    assert following[: len(stream)].tolist() == stream.tolist()
    delta = made.codec.decode(following[len(stream) :])
    assert delta == "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    (row,) = strategy.rows()
    assert row.ids[row.loss_mask].tolist() == odd.tolist() and row.ids.tolist() == following.tolist()


def test_a_template_that_no_renderer_writes_is_refused(installed: None, corpus: Path) -> None:
    with pytest.raises(StrategyRefused, match="No renderer of the package"):
        STRATEGIES["bridge"](context(corpus, "qwen3", "trl-training--qwen3")).begin([USER], None, {})


def test_what_it_cannot_extend_exactly_is_refused(installed: None, corpus: Path) -> None:
    strategy = STRATEGIES["bridge"](context(corpus, "qwen3", "qwen3"))
    strategy.begin([USER], None, {})
    strategy.sampled(load(corpus / "tokenizers" / "qwen3").encode("4.<|im_end|>"), None, {"role": "assistant"})
    with pytest.raises(StrategyRefused, match="cannot extend this stream by assistant messages"):
        strategy.observe([{"role": "assistant", "content": "a turn that nobody sampled"}])


def test_without_the_package_it_is_listed_with_a_sentence(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bridge, "package", "a_package_that_is_not_installed")
    monkeypatch.setattr(renderers_package, "_found", {})
    with pytest.raises(StrategyRefused, match="which is not installed"):
        STRATEGIES["bridge"](context(corpus, "qwen3", "qwen3")).begin([USER], None, {})
    with pytest.raises(StrategyRefused, match="both are missing"):
        loaded: Any = load(corpus / "tokenizers" / "qwen3")
        STRATEGIES["bridge"](Context(loaded, renderer(loaded, "x"), loaded.stop_ids)).begin([USER], None, {})


@pytest.mark.django_db
def test_the_extra_is_the_package_that_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = map(Requirement, extras["bridge"])
    assert extras["renderers"] == extras["bridge"]
    pins = (ROOT / "tests/formats/requirements-trainers.txt").read_text().splitlines()
    (pin,) = [Requirement(line) for line in pins if line.startswith(f"{Bridge.package}==")]
    (version,) = [one.version for one in pin.specifier]
    assert requirement.name == Bridge.package and version in requirement.specifier


def test_a_launch_with_it_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bridge, "package", "a_package_that_is_not_installed")
    assert "not installed" in LaunchSettings(strategy="bridge").problems()["strategy"]
    monkeypatch.setattr(Bridge, "package", "json")
    assert "strategy" not in LaunchSettings(strategy="bridge").problems()
