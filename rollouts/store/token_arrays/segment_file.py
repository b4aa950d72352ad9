"""The file of a segment: Parquet, a row for each step or training row, a list column for each array.

A list keeps None apart from empty, and each array has its own length, as the source wrote it. The schema is fixed, so
that one query reads the segments of all runs; only the columns ``RARE`` stand in files alone that hold something of
them. docs/segments.md describes it. A reader takes the end of a file
once, then the row groups that are asked for, behind a bounded cache.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cachetools import LRUCache
from django.http import Http404
from numpy.typing import NDArray

from rollouts.store import files
from rollouts.store.fields import ArrayField, FloatsField
from rollouts.store.models import TokenSegment
from rollouts.store.token_arrays.items import ALTERNATIVES, COLUMNS, ROW_ARRAYS, STEP_ARRAYS, TokenItem

GROUP_TOKENS = 1 << 16
"""Ids of a row group, which is what a reader fetches and decodes at once. A longer step or row is a group by itself."""
ARRAYS = {**STEP_ARRAYS, **ROW_ARRAYS}  # Every array column of the file. ``logprobs`` is one of a step and of a row.
RARE = ("entropy", "kept_set", *ALTERNATIVES)
"""The array columns that a file has only where it holds something of them."""
SCHEMA = pa.schema([
    ("trajectory", pa.string()),
    ("step", pa.int32()),
    ("row", pa.int32()),
    *((name, pa.list_(pa.from_numpy_dtype(field.dtype))) for name, field in ARRAYS.items()),
    (COLUMNS, pa.map_(pa.string(), pa.list_(pa.float32()))),
])
"""All columns, in their order."""
_FLOATS = [f"{name}.list.element" for name, field in ARRAYS.items() if isinstance(field, FloatsField)]
_WRITING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    # Sign and exponent of neighbours are alike; the rest of a mantissa is noise.
    "column_encoding": dict.fromkeys([*_FLOATS, f"{COLUMNS}.key_value.value.list.element"], "BYTE_STREAM_SPLIT"),
    "use_dictionary": ["trajectory", "delta_origin.list.element", "origin.list.element"],
    "write_statistics": ["trajectory", "step", "row"],
    "store_schema": False,
}
"""``benchmarks/bench_segments.py`` prints the bytes a token that other encodings of the ids would take."""


def write_items(items: Sequence[TokenItem], file: IO[bytes]) -> None:
    """Write a segment. The file row of an item is its place in ``items``."""
    absent = [name for name in RARE if all(item.arrays.get(name) is None for item in items)]
    schema = pa.schema([field for field in SCHEMA if field.name not in absent])
    with pq.ParquetWriter(file, schema, **_WRITING) as writer:
        for group in _groups(items):
            writer.write_table(_table(group).drop_columns(absent), row_group_size=len(group))


def _groups(items: Sequence[TokenItem]) -> Iterator[Sequence[TokenItem]]:
    first, size = 0, 0
    for n, item in enumerate(items):
        n_tokens = item.n_tokens
        if n > first and size + n_tokens > GROUP_TOKENS:
            yield items[first:n]
            first, size = n, 0
        size += n_tokens
    if first < len(items):
        yield items[first:]


def _table(items: Sequence[TokenItem]) -> pa.Table:
    data: list[Any] = [[item.trajectory for item in items], [item.step for item in items], [item.row for item in items]]
    data += [_lists([item.arrays.get(name) for item in items], field) for name, field in ARRAYS.items()]
    columns = [list((item.columns or {}).items()) for item in items]
    pairs = [pair for row_columns in columns for pair in row_columns]
    data.append(pa.MapArray.from_arrays(
        _offsets([len(row_columns) for row_columns in columns]),
        pa.array([name for name, _ in pairs], pa.string()),
        _lists([values for _, values in pairs], FloatsField()),
    ))
    return pa.table(data, schema=SCHEMA)


def _lists(arrays: Sequence[NDArray[Any] | None], field: ArrayField) -> pa.ListArray:
    """The arrays as one column; None is null."""
    present = [values for values in arrays if values is not None]
    whole = np.concatenate(present).astype(field.dtype, copy=False) if present else np.zeros(0, field.dtype)
    return pa.ListArray.from_arrays(
        _offsets([0 if values is None else len(values) for values in arrays]),
        pa.array(whole),
        mask=pa.array([values is None for values in arrays], pa.bool_()),
    )


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


@dataclass(frozen=True, eq=False)
class ListColumn:
    """One array column of a row group."""

    offsets: NDArray[np.int32]  # ``[n + 1]``: where each list begins in ``values``.
    values: NDArray[Any]  # All lists, one after the other. Read-only.
    is_present: NDArray[np.bool_]  # ``[n]``: False = null.

    def at(self, n: int) -> NDArray[Any] | None:
        """The list of a row; None = null."""
        return self.values[self.offsets[n] : self.offsets[n + 1]] if self.is_present[n] else None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.offsets.nbytes + self.values.nbytes + self.is_present.nbytes


@dataclass(frozen=True, eq=False)
class MapColumn:
    """The trainer's columns of a row group."""

    offsets: NDArray[np.int32]  # ``[n + 1]``: where the columns of each row begin in ``names`` and ``lists``.
    names: list[str]  # The name of each column.
    lists: ListColumn  # The values of each column.

    def at(self, n: int) -> dict[str, NDArray[Any] | None]:
        """The columns of a row by name."""
        return {self.names[k]: self.lists.at(k) for k in range(self.offsets[n], self.offsets[n + 1])}

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.offsets.nbytes + self.lists.nbytes + sum(map(len, self.names))


def read_column(file: pq.ParquetFile, group: int, name: str) -> ListColumn | MapColumn:
    """One array column of a row group, or the trainer's columns. A column that the file lacks is null everywhere."""
    if name not in file.schema_arrow.names:
        n = file.metadata.row_group(group).num_rows
        return ListColumn(np.zeros(n + 1, np.int32), np.zeros(0, ARRAYS[name].dtype), np.zeros(n, np.bool_))
    chunk = file.read_row_group(group, columns=[name], use_threads=False).column(0).combine_chunks()
    if name != COLUMNS:
        return _list_column(chunk)
    return MapColumn(chunk.offsets.to_numpy(), chunk.keys.to_pylist(), _list_column(chunk.items))


def _list_column(lists: pa.ListArray) -> ListColumn:
    values = lists.values.to_numpy(zero_copy_only=False)
    values.flags.writeable = False
    return ListColumn(lists.offsets.to_numpy(), values, lists.is_valid().to_numpy(zero_copy_only=False))


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
        with _SegmentReader(key) as reader:
            starts = reader.footer().starts
            groups = np.searchsorted(starts, offsets, side="right") - 1
            columns = {(group, name): reader.column(int(group), name) for group in np.unique(groups) for name in names}
            return [
                {name: columns[group, name].at(offset - starts[group]) for name in names}
                for group, offset in zip(groups, offsets, strict=True)
            ]
    except FileNotFoundError as error:
        if not TokenSegment.objects.filter(key=key).exists():
            raise TokensDeleted("These tokens were deleted a moment ago.") from error
        raise files.StorageDown(f"The file storage lacks {key}, which holds tokens. {_RESTORE}") from error
    except (pa.ArrowException, OSError, IndexError) as error:
        raise files.StorageDown(f"The tokens in {key} of the file storage cannot be read. {_RESTORE}") from error


_RESTORE = "Restore it from a backup."


class _SegmentReader:
    """One segment, opened only when the cache lacks something of it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._raw: Any = None
        self._file: pq.ParquetFile | None = None

    def __enter__(self) -> Self:
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
