"""Figures by training step, against a plain count of the same trajectories."""

import io
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from rollout_inspector.diagnose.gap.figures import GapFigures
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job, PushedFigures, Run, TrainingStepFigures
from rollouts.store.runs import policy_versions
from rollouts.store.runs.policy_versions import count_due, over_versions, take_policy_versions
from rollouts.store.runs.runs import create_run
from rollouts.store.runs.training_steps import over_training, take_training_steps
from rollouts.store.trajectories.save_trajectories import add_new_trajectories, note_pushed_diagnosed
from rollouts.worker.jobs import do_job
from tests.samples.training_steps import save, world
from tests.storage.build import chain

pytestmark = pytest.mark.django_db


def test_figures_are_those_of_a_plain_count() -> None:
    run, made = create_run(Run.Kind.IMPORT, "r"), world()
    findings = save(run, made)
    take_training_steps(run)
    lines, first_steps = over_training(run)
    assert [line.training_step for line in lines] == [0, 1, 2, 3]
    for line in lines:
        held = [one for one in made if one.training_step == line.training_step]
        kinds: Counter[str] = Counter(kind for one in held for kind in {f.kind for f in findings[one.external_id]})
        assert line.findings == kinds and line.trajectories == len(held) == 4
        assert line.broken == sum(any(f.severity == "error" for f in findings[one.external_id]) for one in held)
        assert line.truncated == (line.training_step == 3)
        assert line.reward_mean == pytest.approx(np.mean([one.reward for one in held]))
        assert (line.groups, line.same_reward) == (2, 2 if line.training_step == 0 else 1)
        sampled = sum(len(step.completion_ids) for one in held for step in one.steps)
        assert line.sampled == sampled
        assert line.gap is not None and line.gap["tokens"] == 16
        assert line.gap["mean_abs"] == pytest.approx(0.1 * line.training_step, abs=1e-6)
    first = {kind: min(one.training_step for one in lines if one.findings.get(kind)) for kind in first_steps}
    assert first_steps == first and first
    assert [line.training_step for line in over_training(run, 1, 2)[0]] == [1, 2]
    assert over_training(run, 3)[1] == first_steps


def test_counting_again_replaces_what_was_stored(django_assert_max_num_queries: Any) -> None:
    run, made = create_run(Run.Kind.IMPORT, "r"), world()
    save(run, made)
    take_training_steps(run)
    before = over_training(run)
    with django_assert_max_num_queries(13):
        take_training_steps(run, {1, 3})
    assert over_training(run) == before
    run.trajectories.filter(training_step=3).delete()
    take_training_steps(run, {3})
    assert over_training(run)[0] == before[0][:3]
    run.trajectories.all().delete()
    take_training_steps(run)
    assert not TrainingStepFigures.objects.exists()


def test_the_number_of_queries_does_not_grow_with_the_steps(django_assert_max_num_queries: Any) -> None:
    run = create_run(Run.Kind.IMPORT, "r")
    save(run, world(30))
    with django_assert_max_num_queries(15):
        take_training_steps(run)
    with django_assert_max_num_queries(1):
        assert len(over_training(run)[0]) == 30


def test_pushed_data_is_counted_when_it_is_diagnosed() -> None:
    run, made = create_run(Run.Kind.IMPORT, "pushed"), world()
    add_new_trajectories(run, made[:6])
    _diagnose(run)
    assert [(line.training_step, line.trajectories) for line in over_training(run)[0]] == [(0, 4), (1, 2)]
    add_new_trajectories(run, made[6:])
    _diagnose(run)
    assert count_due() == 0 and len(over_training(run)[0]) == 2  # so soon after the last count
    wait(run)
    assert count_due() == 1 and count_due() == 0
    stored = over_training(run)
    assert [line.trajectories for line in stored[0]] == [4] * 4
    take_training_steps(run)
    assert over_training(run) == stored
    assert stored[0][2].gap is not None and stored[0][2].gap["mean_abs"] == pytest.approx(0.2, abs=1e-6)


def test_a_count_whose_worker_was_lost_is_made_again_and_what_came_meanwhile_is_due(monkeypatch: Any) -> None:
    run, made = create_run(Run.Kind.IMPORT, "pushed"), world()
    add_new_trajectories(run, made[:6])

    def lost(*_: Any) -> None:
        raise ConnectionError

    with monkeypatch.context() as patched:
        patched.setattr(policy_versions, "take_training_steps", lost)
        with pytest.raises(AssertionError, match="ConnectionError"):
            _diagnose(run)
    assert not over_training(run)[0] and count_due() == 0
    wait(run)

    def meanwhile(run: Run, steps: Any) -> None:
        take_training_steps(run, steps)
        if run.trajectories.count() == 6:
            add_new_trajectories(run, made[6:])
            note_pushed_diagnosed(run, run.trajectories.order_by("-pk")[0].pk)

    monkeypatch.setattr(policy_versions, "take_training_steps", meanwhile)
    assert count_due() == 1 and len(over_training(run)[0]) == 2
    wait(run)
    assert count_due() == 1 and [line.trajectories for line in over_training(run)[0]] == [4] * 4


def wait(run: Run) -> None:
    """Let the time pass until what was pushed is due."""
    assert PushedFigures.objects.filter(run=run, due_at__gt=timezone.now()).update(due_at=timezone.now())


def _diagnose(run: Run) -> None:
    job, _ = ask_job(run, "diagnose_pushed")
    do_job(job.pk)
    job.refresh_from_db()
    assert job.status == Job.Status.DONE, job.error


def test_the_command_prints_the_contract() -> None:
    run = create_run(Run.Kind.IMPORT, "r")
    save(run, world())
    take_training_steps(run)
    out = io.StringIO()
    call_command("over_training", run.code, "--json", stdout=out)
    said = json.loads(out.getvalue())
    assert set(said) == {"steps", "began"} and said["began"] == over_training(run)[1]
    assert {"training_step", "trajectories", "findings", "gap"} <= set(said["steps"][0])
    assert said["steps"][2]["gap"].keys() == said["steps"][0]["gap"].keys() and said["began"]
    TrainingStepFigures.objects.filter(training_step=1).delete()
    call_command("over_training", run.code, stdout=out)
    assert "begins at training step" in out.getvalue() and "not_decidable begins" not in out.getvalue()
    assert "No trajectory has training step 1." in out.getvalue()
    with pytest.raises(CommandError, match="There is no run with the code 'nosuch'"):
        call_command("over_training", "nosuch", "--json")


def test_a_gap_is_stored_with_its_trajectory() -> None:
    run, made = create_run(Run.Kind.IMPORT, "r"), world(1)
    save(run, made)
    held = run.trajectories.get(external_id="0-0").gap
    assert held is not None and GapFigures.from_json(held).tokens == 4
    assert run.trajectories.get(external_id="no step").gap is None


def test_versions_are_counted_by_the_first_step_and_ordered_by_number_or_by_place() -> None:
    def stored(names: list[str]) -> Run:
        run = create_run(Run.Kind.IMPORT, "r")
        made = []
        for n, name in enumerate(names):
            one = chain(f"{n}", seed=n)
            first, *rest = one.steps
            made.append(replace(one, steps=(replace(first, policy_version=name), *rest)))  # the rest has none
        save(run, made)
        take_policy_versions(run)
        return run

    def order(run: Run) -> list[tuple[str, int]]:
        return [(line.version, line.trajectories) for line in over_versions(run)]

    run = stored(["10", "9", "10", "", "2"])
    assert order(run) == [("2", 1), ("9", 1), ("10", 2)]
    assert order(stored(["main", "a7", "b6"])) == [("main", 1), ("a7", 1), ("b6", 1)]
    assert order(stored(["", ""])) == []
    run.trajectories.filter(external_id="0").delete()
    take_policy_versions(run, {"10"})
    assert order(run) == [("2", 1), ("9", 1), ("10", 1)]
    run.trajectories.filter(external_id="4").delete()
    take_policy_versions(run, {"2"})
    assert order(run) == [("9", 1), ("10", 1)]


def test_as_many_versions_as_trajectories_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_versions, "MAX_VERSIONS", 2)
    run = create_run(Run.Kind.IMPORT, "r")
    save(run, [replace(one, steps=(replace(one.steps[0], policy_version=one.external_id),)) for one in world(1)])
    take_policy_versions(run)
    assert over_versions(run) == []


def test_versions_of_pushed_data_are_counted_when_it_is_diagnosed() -> None:
    run = create_run(Run.Kind.IMPORT, "pushed")
    made = [replace(one, steps=tuple(replace(s, policy_version="7") for s in one.steps)) for one in world(2)]
    for part in (made[:5], made[5:]):
        add_new_trajectories(run, part)
        _diagnose(run)
    wait(run)
    count_due()
    assert [(line.version, line.trajectories) for line in over_versions(run)] == [("7", len(made))]


def test_versions_far_back_in_a_large_run_wait_for_its_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_versions, "MAX_PLACES", 5)
    run = create_run(Run.Kind.IMPORT, "pushed")
    made = [replace(one, steps=tuple(replace(s, policy_version=v) for s in one.steps))
            for one, v in zip(world(2), "111222333", strict=True)]
    for n, part in enumerate((made[:3], made[3:8], made[8:])):
        add_new_trajectories(run, part)
        _diagnose(run)
        if n:
            wait(run)
            count_due()
    assert [(line.version, line.trajectories) for line in over_versions(run)] == [("1", 3), ("2", 3), ("3", 3)]
    add_new_trajectories(run, [replace(made[0], external_id="again")])
    _diagnose(run)
    wait(run)
    count_due()
    assert over_versions(run)[0].trajectories == 3
    take_policy_versions(run)
    assert over_versions(run)[0].trajectories == 4
