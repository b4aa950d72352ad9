"""Writing trajectories that a trainer pushes: each external id once, however often it is sent."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from django.db import transaction
from django.utils import timezone

from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.jobs.activity import is_active
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectories import taken_ids

DIAGNOSED_TO = "judged_to"
"""In the run's settings: the key of the last trajectory that was diagnosed. Keys of a run grow as it is stored."""


def add_new_trajectories(
    run: models.Run, trajectories: Sequence[Trajectory], token_table: ByteTable | None = None
) -> tuple[list[models.StoredTrajectory], list[Trajectory]]:
    """Store trajectories whose external id is new to the run. Returns the stored ones and the known ones."""
    with transaction.atomic():
        # Pushes to one run queue here, so that two of them agree on what is known and on the next index.
        models.Run.objects.select_for_update().get(pk=run.pk)
        taken_names = taken_ids(run, [trajectory.external_id for trajectory in trajectories])
        fresh = [trajectory for trajectory in trajectories if trajectory.external_id not in taken_names]
        again = [trajectory for trajectory in trajectories if trajectory.external_id in taken_names]
        return save_trajectories(run, fresh, token_table=token_table), again


def named_by_content(trajectory: Trajectory) -> Trajectory:
    """Name a trajectory without an id by its place and content: each push has a line 1."""
    digest = hashlib.sha256()
    for step in trajectory.steps:
        digest.update(b"%d " % len(step.prompt_ids) + step.completion_ids.tobytes())
        digest.update(canonical_json([step.text, step.reply, step.extra]).encode())
    for row in trajectory.rows:
        digest.update(row.ids.tobytes() + row.loss_mask.tobytes() + canonical_json(row.extra).encode())
    digest.update(canonical_json([trajectory.reward, trajectory.extra]).encode())
    return replace(trajectory, external_id=f"{trajectory.external_id}-{digest.hexdigest()[:12]}")


def differing(run: models.Run, known: Sequence[Trajectory]) -> list[str]:
    """Ids under which the run has another trajectory: other tokens, another reward or another training step."""
    stored = run.trajectories.filter(external_id__in=[trajectory.external_id for trajectory in known])
    columns = ("n_steps", "n_sampled", "reward", "training_step")
    by_name = {name: facts for name, *facts in stored.values_list("external_id", *columns)}
    return [
        trajectory.external_id
        for trajectory in known
        if trajectory.external_id in by_name
        and by_name[trajectory.external_id]
        != [len(trajectory.steps), trajectory.n_sampled, trajectory.reward, trajectory.training_step]
    ]


def note_push(run: models.Run, format_name: str) -> None:
    """After a push: end the run unless it is active, and add the format to its formats."""
    with transaction.atomic():
        locked = models.Run.objects.select_for_update().get(pk=run.pk)
        names = locked.format.split(", ") if locked.format else []
        if format_name and format_name not in names:
            locked.format = ", ".join([*names, format_name])[:200]
        if not is_active(locked):  # else a worker or recorder ends it
            locked.status, locked.finished_at = models.Run.Status.DONE, timezone.now()
            locked.started_at = locked.started_at or locked.finished_at
        locked.save(update_fields=["format", "status", "finished_at", "started_at"])


def note_pushed_diagnosed(run: models.Run, key: int) -> None:
    """Remember that the pushed trajectories up to a key were diagnosed."""
    with transaction.atomic():
        locked = models.Run.objects.select_for_update().get(pk=run.pk)
        locked.settings[DIAGNOSED_TO] = max(int(locked.settings.get(DIAGNOSED_TO, 0)), key)
        locked.save(update_fields=["settings"])
    run.settings = locked.settings
