"""Imports: files are read as a stream and stored in batches of bounded size, each file whole or not at all."""

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from django.core.files.uploadedfile import UploadedFile
from django.db import IntegrityError, transaction

from rollout_inspector import formats
from rollout_inspector.diagnose.checks import Diagnosis
from rollout_inspector.formats import FileRefused, Rejected, Source
from rollout_inspector.formats.training_step import ANY, TrainingStepRule
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.jobs.broker import send_job, send_shards
from rollouts.jobs.diagnosis import diagnosis_for, gap_json
from rollouts.jobs.imports.trajectory_ids import prefixed
from rollouts.jobs.imports.uploads import drop_uploads, file_of, is_there, keep_files, read_in_place
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import byte_table_of, tokenizer_named
from rollouts.store.database import reload
from rollouts.store.jobs.jobs import Beat, JobLost, ask_job, end_job, is_active
from rollouts.store.jobs.shards import hand_on_shards, open_shards, unfinished_shards
from rollouts.store.models import Job
from rollouts.store.people.activity_log import Action, record
from rollouts.store.runs import runs
from rollouts.store.runs.imports import (
    add_rejections, begin_parts, drop_incomplete, end_import, failed_import_of, imported, list_rejections,
    note_imported, reject_file, set_bytes_total
)
from rollouts.store.runs.runs import choose_tokenizer, delete_run, end_run, reopen_run, run_of_job, start_run
from rollouts.store.trajectories.retokenized import keep_retokenized
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.token_encoding import drop_arrays, encode_trajectories
from rollouts.store.trajectories.trajectories import taken_ids

BATCH_TRAJECTORIES = 500
BATCH_TOKENS = 1_000_000
BATCH_BYTES = 16_000_000  # Bytes of the file. A trajectory of text alone has no tokens.
BEAT_SECONDS = 0.5  # How often progress is written and the cancel flag is read.
GC_THRESHOLD = 100_000  # New objects until the cyclic garbage collector runs.


class ImportCancelled(Exception):
    """Somebody asked the run to stop."""


def ask(
    run: models.Run,
    files: Sequence[Path | str],
    format_name: str = "auto",
    use_recorded_tokenizer: bool = True,
    training_step: TrainingStepRule = ANY,
) -> Job:
    """Returns the job that reads files into a new run: files of the storage by their keys, or paths of this machine."""
    paths = [Path(file) for file in files if isinstance(file, Path)]
    options = {
        "files": read_in_place(paths, run) if paths else list(files),
        "format": format_name,
        "use_recorded_tokenizer": use_recorded_tokenizer,
        **({} if training_step == ANY else {"training_step": asdict(training_step)}),
    }
    job, _ = ask_job(run, "import", options, run.created_by)
    record(Action.IMPORTED, run)
    return job


def ask_for_uploads(
    run: models.Run,
    uploads: Sequence[UploadedFile],
    format_name: str = "auto",
    use_recorded_tokenizer: bool = False,
    training_step: TrainingStepRule = ANY,
) -> Job:
    """Keep uploaded files. Returns the job that reads them into a new run. A failure leaves neither run nor files."""
    try:
        keys = keep_files(uploads, run)
        set_bytes_total(run, sum(upload.size or 0 for upload in uploads))
        return ask(run, keys, format_name, use_recorded_tokenizer, training_step)
    except BaseException:
        drop_uploads(run.code)
        delete_run(run)
        raise


def send_import(run: models.Run, job: Job) -> None:
    """Send a worker for an import. The run fails with a sentence when none can be sent."""
    if sentence := send_job(job):
        sentence += " Then resume the run. Or use the command import_rollouts, which needs no worker."
        end_run(run, models.Run.Status.FAILED, f"The import could not be sent to a worker. {sentence}")


def do_job(job: Job, beat: Beat) -> None:
    """Read the files of a job's options into its run. After a lost worker it goes on at the first incomplete file."""
    run = run_of_job(job)
    if not is_active(run):
        end_job(job, run.status, run.error)
        return
    options = job.options
    import_files(
        run, [file_of(key) for key in options["files"]], options["format"] or "auto", options["use_recorded_tokenizer"],
        alive=beat, end=partial(end_import, run, job), training_step=rule_of(job),
    )
    drop_uploads(run.code)


def rule_of(job: Job) -> TrainingStepRule:
    """What the user of an import said about training steps."""
    return TrainingStepRule(**job.options.get("training_step", {}))


def left_of(run: models.Run) -> Job | None:
    """The job of an import that broke off, if the files that it had not read are still there. Raises
    :class:`rollouts.store.files.StorageDown`."""
    if run.status != models.Run.Status.FAILED:
        return None
    job = failed_import_of(run)
    if job is None:
        return None
    files, shards = job.options["files"], unfinished_shards(job)
    numbers = {piece["file"] for shard in shards for piece in shard.options["pieces"]}
    remaining = [files[n] for n in sorted(numbers)] if shards else files[imported(run)["files"] :]
    return job if remaining and all(map(is_there, remaining)) else None


def resume(run: models.Run) -> None:
    """Read the files that are left of an import that broke off. Raises :class:`Refusal`."""
    old = left_of(run)
    if old is None:
        raise Refusal("Nothing is left of this import to resume. Import the files again.")
    reopen_run(run)
    with transaction.atomic():
        job, is_new = ask_job(run, "import", old.options, run.created_by)
        if is_new:
            hand_on_shards(old, job)
    if is_new:
        if waiting := open_shards(job):
            start_run(run)
            begin_parts(run, run.bytes_total)
        send_import(run, job)
        if is_active(run):
            send_shards(waiting)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Runs the cyclic garbage collector rarely: an import makes many objects and hardly any cycle."""
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@rare_collections()
def import_files(
    run: models.Run,
    files: Sequence[Path | Source],
    format_name: str = "auto",
    use_recorded_tokenizer: bool = True,
    alive: Callable[[], object] = lambda: None,
    end: Callable[[str, str], object] | None = None,
    training_step: TrainingStepRule = ANY,
) -> None:
    """Read files into a run, diagnose each trajectory in the same pass, and end the run.

    The run ends as done, as failed when nothing was read, or as cancelled when somebody asked. A file that cannot be
    read to its end leaves nothing but a rejection. A run without a tokenizer takes the registered one that its first
    file names. ``alive`` is called often, and in each transaction. It raises :class:`JobLost` when another worker has
    taken the import. ``end`` ends the run with a status and a sentence; default: the run alone.
    """
    end = end or partial(end_run, run)
    sizes, names = [size_of(file) for file in files], names_of(files)
    with transaction.atomic():
        alive()
        start_run(run)
        set_bytes_total(run, sum(sizes))
    try:
        for n, file in enumerate(files):
            if n < imported(run)["files"]:
                continue
            drop_incomplete(run, alive)
            done, before = imported(run), sum(sizes[:n])
            try:
                source = file if isinstance(file, Source) else Source.of_path(file, names[n])
                file_import = FileImport(
                    run, source, before, done["next_index"], use_recorded_tokenizer, alive, training_step
                )
                file_format = file_import.read(format_name)
                formats_read = sorted({*done["formats"], file_format})
                done |= {"next_index": file_import.next_index, "formats": formats_read}
            except FileRefused as refusal:
                drop_incomplete(run, alive)
                reject_file(run, names[n], str(refusal), alive)
            note_imported(run, done | {"files": done["files"] + 1}, before + sizes[n], alive)
    except ImportCancelled:
        drop_incomplete(run, alive)
        end(models.Run.Status.CANCELLED, "")
    else:
        reload(run)
        if imported(run)["next_index"]:
            end(models.Run.Status.DONE, "")
        else:
            end(models.Run.Status.FAILED, nothing_imported(run))
    reload(run)


def names_of(files: Sequence[Path | Source]) -> list[str]:
    """File names with enough of their folders to tell them apart: trainers write ``step_1/rank_0.jsonl``."""
    paths = [file.parts if isinstance(file, Path) else (file.name,) for file in files]
    alike = Counter(path[-1:] for path in paths)
    names = []
    for path in paths:
        n = 1
        while alike[path[-1:]] > 1 and n < len(path) and any(p != path and p[-n:] == path[-n:] for p in paths):
            n += 1
        names.append("/".join(path[-n:]))
    return names


def size_of(file: Path | Source) -> int:
    if isinstance(file, Source):
        return file.size
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def nothing_imported(run: models.Run) -> str:
    """Why no file of a run held a trajectory, as sentences."""
    first = list_rejections(run, 1)
    reason = f" {first[0].reason}" if first else " The files hold no trajectories."
    more = f" ({run.n_rejected:,} rejections in all.)" if run.n_rejected > 1 else ""
    return f"Nothing was imported.{reason}{more}"


class FileImport:
    """The import of one file."""

    def __init__(
        self, run: models.Run, source: Source, before: int, index: int, use_recorded: bool,
        alive: Callable[[], object], training_step: TrainingStepRule = ANY,
    ) -> None:
        self.run, self.source, self.use_recorded, self.alive = run, source, use_recorded, alive
        self.training_step = training_step
        self.next_index = index
        self._bytes_before = before
        self._last_beat = 0.0
        self._table: ByteTable | None = None

    def read(self, format_name: str) -> str:
        """Returns the name of the format. Raises :class:`FileRefused` after parts of the file may have been stored."""
        self.source.on_line = self._tick
        chosen, items = formats.read(self.source, format_name, self.training_step)
        for batch in batches(self.watched(items), self.source):
            self.reject([item for item in batch if isinstance(item, Rejected)])
            self._save([item for item in batch if isinstance(item, Trajectory)])
            self._tick()
        return chosen.name

    def watched(self, items: Iterator[Trajectory | Rejected]) -> Iterator[Trajectory | Rejected]:
        """The items of the file as they are read."""
        return items

    def reject(self, rejected: Sequence[Rejected]) -> None:
        """Keep what could not be read."""
        with transaction.atomic():
            self.alive()
            add_rejections(self.run, self.source.name, rejected)

    def _tick(self) -> None:
        """Write every ``BEAT_SECONDS`` how far the file is read."""
        now = time.monotonic()
        if now - self._last_beat < BEAT_SECONDS:
            return
        self._last_beat = now
        self.tell(self._bytes_before + self.source.position)

    def tell(self, n_bytes: int) -> None:
        """Write how many bytes are read. Raises what stops the import."""
        self.alive()
        if runs.beat(self.run, bytes_done=n_bytes):
            raise ImportCancelled

    def _save(self, batch: list[Trajectory]) -> None:
        if not batch:
            return
        self._choose_tokenizer(batch)
        batch = self.named(batch)
        diagnoses = []
        for trajectory in batch:
            diagnoses.append(diagnosis_for(trajectory, self.run))
            self._tick()
        self.store(batch, diagnoses)

    def store(self, batch: Sequence[Trajectory], found: Sequence[Diagnosis]) -> None:
        """Store trajectories with their diagnoses."""
        encoded = encode_trajectories(batch, self._table, put_for=self.run)
        try:
            with transaction.atomic():
                self.alive()  # in this transaction: a worker that has lost the import stores nothing more
                records = save_trajectories(
                    self.run,
                    batch,
                    [diagnosis.findings for diagnosis in found],
                    self.next_index,
                    checks=[diagnosis.checks for diagnosis in found],
                    gaps=[gap_json(diagnosis) for diagnosis in found],
                    encoded=encoded,
                )
                again = [(record.pk, diagnosis.again) for record, diagnosis in zip(records, found, strict=True)]
                keep_retokenized(self.run, again)
        except (IntegrityError, JobLost):  # it is rolled back; after an outage that is not known
            drop_arrays(encoded)
            raise
        self.next_index += len(batch)

    def named(self, batch: list[Trajectory]) -> list[Trajectory]:
        """Files of one run may use the same ids. If an id is taken, it and its group get the file's name in front."""
        stored_ids = taken_ids(self.run, [trajectory.external_id for trajectory in batch])
        if not stored_ids:
            return batch
        renamed = []
        for trajectory in batch:
            if trajectory.external_id in stored_ids:
                name, group = prefixed(self.source.name, trajectory.external_id), trajectory.group
                group = group and prefixed(self.source.name, group)
                trajectory = replace(trajectory, external_id=name, group=group)
            renamed.append(trajectory)
        accepted, used_ids = [], taken_ids(self.run, [trajectory.external_id for trajectory in renamed])
        for trajectory in renamed:
            if trajectory.external_id in used_ids:
                reason = f"The id {trajectory.external_id!r} is in this run already."
                add_rejections(self.run, self.source.name, [Rejected(None, reason)])
                continue
            used_ids.add(trajectory.external_id)
            accepted.append(trajectory)
        return accepted

    def _choose_tokenizer(self, batch: Sequence[Trajectory]) -> None:
        if self.run.tokenizer is None and self.use_recorded:
            names = {trajectory.tokenizer for trajectory in batch if trajectory.tokenizer}
            if len(names) == 1 and (tokenizer := tokenizer_named(self.run.project_id, names.pop())) is not None:
                choose_tokenizer(self.run, tokenizer)
        if self._table is None:
            self._table = byte_table_of(self.run)


def batches(items: Iterable[Trajectory | Rejected], source: Source) -> Iterator[list[Trajectory | Rejected]]:
    """Batches of bounded size."""
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
