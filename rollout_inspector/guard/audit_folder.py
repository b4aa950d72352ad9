"""The folder that an audit writes: a file for each shard that is done, and at the end the tables of all. A shard's file
has the key of the shard as its name. So the same command goes on where it was stopped, and a file that changed is
audited again."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollout_inspector.diagnose import VERSION
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import FINDING, SCHEMA, CutFiles, Shard, key_of, unread_row
from rollout_inspector.outputs import remove_dead_drafts, whole_file
from rollout_inspector.refusal import Refusal

FINDINGS, TRAJECTORIES, UNREAD = "findings.parquet", "trajectories.parquet", "unread.parquet"
SUMMARY = "audit.json"  # Written last: a folder that holds it holds a whole audit.
SHARDS = "shards"
_OF_TRAJECTORY = [name for name in SCHEMA.names if name not in ("unread", "findings")]
_PLACE = ["shard", "place", "file", "line", "trajectory", "training_step", "policy_version"]
"""Columns of a finding that tell its trajectory."""
_WITH_SHARD = SCHEMA.insert(0, pa.field("shard", pa.int32()))
SCHEMAS = {
    TRAJECTORIES: pa.schema([_WITH_SHARD.field(name) for name in ("shard", *_OF_TRAJECTORY)]),
    FINDINGS: pa.schema([*(_WITH_SHARD.field(name) for name in _PLACE), *FINDING]),
    UNREAD: pa.schema([pa.field("file", pa.string()), pa.field("line", pa.int64()), pa.field("unread", pa.string())]),
}
"""File -> its columns."""


class AuditFolder:
    """Where an audit is written. Raises :class:`Refusal`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
            if names and SHARDS not in names:
                raise Refusal(f"{path} holds other files. Name a new folder, or that of an earlier audit.")
            (self.path / SHARDS).mkdir(parents=True, exist_ok=True)
            for folder in (self.path, self.path / SHARDS):  # the next audit may have other shards
                remove_dead_drafts(folder)
        except OSError as error:
            raise Refusal(f"{path} cannot be written: {error.strerror}.") from error

    def file_of(self, key: str) -> Path:
        """Where the table of a shard lies, or will lie."""
        return self.path / SHARDS / f"{key}.parquet"

    def has(self, key: str) -> bool:
        """Whether a shard is done."""
        return self.file_of(key).is_file()

    def save(self, key: str, table: pa.Table) -> None:
        """Store the table of a shard, whole or not at all. Raises :class:`Refusal`."""
        try:
            with whole_file(self.file_of(key)) as file:
                pq.write_table(table, file, compression="zstd")
        except OSError as error:
            raise Refusal(f"{self.file_of(key)} cannot be written: {error.strerror}.") from error

    def n_trajectories(self, key: str) -> int:
        """Trajectories of a shard that is done."""
        return len(pc.drop_null(pq.read_table(self.file_of(key), columns=["place"])["place"]))

    def finish(self, cut: CutFiles, settings: AuditSettings, digest: str) -> dict[str, Any]:
        """Write the tables of all shards in their order, then the summary. Returns the summary. A shard is a row group
        of each table. So the bytes are the same in whichever order the shards were done."""
        for name in (SUMMARY, *SCHEMAS):  # a summary never stands beside tables of another audit
            (self.path / name).unlink(missing_ok=True)
        counts: Counter[str] = Counter()
        kinds: dict[str, Counter[str]] = {}
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(
                    pq.ParquetWriter(stack.enter_context(whole_file(self.path / name)), schema, compression="zstd")
                )
                for name, schema in SCHEMAS.items()
            }
            for table in self._tables(cut.shards, digest, cut.refused):
                is_read = pc.is_null(table["unread"])
                read, unread = table.filter(is_read), table.filter(pc.invert(is_read))
                findings = _flat(read)
                for name, rows in ((TRAJECTORIES, read), (FINDINGS, findings), (UNREAD, unread)):
                    counts[name] += len(rows)
                    if len(rows):
                        files[name].write_table(rows.select(SCHEMAS[name].names).cast(SCHEMAS[name]))
                counts["tokens"] += pc.sum(read["n_tokens"]).as_py() or 0
                _count(kinds, findings)
        summary = {
            "version": VERSION, "files": cut.n_files, "shards": len(cut.shards),
            "trajectories": counts[TRAJECTORIES], "tokens": counts["tokens"], "findings": counts[FINDINGS],
            "unread": counts[UNREAD],
            "kinds": {
                kind: dict(sorted(counts.items()))
                for kind, counts in sorted(kinds.items(), key=lambda one: (-one[1]["trajectories"], one[0]))
            },
            "settings": asdict(settings), "pieces": cut.shards,
        }
        with whole_file(self.path / SUMMARY) as file:
            file.write(json.dumps(summary, indent=1).encode() + b"\n")
        return summary

    def _tables(self, shards: Sequence[Shard], digest: str, refused: Sequence[tuple[str, str]]) -> Iterator[pa.Table]:
        """The table of each shard, with its number, and one of what could not be opened."""
        for number, shard in enumerate(shards):
            table = pq.read_table(self.file_of(key_of(shard, digest)))
            yield table.add_column(0, "shard", pa.array([number] * len(table), pa.int32()))
        if refused:
            table = pa.Table.from_pylist([unread_row(name, None, reason) for name, reason in refused], schema=SCHEMA)
            yield table.add_column(0, "shard", pa.nulls(len(table), pa.int32()))


def _flat(table: pa.Table) -> pa.Table:
    """One row a finding, with the place of its trajectory."""
    column = table["findings"].combine_chunks()
    places = table.select(_PLACE).take(pc.list_parent_indices(column))
    flat = pc.list_flatten(column)
    for n, name in enumerate(FINDING):
        places = places.append_column(name, pc.struct_field(flat, [n]))
    return places


def _count(kinds: dict[str, Counter[str]], found: pa.Table) -> None:
    for row in found.group_by(["kind", "shard", "place"]).aggregate([([], "count_all")]).to_pylist():
        counts = kinds.setdefault(row["kind"], Counter())
        counts["findings"] += row["count_all"]
        counts["trajectories"] += 1


def read_summary(path: str | Path) -> dict[str, Any]:
    """The summary of a whole audit. Raises :class:`Refusal`."""
    try:
        summary = json.loads(Path(path, SUMMARY).read_text(encoding="utf-8"))
        missing = [name for name in SCHEMAS if not Path(path, name).is_file()]
    except FileNotFoundError as error:
        raise Refusal(
            f"{path} holds no whole audit: there is no {SUMMARY}. Run the same audit again; it goes on where it ended."
        ) from error
    except (OSError, ValueError) as error:
        raise Refusal(f"{Path(path, SUMMARY)} cannot be read: {error}.") from error
    if missing or not isinstance(summary, dict) or not {"pieces", "settings", "kinds"} <= summary.keys():
        raise Refusal(f"{path} holds no whole audit. Run the same audit again.")
    return summary
