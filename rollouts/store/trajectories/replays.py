"""Replays of trajectories, and the rows that strategies made in them."""

from collections.abc import Sequence

from rollouts.store.models import Job, ParserAudit, Replay, ReplayRows, StoredTrajectory


def parser_audit_of(trajectory: StoredTrajectory, step: int, key: str) -> ParserAudit:
    """The audit of a step's reply; a new one has the ``key``."""
    return ParserAudit.objects.get_or_create(trajectory=trajectory, step_index=step, defaults={"key": key})[0]


def find_parser_audit(trajectory: StoredTrajectory, step: int) -> ParserAudit | None:
    """The audit of a step's reply with its job. One query."""
    return trajectory.parser_audits.select_related("job").filter(step_index=step).first()


def parser_audit_of_job(job: Job) -> ParserAudit:
    """The audit that a job makes, with its trajectory, and the tokenizer and chat templates of the run. One query."""
    run = "trajectory__run"
    related = (f"{run}__tokenizer__chat_template", f"{run}__chat_template")
    return ParserAudit.objects.select_related(*related).get(job=job)


def replay_of(trajectory: StoredTrajectory, key: str) -> tuple[Replay, bool]:
    """The replay of a trajectory, and whether it is new; a new one has the ``key``."""
    return Replay.objects.get_or_create(trajectory=trajectory, defaults={"key": key})


def find_replay(trajectory: StoredTrajectory) -> Replay | None:
    """The replay of a trajectory with its job. One query."""
    return Replay.objects.select_related("job").filter(trajectory=trajectory).first()


def replay_of_job(job: Job) -> Replay:
    """The replay that a job makes, with its trajectory, and the tokenizer and chat templates of the run. One query."""
    run = "trajectory__run"
    related = (f"{run}__tokenizer__chat_template", f"{run}__chat_template", f"{run}__rows_chat_template")
    return Replay.objects.select_related(*related).get(job=job)


def replace_replay_rows(replay: Replay, rows: Sequence[ReplayRows]) -> None:
    """Put new rows in place of the old ones."""
    replay.rows.all().delete()
    ReplayRows.objects.bulk_create(rows)


def stored_rows(replay: Replay, strategies: Sequence[str]) -> dict[str, ReplayRows]:
    """Strategy -> its stored rows. Strategies whose rows were not stored are left out. One query."""
    return {rows.strategy: rows for rows in replay.rows.filter(strategy__in=strategies)}
