"""Writing finished trajectories, and what is shared by all that write trajectories: the totals of a run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.bulk import bare, reserve_keys
from rollouts.store.text import without_paths
from rollouts.store.trajectories.findings import add_findings, set_findings
from rollouts.store.trajectories.step_writer import StepWriter
from rollouts.store.trajectories.token_encoding import EncodedTrajectory, encode_trajectories
from rollouts.store.trajectories.trajectories import last_index

Status = models.StoredTrajectory.Status


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
            counts = add_findings(
                run,
                [coded_trajectory for coded_trajectory in zip(records, findings, strict=True) if coded_trajectory[1]],
            )
        if connection.vendor == "postgresql":
            connection.check_constraints()  # at the commit other workers would wait for the row of the run meanwhile
        bump_run(
            run,
            counts,
            n_trajectories=len(records),
            n_finished=sum(record.status == Status.DONE for record in records),
            n_failed=sum(record.status == Status.FAILED for record in records),
            n_steps=sum(record.n_steps for record in records),
            n_rows=sum(record.n_rows for record in records),
            n_tokens=sum(record.n_tokens for record in records),
            n_sampled=sum(record.n_sampled for record in records),
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
