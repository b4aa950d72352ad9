"""Writing trajectories as their calls pass the recorder. One recorder writes a run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from django.db import transaction
from django.utils import timezone

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.trajectory import Step
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.bulk import reserve_keys
from rollouts.store.trajectories.findings import replace_findings
from rollouts.store.trajectories.previews import stored_preview
from rollouts.store.trajectories.save_trajectories import bump_run, next_index, reward_totals
from rollouts.store.trajectories.step_writer import StepWriter
from rollouts.store.trajectories.token_encoding import stored_steps

Status = models.StoredTrajectory.Status
_TOTALS = ("n_steps", "n_rows", "n_tokens", "n_sampled")


def append_steps(
    run: models.Run, calls: Mapping[str, Sequence[Step]], token_table: ByteTable | None = None
) -> dict[str, models.StoredTrajectory]:
    """Add steps to the trajectories of these external ids, begun where they are new; rows follow at once. One
    transaction. A trajectory that was settled is under way again."""
    with transaction.atomic():
        records, n_new, reopened = _records(run, calls)
        before = {record.pk: [getattr(record, name) for name in _TOTALS] for record in records.values()}
        values = stored_steps(before.keys())
        steps: dict[int, list[models.StoredStep]] = defaultdict(list)
        for stored in models.StoredStep.objects.filter(trajectory__in=before).order_by("trajectory_id", "index"):
            steps[stored.trajectory_id].append(stored)
        writer = StepWriter(sum(len(new) for new in calls.values()), token_table)
        for name, new in calls.items():
            record = records[name]
            own_steps = steps[record.pk]
            own_steps += [writer.add_step(record.pk, values[record.pk], step) for step in new]
            writer.add_rows(record, own_steps, values[record.pk], None)
            record.prompt_line, record.answer_line = stored_preview(values[record.pk].steps, (), token_table)
        models.StoredRow.objects.filter(trajectory__in=before).delete()
        writer.save()
        fields = ["status", "finished_at", "n_trained", "n_lost", "prompt_line", "answer_line", *_TOTALS]
        models.StoredTrajectory.objects.bulk_update(records.values(), fields, batch_size=100)
        grown = {
            total: sum(getattr(record, total) - before[record.pk][n] for record in records.values())
            for n, total in enumerate(_TOTALS)
        }
        bump_run(run, {}, n_trajectories=n_new, n_finished=-reopened, **grown)
    return records


def _records(run: models.Run, names: Mapping[str, object]) -> tuple[dict[str, models.StoredTrajectory], int, int]:
    """The trajectories by external id, how many of them are new, and how many had been settled."""
    models.Run.objects.select_for_update().get(pk=run.pk)
    stored = {record.external_id: record for record in run.trajectories.filter(external_id__in=list(names))}
    first = next_index(run)
    missing = [name for name in names if name not in stored]
    keys = reserve_keys(models.StoredTrajectory, len(missing))
    created = [
        models.StoredTrajectory(pk=next(keys), run=run, external_id=name, index=first + n, status=Status.RUNNING)
        for n, name in enumerate(missing)
    ]
    models.StoredTrajectory.objects.bulk_create(created)
    reopened = 0
    for record in stored.values():
        reopened += record.status == Status.DONE
        record.status, record.finished_at = Status.RUNNING, None
    return {**stored, **{record.external_id: record for record in created}}, len(created), reopened


def settle_trajectory(run: models.Run, end: TrajectoryEnd) -> None:
    """A recorded trajectory has ended, as far as can be told. A reward or reason that the end lacks stays as it was."""
    with transaction.atomic():
        models.Run.objects.select_for_update().get(pk=run.pk)
        record = run.trajectories.filter(external_id=end.key).first()
        if record is None:
            return
        finished = record.status != Status.DONE
        record.status, record.finished_at = Status.DONE, timezone.now()
        before = reward_totals([record.reward])
        record.reward = record.reward if end.reward is None else end.reward
        last = record.steps.order_by("-index").values_list("finish_reason", flat=True).first()
        record.stop_reason = end.stop_reason[:60] or record.stop_reason or last or ""
        record.save(update_fields=["status", "finished_at", "reward", "stop_reason"])
        record.checks = end.checks
        replace_findings(run, [(record, end.findings)])
        after = reward_totals([record.reward])
        bump_run(run, {}, n_finished=int(finished), **{name: after[name] - before[name] for name in after})
