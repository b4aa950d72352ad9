"""*Weights in the loss* on the page *Gap*: asked for, summed by a job, told like a plain count; and missing columns."""

import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from inspector.runs.jobs.job_values import listed_kinds
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs import loss_weights
from rollouts.store.jobs.jobs import ask_job, latest_jobs
from rollouts.store.models import Job, Run
from rollouts.store.runs.muted import mute
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.groups import advantage_in_group, advantages_of_groups
from rollouts.worker import jobs
from tests.people import make_member
from tests.samples.training_steps import save, world
from tests.web.trajectory_samples import Maker, own_row

pytestmark = pytest.mark.django_db


@pytest.fixture
def made() -> list[Trajectory]:
    """Groups in which rewards differ from step 1 on, so that the broken trajectories of steps 2 and 3 have a weight."""
    return [replace(one, group=f"g{n % 2}") for n, one in enumerate(world())]


@pytest.fixture
def run(made: list[Trajectory]) -> Run:
    run = create_run(Run.Kind.IMPORT, "r")
    return saved(run, made)


def saved(run: Run, made: list[Trajectory]) -> Run:
    save(run, made)
    Run.objects.filter(pk=run.pk).update(status="done")
    return Run.objects.get(pk=run.pk)


def counted(run: Run, **options: Any) -> dict[str, Any]:
    job, _ = ask_job(run, "loss_weights", options)
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, job.error) == ("done", "") and job.report is not None
    return job.report


def text(web: Client, run: Run, query: str = "") -> str:
    """The section, not the rest of the page."""
    body = web.get(f"/runs/{run.code}/gap{query}").content.decode()
    return " ".join(body.partition('<section id="weights"')[2].split())


def twin(web: Client, run: Run, query: str = "") -> dict[str, Any]:
    return web.get(f"/runs/{run.code}/gap.json{query}").json()["weights"]


def test_a_press_sends_a_worker_and_the_page_tells_its_sums(
    web: Client, run: Run, made: list[Trajectory], sent: list[int], django_assert_max_num_queries: Any
) -> None:
    assert "Count the weights" in text(web, run) and twin(web, run)["report"] is None
    for _ in range(2):
        assert web.post(f"/runs/{run.code}/weigh").headers["Location"] == f"/runs/{run.code}/gap#weights"
    assert len(set(sent)) == 1 == Job.objects.count()
    assert 'hx-trigger="every 1s"' in text(web, run) and "Cancel the count" in text(web, run)
    jobs.do_job(sent[0])
    said = twin(web, run)
    assert (said["rule"], said["mean"], said["stale"], said["live"]) == ("grpo", "row_mean", False, False)
    weights = said["report"]
    with_row = [one for one in made if one.rows]
    assert (weights["trajectories"], weights["tokens"], weights["batches"]) == (len(made), 4 * 16 + 18, 5)
    # The rows of step s have a ratio of exp(0.1 s) at each token. From step 1 on, two of a group have other rewards.
    pushed = [one for one in with_row if one.training_step]
    assert weights["advantages"] == {"rewards": 4 * 16} and weights["zero_advantage"] == 4 * (16 - len(pushed))
    grpo = next(line for line in weights["rules"] if line["rule"] == "grpo")
    kinds = [
        set(run.trajectories.get(external_id=name).findings.values_list("kind", flat=True)) for name in ("1-0", "2-0")
    ]
    (kind,) = kinds[1] - kinds[0]
    whole = broken = clipped = 0.0
    for one in pushed:
        ratio, is_better = math.exp(0.1 * (one.training_step or 0)), (one.reward or 0.0) > 1.0
        size = 0.0 if is_better and ratio > 1.2 else ratio  # all advantages have one size, and all batches four rows
        clipped += 4 * (size == 0.0)
        whole += size
        broken += size * run.trajectories.filter(external_id=one.external_id, findings__kind=kind).exists()
    assert (grpo["known"], grpo["clipped"], grpo["masked"]) == (4 * 16, clipped, 0) and clipped == 16
    assert grpo["findings"][kind]["trajectories"]["row_mean"] == pytest.approx(broken / whole, rel=1e-5)
    assert 0 < broken < whole
    found = {line["training_step"]: (line["known"], line["clipped"], line["masked"]) for line in said["steps"]}
    assert found == {0: (16, 0, 0), 1: (16, 0, 0), 2: (16, 8, 0), 3: (16, 8, 0)}
    assert twin(web, run, "?rule=tis")["steps"][2] == {"training_step": 2, "known": 16, "clipped": 0, "masked": 0}
    with django_assert_max_num_queries(11):
        body = text(web, run)
    assert "By training step, under GRPO" in body and "50.0 %" in body
    assert "Count again" in body and "every 1s" not in body and "IcePop" in body and "trainer_logprobs" in body
    assert "none of uncorrected" in text(web, run, "?rule=nope&mean=token_mean")
    for rule in ("uncorrected", "gspo"):
        assert twin(web, run, f"?rule={rule}&mean=token_mean")["rule"] == rule
    mute(run, kind, "run", "known", make_member("ann", run.project))
    assert "(muted)" in text(web, run)
    Run.objects.filter(pk=run.pk).update(n_tokens=1)
    assert "have changed since" in text(web, run)
    Job.objects.update(report={"version": 0})
    assert twin(web, run)["report"] is None


def test_the_address_of_the_page_that_was_leads_to_the_section(web: Client, run: Run) -> None:
    here = f"/runs/{run.code}"
    for old, new in (
        ("weights", "gap#weights"), ("weights?rule=tis", "gap?rule=tis#weights"), ("weights.json", "gap.json"),
        ("weights.json?rule=tis&mean=row_sum", "gap.json?rule=tis&mean=row_sum"),
    ):
        answer = web.get(f"{here}/{old}")
        assert (answer.status_code, answer.headers["Location"]) == (301, f"{here}/{new}")
    job, _ = ask_job(run, "loss_weights", {})
    assert web.post(f"{here}/jobs/{job.code}/cancel").headers["Location"] == f"{here}/gap#weights"


def test_advantages_are_those_of_the_group_within_its_training_step(run: Run) -> None:
    found = advantages_of_groups(run)
    for one in run.trajectories.all():
        assert advantage_in_group(one) == found.get(one.pk)
    step = run.trajectories.filter(training_step=2, group="g1").order_by("reward")
    assert [found[one.pk] for one in step] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert run.trajectories.get(external_id="no step").pk not in found  # alone in its group


def test_rows_of_strategies_are_weighed_as_far_as_columns_reach(web: Client, run: Run) -> None:
    report = counted(run, strategies=True)
    lines = {line["strategy"]: line for line in report["strategies"]}
    step_wise = lines["step_wise"]
    assert step_wise["trajectories"] == len(world()) and step_wise["refused"] == 0
    assert step_wise["rows"] == 3 * len(world()) > lines["step_wise_merged"]["rows"]
    rules = {rule["rule"]: rule for rule in step_wise["rules"]}
    # Nobody made the trainer's forward pass over these rows, so that only the rule that needs none weighs tokens.
    assert rules["grpo"]["known"] == 0 and (rules["grpo"]["compared"], rules["grpo"]["moved"]["row_mean"]) == (0, None)
    assert "trainer’s log-probabilities" in rules["grpo"]["why_not"][0]["sentence"]
    # The one without a step has no advantage.
    assert (rules["uncorrected"]["known"], rules["uncorrected"]["compared"]) == (16 * 18, 16)
    assert lines["tool_delta"]["trajectories"] == 0 and "tokenizer" in next(iter(lines["tool_delta"]["why"]))
    again = counted(run)  # the report of the first job is not kept beside this one, and no list reads it
    assert again["strategies"] == [] and [bool(job.report) for job in run.jobs.order_by("pk")] == [False, True]
    listed = latest_jobs(run, *listed_kinds())
    assert len(listed) == 2 and all("report" in job.get_deferred_fields() for job in listed)
    assert counted(run, strategies=True)["strategies"] == report["strategies"]
    body = text(web, run, "?rule=uncorrected")
    assert "Under the rows of other strategies" in body and "step wise merged" in body


def test_what_is_missing_is_named(web: Client, made: list[Trajectory]) -> None:
    alone = [Trajectory(f"t{n}", rows=(replace(made[n].rows[0], columns={}),)) for n in range(2)]
    bare = saved(create_run(Run.Kind.IMPORT, "bare"), alone)
    report = counted(bare)
    assert [line["known"] for line in report["rules"]] == [0] * 5
    body = text(web, bare)
    assert "They lack the advantages (a column “advantages”" in body and "decides the weight of no token" in body
    assert "also under the rows" not in body
    refused, _ = ask_job(bare, "loss_weights", {"strategies": True})
    jobs.do_job(refused.pk)
    assert "holds training rows without steps" in text(web, bare)
    empty = create_run(Run.Kind.IMPORT, "empty")
    Run.objects.filter(pk=empty.pk).update(status="done")
    assert "no finished trajectory" in text(web, empty)
    assert web.post(f"/runs/{empty.code}/weigh.json").status_code == 409


def test_the_command_says_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    call_command("loss_weights", run.code, "--json", stdout=out)
    report = counted(run)
    assert json.loads(out.getvalue()) == {name: value for name, value in report.items() if name != "key"}
    words = io.StringIO()
    call_command("loss_weights", run.code, "--strategies", "--mean", "token_mean", stdout=words)
    assert "GRPO: 64 tokens weighed, 25.0 % clipped" in words.getvalue()
    assert "not decidable for 18 of 82 tokens" in words.getvalue() and "step_wise: 51 rows" in words.getvalue()
    with pytest.raises(CommandError, match="no run with the code"):
        call_command("loss_weights", "nothing")
    monkeypatch.setattr(loss_weights, "MAX_REPLAYED", 3)
    with pytest.raises(CommandError, match="at most 3 trajectories"):
        call_command("loss_weights", run.code, "--strategies")


def test_the_lens_shows_the_weight_of_each_token(web: Client, make: Maker, django_assert_max_num_queries: Any) -> None:
    """Two rows of one group: one with advantages of the trainer, one whose advantage follows from the rewards."""
    whole = own_row().rows[0]
    n = len(whole.ids)
    sampler = np.where(whole.loss_mask, np.float32(-1.0), np.float32(np.nan)).astype(np.float32)
    trainer = np.where(whole.loss_mask, np.float32(-0.5), np.float32(0.0)).astype(np.float32)
    columns = {"trainer_logprobs": trainer}
    rows = {
        "column": replace(whole, logprobs=sampler, columns=columns | {"advantages": np.full(n, 2.0, np.float32)}),
        "rewards": replace(whole, logprobs=sampler, columns=columns),
        "bare": replace(whole, logprobs=None, columns=columns),
    }
    made = [Trajectory(name, rows=(row,), group="g", reward=float(name != "rewards")) for name, row in rows.items()]
    run = make.run(made)
    codes = {one.external_id: one.code for one in run.trajectories.all()}
    ratio, advantage = math.exp(0.5), {"column": 2.0, "rewards": (0 - 2 / 3) / math.sqrt(1 / 3)}
    wanted = {"uncorrected": 1.0, "tis": ratio, "icepop": ratio}
    for name, size in advantage.items():
        clip = {"grpo": 0.0 if size > 0 else ratio, "gspo": 0.0 if size > 0 else ratio}
        for rule, factor in (wanted | clip).items():
            said = web.get(f"/trajectories/{codes[name]}.json?lens=weight_{rule}&view=tokens").json()
            assert said["notices"] == [] and f"weight_{rule}" in said["lenses"]
            for token, trained in zip(said["window"]["tokens"], whole.loss_mask.tolist(), strict=True):
                found = token["columns"][f"weight_{rule}"]
                assert found == (pytest.approx(factor * size, rel=1e-5) if trained else None)
    address = f"/trajectories/{codes['rewards']}"
    with django_assert_max_num_queries(25):
        body = web.get(f"{address}?lens=weight_tis&view=tokens").content.decode()
    assert (
        all(f"weight: {rule}" in body for rule in ("GRPO", "TIS", "IcePop", "GSPO"))
        and "weight: TIS” colours" not in body
    )
    assert "weight: TIS" in web.get(f"{address}/card.json?lens=weight_tis&view=tokens").json()["columns"]
    first = web.get(address).content.decode()
    assert 'data-lens-choice="weight_grpo"' in first and "weight_tis" not in first
    # A value that is missing is named; a weight of 0 is explained.
    assert "the row lacks the sampler’s log-probabilities" in text_of(web, codes["bare"], "grpo")
    assert "each token is clipped or masked" in text_of(web, codes["column"], "grpo")
    assert "weight: no correction” colours nothing" not in text_of(web, codes["bare"], "uncorrected")


def text_of(web: Client, code: str, rule: str) -> str:
    return " ".join(web.get(f"/trajectories/{code}?lens=weight_{rule}").content.decode().split())


def test_strategies_take_over_what_the_trainer_read(web: Client, make: Maker) -> None:
    """Trajectories of one and of three turns, with advantages of one size: a row for each step favours the longer."""
    made = []
    for turns, advantage in ((1, 1.0), (3, -1.0)):
        one = make.conversation(f"t{turns}", turns)
        (row,) = merged_rows(one.steps)
        assert row.logprobs is not None
        columns = {
            "old_log_probs": np.nan_to_num(row.logprobs),
            "advantages": np.where(row.loss_mask, advantage, 0).astype(np.float32),
        }
        made.append(replace(one, rows=(replace(row, columns=columns),)))
    run = make.run(made)
    report = counted(run, strategies=True)
    lines = {line["strategy"]: {rule["rule"]: rule for rule in line["rules"]} for line in report["strategies"]}
    for rule in ("grpo", "gspo", "uncorrected"):
        for strategy in ("step_wise", "step_wise_merged"):
            assert lines[strategy][rule]["known"] == report["tokens"] == run.n_sampled
        assert lines["step_wise"][rule]["moved"]["row_mean"] == pytest.approx(3 / 4 - 1 / 2)
        assert lines["step_wise"][rule]["moved"]["token_mean"] == pytest.approx(0.0)
        assert lines["step_wise_merged"][rule]["moved"]["row_mean"] == pytest.approx(0.0)
    body = text(web, run, "?rule=gspo")
    assert "By class of token" in body and ">digits</th>" in body and "25.0 %" in body
