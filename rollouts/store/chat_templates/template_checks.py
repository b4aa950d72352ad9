"""Chat-template checks, and the request of a stored run that a check is about."""

from collections.abc import Iterable
from typing import Any

from django.db.models import QuerySet

from rollouts.store.chat_templates.chat_templates import chat_template_labels
from rollouts.store.models import ChatTemplate, Job, Project, Role, Run, StoredStep, StoredTrajectory, TemplateCheck
from rollouts.store.people.access import Access
from rollouts.store.runs.runs import find_run


def _checks() -> QuerySet[TemplateCheck]:
    return TemplateCheck.objects.select_related("project", "tokenizer", "chat_template", "job")


def find_check(code: str, report: bool = True) -> TemplateCheck | None:
    """A check with its tokenizer and template. ``report``: also read that long column. One query."""
    checks = _checks().filter(code=code)
    return (checks if report else checks.defer("report")).first()


def find_checks(codes: Iterable[str], report: bool = False) -> dict[str, TemplateCheck]:
    """Code -> check, for each code that exists, without tokenizer and template. One query."""
    checks = TemplateCheck.objects.select_related("job").filter(code__in=list(codes))
    return {check.code: check for check in (checks if report else checks.defer("report", "question"))}


def recent_checks(access: Access, limit: int, project_code: str = "") -> list[TemplateCheck]:
    """The newest checks that may be seen first, without reports and template texts; of one project with a code. One
    query."""
    checks = access.limit(_checks())
    if project_code:
        checks = checks.filter(project__code=project_code)
    return list(checks.defer("chat_template__text", "report").order_by("-created_at", "-pk")[:limit])


def renderer_checks(access: Access, least: Role = Role.VIEWER) -> list[TemplateCheck]:
    """The checks that were asked of ``renderer:NAME`` without arguments, in projects where the role is at least
    ``least``. Their tokenizers have their projects; the reports are not loaded. One query."""
    checks = access.limit(_checks(), least=least).filter(chat_template__text__startswith="renderer:", question={})
    return list(checks.select_related("tokenizer__project").defer("report").order_by("tokenizer__name", "label"))


def find_request(
    access: Access, trajectory_code: str, run_code: str, index: int
) -> tuple[Run, StoredStep | None] | None:
    """Step ``index`` of a trajectory; without such a trajectory, of the first trajectory of the run. Three queries. The
    run has its project, tokenizer and chat templates, the step its tools and template kwargs; it is None when the
    trajectory has no step at that index. None when the run does not exist either, or may not be seen."""
    visible = access.limit(StoredTrajectory.objects.all(), "run__project")
    trajectory = visible.filter(code=trajectory_code).first() if trajectory_code else None
    run = find_run(templates=True, **({"pk": trajectory.run_id} if trajectory else {"code": run_code}))
    if run is None or access.role_in(run.project_id) is None:
        return None
    trajectory = trajectory or StoredTrajectory.objects.filter(run=run).order_by("index").first()
    steps = StoredStep.objects.select_related("tools", "template_kwargs")
    step = steps.filter(trajectory=trajectory, index=index).first() if trajectory else None
    return run, step


def check_of(code: str, project: Project, chat_template: ChatTemplate, **columns: Any) -> tuple[TemplateCheck, bool]:
    """The check with a code, and whether it is new; a new one has these columns and the project's template label."""
    label = chat_template_labels(project, [chat_template.pk]).get(chat_template.pk, "")
    columns |= {"project": project, "chat_template": chat_template, "label": label}
    return TemplateCheck.objects.get_or_create(code=code, defaults=columns)


def check_of_job(job: Job) -> TemplateCheck:
    """The check that a job answers, with its tokenizer and template. One query."""
    return TemplateCheck.objects.select_related("tokenizer", "chat_template").get(job=job)
