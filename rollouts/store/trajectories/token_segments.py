"""The life of a segment after it was put: it is named, then replaced or deleted, and in the end swept."""

import logging
from collections.abc import Collection
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from rollout_inspector.streams.batches import batched
from rollouts.store import files, models
from rollouts.store.token_arrays.stores import SEGMENTS, folder_of

log = logging.getLogger(__name__)

READABLE = timedelta(hours=1)
"""How long a replaced segment stays. A reader that saw its name before has read it by then."""
ORPHAN_AGE = timedelta(days=1)  # A file that no row names for so long belongs to a transaction that never ended.


def segments_of(trajectories: Collection[int]) -> set[int]:
    """The keys of the segments that hold arrays of trajectories."""
    keys: set[int] = set()
    for model in (models.StoredStep, models.StoredRow):
        records = model.objects.filter(trajectory__in=trajectories, segment__isnull=False).order_by()
        keys.update(records.values_list("segment_id", flat=True).distinct())
    return keys


def mark_unused(keys: Collection[int]) -> None:
    """Say of those segments that nothing names any more that they were replaced. Call it in the transaction."""
    _unnamed(keys).update(replaced_at=timezone.now())


def delete_unused(keys: Collection[int]) -> None:
    """Delete those segments that nothing names any more, and after the commit their files."""
    unnamed = list(_unnamed(keys).values_list("pk", "key"))
    models.TokenSegment.objects.filter(pk__in=[pk for pk, _ in unnamed]).delete()
    transaction.on_commit(lambda: delete_files([key for _, key in unnamed]))


def _unnamed(keys: Collection[int]) -> QuerySet[models.TokenSegment]:
    """Those segments that no step and no row names. Locked, so that the last of two that leave a segment notices it."""
    segments = models.TokenSegment.objects.filter(pk__in=keys)
    list(segments.select_for_update().order_by("pk").values_list("pk"))
    for model in (models.StoredStep, models.StoredRow):
        segments = segments.filter(~Exists(model.objects.filter(segment=OuterRef("pk"))))
    return segments


def delete_files(keys: Collection[str]) -> None:
    """Delete the files of segments that no row names. The sweep deletes what cannot be deleted now."""
    for key in keys:
        try:
            files.delete(key)
        except (files.StorageDown, OSError) as error:
            log.warning("segment left for the sweep key=%s reason=%s", key, error)


def delete_segments_of(code: str) -> None:
    """Delete every segment file of a run that is deleted, those that nothing names included."""
    try:
        files.delete_all(folder_of(code))
    except (files.StorageDown, OSError) as error:
        log.warning("segments left for the sweep run=%s reason=%s", code, error)


def delete_replaced(now: datetime) -> None:
    """Delete segments that were replaced a while ago, rows and files."""
    old = models.TokenSegment.objects.filter(replaced_at__lt=now - READABLE)
    for keys in batched(list(old.values_list("pk", flat=True)), 500):
        with transaction.atomic():
            delete_unused(keys)


def delete_orphans(now: datetime) -> None:
    """Delete files that no row names, because their transaction never ended or their deletion broke off. A database
    that names none at all deletes nothing: it may be a new one, beside files of another."""
    if not models.TokenSegment.objects.exists():
        return
    for batch in batched(files.listed(SEGMENTS), 500):
        old = [file.key for file in batch if file.changed_at is not None and file.changed_at < now - ORPHAN_AGE]
        known_keys = set(models.TokenSegment.objects.filter(key__in=old).values_list("key", flat=True))
        delete_files([key for key in old if key not in known_keys])


def segment_keys() -> set[str]:
    """The keys of all segments that were not replaced. One query."""
    return set(models.TokenSegment.objects.filter(replaced_at=None).values_list("key", flat=True))
