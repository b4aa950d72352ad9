"""Writing finished trajectories, those of a push too: each external id once, however often it is sent. Also what is
shared by all that write trajectories: the totals of a run."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.bulk import bare, reserve_keys
from rollouts.store.jobs.jobs import is_active
from rollouts.store.text import without_paths
from rollouts.store.trajectories.findings import add_findings, set_findings
from rollouts.store.trajectories.step_writer import StepWriter
from rollouts.store.trajectories.token_encoding import EncodedTrajectory, encode_trajectories
from rollouts.store.trajectories.trajectories import last_index, taken_ids

Status = models.StoredTrajectory.Status
_SUMMED = ("n_steps", "n_rows", "n_tokens", "n_sampled")


def save_trajectories(
    run: models.Run,
    trajectories: Sequence[Trajectory],
    findings: Sequence[Sequence[Finding]] | None = None,
    base_index: int | None = None,
    token_table: ByteTable | None = None,
    checks: Sequence[Mapping[str, Any]] | None = None,
    gaps: Sequence[Mapping[str, Any] | None] | None = None,
    encoded: Sequence[EncodedTrajectory] | None = None,
) -> list[models.StoredTrajectory]:
    """Store finished trajectories in one transaction, and bump the run's totals.

    ``findings[i]``, ``checks[i]`` (the outcomes of the checks) and ``gaps[i]`` belong to ``trajectories[i]``.
    ``base_index`` is the first one's position in the run (default: after the last). ``encoded``: what
    ``encode_trajectories`` made of them before the caller's transaction. Without it the arrays go into the database,
    and a ``token_table`` finds the origin of the tokens between completions.
    """
    if not trajectories:
        return []
    if encoded is None:
        encoded = encode_trajectories(trajectories, token_table)
    with transaction.atomic():
        if base_index is None:
            base_index = next_index(run)
        writer = StepWriter(sum(len(trajectory.steps) for trajectory in trajectories))
        keys = reserve_keys(models.StoredTrajectory, len(trajectories))
        records = []
        now = timezone.now()
        for n, trajectory in enumerate(trajectories):
            coded_trajectory = encoded[n]
            record = bare(
                models.StoredTrajectory,
                id=next(keys),
                code=coded_trajectory.code,
                run_id=run.pk,
                index=base_index + n,
                external_id=trajectory.external_id,
                group=trajectory.group,
                status=Status.FAILED if trajectory.error else Status.DONE,
                error=without_paths(trajectory.error),
                stop_reason=trajectory.stop_reason,
                reward=trajectory.reward,
                reward_parts=dict(trajectory.reward_parts),
                tokenizer_name=trajectory.tokenizer,
                training_step=trajectory.training_step,
                extra_id=writer.contents.add_unless_empty(trajectory.extra),
                created_at=now,
                finished_at=now,
                checks=None if checks is None else checks[n],
                gap=None if gaps is None else gaps[n],
                prompt_line=coded_trajectory.preview.prompt,
                answer_line=coded_trajectory.preview.answer,
            )
            steps = [
                writer.add_step(record.pk, coded_trajectory.values, step, coded)
                for step, coded in zip(trajectory.steps, coded_trajectory.steps, strict=True)
            ]
            writer.add_rows(
                record, steps, coded_trajectory.values, trajectory.rows or None, coded_trajectory.row_places
            )
            if findings is not None:
                set_findings(record, findings[n])
            records.append(record)
        writer.save(records)
        counts: Counter[str] = Counter()
        if findings is not None:
            counts = add_findings(run, [pair for pair in zip(records, findings, strict=True) if pair[1]])
        if connection.vendor == "postgresql":
            connection.check_constraints()  # at the commit other workers would wait for the row of the run meanwhile
        bump_run(
            run,
            counts,
            n_trajectories=len(records),
            n_finished=sum(record.status == Status.DONE for record in records),
            n_failed=sum(record.status == Status.FAILED for record in records),
            **{name: sum(getattr(record, name) for record in records) for name in _SUMMED},
            **reward_totals(record.reward for record in records),
        )
    return records


def next_index(run: models.Run) -> int:
    """The position behind the last trajectory of a run."""
    last = last_index(run.trajectories.all())
    return 0 if last is None else last + 1


def reward_totals(rewards: Iterable[float | None]) -> dict[str, float]:
    """What scored trajectories add to the totals of their run."""
    scored = [reward for reward in rewards if reward is not None]
    return {"n_rewards": len(scored), "reward_sum": sum(scored)}


def bump_run(run: models.Run, counts: Mapping[str, int], **added: float) -> None:
    """Add to the run's totals. The row is locked, because the counts of findings are read and written back."""
    locked = models.Run.objects.select_for_update(no_key=True).get(pk=run.pk)
    kinds = Counter(locked.finding_counts)
    kinds.update(counts)
    values: dict[str, Any] = {name: getattr(locked, name) + value for name, value in added.items()}
    values["finding_counts"] = {kind: n for kind, n in kinds.items() if n > 0}
    models.Run.objects.filter(pk=run.pk).update(**values)
    for name, value in values.items():
        setattr(run, name, value)


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
