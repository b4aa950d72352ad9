"""Names and tags of runs."""

from collections.abc import Sequence

from rollout_inspector.refusal import Refusal
from rollouts.store import models
from rollouts.store.models import Run, RunTag
from rollouts.store.people.access import Access
from rollouts.store.people.activity_log import Action, record
from rollouts.store.text import storable_text

MAX_TAG = 40
MAX_TAGS = 20  # Tags of one run.


def read_tags(text: str) -> list[str]:
    """Tags from a text with commas, each once. Raises :class:`Refusal`."""
    names = list(dict.fromkeys(" ".join(storable_text(part).split()) for part in text.split(",")))
    names = [name for name in names if name]
    if not names:
        raise Refusal("Write a tag, or several with commas between them.")
    if long := next((name for name in names if len(name) > MAX_TAG), None):
        raise Refusal(f"A tag has at most {MAX_TAG} characters; “{long[:MAX_TAG]}…” is longer.")
    return names


def rename_run(run: Run, name: str) -> None:
    """Give a run another name. Raises ``ValueError`` for an empty one."""
    name = " ".join(storable_text(name).split())[:200]
    if not name:
        raise Refusal(f"The run “{run.name}” needs a name.")
    if name != run.name:
        before, run.name = run.name, name
        run.save(update_fields=["name"])
        record(Action.RENAMED, run, detail=f"before: {before}")


def add_tags(run: Run, names: Sequence[str]) -> None:
    """Add tags to a run. Raises :class:`Refusal` when it would have too many."""
    present = set(run.tags.values_list("name", flat=True))
    new = [name for name in names if name not in present]
    if len(present) + len(new) > MAX_TAGS:
        raise Refusal(f"The run “{run.name}” would have more than {MAX_TAGS} tags. Remove some first.")
    RunTag.objects.bulk_create([RunTag(run=run, name=name) for name in new], ignore_conflicts=True)
    if new:
        record(Action.TAGGED, run, detail=f"added: {', '.join(new)}")


def remove_tags(run: Run, names: Sequence[str]) -> None:
    """Remove tags from a run; those that it lacks are nothing to it."""
    gone = [name for name in names if run.tags.filter(name=name).delete()[0]]
    if gone:
        record(Action.TAGGED, run, detail=f"removed: {', '.join(gone)}")


def tags_of(runs: Sequence[models.Run]) -> dict[int, list[str]]:
    """Key of a run -> its tags by name. One query."""
    names: dict[int, list[str]] = {}
    for run, name in models.RunTag.objects.filter(run__in=runs).order_by("name").values_list("run", "name"):
        names.setdefault(run, []).append(name)
    return names


def known_tags(access: Access, limit: int) -> list[str]:
    """The first tags by name of the runs that may be seen. One query."""
    tags = access.limit(models.RunTag.objects.all(), "run__project")
    return list(tags.order_by("name").values_list("name", flat=True).distinct()[:limit])
