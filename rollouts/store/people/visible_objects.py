"""Objects and lists of the projects that a caller may see. A hidden object is None, as one that does not exist."""

import re
from typing import Any

from django.db.models import Q, QuerySet

from rollouts.store.models import Job, Run, StoredFinding, StoredTrajectory, TemplateCheck
from rollouts.store.paging import ListPart, cut_part, read_cursor
from rollouts.store.people.access import Access

_CODE = re.compile(r"[0-9a-z]{4,64}\Z")
SUBJECTS = (
    "run__project",
    "replay__trajectory__run__project",
    "template_check__project",
    "parser_audit__trajectory__run__project",
)
"""The ways in which a job belongs to a project."""


def find_visible_run(access: Access, code: str) -> Run | None:
    """A run with its project, tokenizer, chat templates and maker. One query."""
    related = ("project", "tokenizer", "chat_template", "rows_chat_template", "created_by")
    runs = Run.objects.select_related(*related).defer("chat_template__text", "rows_chat_template__text")
    return _one(access.limit(runs), code)


def find_visible_trajectory(access: Access, code: str) -> StoredTrajectory | None:
    """A trajectory with its run, tokenizer and chat templates. One query."""
    related = ("run__tokenizer__chat_template", "run__chat_template", "run__rows_chat_template")
    return _one(access.limit(StoredTrajectory.objects.select_related(*related), "run__project"), code)


def find_visible_check(access: Access, code: str) -> TemplateCheck | None:
    """A check with its tokenizer, template, job and project. One query."""
    related = ("tokenizer", "chat_template", "job", "project")
    return _one(access.limit(TemplateCheck.objects.select_related(*related)), code)


def find_visible_job(access: Access, code: str) -> Job | None:
    """A job with its subject and its maker. One query."""
    return _one(access.limit(_jobs(), *SUBJECTS), code)


def _one(found: QuerySet[Any], code: str) -> Any:
    return found.filter(code=code).first() if _CODE.match(code) else None


def _jobs() -> QuerySet[Job]:
    """What may be listed and acted on: a shard is a part of its job, of no project by itself."""
    return Job.objects.filter(whole=None).select_related(
        "run", "replay__trajectory", "template_check", "parser_audit__trajectory", "created_by"
    ).defer("report", "replay__report", "template_check__report", "template_check__question", "parser_audit__report")


def visible_jobs(access: Access, columns: dict[str, str], cursor: str, limit: int) -> ListPart[Job]:
    """The jobs with these columns, newest first; an empty value filters nothing. One query. Raises ``ValueError`` for a
    cursor that cannot be read."""
    jobs = access.limit(_jobs(), *SUBJECTS).filter(**{name: value for name, value in columns.items() if value})
    return _newest("jobs", jobs, cursor, limit)


def visible_checks(access: Access, cursor: str, limit: int) -> ListPart[TemplateCheck]:
    """The template checks by the time they were first asked for, newest first, without reports. One query. Raises
    ``ValueError`` for a cursor that cannot be read."""
    related = ("tokenizer", "chat_template", "job", "project")
    checks = TemplateCheck.objects.select_related(*related).defer("chat_template__text", "report", "question")
    return _newest("checks", access.limit(checks), cursor, limit)


def visible_trajectories(access: Access, text: str, cursor: str, limit: int) -> ListPart[StoredTrajectory]:
    """The trajectories whose external id holds a text, or whose code or group it is, newest first. One query. Raises
    ``ValueError`` for a cursor that cannot be read."""
    matches = Q(external_id__icontains=text) | Q(code=text) | Q(group=text)
    trajectories = access.limit(StoredTrajectory.objects.select_related("run"), "run__project").filter(matches)
    return _newest("trajectories", trajectories, cursor, limit)


def findings_of_run(run: Run, columns: dict[str, str], cursor: str, limit: int) -> ListPart[StoredFinding]:
    """The findings of a run with these columns, in the order of storing, with their trajectories. One query. Raises
    ``ValueError`` for a cursor that cannot be read."""
    findings = run.findings.select_related("trajectory").defer("expected_ids", "actual_ids")
    findings = findings.filter(**{name: value for name, value in columns.items() if value})
    if last := read_cursor(cursor, "findings", int):
        findings = findings.filter(pk__gt=last[0])
    return cut_part("findings", list(findings.order_by("pk")[: limit + 1]), limit, lambda finding: (finding.pk,))


def _newest(name: str, records: QuerySet[Any], cursor: str, limit: int) -> ListPart[Any]:
    if last := read_cursor(cursor, name, int):
        records = records.filter(pk__lt=last[0])
    return cut_part(name, list(records.order_by("-pk")[: limit + 1]), limit, lambda item: (item.pk,))
