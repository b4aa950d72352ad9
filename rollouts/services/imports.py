"""Imports: files read as a stream, kept in batches of bounded size, each file whole or not at all."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from django.db import transaction

from rollouts import formats, models
from rollouts.formats import FileRefused, Rejected, Source
from rollouts.services.rejections import add_rejections
from rollouts.services.runs import beat, delete_trajectories, end_run, recount, start_run
from rollouts.services.text import storable_text
from rollouts.services.tokenizers import byte_table_of
from rollouts.services.trajectories import TokenTable, save_trajectories
from rollouts.tito.diagnose.finding import Finding
from rollouts.tito.trajectory import Trajectory

log = logging.getLogger(__name__)

BATCH_TRAJECTORIES = 500
BATCH_TOKENS = 1_000_000
BATCH_BYTES = 16_000_000
"""Of the file; what has text alone has no tokens."""
BEAT_SECONDS = 0.5
"""How often progress is written and the cancel flag read."""
GC_THRESHOLD = 100_000
"""New objects until the cyclic collector looks at them."""
IMPORTED = "imported"
"""In the run's settings: what is complete, so that an import that was killed goes on at the file it was at."""

Diagnose = Callable[[Trajectory, models.Run], Sequence[Finding]]


class _Cancelled(Exception):
    """Somebody asked the run to stop."""


@dataclass
class _Progress:
    """How far the files are read; says so in the database now and then."""

    run: models.Run
    before: int
    source: Source
    last: float = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        if now - self.last < BEAT_SECONDS:
            return
        self.last = now
        if beat(self.run, bytes_done=self.before + self.source.position):
            raise _Cancelled


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """An import makes many objects and hardly a cycle, so that the collector is hardly ever worth its look at all."""
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rare_collections()
def import_files(
    run: models.Run,
    files: Sequence[Path | Source],
    format_name: str = "auto",
    diagnose: Diagnose | None = None,
    use_recorded_tokenizer: bool = True,
) -> None:
    """Read files into a run and end it: done, failed when nothing was read, cancelled when somebody asked.

    A file that cannot be read to its end leaves nothing but a rejection. ``judge`` finds what is wrong with each
    trajectory in the same pass. A run without a tokenizer takes the registered one that its first file names.
    """
    start_run(run)
    sizes, names = [_size(file) for file in files], _names(files)
    done = run.settings.get(IMPORTED, {"files": 0, "next_index": 0, "formats": []})
    models.Run.objects.filter(pk=run.pk).update(bytes_total=sum(sizes))
    try:
        for n, file in enumerate(files):
            if n < done["files"]:
                continue
            _drop_from(run, done["next_index"])
            before = sum(sizes[:n])
            try:
                source = file if isinstance(file, Source) else Source.of_path(file, names[n])
                one = _File(run, source, before, done["next_index"], diagnose, use_recorded_tokenizer)
                name = one.read(format_name)
                done = {
                    "files": n + 1, "next_index": one.next_index, "formats": sorted({*done["formats"], name}),
                }  # fmt: skip
            except FileRefused as refusal:
                _drop_from(run, done["next_index"])
                name = names[n]
                models.Rejection.objects.filter(run=run, file=storable_text(name[:500])).delete()
                add_rejections(run, name, [Rejected(None, str(refusal))])
                done = {**done, "files": n + 1}
            _note(run, done, before + sizes[n])
        _end(run, bool(done["next_index"]))
    except _Cancelled:
        _drop_from(run, done["next_index"])
        end_run(run, models.Run.Status.CANCELLED)
    except Exception as error:
        _drop_from(run, done["next_index"])
        end_run(run, models.Run.Status.FAILED, f"The import broke off: {type(error).__name__}: {error}"[:2000])
        raise
    finally:
        run.refresh_from_db()


def _names(files: Sequence[Path | Source]) -> list[str]:
    """Files by name, with as much of their folders as tells them apart: trainers write ``step_1/rank_0.jsonl``."""
    paths = [file.parts if isinstance(file, Path) else (file.name,) for file in files]
    alike = Counter(path[-1:] for path in paths)
    names = []
    for path in paths:
        n = 1
        while alike[path[-1:]] > 1 and n < len(path) and any(p != path and p[-n:] == path[-n:] for p in paths):
            n += 1
        names.append("/".join(path[-n:]))
    return names


def _size(file: Path | Source) -> int:
    if isinstance(file, Source):
        return file.size
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def _note(run: models.Run, done: dict[str, object], bytes_done: int) -> None:
    with transaction.atomic():
        held = models.Run.objects.select_for_update().get(pk=run.pk)
        held.settings[IMPORTED] = done
        held.format = ", ".join(done["formats"])[:200]  # type: ignore[arg-type]
        held.bytes_done = bytes_done
        held.save(update_fields=["settings", "format", "bytes_done"])
    run.settings, run.format, run.bytes_done = held.settings, held.format, held.bytes_done


def _end(run: models.Run, has_any: bool) -> None:
    run.refresh_from_db()
    if has_any:
        end_run(run, models.Run.Status.DONE)
        return
    first = run.rejections.order_by("pk").first()
    reason = f" {first.reason}" if first else " The files hold no trajectories."
    more = f" ({run.n_rejected:,} rejections in all.)" if run.n_rejected > 1 else ""
    end_run(run, models.Run.Status.FAILED, f"Nothing was imported.{reason}{more}")


def _drop_from(run: models.Run, index: int) -> None:
    """Take away what was stored of a file that is not complete."""
    dropped = False
    while keys := list(run.trajectories.filter(index__gte=index).values_list("pk", flat=True)[:200]):
        delete_trajectories(keys)
        dropped = True
    if dropped:
        recount(run)


class _File:
    """One file under way."""

    def __init__(
        self, run: models.Run, source: Source, before: int, index: int, diagnose: Diagnose | None, use_recorded: bool
    ) -> None:
        self.run, self.source, self.diagnose, self.use_recorded = run, source, diagnose, use_recorded
        self.next_index = index
        self._first_index = index
        self._progress = _Progress(run, before, source)
        self._table: TokenTable | None = None

    def read(self, format_name: str) -> str:
        """Gives the name of the format. Raises :class:`FileRefused`, after parts of the file may have been stored."""
        self.source.on_line = self._progress.tick
        chosen, items = formats.read(self.source, format_name)
        for batch in _batches(items, self.source):
            add_rejections(self.run, self.source.name, [one for one in batch if isinstance(one, Rejected)])
            self._save([one for one in batch if isinstance(one, Trajectory)])
            self._progress.tick()
        return chosen.name

    def _save(self, batch: list[Trajectory]) -> None:
        if not batch:
            return
        self._choose_tokenizer(batch)
        batch = self._with_free_ids(batch)
        findings = None
        if self.diagnose is not None:
            findings = []
            for trajectory in batch:
                findings.append(self.diagnose(trajectory, self.run))
                self._progress.tick()
        save_trajectories(self.run, batch, findings, self.next_index, self._table)
        self.next_index += len(batch)

    def _with_free_ids(self, batch: list[Trajectory]) -> list[Trajectory]:
        """Files of one run may count alike: an id that is taken gets the file's name before it, as does its group."""
        wanted = [one.external_id for one in batch]
        taken = set(self.run.trajectories.filter(external_id__in=wanted).values_list("external_id", flat=True))
        if not taken:
            return batch
        renamed = []
        for one in batch:
            if one.external_id in taken:
                name, group = f"{self.source.name}:{one.external_id}", f"{self.source.name}:{one.group}"
                one = replace(one, external_id=name[-200:], group=one.group and group[-200:])
            renamed.append(one)
        again = [one.external_id for one in renamed]
        twice = set(self.run.trajectories.filter(external_id__in=again).values_list("external_id", flat=True))
        kept, seen = [], twice
        for one in renamed:
            if one.external_id in seen:
                add_rejections(
                    self.run, self.source.name, [Rejected(None, f"The id {one.external_id!r} is in this run already.")]
                )
                continue
            seen.add(one.external_id)
            kept.append(one)
        return kept

    def _choose_tokenizer(self, batch: Sequence[Trajectory]) -> None:
        if self.run.tokenizer is None and self.use_recorded:
            names = {one.tokenizer for one in batch if one.tokenizer}
            found = (
                models.Tokenizer.objects.filter(name__in=names).order_by("name").first() if len(names) == 1 else None
            )
            if found is not None:
                self.run.tokenizer = found
                self.run.chat_template = self.run.chat_template or found.chat_template
                self.run.save(update_fields=["tokenizer", "chat_template"])
        if self._table is None:
            self._table = byte_table_of(self.run)


def _batches(items: Iterable[Trajectory | Rejected], source: Source) -> Iterator[list[Trajectory | Rejected]]:
    """Piles of bounded size."""
    batch: list[Trajectory | Rejected] = []
    n_tokens, start = 0, 0
    for item in items:
        batch.append(item)
        if isinstance(item, Trajectory):
            n_tokens += item.n_ids
        n_bytes = source.position - start
        if len(batch) >= BATCH_TRAJECTORIES or n_tokens >= BATCH_TOKENS or n_bytes >= BATCH_BYTES:
            yield batch
            batch, n_tokens, start = [], 0, source.position
    if batch:
        yield batch
