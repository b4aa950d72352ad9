"""Parquet: rows are read as if they were lines of JSON, so that every format may come in it; and our own is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, BinaryIO

import msgspec

from rollouts.formats.containers.json_text import canonical_json
from rollouts.formats.containers.source import FileRefused
from rollouts.formats.readers import inspector_jsonl
from rollouts.formats.registry import Format, has_keys
from rollouts.tito.trajectory import Trajectory

BATCH_ROWS = 64
BATCH_BYTES = 1 << 20
"""What rows that are read at once take in the file, as far as they are more than one."""
GROUP_ROWS, GROUP_BYTES = 10_000, 4 << 20
"""What is written at once. The end of the file describes every row group, so a small one for each row would cost."""
MAX_ROW_GROUP_BYTES = 4 << 30
"""Unpacked size that a file may claim for one row group, which is what is held at once."""


def rows(raw: BinaryIO, name: str) -> Iterator[bytes]:
    """Each row as JSON text. Raises :class:`FileRefused` when the file cannot be read."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise FileRefused(
            f"{name} is a Parquet file; install pyarrow to read it, or convert it to JSON lines."
        ) from None
    import pyarrow

    try:
        # Unbuffered, a whole row group would be held; trainers write files of one.
        file = pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20)
        meta = file.metadata
        groups = [meta.row_group(n) for n in range(meta.num_row_groups)]
        largest = max((group.total_byte_size for group in groups), default=0)
        if largest > MAX_ROW_GROUP_BYTES:
            raise FileRefused(f"{name} has a row group of {largest >> 30} GB. Write it anew with smaller row groups.")
        most = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        for batch in file.iter_batches(min(max(BATCH_BYTES // max(most, 1), 1), BATCH_ROWS)):
            for place in range(batch.num_rows):
                yield _row(batch, place)
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, FileRefused):
            raise
        raise FileRefused(f"{name} is a damaged Parquet file: {str(error).splitlines()[0][:200]}.") from error


def _row(batch: Any, place: int) -> bytes:
    """A row's JSON text, column by column: of its values only those of one column are ever Python objects."""
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
    """What JSON can say: NaN becomes null, bytes and dates their text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def write(trajectories: Iterable[Trajectory], file: IO[bytes]) -> int:
    """One row each: what one sorts and filters by as columns, and the whole of it as in our own JSONL."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        [
            ("external_id", pyarrow.string()), ("group", pyarrow.string()), ("tokenizer", pyarrow.string()),
            ("reward", pyarrow.float64()), ("stop_reason", pyarrow.string()), ("n_steps", pyarrow.int32()),
            ("n_sampled", pyarrow.int64()), ("record", pyarrow.large_string()),
        ]
    )  # fmt: skip
    n, held, size = 0, list[dict[str, Any]](), 0
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for one in trajectories:
            record = inspector_jsonl.encode(one).decode()
            held.append(
                {
                    "external_id": one.external_id, "group": one.group, "tokenizer": one.tokenizer,
                    "reward": one.reward, "stop_reason": one.stop_reason, "n_steps": len(one.steps),
                    "n_sampled": sum(len(step.completion_ids) for step in one.steps), "record": record,
                }
            )  # fmt: skip
            n, size = n + 1, size + len(record)
            if size >= GROUP_BYTES or len(held) >= GROUP_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(held, schema))
                held, size = [], 0
        if held:
            writer.write_table(pyarrow.Table.from_pylist(held, schema))
    return n


def detect(values: Sequence[Any]) -> bool:
    return has_keys(values[0], "record", "external_id") and isinstance(values[0]["record"], str)


FORMAT = Format(
    "own_parquet",
    "Rollout Inspector Parquet (lossless)",
    detect,
    inspector_jsonl.read_records,
    write=write,
    suffix=".parquet",
)
