"""Projects. Each function is one query."""

from django.db.models import Count, Q

from rollouts.store.models import Project, default_project
from rollouts.store.people.access import Access

MAX_LISTED = 500


def key_of(project: Project | None) -> int:
    """The key of a project; None = of the default one, which takes what notebooks and tests make without a project."""
    return default_project() if project is None else project.pk


def project_or_default(project: Project | None = None) -> Project:
    """The project itself; None = the default one."""
    return project or Project.objects.get(pk=default_project())


def find_project(code: str) -> Project | None:
    """The project with that code."""
    return Project.objects.filter(code=code).first()


def find_project_named(text: str) -> Project | None:
    """The project with that code, else the project with that name."""
    projects = Project.objects.filter(Q(code=text) | Q(name=text))
    return max(projects, key=lambda project: project.code == text, default=None)


def listed_projects(access: Access) -> list[Project]:
    """The projects that somebody may see, by name, each with ``n_members``."""
    counted = Project.objects.annotate(n_members=Count("memberships"))
    return list(access.limit(counted.order_by("name"), "pk")[:MAX_LISTED])


def project_names(limit: int) -> list[str]:
    """The first names of projects, for who may see all."""
    return list(Project.objects.order_by("name").values_list("name", flat=True)[:limit])


def lock_project(project: Project) -> None:
    """Let others that lock the project wait until the transaction ends."""
    Project.objects.select_for_update().get(pk=project.pk)
