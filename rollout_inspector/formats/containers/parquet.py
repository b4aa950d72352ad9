"""Parquet as a container: each row is read like a line of JSON, so every format may come in Parquet."""

import math
import os
import resource
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rollout_inspector.formats import limits
from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.formats.containers.refusals import FileRefused, TooLarge

BATCH_ROWS = 64
BATCH_BYTES = 1 << 20  # Largest size in the file of rows that are read at once. One row may be larger.


def _opened(raw: BinaryIO) -> Any:
    """The file, once its footer is known to be small: what that says of columns takes many times its bytes."""
    import pyarrow.parquet

    if (start := raw.seek(0, os.SEEK_END) - 8) > 0:
        raw.seek(start)
        n_bytes, most = int.from_bytes(raw.read(4), "little"), limits.current().limits.parquet_footer_bytes
        if n_bytes > most:
            raise TooLarge(
                f"The Parquet file describes itself in {n_bytes >> 20:,} MB; at most {most >> 20:,} MB are read. "
                "Write it again with fewer row groups and columns."
            )
    raw.seek(0)
    # Without a buffer a whole row group would be in memory, and trainers write files of one row group.
    with _memory(limits.current().limits.parquet_memory):
        return pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20)


def group_sizes(raw: BinaryIO) -> list[tuple[int, int]]:
    """Of each row group its rows and the bytes that it takes in the file. Raises ``ValueError`` for a damaged file."""
    import pyarrow

    try:
        meta = _opened(raw).metadata
        groups = [meta.row_group(n) for n in range(meta.num_row_groups)]
        return [
            (group.num_rows, sum(group.column(n).total_compressed_size for n in range(group.num_columns)))
            for group in groups
        ]
    except (pyarrow.ArrowException, OSError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error


def rows(
    raw: BinaryIO, name: str, size: int, part: range | None = None, only: int | None = None
) -> Iterator[bytes | None]:
    """Each row as JSON text, None for a row that is longer than a line may be. ``size``: bytes of the file.

    ``part``: the row groups that are read, and ``size`` the bytes that they take; None = all. ``only``: the place of
    the only row that is yielded, from 0 in these groups; what stands before it is not made into text.
    Raises :class:`FileRefused` when the file cannot be read, or needs too much memory.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise FileRefused(
            f"{name} is a Parquet file; install pyarrow to read it, or convert it to JSON lines."
        ) from None
    import pyarrow

    bounds = limits.current().limits
    try:
        file = _opened(raw)
        meta = file.metadata
        part = range(meta.num_row_groups) if part is None else part
        if only is not None:
            ends = list(accumulate(meta.row_group(n).num_rows for n in part))
            chosen = bisect_right(ends, only)
            only, part = only - (ends[chosen - 1] if chosen else 0), part[chosen : chosen + 1]
        groups = [meta.row_group(n) for n in part]
        largest = max((group.total_byte_size for group in groups), default=0)
        limits.current().check_parquet_group(name, largest)
        limits.current().check_parquet_growth(name, sum(group.total_byte_size for group in groups), size)
        most = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        # The sizes are what the file says. What its pages become is seen by the memory that they take.
        with _memory(bounds.parquet_memory):
            for batch in file.iter_batches(min(max(BATCH_BYTES // max(most, 1), 1), BATCH_ROWS), list(part)):
                is_long = batch.nbytes > bounds.line_bytes
                places = range(batch.num_rows)
                if only is not None:
                    places, only = (range(only, only + 1) if 0 <= only < len(places) else range(0)), only - len(places)
                for place in places:
                    too_long = is_long and batch.slice(place, 1).nbytes > bounds.line_bytes
                    yield None if too_long else _row(batch, place)
    except MemoryError as error:
        raise TooLarge(
            f"{name} needs more than {bounds.parquet_memory >> 20:,} MB of memory. Write it again as JSON Lines."
        ) from error
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, FileRefused):
            raise
        raise FileRefused(f"{name} is a damaged Parquet file: {str(error).splitlines()[0][:200]}.") from error


@contextmanager
def _memory(n_bytes: int) -> Iterator[None]:
    """Limits what the process may take beyond what it has (Linux). An allocation beyond it raises ``MemoryError``."""
    try:
        data_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_bytes + n_bytes if before == resource.RLIM_INFINITY else min(data_bytes + n_bytes, before)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _row(batch: Any, place: int) -> bytes:
    """The JSON text of a row. Only the values of one column at a time become Python objects."""
    fields = zip(batch.schema.names, (column[place] for column in batch.columns), strict=True)
    parts = [canonical_json(name).encode() + b":" + _text(value) for name, value in fields if value.is_valid]
    return b"{" + b",".join(parts) + b"}"


def _text(scalar: Any) -> bytes:
    import pyarrow.types

    values = getattr(scalar, "values", None)
    if values is not None and pyarrow.types.is_list(scalar.type) and not values.null_count:
        kind = scalar.type.value_type
        if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
            return msgspec.json.encode(values.to_numpy(zero_copy_only=False).tolist())
    return canonical_json(_plain(scalar.as_py())).encode()


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: NaN becomes null, bytes and dates become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):  # an entry of a map is a pair
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
