"""Reads ranges of segments: the end of a file once, then the row groups that are asked for, behind a bounded cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cachetools import LRUCache
from django.http import Http404

from rollouts.store import files
from rollouts.store.models import TokenSegment
from rollouts.store.token_arrays.segment_file import read_column

MAX_CACHED_BYTES = 64 << 20  # Decoded columns that a process keeps in memory.


class TokensDeleted(Http404, files.StorageDown):
    """A segment was deleted after the database named it: a page is not found, and a job looks again."""


class _Footer:
    """What the end of a file says: where its row groups begin."""

    def __init__(self, metadata: pq.FileMetaData) -> None:
        self.metadata = metadata
        groups = range(metadata.num_row_groups)
        self.starts = np.array([0, *accumulate(metadata.row_group(n).num_rows for n in groups)])
        self.nbytes = metadata.serialized_size


_cache: LRUCache[tuple[Any, ...], Any] = LRUCache(MAX_CACHED_BYTES, getsizeof=lambda value: max(1, value.nbytes))
_lock = threading.Lock()


def _renew_lock() -> None:
    """After a fork: a thread of the parent may hold the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def read_arrays(key: str, offsets: Sequence[int], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """The arrays ``names`` of the file rows ``offsets`` of a segment, in their order; no other range is read.
    ``columns`` is a dict, every other name an array or None. Raises :class:`StorageDown` with a sentence when the
    storage does not answer, or when it lacks the file or holds another, and :class:`TokensDeleted`."""
    try:
        return _read(key, offsets, names)
    except FileNotFoundError as error:
        if not TokenSegment.objects.filter(key=key).exists():
            raise TokensDeleted("These tokens were deleted a moment ago.") from error
        raise files.StorageDown(f"The file storage lacks {key}, which holds tokens. {_RESTORE}") from error
    except (pa.ArrowException, OSError, IndexError) as error:
        raise files.StorageDown(f"The tokens in {key} of the file storage cannot be read. {_RESTORE}") from error


_RESTORE = "Restore it from a backup."


def _read(key: str, offsets: Sequence[int], names: Sequence[str]) -> list[Mapping[str, Any]]:
    with _SegmentReader(key) as reader:
        starts = reader.footer().starts
        groups = np.searchsorted(starts, offsets, side="right") - 1
        columns = {(group, name): reader.column(int(group), name) for group in np.unique(groups) for name in names}
        return [
            {name: columns[group, name].at(offset - starts[group]) for name in names}
            for group, offset in zip(groups, offsets, strict=True)
        ]


class _SegmentReader:
    """One segment, opened only when the cache lacks something of it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._raw: Any = None
        self._file: pq.ParquetFile | None = None

    def __enter__(self) -> _SegmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._raw is not None:
            self._raw.close()

    def footer(self) -> _Footer:
        footer = _known((self.key,))
        if footer is None:
            footer = _remember((self.key,), _Footer(self._opened(None).metadata))
        assert isinstance(footer, _Footer)
        return footer

    def column(self, group: int, name: str) -> Any:
        place = (self.key, group, name)
        column: Any = _known(place)
        if column is None:
            column = _remember(place, read_column(self._opened(self.footer().metadata), group, name))
        return column

    def _opened(self, metadata: pq.FileMetaData | None) -> pq.ParquetFile:
        if self._file is None:
            self._raw = files.open_file(self.key)
            self._file = pq.ParquetFile(self._raw, metadata=metadata, pre_buffer=False)
        return self._file


def _known(place: tuple[Any, ...]) -> Any:
    with _lock:
        return _cache.get(place)


def _remember(place: tuple[Any, ...], value: Any) -> Any:
    if value.nbytes <= MAX_CACHED_BYTES // 4:  # one long row must not drive everything else out
        with _lock:
            _cache[place] = value
    return value
