"""Launched trajectories: leases, steps as they come, the end; every write twice is the same as once."""

import json
from datetime import timedelta

import numpy as np
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollouts.store import models
from rollouts.store.models import StoredTrajectory
from rollouts.store.runs.runs import beat, cancel_run, create_run, delete_run, start_run
from rollouts.store.trajectories.launched_trajectories import (
    add_queued_trajectories, cancel_remaining, fail_trajectory, finish_trajectories, lease_trajectories,
    release_trajectories, renew_lease, save_steps
)
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.storage.build import assert_same, chain, rows_only

pytestmark = pytest.mark.django_db

Status = models.StoredTrajectory.Status


@pytest.fixture
def run() -> models.Run:
    run = create_run(models.Run.Kind.LAUNCH, "launch")
    add_queued_trajectories(
        run, [(StoredTrajectory(external_id=f"t{n}", group="g", seed=n), {"prompt": n}) for n in range(4)]
    )
    return run


def test_queued_trajectories_keep_their_task(run: models.Run) -> None:
    first = run.trajectories.select_related("task").order_by("index")[1]
    assert (first.status, first.seed, json.loads(first.task.body)) == ("queued", 1, {"prompt": 1})
    assert (run.n_expected, run.n_trajectories) == (4, 4)


def test_a_trajectory_is_leased_once_until_its_worker_goes_silent(run: models.Run) -> None:
    first = lease_trajectories(run, 3, 60)
    second = lease_trajectories(run, 3, 60)
    assert [t.index for t in first] == [0, 1, 2] and [t.index for t in second] == [3]
    assert lease_trajectories(run, 3, 60) == []
    models.StoredTrajectory.objects.filter(pk=first[0].pk).update(lease_until=timezone.now() - timedelta(seconds=1))
    (again,) = lease_trajectories(run, 3, 60)
    assert (again.pk, again.attempt) == (first[0].pk, 2)
    # The silent worker is told, and can write no end.
    assert renew_lease(first, 60) == {first[1].pk, first[2].pk}
    assert not finish_trajectories([TrajectoryEnd(first[0].pk, first[0].attempt, 1.0, {}, "answered")])
    assert not fail_trajectory(TrajectoryEnd(first[0].pk, first[0].attempt, error="no"))


def test_released_trajectories_are_queued_again(run: models.Run) -> None:
    taken = lease_trajectories(run, 2, 60)
    release_trajectories(taken)
    assert [t.attempt for t in lease_trajectories(run, 9, 60)] == [2, 2, 1, 1]


@pytest.mark.parametrize("value", [chain("t0", 4), chain("t0", 4, broken_at=2)])
def test_steps_saved_one_by_one_are_what_a_whole_import_stores(run: models.Run, value) -> None:  # type: ignore[no-untyped-def]
    (record,) = lease_trajectories(run, 1, 60)
    for index, step in enumerate(value.steps):
        save_steps([(record.pk, index, step)])
        save_steps([(record.pk, index, step)])
    run.refresh_from_db()
    assert run.n_steps == 4 and run.n_sampled == sum(len(step.completion_ids) for step in value.steps)
    assert finish_trajectories([TrajectoryEnd(record.pk, 1, 0.5, {"right": 1.0}, "answered")]) == {record.pk}
    assert not finish_trajectories([TrajectoryEnd(record.pk, 1, 0.9, {}, "again")])
    other = create_run(models.Run.Kind.IMPORT, "import")
    (imported,) = save_trajectories(other, [value])
    record.refresh_from_db()
    assert (record.status, record.reward, record.stop_reason) == (Status.DONE, 0.5, "answered")
    assert set(models.Run.objects.values_list("n_rewards", "reward_sum")) == {(1, 0.5)}
    for name in ("n_steps", "n_rows", "n_tokens", "n_sampled", "n_trained"):
        assert getattr(record, name) == getattr(imported, name), name
    columns = (
        "index",
        "shared_length",
        "parent_length",
        "messages_shared",
        "messages_new",
        "row_index",
        "parent__index",
    )
    assert list(record.steps.order_by("index").values_list(*columns)) == list(
        imported.steps.order_by("index").values_list(*columns)
    )
    for index in range(record.n_rows):
        left, right = (row_window(one, index, 0, 10**6) for one in (record, imported))
        assert np.array_equal(left.ids, right.ids) and np.array_equal(left.loss_mask, right.loss_mask)
    run.refresh_from_db()
    other.refresh_from_db()
    assert (run.n_finished, run.n_tokens, run.n_rows) == (1, other.n_tokens, other.n_rows)


def test_messages_of_a_resumed_trajectory_are_coded_against_stored_ones(run: models.Run) -> None:
    value = chain("t0", 3)
    save_steps([(run.trajectories.get(index=0).pk, 0, value.steps[0])])
    save_steps([(run.trajectories.get(index=0).pk, 1, value.steps[1])])
    stored = run.trajectories.get(index=0).steps.get(index=1)
    assert (stored.messages_shared, stored.shared_length) == (1, stored.parent_length)


def test_a_step_leaves_no_gap(run: models.Run) -> None:
    with pytest.raises(ValueError, match="before step 0"):
        save_steps([(run.trajectories.get(index=0).pk, 1, chain().steps[1])])


def test_steps_of_many_trajectories_are_saved_in_few_queries(run: models.Run) -> None:
    keys = list(run.trajectories.order_by("index").values_list("pk", flat=True))

    def count(n: int, index: int) -> int:
        with CaptureQueriesContext(connection) as context:
            save_steps([(key, index, chain(seed=key).steps[index]) for key in keys[:n]])
        return len(context)

    assert count(4, 0) - count(1, 1) <= 3  # one UPDATE for each trajectory's totals
    save_steps([(10**9, 0, chain().steps[0])])  # of a run that was deleted


def test_rows_of_a_strategy_are_kept_as_they_are(run: models.Run) -> None:
    (record,) = lease_trajectories(run, 1, 60)
    value = chain("t0", 2)
    save_steps([(record.pk, n, step) for n, step in enumerate(value.steps)])
    finding = Finding(Axis.ROW, "mask_overrun", Severity.ERROR, row=0)
    end = TrajectoryEnd(record.pk, 1, findings=(finding,), rows=rows_only().rows)
    assert finish_trajectories([end]) == {record.pk}
    record.refresh_from_db()
    assert (record.n_rows, record.n_findings, record.worst_severity) == (2, 1, "error")
    loaded = load_trajectory(record)
    from dataclasses import replace

    assert_same(replace(loaded, steps=(), external_id="r", group="g"), replace(rows_only(), group="g"))


def test_a_failed_trajectory_keeps_its_steps_and_counts(run: models.Run) -> None:
    (record,) = lease_trajectories(run, 1, 60)
    save_steps([(record.pk, 0, chain().steps[0])])
    assert fail_trajectory(TrajectoryEnd(record.pk, 1, error="The engine died."))
    assert not fail_trajectory(TrajectoryEnd(record.pk, 1, error="again"))
    run.refresh_from_db()
    record.refresh_from_db()
    assert (run.n_failed, record.status, record.error, record.n_steps) == (1, "failed", "The engine died.", 1)


def test_cancelling(run: models.Run) -> None:
    taken = lease_trajectories(run, 1, 60)
    start_run(run)
    assert not beat(run)
    cancel_run(run)
    assert run.status == "running" and beat(run)  # its worker sees the flag and ends it
    cancel_remaining(run)
    assert not finish_trajectories([TrajectoryEnd(taken[0].pk, 1, 1.0, {}, "late")])
    assert set(run.trajectories.values_list("status", flat=True)) == {"cancelled"}
    queued = create_run(models.Run.Kind.LAUNCH, "nobody has begun")
    cancel_run(queued)
    assert queued.status == "cancelled"
    cancel_run(queued)
    delete_run(run)
    assert beat(run)  # a run that is gone has to stop too
