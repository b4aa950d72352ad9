"""The audit of a shard: a pure function from a part of the files to an Arrow table, wherever it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

import pyarrow as pa

from rollout_inspector import formats
from rollout_inspector.diagnose.checks import Diagnosis
from rollout_inspector.diagnose.finding import Finding, Severity
from rollout_inspector.formats import FileRefused, Rejected, Source
from rollout_inspector.formats.containers.file_part import FilePart
from rollout_inspector.formats.folders import files_of
from rollout_inspector.formats.training_step import TrainingStepRule
from rollout_inspector.guard.audit_settings import AuditSettings, tools_of
from rollout_inspector.guard.checked_files import SEVERITIES, diagnosis_of
from rollout_inspector.streams.prefix import n_new_tokens
from rollout_inspector.streams.trajectory import Trajectory

SHARD_BYTES = 8 << 20  # Bytes of the files that a shard reads. A lost process costs at most this much work.
MAX_SHARDS = 4096  # Files of more than so many shards are cut into larger ones.
MAX_IDS = 64  # Ids that a finding keeps of what stands there and of what should.
MAX_TEXT = 500  # Characters that a finding keeps of a text.

FINDING = pa.struct({
    "kind": pa.string(), "severity": pa.string(), "axis": pa.string(), "step": pa.int32(), "row": pa.int32(),
    "start": pa.int64(), "stop": pa.int64(), "message_index": pa.int32(), "chat_template_sha256": pa.string(),
    "expected_ids": pa.list_(pa.int32()), "actual_ids": pa.list_(pa.int32()),
    "expected_text": pa.string(), "actual_text": pa.string(), "evidence": pa.string(), "remedy": pa.string(),
    "trained_tokens_lost": pa.int64(), "trained_tokens_wrong": pa.int64(), "rows": pa.int64(),
    "prompt_tokens_repaid": pa.int64(),
})
"""A finding. ``start`` and ``stop`` count tokens in the stream of ``step``, or in ``row`` where there is no step."""
SCHEMA = pa.schema({
    "file": pa.string(), "line": pa.int64(), "place": pa.int64(), "unread": pa.string(), "format": pa.string(),
    "trajectory": pa.string(), "training_step": pa.int32(), "prompt_group": pa.string(), "tokenizer": pa.string(),
    "policy_version": pa.string(), "reward": pa.float64(), "n_steps": pa.int64(), "n_rows": pa.int64(),
    "n_tokens": pa.int64(), "n_findings": pa.int64(), "worst": pa.string(), "findings": pa.list_(FINDING),
})
"""One row a trajectory, in the order of the files; and one for each line or file that was not read. ``place`` counts
the trajectories of a shard from 0. ``unread`` is null for a trajectory, and else says why. ``n_tokens`` counts the
tokens that the steps add, or those of the rows where there are no steps, as pages do."""


Shard = tuple[dict[str, Any], ...]
"""Pieces: whole files, or one part of a file, a range of bytes, of row groups or of sessions. JSON holds them. Of each
``path``, ``bytes`` to read, ``size`` of the file, ``changed`` (nanoseconds), ``format``; the keys of a part."""


def key_of(shard: Shard, settings_digest: str) -> str:
    """The same for the same part of the same unchanged files under the same settings."""
    value = json.dumps([shard, settings_digest], sort_keys=True)
    return hashlib.sha256(value.encode("utf-8", "backslashreplace")).hexdigest()[:32]


@dataclass
class CutFiles:
    """The shards of an audit, in the order of the files, and what could not be opened."""

    shards: list[Shard] = field(default_factory=list)
    n_files: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)  # (path, sentence)


def cut_files(
    paths: Iterable[str | Path], format_name: str = "auto", n_bytes: int = SHARD_BYTES, output: Path | None = None
) -> CutFiles:
    """Cut files and folders into shards of about ``n_bytes``. What lies in ``output`` is left out. The shards follow
    from the files alone, never from the number of workers. So the output is the same everywhere."""
    cut, files = CutFiles(), dict[Path, int]()
    for path in paths:
        try:
            for file in files_of(Path(path)):
                state = file.stat()
                if not S_ISREG(state.st_mode):
                    cut.refused.append((str(file), f"{file} is no regular file."))
                elif output is None or not file.resolve().is_relative_to(output.resolve()):
                    files.setdefault(file.absolute(), state.st_size)
        except FileRefused as refusal:
            cut.refused.append((str(path), str(refusal)))
        except OSError as error:
            cut.refused.append((str(path), f"{path} cannot be read: {error.strerror}."))
    cut.n_files = len(files)
    n_bytes = max(n_bytes, sum(files.values()) // MAX_SHARDS)
    pieces: list[dict[str, Any]] = []
    for file in files:
        for piece in _pieces(file, format_name, n_bytes):
            is_alone = "part" in piece or (pieces and "part" in pieces[-1])
            if pieces and (is_alone or sum(item["bytes"] for item in pieces) + piece["bytes"] > n_bytes):
                cut.shards.append(tuple(pieces))
                pieces = []
            pieces.append(piece)
    if pieces:
        cut.shards.append(tuple(pieces))
    return cut


def _pieces(file: Path, format_name: str, n_bytes: int) -> Iterator[dict[str, Any]]:
    whole: dict[str, Any] = {"path": str(file), "bytes": 0, "size": 0, "changed": 0, "format": format_name}
    parts: list[FilePart] = []
    try:
        state = file.stat()
        whole |= {"bytes": state.st_size, "size": state.st_size, "changed": state.st_mtime_ns}
        source = Source.of_path(file)
        if source.size >= 2 * n_bytes:
            reader, _ = formats.read(source, format_name)
            parts = reader.cut(source, n_bytes) if reader.cut else []
            whole["format"] = reader.name if parts else format_name
    except (FileRefused, OSError):
        parts = []  # whoever reads it says why
    for part in parts:
        # through JSON, so that a shard is equal to itself after a journey
        yield whole | {"bytes": part.size, **json.loads(json.dumps(part.to_json()))}
    if not parts:
        yield whole


def audit(
    shard: Shard, settings: AuditSettings,
    keep: Callable[[dict[str, Any], Trajectory, Diagnosis], object] = lambda *_: None,
) -> pa.Table:
    """Read and diagnose what a shard holds. Returns a table of :data:`SCHEMA`.

    ``keep`` is called with the piece, the trajectory and its diagnosis, whose findings the table holds shortened.
    The same shard and settings make the same table on any machine. What cannot be read becomes a row that says why.
    Raises ``OSError`` when a file is not there as it was cut, ``ValueError`` when the tokenizer cannot be used.
    """
    codec, renderer = tools_of(settings.tokenizer, settings.template)
    fallback = renderer.chat_template_sha256 if renderer is not None else ""
    rows: list[dict[str, Any]] = []
    place = 0
    for piece in shard:
        name = piece["path"]
        _must_be_as_cut(piece)
        try:
            for line, format_name, item in _items(piece, settings):
                if isinstance(item, Rejected):
                    rows.append(unread_row(name, item.line, item.reason))
                    continue
                diagnosis = diagnosis_of(item, codec, renderer)
                keep(piece, item, diagnosis)
                rows.append(_row(name, line, place, format_name, item, diagnosis, fallback))
                place += 1
        except FileRefused as refusal:
            rows.append(unread_row(name, None, str(refusal)))
        except OSError as error:
            rows.append(unread_row(name, None, f"It cannot be read: {error.strerror or type(error).__name__}."))
        except Exception as error:  # one file must not end the audit of all
            rows.append(unread_row(name, None, f"The reader itself failed ({type(error).__name__}: {error})."))
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def reason_of(error: Exception) -> str:
    """Why a shard was not read, as a sentence: what :func:`audit` raised."""
    if isinstance(error, (OSError, ValueError)) and str(error):
        return str(error)
    return f"A shard could not be read ({type(error).__name__}: {error}). Audit its files with check to see which one."


def _must_be_as_cut(piece: dict[str, Any]) -> None:
    path = Path(piece["path"])
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path} on this machine. Mount it at the same path, and audit again.")
    state = path.stat()
    if (state.st_size, state.st_mtime_ns) != (piece["size"], piece["changed"]):
        raise OSError(f"{path} changed since the audit began: its size or its time. Audit again: what is done is kept.")


def trajectories_at(shard: Shard, settings: AuditSettings, places: set[int]) -> Iterator[Trajectory]:
    """Yields the trajectories of a shard at these places (column ``place``), in order. Nothing behind them is read.

    Each says in ``extra["audited"]`` from which file and line it is. Raises ``OSError`` when a file is not as audited.
    """
    place, last = 0, max(places, default=-1)
    for piece in shard:
        _must_be_as_cut(piece)
        try:
            for line, _, item in _items(piece, settings):
                if isinstance(item, Trajectory):
                    if place in places:
                        yield replace(item, extra={**item.extra, "audited": {"file": piece["path"], "line": line}})
                    place += 1
                    if place > last:
                        return
        except FileRefused:
            continue


def _items(piece: dict[str, Any], settings: AuditSettings) -> Iterator[tuple[int | None, str, Trajectory | Rejected]]:
    """(line, format, what stands there) of a piece."""
    source = Source.of_path(piece["path"])
    part = FilePart.of_json(piece)
    source = source if part is None else source.of_part(part)
    rule = TrainingStepRule(settings.step, settings.pattern)
    chosen, items = formats.read(source, piece["format"], rule)
    for item in items:
        yield source.line if chosen.by_line and source.line else None, chosen.name, item


def unread_row(file: str, line: int | None, reason: str) -> dict[str, Any]:
    """The row of a line or a file that was not read."""
    return {"file": _text(file, 4096), "line": line, "unread": _text(reason, MAX_TEXT), "findings": []}


def _row(
    file: str, line: int | None, place: int, format_name: str, one: Trajectory, diagnosis: Diagnosis, template: str
) -> dict[str, Any]:
    findings = [
        finding
        for finding in diagnosis.findings
        if finding.kind != "not_decidable" or finding.severity is not Severity.INFO
    ]
    worst = min((finding.severity for finding in findings), key=SEVERITIES.index, default=None)
    return {
        "file": _text(file, 4096), "line": line, "place": place, "format": format_name,
        "trajectory": _text(one.external_id), "training_step": one.training_step, "prompt_group": _text(one.group),
        "tokenizer": _text(one.tokenizer), "policy_version": _text(one.steps[0].policy_version if one.steps else ""),
        "reward": one.reward, "n_steps": len(one.steps), "n_rows": len(one.rows),
        "n_tokens": n_new_tokens(one),
        "n_findings": len(findings), "worst": None if worst is None else worst.value,
        "findings": [_finding(finding, one, template) for finding in findings],
    }


def _finding(one: Finding, trajectory: Trajectory, template: str) -> dict[str, Any]:
    step = one.step if one.step is not None and 0 <= one.step < len(trajectory.steps) else None
    sha256 = "" if step is None else trajectory.steps[step].chat_template_sha256
    return {
        "kind": one.kind, "severity": one.severity.value, "axis": one.axis.value, "step": one.step, "row": one.row,
        "start": one.start, "stop": one.stop, "message_index": one.message_index,
        "chat_template_sha256": _text(sha256 or template),
        "expected_ids": one.expected_ids[:MAX_IDS].tolist(), "actual_ids": one.actual_ids[:MAX_IDS].tolist(),
        "expected_text": _text(one.expected_text, MAX_TEXT), "actual_text": _text(one.actual_text, MAX_TEXT),
        "evidence": _text(one.evidence, MAX_TEXT), "remedy": _text(one.remedy, MAX_TEXT),
        "trained_tokens_lost": one.cost.trained_tokens_lost, "trained_tokens_wrong": one.cost.trained_tokens_wrong,
        "rows": one.cost.rows, "prompt_tokens_repaid": one.cost.prompt_tokens_repaid,
    }


def _text(value: str, most: int = 1024) -> str:
    """The text as Arrow can hold it: half a surrogate pair becomes a question mark."""
    return value[:most].encode("utf-8", "replace").decode()
