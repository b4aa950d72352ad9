"""Continuing a trajectory from a token, and from both sides of a break, with the demo policy in this process."""

import io
import json
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import FORKED
from rollouts.jobs import forks, gallery
from rollouts.jobs.forks import ForkSettings
from rollouts.jobs.launch import LaunchRefused, LaunchSettings, launch
from rollouts.sampling.environments import calculator
from rollouts.store.models import Fork, Run, StepTokens, StoredTrajectory
from rollouts.store.runs.forks import effects_of, fork_figures, forks_of
from rollouts.store.runs.runs import delete_run, recount
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.store.trajectories.trajectory_parts import read_steps
from rollouts.worker import run_rollouts

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines")]


def fork(trajectory: StoredTrajectory, settings: ForkSettings, enqueue: bool = True) -> Run:
    """The run of a fork from a token."""
    (run,) = forks.fork(trajectory, settings, enqueue=enqueue)
    return run


def worked(run: Run) -> list[StoredTrajectory]:
    """The trajectories of a run when the work is done."""
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    return list(run.trajectories.select_related("run", "task").order_by("index"))


@pytest.fixture
def parent() -> StoredTrajectory:
    """A trajectory of two calls that is sampled greedily."""
    trajectories = worked(launch(LaunchSettings(prompts=2, group=1, seed=7, temperature=0), enqueue=False))
    return next(trajectory for trajectory in trajectories if trajectory.n_steps > 1)


def ids_of(trajectory: StoredTrajectory) -> list[int]:
    row = trajectory.rows.get(index=0)
    return row_window(trajectory, row, 0, row.n_tokens).ids.tolist()


def n_stored(run: Run) -> int:
    """Token ids that the database holds of a run."""
    tokens = StepTokens.objects.filter(step__trajectory__run=run).values_list("delta_ids", "completion_ids")
    return sum(len(delta) + len(completion) for delta, completion in tokens)


class TestAFork:
    def test_goes_on_from_every_kind_of_place_and_stores_what_is_new(self, parent: StoredTrajectory) -> None:
        """The policy is greedy: from its own tokens it goes on as it did."""
        before = (parent.run.n_trajectories, parent.run.n_tokens, parent.run.reward_sum)
        first, second = read_steps(parent)[:2]
        end = first.prompt_length + first.completion_length
        whole = ids_of(parent)
        places = {
            "start of a turn": first.prompt_length, "inside a turn": first.prompt_length + 9,
            "start of a later turn": second.prompt_length, "inside a later one": second.prompt_length + 2,
        }
        for name, at in places.items():
            run = fork(parent, ForkSettings(at=at, samples=2, seed=1), enqueue=False)
            samples = worked(run)
            assert [sample.status for sample in samples] == ["done", "done"], (name, run.error)
            for sample in samples:
                assert ids_of(sample) == whole, name
                assert (sample.reward, sample.stop_reason) == (parent.reward, parent.stop_reason)
                assert sample.n_tokens == len(whole) - at and sample.checks["first_prompt"] == ["first turn of its own"]
                value = load_trajectory(sample)
                assert value.extra[FORKED] == {"trajectory": parent.code, "row": 0, "offset": at}
                assert value.steps[0].prompt_ids.tolist() == whole[:at]
                assert value.steps[0].request is not None
                assert not sample.n_findings, (name, list(sample.findings.values_list("kind", "evidence")))
            assert n_stored(run) == 2 * (len(whole) - at)
        assert end < second.prompt_length
        recount(parent.run)
        parent.run.refresh_from_db()
        assert (parent.run.n_trajectories, parent.run.n_tokens, parent.run.reward_sum) == before

    def test_another_token_or_observation_stands_at_the_place(self, parent: StoredTrajectory) -> None:
        first, second = read_steps(parent)[:2]
        whole, at = ids_of(parent), second.prompt_length
        token = next(number for number in range(300, 400) if number != whole[at])
        (sample,) = worked(fork(parent, ForkSettings(at=at, token=token, samples=1, seed=1), enqueue=False))
        assert ids_of(sample)[: at + 1] == [*whole[:at], token] and n_stored(sample.run) == sample.n_tokens
        end = first.prompt_length + first.completion_length
        run = fork(parent, ForkSettings(at=end + 3, text="77", samples=2, seed=1), enqueue=False)
        for sample in worked(run):
            step = load_trajectory(sample).steps[0]
            assert step.prompt_ids[:end].tolist() == whole[:end] and step.request is not None
            assert step.request.messages[-1]["content"] == "77" and "77" in sample.answer_line
        assert n_stored(run) == sum(sample.n_tokens for sample in run.trajectories.all())

    def test_an_answer_that_differs_stops_it_unless_it_is_to_go_on(
        self, parent: StoredTrajectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        at = read_steps(parent)[1].prompt_length
        monkeypatch.setattr(calculator, "calculator_reply", lambda expression: "41")
        run = fork(parent, ForkSettings(at=at, samples=2, seed=1), enqueue=False)
        assert {sample.status for sample in worked(run)} == {"failed"} and run.status == "failed"
        assert "does not answer turn 0 as it was recorded" in run.error and "41" in run.error
        run = fork(parent, ForkSettings(at=at, samples=2, seed=1, goes_on=True), enqueue=False)
        assert {ids_of(sample) == ids_of(parent) for sample in worked(run)} == {True}

    def test_a_fork_of_a_fork_outlives_both_parents(self, parent: StoredTrajectory) -> None:
        whole, at = ids_of(parent), read_steps(parent)[0].prompt_length + 5
        (child,) = worked(fork(parent, ForkSettings(at=at, samples=1, seed=1), enqueue=False))
        (grandchild,) = worked(fork(child, ForkSettings(at=at + 8, samples=1, seed=1), enqueue=False))
        assert ids_of(grandchild) == whole and n_stored(grandchild.run) == len(whole) - at - 8
        delete_run(parent.run)
        delete_run(child.run)
        assert ids_of(grandchild) == whole
        assert load_trajectory(grandchild).steps[0].prompt_ids.tolist() == whole[: at + 8]
        assert Fork.objects.get().parent is None

    def test_stored_steps_are_not_sampled_again(self, parent: StoredTrajectory) -> None:
        at = read_steps(parent)[0].prompt_length + 3
        run = fork(parent, ForkSettings(at=at, samples=1, seed=1), enqueue=False)
        (sample,) = worked(run)
        StoredTrajectory.objects.filter(pk=sample.pk).update(status="queued")
        Run.objects.filter(pk=run.pk).update(status="queued", finished_at=None)
        sample.rows.all().delete()
        sample.steps.filter(index__gt=0).delete()
        StoredTrajectory.objects.filter(pk=sample.pk).update(n_steps=1)
        assert ids_of(worked(run)[0]) == ids_of(parent)

    @pytest.mark.parametrize(
        ("changes", "field", "words"),
        [
            ({"row": 3}, "row", "counted from 0"), ({"at": 0}, "at", "from 1 to"), ({"at": 10**6}, "at", "from 1 to"),
            ({"at": 5, "token": 10**6}, "token", "run from 0 to"), ({"at": 5, "text": "a"}, "text", "no observation"),
            ({"at": 5, "text": "a", "token": 3}, "text", "not both"), ({"at": 5, "samples": 0}, "samples", "from 1"),
            ({"at": 5, "samples": 10**6}, "samples", "to 512"), ({"at": 5, "model": "gpt-9"}, "model", "no model"),
            ({"at": 5, "temperature": float("nan")}, "temperature", "from 0"),
            ({"at": 5, "strategy": "hope"}, "strategy", "tool_delta"),
            ({"at": 5, "chat_template": "0" * 64}, "chat_template", "No chat template"),
        ],
    )
    def test_what_cannot_be_continued_is_said_by_field(
        self, parent: StoredTrajectory, changes: dict[str, Any], field: str, words: str
    ) -> None:
        with pytest.raises(LaunchRefused) as refused:
            fork(parent, ForkSettings(**changes), enqueue=False)
        assert words in refused.value.problems[field] and not Fork.objects.exists()


class TestTheGallery:
    @pytest.mark.sqlite_only  # TestAFork stores forks on any database
    def test_both_forks_of_pair_a_break_have_the_same_seeds(self) -> None:
        run = gallery.load()
        trajectory = run.trajectories.select_related("run").get(external_id="tokenizer_mismatch")
        out = io.StringIO()
        call_command(
            "break_effect", trajectory.code, "--finding", "1", "--samples", "3", "--seed", "5", "--wait", "--json",
            stdout=out,
        )
        answer = json.loads(out.getvalue())
        assert set(answer) == {"sampled", "broken", "difference", "interval", "seen"}
        sides = forks_of(trajectory)
        (effect,) = effects_of(fork_figures(sides))
        assert effect.reward.n == answer["sampled"]["n"] == answer["broken"]["n"] == 3 and not effect.active
        assert answer["difference"] == pytest.approx(answer["broken"]["mean"] - answer["sampled"]["mean"])
        low, high = answer["interval"]
        assert low <= answer["difference"] <= high and answer["seen"] == (not low <= 0 <= high)
        seeds = [list(side.run.trajectories.order_by("index").values_list("seed", flat=True)) for side in sides]
        assert seeds[0] == seeds[1]
        prompts = [load_trajectory(side.run.trajectories.first()).steps[0].prompt_ids for side in sides]  # type: ignore[arg-type]
        assert not np.array_equal(*prompts)
        assert [figures.finding for figures in fork_figures(sides)] == [1, 1]

    @pytest.mark.sqlite_only  # TestAFork stores forks on any database
    def test_every_kind_has_two_sides_or_a_sentence_why_not(self) -> None:
        run = gallery.load()
        n_sides, sentences = 0, set()
        for trajectory in run.trajectories.select_related("run").order_by("index"):
            for number in range(1, trajectory.n_findings + 1):
                try:
                    sides = forks._break_starts(trajectory, number)
                except Refusal as refusal:
                    sentences.add(refusal.sentence)
                    continue
                n_sides += 1
                assert set(sides) == {"sampled", "broken"}
        assert n_sides >= 25 and len(sentences) == 2, (n_sides, sentences)

    def test_what_has_no_environment_gets_one_completion_each(self) -> None:
        run = gallery.load()
        Run.objects.filter(pk=run.pk).update(settings={})
        trajectory = run.trajectories.select_related("run").get(external_id="clean")
        made = fork(trajectory, ForkSettings(at=trajectory.steps.get(index=0).prompt_length, samples=2), enqueue=False)
        assert (made.environment, made.model) == ("prompts", "demo")
        assert {(sample.n_steps, sample.reward) for sample in worked(made)} == {(1, None)}

    def test_a_model_with_another_tokenizer_is_refused(self, settings: Any, tiny_tokenizer: Any) -> None:
        trajectory = gallery.load().trajectories.select_related("run").get(external_id="clean")
        settings.INSPECTOR_MODELS = {"words": {"engine": "transformers", "path": str(tiny_tokenizer)}}
        if trajectory.run.tokenizer.sha256 != gallery.model_tokenizer(forks.served_models()["words"]).sha256:
            with pytest.raises(LaunchRefused, match="No served model has the tokenizer"):
                fork(trajectory, ForkSettings(at=5), enqueue=False)

    def test_a_number_without_a_finding_is_refused(self) -> None:
        trajectory = gallery.load().trajectories.select_related("run").get(external_id="clean")
        with pytest.raises(Refusal, match="counted from 1"):
            forks.fork(trajectory, ForkSettings(finding=1), enqueue=False)


@pytest.mark.sqlite_only  # TestAFork stores forks on any database
def test_the_command_prints_the_contract(parent: StoredTrajectory) -> None:
    out = io.StringIO()
    at = read_steps(parent)[0].prompt_length
    call_command("fork", parent.code, "--row", "0", "--at", str(at), "--samples", "2", "--seed", "3", "--temperature",
                 "1", "--wait", "--json", stdout=out)
    answer = json.loads(out.getvalue())
    assert answer["parent"] == {"trajectory": parent.code, "row": 0, "offset": at} and len(answer["samples"]) == 2
    assert {tuple(sample) for sample in answer["samples"]} == {("trajectory", "reward", "n_tokens")}
    with pytest.raises(CommandError, match=r"--at: Choose a token from 1"):
        call_command("fork", parent.code, "--row", "0", "--at", "0")
