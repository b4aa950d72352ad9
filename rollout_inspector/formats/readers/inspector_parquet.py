"""This project's own Parquet: one trajectory a row, lossless, with columns to sort and filter by."""

from collections.abc import Iterable
from typing import IO, Any

from rollout_inspector.formats.containers.cutting import parts_of
from rollout_inspector.formats.readers import inspector_jsonl
from rollout_inspector.formats.registry import Format, having
from rollout_inspector.streams.trajectory import Trajectory

GROUP_ROWS, GROUP_BYTES = 10_000, 4 << 20
"""Limits of one row group. The end of the file describes every row group, so many small ones would cost space."""


def write(trajectories: Iterable[Trajectory], file: IO[bytes]) -> int:
    """One row each: the columns, and the whole trajectory as one line of our own JSONL. Returns the number of rows."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([
        ("external_id", pyarrow.string()), ("group", pyarrow.string()), ("tokenizer", pyarrow.string()),
        ("reward", pyarrow.float64()), ("stop_reason", pyarrow.string()), ("n_steps", pyarrow.int32()),
        ("n_sampled", pyarrow.int64()), ("record", pyarrow.large_string()),
    ])
    n, records, size = 0, list[dict[str, Any]](), 0
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for trajectory in trajectories:
            record = inspector_jsonl.encode(trajectory).decode()
            records.append({
                "external_id": trajectory.external_id, "group": trajectory.group, "tokenizer": trajectory.tokenizer,
                "reward": trajectory.reward, "stop_reason": trajectory.stop_reason,
                "n_steps": len(trajectory.steps),
                "n_sampled": sum(len(step.completion_ids) for step in trajectory.steps), "record": record,
            })
            n, size = n + 1, size + len(record)
            if size >= GROUP_BYTES or len(records) >= GROUP_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(records, schema))
                records, size = [], 0
        if records:
            writer.write_table(pyarrow.Table.from_pylist(records, schema))
    return n


def join(parts: Iterable[IO[bytes]], file: IO[bytes]) -> None:
    """The row groups of several files, which have the columns of :func:`write`, in one file."""
    import pyarrow.parquet

    writer = None
    for part in parts:
        read = pyarrow.parquet.ParquetFile(part)
        writer = writer or pyarrow.parquet.ParquetWriter(file, read.schema_arrow, compression="zstd")
        for n in range(read.num_row_groups):
            writer.write_table(read.read_row_group(n))
    if writer is not None:
        writer.close()


FORMAT = Format(
    "own_parquet", "Rollout Inspector Parquet (lossless)", having("external_id", record=str),
    inspector_jsonl.read_records, write=write, join=join, suffix=".parquet", cut=parts_of, is_lossless=True,
)
