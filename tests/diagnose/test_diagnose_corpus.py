"""Labelled trajectories, and faults planted with tokenizers and templates that the labels do not cover."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout_inspector.diagnose import Severity, diagnose
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Trajectory
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from tests.samples.diagnosis import PAIRS, problem
from tests.samples.planted.plant import PLANTERS, ModelSetup, planted

TEMPLATES = {"qwen3-fixed": ("qwen3", "qwen3--seed-one-line-fix")}


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3-fixed", "llama3.1"])
def test_every_label_is_named(corpus: Path, name: str) -> None:
    tokenizer, template = TEMPLATES.get(name, (name, name))
    codec = load(corpus / "tokenizers" / tokenizer)
    template_renderer = renderer(codec, (corpus / "templates" / f"{template}.jinja").read_text(encoding="utf-8"))
    expected = json.loads((corpus / "labelled" / f"{name}.expect.json").read_text())
    wrong = []
    for trajectory in read(Source.of_path(corpus / "labelled" / f"{name}.calls.jsonl"))[1]:
        assert isinstance(trajectory, Trajectory)
        label = expected.pop(trajectory.external_id)
        findings = diagnose(trajectory, codec, lambda sha: template_renderer)
        loud = [f for f in findings if f.severity is not Severity.INFO]
        right = [f for f in findings if (f.kind, f.step, f.axis) == (label["kind"], label["step"], label["axis"])]
        if (label["kind"] and not right) or [f for f in loud if f not in right]:
            wrong.append((trajectory.external_id, label, [(f.kind, f.step, f.evidence) for f in loud]))
    assert wrong == [] and expected == {}


OPTIONS: tuple[dict[str, bool], ...] = (
    {}, {"string_arguments": True}, {"tools": False, "history": True}, {"system": False},
)


@pytest.mark.parametrize(("n_pair", "tokenizer", "template"), [(n, *pair) for n, pair in enumerate(PAIRS)])
def test_planted_faults_of_other_families_are_named(corpus: Path, n_pair: int, tokenizer: str, template: str) -> None:
    """Each family with two of the kinds of conversations; each kind is had by five families."""
    codec = load(corpus / "tokenizers" / tokenizer)
    template_renderer = renderer(codec, (corpus / "templates" / f"{template}.jinja").read_text(encoding="utf-8"))
    problems, n = [], 0
    for options in (OPTIONS[n_pair % 4], OPTIONS[(n_pair + 1) % 4]):
        s = ModelSetup(f"{tokenizer}/{template}", codec, template_renderer, random.Random(11), **options)  # type: ignore[arg-type]
        for case in planted(s, 1):
            n += 1
            problems.append(problem(case, s, diagnose(case.trajectory, codec, lambda sha: template_renderer)))
    assert n > 12
    assert [text for text in problems if text] == []


@pytest.mark.parametrize(
    ("name", "mark", "options"),
    [
        ("mistral-nemo", "[TOOL_RESULTS]", {}),
        # Its template adds arguments up as text and refuses objects.
        ("deepseek-r1", "<｜tool▁output▁begin｜>", {"string_arguments": True}),
    ],
)
def test_an_answer_behind_a_tool_result_is_the_assistants(
    corpus: Path, name: str, mark: str, options: dict[str, bool]
) -> None:
    """Both open it without a header: only the end of the results stands before it."""
    codec = load(corpus / "tokenizers" / name)
    text = (corpus / "tokenizers" / name / "chat_template.jinja").read_text(encoding="utf-8")
    template_renderer = renderer(codec, text)
    trajectory = PLANTERS["clean"](
        ModelSetup(name, codec, template_renderer, random.Random(3), system=False, **options)
    ).trajectory
    (row,) = merged_rows(trajectory.steps)
    bare = replace(row, origin=None, step_indices=(), logprobs=np.nan_to_num(row.logprobs))
    assert [f.kind for f in diagnose(Trajectory("t", rows=(bare,)), codec, lambda sha: template_renderer)] == []
    mask = row.loss_mask.copy()
    results = np.flatnonzero(row.ids == codec.token_id(mark))[-1]
    mask[results + 1 : results + 4] = True
    (finding,) = diagnose(Trajectory("t", rows=(replace(bare, loss_mask=mask),)), codec, lambda sha: template_renderer)
    assert (finding.kind, finding.start, finding.stop) == ("observation_trained", results + 1, results + 4)


@pytest.mark.parametrize("mark", ["<think>", "</think>"])
def test_a_row_does_not_say_whether_thinking_was_on(corpus: Path, mark: str) -> None:
    """Its first turn tells the header: the template opens a think block or closes it."""
    codec = load(corpus / "tokenizers" / "deepseek-r1")
    text = (corpus / "templates" / "deepseek-v3.1.jinja").read_text(encoding="utf-8")
    template_renderer = renderer(codec, text)
    parts = [
        (f"<｜begin▁of▁sentence｜><｜User｜>What is 2+2?<｜Assistant｜>{mark}", False),
        ("I ask.<｜tool▁calls▁begin｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>", True),
        ("<｜tool▁output▁begin｜>It is four, says the tool.<｜tool▁output▁end｜>", False),
        ("It is four.<｜end▁of▁sentence｜>", True),
    ]
    stretches = [(codec.encode(part), trained) for part, trained in parts]
    mask = np.concatenate([np.full(len(ids), trained) for ids, trained in stretches])
    good = Row(np.concatenate([ids for ids, _ in stretches]), mask)
    assert [f.kind for f in diagnose(Trajectory("t", rows=(good,)), codec, lambda sha: template_renderer)] == []
    late = mask.copy()
    result = len(stretches[0][0]) + len(stretches[1][0])
    late[result + 1 : result + 4] = True
    (found,) = diagnose(Trajectory("t", rows=(replace(good, loss_mask=late),)), codec, lambda sha: template_renderer)
    assert (found.kind, found.start, found.stop) == ("observation_trained", result + 1, result + 4)
