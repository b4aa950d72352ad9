"""Large imports: files are cut into parts, and any workers read them side by side. A shard stores its trajectories in a
range of indices of its own, and keeps the rest of what it found in its row. The join then sets the ids of the
trajectories and their places in the order of the files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from django.db import IntegrityError

from rollout_inspector import formats
from rollout_inspector.diagnose.checks import Diagnosis
from rollout_inspector.formats import FileRefused, Rejected, Source
from rollout_inspector.formats.containers.file_part import FilePart
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs.imports.imports import FileImport, ImportCancelled, names_of, rare_collections, rule_of
from rollouts.jobs.imports.trajectory_ids import MAX_NAME, hash_of, packed
from rollouts.jobs.imports.uploads import file_of
from rollouts.store.chat_templates.tokenizers import tokenizer_named
from rollouts.store.jobs.jobs import Beat, JobLost, beat_job, is_active
from rollouts.store.models import Job, Run, new_code
from rollouts.store.runs.imports import MAX_REJECTIONS, PROVISIONAL, beat_import, begin_parts, drop_range, imported
from rollouts.store.runs.runs import choose_tokenizer, find_run, run_of_job, start_run
from rollouts.store.text import storable_text
from rollouts.store.trajectories.trajectories import taken_ids

PART_BYTES = 8 << 20
"""Bytes of the files that a shard reads. Imports of less than two such parts are read by one worker. At the end of an
import the other workers wait for one shard at most."""
MAX_PARTS = 256
LOOK_AT = 20  # Trajectories at the beginning of a piece that may name its tokenizer.
MAX_LOOKED_AT = 20  # Pieces whose beginning is looked at.
STORE_ATTEMPTS = 5  # Two workers may store the same id in one moment. One of them tries again.


# -- cutting


def cut(job: Job, beat: Beat) -> list[dict[str, Any]]:
    """The options of each shard of an import: the pieces that it reads, and its range of indices. A piece is a whole
    file or a part of one. Small files come together. Empty if one worker is to read all."""
    run = find_run(templates=True, jobs=job)
    if run is None or not is_active(run) or imported(run)["files"] or run.n_trajectories:
        return []
    files = [file_of(key) for key in job.options["files"]]
    if any(isinstance(file, Path) for file in files):  # on this machine alone
        return []
    sources = [file for file in files if isinstance(file, Source)]
    total = sum(source.size for source in sources)
    if total < 2 * PART_BYTES:
        return []
    beat()
    start_run(run)
    n_bytes = max(PART_BYTES, total // MAX_PARTS)
    groups = _grouped(_pieces(sources, job.options["format"] or "auto", n_bytes), n_bytes)
    if len(groups) < 2:
        return []
    begin_parts(run, total)
    if run.tokenizer is None and job.options["use_recorded_tokenizer"]:
        _choose_tokenizer(run, job.options["files"], [piece for group in groups for piece in group])
    return _with_ranges(groups)


def _pieces(sources: Sequence[Source], format_name: str, n_bytes: int) -> Iterator[dict[str, Any]]:
    for n, (source, name) in enumerate(zip(sources, names_of(sources), strict=True)):
        whole = {"file": n, "name": name, "format": format_name, "bytes": source.size}
        chosen, parts = "", list[FilePart]()
        try:
            if source.size >= 2 * n_bytes:
                file_format, _ = formats.read(source, format_name)
                chosen, parts = file_format.name, file_format.cut(source, n_bytes) if file_format.cut else []
        except FileRefused:
            pass  # the worker that reads it says why
        for part in parts:
            yield whole | {"format": chosen, "bytes": part.size, **part.to_json()}
        if not parts:
            yield whole


def _grouped(pieces: Iterator[dict[str, Any]], n_bytes: int) -> list[list[dict[str, Any]]]:
    """Pieces of one shard each: small files together, a part of a file alone."""
    groups: list[list[dict[str, Any]]] = []
    for piece in pieces:
        group = groups[-1] if groups else [piece]
        fits = sum(member["bytes"] for member in group) + piece["bytes"] <= n_bytes
        if groups and fits and "part" not in piece and "part" not in group[-1]:
            group.append(piece)
        else:
            groups.append([piece])
    return groups


def _with_ranges(groups: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Ranges of indices as wide as the share of the bytes, so that a file of any size has room."""
    sizes = [sum(piece["bytes"] for piece in group) + 1 for group in groups]
    total, before, shards = sum(sizes), 0, []
    for group, size in zip(groups, sizes, strict=True):
        first = PROVISIONAL + PROVISIONAL * before // total
        before += size
        shards.append({"pieces": group, "first": first, "stop": PROVISIONAL + PROVISIONAL * before // total - 1})
    return shards


def _choose_tokenizer(run: Run, files: Sequence[str], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Take the registered tokenizer that the first piece with trajectories names."""
    for piece in pieces[:MAX_LOOKED_AT]:
        try:
            items = islice(formats.read(_source(files, piece), piece["format"])[1], LOOK_AT)
            names = {item.tokenizer for item in items if isinstance(item, Trajectory)}
        except FileRefused:
            continue
        if not names:
            continue
        names_given = names - {""}
        if len(names_given) == 1 and (tokenizer := tokenizer_named(run.project_id, names_given.pop())) is not None:
            choose_tokenizer(run, tokenizer)
        return


# -- reading


@rare_collections()
def do_shard(shard: Job, beat: Beat) -> dict[str, Any]:
    """Read the pieces of a shard from the start. Returns the column with what was found beside trajectories."""
    run, whole = run_of_job(shard), shard.whole
    if whole is None or not is_active(run):
        raise JobLost
    first, stop = shard.options["first"], shard.options["stop"]
    alive = partial(beat_job, shard)
    drop_range(run, first, stop + 1, alive)
    beat(reached=0)
    pieces, before, index = [], 0, first
    for piece in shard.options["pieces"]:
        piece_import = _Piece(run, _source(whole.options["files"], piece), before, index, stop, beat, whole)
        try:
            piece_import.read(piece["format"])
        except FileRefused as refusal:
            drop_range(run, index, stop + 1, alive)
            piece_import.refused = storable_text(str(refusal))
        except ImportCancelled as error:
            raise Refusal("Somebody asked the import to stop.") from error
        pieces.append(piece_import.found(piece))
        before += piece["bytes"]
        index += pieces[-1]["n"]
    beat(reached=before)
    return {"report": {"pieces": pieces}}


def _source(files: Sequence[str], piece: Mapping[str, Any]) -> Source:
    file = file_of(files[piece["file"]])
    source = Source.of_path(file) if isinstance(file, Path) else file
    source.name = piece["name"]
    part = FilePart.of_json(piece)
    return source if part is None else source.of_part(part)


class _Piece(FileImport):
    """The import of a file, or of a part of one, by a worker beside others."""

    def __init__(self, run: Run, source: Source, before: int, index: int, stop: int, beat: Beat, whole: Job) -> None:
        super().__init__(run, source, before, index, False, partial(beat_job, beat.job), rule_of(whole))
        self._first, self._stop, self._beat, self._whole = index, stop, beat, whole
        self._rejected: list[Rejected] = []
        self._n_rejected = 0
        self._hashes: list[int] = []
        self._lines: list[int] = []
        self._held: dict[int, tuple[str, str]] = {}
        self._format = ""
        self.refused = ""

    def read(self, format_name: str) -> str:
        self._format = super().read(format_name)
        return self._format

    def watched(self, items: Iterator[Trajectory | Rejected]) -> Iterator[Trajectory | Rejected]:
        for item in items:
            if isinstance(item, Trajectory):
                self._lines.append(self.source.line)
                self._hashes.append(hash_of(item.external_id))
            yield item

    def reject(self, rejected: Sequence[Rejected]) -> None:
        self._n_rejected += len(rejected)
        self._rejected += rejected[: MAX_REJECTIONS - len(self._rejected)]

    def tell(self, n_bytes: int) -> None:
        self._beat(reached=n_bytes)
        if beat_import(self.run, self._whole):
            raise ImportCancelled

    def named(self, batch: list[Trajectory]) -> list[Trajectory]:
        return batch  # the ids that are free are known when the batch is stored

    def store(self, batch: Sequence[Trajectory], found: Sequence[Diagnosis]) -> None:
        if self.next_index + len(batch) > self._stop:
            raise Refusal(f"{self.source.name} holds too many trajectories for its bytes. Import it by itself.")
        for attempt in range(1, STORE_ATTEMPTS + 1):
            renamed = self._taken(batch)
            free = [
                replace(item, external_id=f"#{new_code()}:{item.external_id}"[:MAX_NAME]) if n in renamed else item
                for n, item in enumerate(batch)
            ]
            try:
                super().store(free, found)
                break
            except IntegrityError:
                if attempt == STORE_ATTEMPTS:
                    raise
        start = self.next_index - len(batch) - self._first
        self._held |= {start + n: name for n, name in renamed.items()}

    def _taken(self, batch: Sequence[Trajectory]) -> dict[int, tuple[str, str]]:
        """Place in the batch -> id and group, for ids that another part has stored."""
        stored_ids: set[str] = set()
        for ids in batched([trajectory.external_id for trajectory in batch], MAX_NAME):
            stored_ids |= taken_ids(self.run, ids)
        return {n: (item.external_id, item.group) for n, item in enumerate(batch) if item.external_id in stored_ids}

    def found(self, piece: Mapping[str, Any]) -> dict[str, Any]:
        """What the row of the shard keeps of the piece. ``at``: the place of its first trajectory in the shard."""
        n = 0 if self.refused else self.next_index - self._first
        return {
            "file": piece["file"], "name": piece["name"], "format": self._format, "refused": self.refused, "n": n,
            "hashes": packed(self._hashes[:n], "<u8"), "lines": packed(self._lines[:n], "<u8"),
            "held": [] if self.refused else [[at, *name] for at, name in self._held.items()],
            "rejected": [] if self.refused else [[line.line, storable_text(line.reason)] for line in self._rejected],
            "n_rejected": 0 if self.refused else self._n_rejected,
        }
