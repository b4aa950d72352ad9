"""Writes stored trajectories in any format of ours, with their own rows or with the rows of another strategy."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from django.db.models import QuerySet
from django.utils import timezone

from rollout_inspector.formats import FORMATS
from rollout_inspector.formats.registry import Join
from rollout_inspector.formats.writers import exports
from rollout_inspector.formats.writers.exports import EXPORTS, Export, padded
from rollout_inspector.outputs import draft_file
from rollout_inspector.refusal import Refusal, Remedy
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs.diagnosis import codec_of
from rollouts.jobs.replays import replay_context
from rollouts.jobs.run_parts import cut_run, range_of
from rollouts.store import files, models
from rollouts.store.files import StorageDown
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, Sharing, end_job, files_in_use
from rollouts.store.jobs.shards import shards_of
from rollouts.store.models import Job
from rollouts.store.trajectories.findings import first_finding_of_stream
from rollouts.store.trajectories.trajectories import finished_trajectories, only_finished
from rollouts.store.trajectories.trajectory_list import passing
from rollouts.store.trajectory_filters import TrajectoryFilters

log = logging.getLogger(__name__)

FILE_AGE = timedelta(days=7)  # How long the file of an export is offered.
MAX_NOTES = 50
WRITERS = (*(file_format.name for file_format in FORMATS.values() if file_format.write), *EXPORTS)
"""Names of what can be written: whole trajectories, then rows."""


def is_rows(name: str) -> bool:
    """Whether a format holds training rows; else it holds trajectories."""
    return name in EXPORTS


def title_of(name: str) -> str:
    """What a writer's format is called where people choose it."""
    return EXPORTS[name].title if name in EXPORTS else FORMATS[name].title


def suffix_of(name: str) -> str:
    return EXPORTS[name].suffix if name in EXPORTS else FORMATS[name].suffix


MAX_PADDING = 1 << 20
"""Tokens to which a row may be padded by who asks from elsewhere: such a row is made in memory, however short it is."""


@dataclass(frozen=True)
class ExportOptions:
    """How a run is to be written. Raises :class:`Refusal` where the parts do not go together."""

    format: str = "own_jsonl"
    strategy: str = ""  # The strategy whose rows are written; empty = the stored rows.
    force: bool = False
    """Rows that break the target's invariants are written too. Trajectories that the strategy refuses are left out."""
    leave_out: bool = False  # Trajectories with such rows are left out, and trajectories that the strategy refuses.
    skip_discontinuous: bool = False
    """Trajectories that are not one row are left out: a later prompt does not begin with the stream before it."""
    pad_to: int | None = None  # From the network at most ``MAX_PADDING``.
    pad_id: int = 0
    only: Mapping[str, Any] | None = None
    """Which trajectories are written: fields of ``TrajectoryFilters`` by name; None = all."""

    def __post_init__(self) -> None:
        if self.format not in WRITERS:
            raise Refusal(f"There is no format {self.format[:40]!r}. Known: {', '.join(WRITERS)}.", field="format")
        if self.strategy and self.strategy not in STRATEGIES:
            raise Refusal(
                f"There is no strategy {self.strategy[:40]!r}. Known: {', '.join(STRATEGIES)}.", field="strategy"
            )
        if self.force and self.leave_out:
            raise Refusal("Faulty rows are either written all the same or left out; choose one of the two.")
        if self.pad_to is not None and (self.format != "sft" or self.pad_to < 1):
            raise Refusal(
                "Padding takes a number of tokens from 1 on, and goes with the format sft alone.", field="pad_to"
            )

    @property
    def filters(self) -> TrajectoryFilters:
        """Which trajectories are written."""
        return TrajectoryFilters(**(self.only or {}))

    def as_options(self) -> dict[str, Any]:
        """The options of the job: every field that is not the default."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @property
    def target(self) -> Export | None:
        """The row format; None for whole trajectories."""
        if self.pad_to is not None:
            return padded(EXPORTS["sft"], self.pad_to, self.pad_id)
        return EXPORTS.get(self.format)


def write_run(
    run: models.Run, records: QuerySet[models.StoredTrajectory], options: ExportOptions, file: IO[bytes],
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[int, str]:
    """Write the finished trajectories of ``records``. ``tell`` is called with a sentence about each that is left out.
    Returns the number of rows or trajectories, and how many were left out, as a sentence; empty = none. Raises
    :class:`Refusal`."""
    part = write_part(run, records, options, file, tell)
    return part.n, sentence_of([part], options)


class WrittenPart(NamedTuple):
    """What a part of an export holds."""

    n: int  # Rows, or trajectories.
    n_read: int
    n_out: int  # Trajectories that were left out.
    first: str  # Why the first of these was left out.


def sentence_of(parts: Sequence[WrittenPart], options: ExportOptions) -> str:
    """How many trajectories were left out. Raises :class:`Refusal` where nothing is left to write."""
    n, n_read, n_out = (sum(getattr(part, name) for part in parts) for name in ("n", "n_read", "n_out"))
    if options.only and not n_read:
        raise Refusal("No finished trajectory passes the filter of this export, so there is nothing to write.")
    if n_out and not n:
        first = next(part.first for part in parts if part.n_out)
        raise Refusal(f"Every trajectory would be left out, so there is nothing to write. The first: {first}")
    if options.strategy and not n:
        name = options.strategy.replace("_", " ")
        raise Refusal(f"The strategy {name} makes no row of any trajectory here, so there is nothing to write.")
    verb = "was" if n_out == 1 else "were"
    return f"{n_out:,} of {n_read:,} trajectories {verb} left out." if n_out else ""


def write_part(
    run: models.Run, records: QuerySet[models.StoredTrajectory], options: ExportOptions, file: IO[bytes],
    tell: Callable[[str], object] = lambda _: None, tick: Callable[[], object] = lambda: None,
) -> WrittenPart:
    """The same for a part of an export, which may hold nothing. ``tick`` is called after each trajectory."""
    n_read, n_out, first = 0, 0, ""

    def counted(values: Iterator[Trajectory]) -> Iterator[Trajectory]:
        nonlocal n_read
        for value in values:
            yield value
            n_read += 1
            tick()

    def leave_out(why: str) -> None:
        nonlocal n_out, first
        n_out, first = n_out + 1, first or why
        tell(f"Left out: {why}")

    values = (value for _, value in replay_context.loaded_trajectories(only_finished(records)))
    n = _write(run, counted(values), options, file, leave_out)
    return WrittenPart(n, n_read, n_out, first)


def _write(
    run: models.Run,
    values: Iterator[Trajectory],
    options: ExportOptions,
    file: IO[bytes],
    leave_out: Callable[[str], object],
) -> int:
    if options.strategy:
        values = _under(options.strategy, run, values, leave_out if options.force or options.leave_out else None)
    if options.skip_discontinuous:
        rows = attrgetter("rows") if options.strategy else exports.rows_of
        values = _continuous(values, rows, leave_out)
    if (target := options.target) is None:
        write = FORMATS[options.format].write
        assert write is not None
        tokenizer = run.tokenizer.name if run.tokenizer else ""
        return write((replace(value, tokenizer=value.tokenizer or tokenizer) for value in values), file)
    codec = codec_of(run)
    return exports.write(
        target,
        values,
        file,
        options.force,
        leave_out=leave_out if options.leave_out else None,
        rows=attrgetter("rows") if options.strategy else None,
        decode=None if codec is None else codec.decode,
        cause=lambda value: cause_of(run, value),
    )


def _continuous(
    values: Iterator[Trajectory], rows: exports.RowsOf, leave_out: Callable[[str], object]
) -> Iterator[Trajectory]:
    """Yields the trajectories that are one row at most, and says of each other one that it is left out."""
    for value in values:
        if (n := len(rows(value))) > 1:
            leave_out(f"Trajectory {value.external_id!r} is left out: its calls are {n} rows, so it is discontinuous.")
        else:
            yield value


def _under(
    slug: str, run: models.Run, values: Iterator[Trajectory], leave_out: Callable[[str], object] | None
) -> Iterator[Trajectory]:
    """Yields the same trajectories with the rows that a strategy makes of them."""
    pairs = ((value, value) for value in values)
    with closing(replay_context.replayed(pairs, [slug], *replay_context.context_of(run))) as replayed:
        for value, (result,) in replayed:
            if not result.refused:
                yield replace(value, rows=result.rows)
                continue
            sentence = f"Trajectory {value.external_id!r} has no rows under {slug}: {result.refused}"
            if leave_out is None:
                raise Refusal(sentence, Remedy.OTHER_STRATEGY)
            leave_out(sentence)


def cause_of(run: models.Run, value: Trajectory) -> str:
    """The stored finding that explains why a trajectory has several rows, as a sentence; empty = none is stored."""
    finding = first_finding_of_stream(run, value.external_id)
    return "" if finding is None else f"Finding {finding.kind} at step {finding.step_index}: {finding.evidence}"


# -- as a job ----------------------------------------------------------------------------------------------------------


def do_job(job: Job, beat: Beat) -> None:
    """Write the run of a job to a file, as its options say."""
    drop_files()
    _end(job, [do_shard(job, beat)["report"]])


def cut(job: Job, beat: Beat) -> list[dict[str, int]]:
    """The ranges of trajectories that workers write side by side; empty = one worker writes the file."""
    drop_files()
    return cut_run(job, beat) if _join_of(ExportOptions(**job.options)) is not None else []


def do_shard(job: Job, beat: Beat) -> dict[str, Any]:
    """Write the trajectories of a job to its file, or those of a shard to a part of the file. Returns the column with
    what is told of it in the end."""
    whole = job.whole or job
    assert whole.run is not None
    plan = ExportOptions(**whole.options)
    records = finished_trajectories(whole.run, *range_of(job))
    if plan.only:
        records = passing(records, whole.run, plan.filters)
    total = records.count()
    beat(n_done=0, n_total=total)
    notes: list[str] = []
    n_done = 0

    def tick() -> None:
        nonlocal n_done
        n_done += 1
        beat.now_and_then(n_done=n_done)

    with draft_file(files.scratch_folder(), job.code) as file:
        part = write_part(whole.run, records, plan, file, tell=notes.append, tick=tick)
        if job is whole:
            sentence_of([part], plan)  # before a file is put
        file.flush()
        beat(n_done=total)
        files.put(key_of(job) if job is whole else part_of(job), Path(file.name), move=True)
    return {"report": {"part": list(part), "notes": notes[:MAX_NOTES], "n_notes": len(notes)}}


def join(job: Job, beat: Beat) -> None:
    """Make one file of those that the shards wrote, in their order, and end the export."""
    shards, join_files = shards_of(job), _join_of(ExportOptions(**job.options))
    assert join_files is not None
    reports = [shard.report or {} for shard in shards]
    sentence_of([WrittenPart(*report["part"]) for report in reports], ExportOptions(**job.options))

    def parts() -> Iterator[IO[bytes]]:
        for shard in shards:
            beat.now_and_then()
            with files.open_file(part_of(shard)) as part:
                yield part

    with draft_file(files.scratch_folder(), job.code) as file:
        join_files(parts(), file)
        file.flush()
        files.put(key_of(job), Path(file.name), move=True)
    _end(job, reports)
    for shard in shards:  # what a lost worker leaves goes with the file
        files.delete(part_of(shard))


def _join_of(options: ExportOptions) -> Join | None:
    target = options.target
    return FORMATS[options.format].join if target is None else target.join


def _end(job: Job, reports: Sequence[Mapping[str, Any]]) -> None:
    parts = [WrittenPart(*report["part"]) for report in reports]
    left_out = sentence_of(parts, ExportOptions(**job.options))
    notes = [note for report in reports for note in report["notes"]][:MAX_NOTES]
    more = sum(report["n_notes"] for report in reports) - len(notes)
    ended = end_job(
        job, Job.Status.DONE, n_written=sum(part.n for part in parts), n_done=job.n_total,
        bytes_written=files.size(key_of(job)),
        notes=[left_out, *notes, *[f"And {more:,} more."] * (more > 0)] if left_out else [],
        expires_at=timezone.now() + FILE_AGE,
    )
    if not ended:
        raise JobLost  # the worker that has the job now reads the parts


def part_of(shard: Job) -> str:
    """The file that a shard writes."""
    assert shard.whole is not None
    return f"{prefix_of(shard.whole.code)}part-{shard.options['first']}"


def prefix_of(code: str) -> str:
    """Begins the keys of the files of the export with this code."""
    return f"exports/{code}/"


def key_of(job: Job) -> str:
    """The file of an export that is done."""
    return f"{prefix_of(job.code)}run{suffix_of(ExportOptions(**job.options).format)}"


def drop_files() -> None:
    """Remove files that are no longer offered: they expired, their run was deleted, or their worker was lost. Raises
    :class:`rollouts.store.files.StorageDown`."""
    stored = {file.key.split("/")[1] for file in files.listed("exports/")}  # before asking which of them are needed
    for code in stored - files_in_use():
        files.delete_all(prefix_of(code))


def drop_files_of(codes: Collection[str]) -> None:
    """Remove the files of these exports. During an outage the sweep does it later."""
    try:
        for code in codes:
            files.delete_all(prefix_of(code))
    except StorageDown as error:
        log.warning("files of exports stay until the next sweep: %s", error)


# -- as people read of it ----------------------------------------------------------------------------------------------


def is_offered(job: Job) -> bool:
    """The job is an export whose file can be downloaded."""
    return job.status == Job.Status.DONE and job.expires_at is not None and job.expires_at > timezone.now()


def _details(options: Mapping[str, Any]) -> str:
    parts = [f" as {options.get('format', 'own_jsonl').replace('_', ' ')}"]
    if options.get("strategy"):
        parts.append(f"rows of {options['strategy'].replace('_', ' ')}")
    if options.get("pad_to"):
        parts.append(f"padded to {options['pad_to']:,} with id {options.get('pad_id', 0)}")
    if options.get("force"):
        parts.append("faulty rows too")
    if options.get("skip_discontinuous"):
        parts.append("discontinuous trajectories left out")
    if options.get("leave_out"):
        parts.append("faulty trajectories left out")
    if only := options.get("only"):
        parts.append("only " + ", ".join(f"{name} {value}".replace("_", " ") for name, value in only.items()))
    return ", ".join(parts)


def _done(job: Job) -> str:
    if not is_offered(job):
        return "Its file has expired. Export it again."
    return " ".join([f"{job.n_written:,} written.", *job.notes[:1]])


KIND = JobKind(
    "export",
    "Export",
    do_job,
    Sharing(cut, do_shard, join),
    activity="export started",
    details=_details,
    done=_done,
    cancelled="Cancelled after {done}; there is no file.",
)
"""A run is written to a file; ``options`` are those of :class:`ExportOptions`."""
