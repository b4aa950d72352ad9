"""The file of a segment: Parquet, a row for each step or training row, a list column for each array.

A list keeps None apart from empty, and each array has its own length, as the source wrote it. The schema is fixed, so
that one query reads the segments of all runs; only the columns ``RARE`` stand in files alone that hold something of
them. docs/segments.md describes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rollouts.store.fields import ArrayField, FloatsField
from rollouts.store.token_arrays.items import ALTERNATIVES, COLUMNS, ROW_ARRAYS, STEP_ARRAYS, TokenItem

GROUP_TOKENS = 1 << 16
"""Ids of a row group, which is what a reader fetches and decodes at once. A longer step or row is a group by itself."""
ARRAYS = {**STEP_ARRAYS, **ROW_ARRAYS}  # Every array column of the file. ``logprobs`` is one of a step and of a row.
RARE = ("entropy", "kept_set", *ALTERNATIVES)
"""The array columns that a file has only where it holds something of them."""
SCHEMA = pa.schema(
    [
        ("trajectory", pa.string()),
        ("step", pa.int32()),
        ("row", pa.int32()),
        *((name, pa.list_(pa.from_numpy_dtype(field.dtype))) for name, field in ARRAYS.items()),
        (COLUMNS, pa.map_(pa.string(), pa.list_(pa.float32()))),
    ]
)
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
    data.append(
        pa.MapArray.from_arrays(
            _offsets([len(row_columns) for row_columns in columns]),
            pa.array([name for name, _ in pairs], pa.string()),
            _lists([values for _, values in pairs], FloatsField()),
        )
    )
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
