"""Real trajectories with planted faults: all are read, every break is where it was planted, and all come back."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from rollout_inspector import formats
from rollout_inspector.formats import Source
from rollouts.jobs.imports import imports
from rollouts.store import models
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.trajectories import load_step_prompt, load_trajectories, load_trajectory
from tests.storage.build import assert_same

pytestmark = pytest.mark.django_db

NAMES = ("qwen2.5", "llama3.1", "qwen3", "qwen3-fixed")
WHOLE = {"engine_ids_inconsistent", "token_ids_missing"}
"""Faults inside one step, which do not show as a difference between two."""


@pytest.fixture
def import_labelled(corpus: Path):  # type: ignore[no-untyped-def]
    def go(name: str) -> models.Run:  # type: ignore[no-untyped-def]
        tokenizer = register_tokenizer(corpus / "tokenizers" / name.removesuffix("-fixed"))
        template = tokenizer.chat_template
        if name.endswith("-fixed"):
            text = (corpus / "templates" / "qwen3--seed-one-line-fix.jinja").read_text()
            template = register_chat_template(text, name)
        run = create_run(models.Run.Kind.IMPORT, name, tokenizer=tokenizer, chat_template=template)
        imports.import_files(run, [corpus / "labelled" / f"{name}.calls.jsonl"])
        return run

    return go


def labels(corpus: Path, name: str) -> dict[str, dict[str, object]]:
    return json.loads((corpus / "labelled" / f"{name}.expect.json").read_text())  # type: ignore[no-any-return]


# The first one on PostgreSQL too: all are stored by the same statements.
@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.sqlite_only) for name in NAMES[1:])])
def test_every_planted_break_is_where_it_was_planted_and_comes_back(corpus: Path, name: str, import_labelled) -> None:  # type: ignore[no-untyped-def]
    run = import_labelled(name)
    expected = labels(corpus, name)
    assert (run.status, run.n_rejected) == ("done", 0)
    assert set(run.trajectories.values_list("external_id", flat=True)) == set(expected)
    for record in run.trajectories.all():
        label = expected[record.external_id]
        broken = [step.index for step in record.steps.order_by("index") if step.shared_length < step.parent_length]
        if label["kind"] is None or label["axis"] == "delta":
            assert broken == [], (record.external_id, label)
        elif label["kind"] not in WHOLE:
            assert broken and broken[0] == label["step"], (record.external_id, label)
            # The offset of the break is the first id that differs.
            step = record.steps.get(index=broken[0])
            prompt = load_step_prompt(step)
            parent = load_trajectory(record).steps[step.parent.index].stream
            n = step.shared_length
            assert np.array_equal(prompt[:n], parent[:n])
            assert n == min(len(prompt), len(parent)) or prompt[n] != parent[n]

    # Exported and imported again, every array is the same.
    before = list(load_trajectories(list(run.trajectories.order_by("index"))))
    file = io.BytesIO()
    assert formats.FORMATS["own_jsonl"].write(before, file) == len(before)  # type: ignore[misc]
    again = create_run(models.Run.Kind.IMPORT, "again")
    imports.import_files(again, [Source.of_bytes(file.getvalue())])
    after = list(load_trajectories(list(again.trajectories.order_by("index"))))
    assert len(before) == len(after) == run.n_trajectories
    for one, other in zip(before, after, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", ("qwen2.5", "llama3.1"))
def test_rows_are_read_with_their_columns(corpus: Path, name: str) -> None:
    run = create_run(models.Run.Kind.IMPORT, name)
    imports.import_files(run, [corpus / "labelled" / f"{name}.train_data_step1.jsonl"])
    expected = json.loads((corpus / "labelled" / f"{name}.rows.expect.json").read_text())
    assert set(run.trajectories.values_list("external_id", flat=True)) == set(expected) and run.format == "nemo_rl"
    for record in run.trajectories.all():
        (row,) = load_trajectory(record).rows
        lengths = {len(row.ids), len(row.loss_mask), *(len(column) for column in row.columns.values())}
        assert (len(lengths) > 1) == (expected[record.external_id] == "length_mismatch"), record.external_id
        assert set(row.columns) == {"advantages", "prev_logprobs"}


def test_the_findings_of_an_import_are_the_planted_ones(corpus: Path, import_labelled) -> None:  # type: ignore[no-untyped-def]
    run = import_labelled("qwen3")
    for record in run.trajectories.all():
        label = labels(corpus, "qwen3")[record.external_id]
        found = {(one.kind, one.step_index, one.axis) for one in record.findings.exclude(severity="info")}
        wanted = {(label["kind"], label["step"], label["axis"])} if label["kind"] else set()
        assert wanted <= found or record.findings.filter(kind=label["kind"], step_index=label["step"]).exists()
        if not wanted:
            assert not record.findings.filter(severity="error").exists(), (record.external_id, found)
