"""Keeps the figures of policy versions: they are counted again when trajectories of a version have changed."""

from __future__ import annotations

from collections.abc import Collection

from django.db import transaction

from rollouts.store.models import PolicyVersionFigures, Run
from rollouts.store.runs.policy_versions import MAX_VERSIONS, count_policy_versions, versions_of


def take_policy_versions(run: Run, versions: Collection[str] | None = None, first: int = 0) -> None:
    """Count the figures of these policy versions of a run again; None = of all. It may be repeated.

    ``first``: none of their trajectories stands before this position in the run. A run with more versions than can be
    counted has no figures by version.
    """
    stored = PolicyVersionFigures.objects.filter(run=run)
    if versions is None:
        held = versions_of(run)
        if not held or len(held) > MAX_VERSIONS:
            stored.delete()
            return
    elif not versions or stored.count() > MAX_VERSIONS:
        return
    found = count_policy_versions(run, versions, first)
    with transaction.atomic():
        Run.objects.select_for_update(no_key=True).filter(pk=run.pk).first()
        (stored if versions is None else stored.filter(version__in=list(versions))).delete()
        PolicyVersionFigures.objects.bulk_create(found, batch_size=200)
