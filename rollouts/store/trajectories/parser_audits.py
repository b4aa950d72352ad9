"""Parser audits: what each parser read in the reply of a step."""

from __future__ import annotations

from rollouts.store.models import Job, ParserAudit, StoredTrajectory


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
