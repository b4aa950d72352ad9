"""Lost, wrong and trained tokens are the same number on every page, for each labelled fault of the corpus."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command
from django.test import Client

from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.strategies import STRATEGIES, Context
from rollout_inspector.streams.strategies.replay import replay
from rollout_inspector.streams.trajectory import Row, Trajectory
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from rollouts.jobs.imports import imports
from rollouts.store import models
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.trajectories import load_trajectories
from tests.people import make_member

pytestmark = pytest.mark.django_db

SOURCES = [
    *((f"{name}.calls.jsonl", name) for name in ("qwen2.5", "llama3.1", "qwen3", "qwen3-fixed")),
    *((f"{name}.train_data_step1.jsonl", name) for name in ("qwen2.5", "llama3.1")),
]
TURNS = {
    "qwen2.5": ("<|im_start|>assistant\n", "<|im_end|>"),
    "llama3.1": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
}
"""What opens and what ends a turn of the assistant."""
OF_THE_MASK = {
    "observation_trained", "generation_prompt_trained", "separator_trained", "mask_overrun", "sampled_masked",
    "stop_token_untrained",
}


def lost_in_one_row(value: Trajectory, finding: dict[str, Any]) -> int:
    """The sampled tokens at and behind the place of a break, in the whole stream that the prompt leaves."""
    steps, step = value.steps, value.steps[finding["step"]]
    shared = [(int((np.cumprod(_equal(step.prompt_ids, one.stream)) if one else 0).sum()), i)
              for i, one in enumerate(steps[: finding["step"]])]
    if not shared or max(shared)[0] != finding["start"]:
        return 0  # about the step itself
    left = steps[max(shared)[1]].stream
    (row,) = [row for row in merged_rows(steps) if np.array_equal(row.ids[: len(left)], left)][:1]
    return int(np.count_nonzero(row.loss_mask[finding["start"] : len(left)]))


def _equal(one: Any, other: Any) -> Any:
    n = min(len(one), len(other))
    return one[:n] == other[:n]


def right_mask(row: Row, codec: Any, name: str) -> Any:
    """What the assistant wrote: behind its header, through its stop token."""
    header, stop = (codec.encode(text) for text in TURNS[name])
    mask, at = np.zeros(len(row.ids), dtype=np.bool_), 0
    while at < len(row.ids):
        if np.array_equal(row.ids[at : at + len(header)], header):
            at += len(header)
            while at < len(row.ids):
                mask[at] = True
                at += 1
                if row.ids[at - 1] == stop[0]:
                    break
        else:
            at += 1
    return mask


def two_of_each(file: Path) -> Source:
    """The labelled calls without the third and fourth of each fault, which tell nothing new."""
    labels = json.loads(file.with_name(f"{file.name.removesuffix('.calls.jsonl')}.expect.json").read_text())
    seen: Counter[str] = Counter()
    kept = []
    for line in file.read_bytes().splitlines(keepends=True):
        (one,) = read(Source.of_bytes(line))[1]
        assert isinstance(one, Trajectory)
        seen[kind := str(labels[one.external_id]["kind"])] += 1
        if seen[kind] <= 2:
            kept.append(line)
    assert set(seen) == {str(label["kind"]) for label in labels.values()}
    return Source.of_bytes(b"".join(kept), file.name)


@pytest.mark.sqlite_only  # the tests of the single pages ask the same queries
@pytest.mark.parametrize(("file", "name"), SOURCES)
def test_every_page_says_the_same_number(
    corpus: Path, client: Client, django_user_model: Any, file: str, name: str
) -> None:
    client.force_login(make_member("reader"))
    folder = corpus / "tokenizers" / name.removesuffix("-fixed")
    codec = load(folder)
    tokenizer = register_tokenizer(folder)
    template = tokenizer.chat_template
    if name.endswith("-fixed"):
        template = register_chat_template(
            (corpus / "templates" / "qwen3--seed-one-line-fix.jinja").read_text(), name
        )
    assert template is not None
    context = Context(codec, renderer(codec, template.text), codec.stop_ids)
    run = create_run(models.Run.Kind.IMPORT, name, tokenizer=tokenizer, chat_template=template)
    path = corpus / "labelled" / file
    imports.import_files(run, [two_of_each(path) if file.endswith(".calls.jsonl") else path])
    out = io.StringIO()
    call_command("findings", run.code, "--json", stdout=out)
    listed = json.loads(out.getvalue())
    records = list(run.trajectories.order_by("index"))
    sums: dict[str, Counter[str]] = {}
    for record in records:
        (value,) = load_trajectories([record])
        rows = value.rows or merged_rows(value.steps)
        trained = sum(int(row.loss_mask.sum()) for row in rows)
        body = client.get(f"/trajectories/{record.code}.json").json()
        mine = [one for one in listed if one["trajectory"] == record.code]
        assert record.n_trained == trained == sum(row["n_trained"] for row in body["rows"])
        if value.steps:  # rows follow from the steps: each sampled token is trained, in its own row
            sampled = sum(len(step.completion_ids) for step in value.steps)
            assert (record.n_sampled, record.n_lost, trained) == (sampled, 0, sampled)
            kept = [client.get(f"/trajectories/{record.code}/mask.json?row={row.index}").json()["verdicts"]
                    for row in record.rows.all()]
            answers = [one["Are sampled tokens trained?"].replace(",", "") for one in kept]
            parts = [tuple(map(int, one.split(" of "))) for one in answers if " of " in one]
            assert (sum(one for one, _ in parts), sum(n for _, n in parts)) == (sampled, sampled)
            made = replay(value, STRATEGIES["step_wise_merged"], context)
            assert made.refused or (made.lost_tokens, made.trained_tokens) == (0, trained)
        else:
            assert record.n_lost is None  # nobody wrote down what was sampled
        for number, one in enumerate(mine, start=1):
            cost, severe = one["cost"], one["severity"] != "info"
            if one["axis"] == "stream" and one["kind"] not in ("duplicate_call", "branch") and severe:
                continues = {i for i, step in enumerate(value.steps) for later in value.steps[i + 1 :]
                             if np.array_equal(later.prompt_ids[: len(step.stream)], step.stream)}
                wanted = lost_in_one_row(value, one)
                assert cost["lost_in_one_row"] in ({wanted, 0} if continues else {wanted}), (one["kind"], wanted)
                assert cost["trained_tokens_lost"] == 0
            if not value.steps and one["kind"] in OF_THE_MASK:
                row = value.rows[one["row"]]
                right = right_mask(row, codec, name)
                if one["kind"] != "separator_trained" or cost["trained_tokens_wrong"]:
                    assert cost["trained_tokens_wrong"] == int((row.loss_mask & ~right).sum()), one
                assert cost["trained_tokens_lost"] == int((right & ~row.loss_mask).sum()), one
            if severe:
                sums.setdefault(one["kind"], Counter()).update(cost)
            card = next(item for item in body["findings"] if item["number"] == number)
            cost = next(f for f in mine if _same(f, card))["cost"]
            assert card["cost"] == cost
            would_be = severe and cost["lost_in_one_row"] and cost["rows"] > 1
            assert card["kind"] in KINDS and ("would be lost" in card["cost_text"]) == bool(would_be)
    cost_page = client.get(f"/runs/{run.code}/cost.json").json()
    summary = client.get(f"/runs/{run.code}.json").json()["summary"]
    for line in cost_page["kinds"]:
        total = sums.get(line["kind"], Counter())
        for key in ("trained_tokens_lost", "trained_tokens_wrong", "prompt_tokens_repaid", "lost_in_one_row"):
            assert line[key] == total[key], (line["kind"], key)
        assert summary["finding_tokens"][line["kind"]] == total["trained_tokens_lost"] + total["trained_tokens_wrong"]
        assert summary["finding_one_row"][line["kind"]] == total["lost_in_one_row"]
    n_sampled = sum(record.n_sampled for record in records if record.n_steps)
    assert cost_page["totals"] == {"sampled": n_sampled, "trained": n_sampled, "lost": 0, "unknown": 0, "foreign": 0}


def _same(finding: dict[str, Any], card: dict[str, Any]) -> bool:
    return all(finding[key] == card[key] for key in ("kind", "step", "start", "stop", "severity", "evidence"))
