"""The columns of log-probabilities of a run: what was recorded, and what engines scored later. Any two can be compared.
A page that compares two columns asks :func:`columns_of` for their names, and reads them by :func:`load_compared`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from django.db import transaction
from django.db.models import Count, Exists, QuerySet, Sum
from django.utils import timezone

from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS, GapFigures, added, gap_of_rows
from rollout_inspector.diagnose.gap.report import EnginePass
from rollout_inspector.streams.alternatives import MAX_KEPT
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Row, Trajectory, is_teacher
from rollouts.store.bulk import bare, insert_whole, reserve_keys
from rollouts.store.models import Job, RowScores, Run, ScoredColumn, StoredStep, StoredTrajectory
from rollouts.store.models.scored_columns import DECODED
from rollouts.store.trajectories.retokenized import checksum
from rollouts.store.trajectories.trajectories import finished_trajectories, load_trajectories, trajectory_batches

Scored = tuple[int, Sequence[Row], Sequence[Floats]]
"""The primary key of a trajectory, its rows, and the scores ``[T]`` of each."""
SAMPLER = "sampler"  # The name of the column that the sampler recorded.
SCORED = "scored:"  # The names of columns that an engine made later begin so; the code of the column follows.
BATCH = 20  # Trajectories that are loaded at once.
SAMPLED_TRAJECTORIES = 5  # Trajectories of a run that are read to learn which columns its source recorded.


def begin_column(
    run: Run, model: str, engine: str, engine_version: str, weights: str, user: Any = None, temperature: float = 1.0
) -> ScoredColumn:
    """The column of a run that this engine with these weights makes: the one that is there, or a new one."""
    names = {"model": model, "engine": engine[:60], "engine_version": engine_version[:60], "weights": weights[:64]}
    column, _ = ScoredColumn.objects.get_or_create(
        run=run, **names, temperature=temperature, defaults={"created_by": user}
    )
    return column


def keep_scores(column: ScoredColumn, found: Sequence[Scored]) -> None:
    """Put the scores of these trajectories in place of older ones. A trajectory that was deleted is left out. Raises
    ``ScoredColumn.DoesNotExist`` where somebody deleted the column."""
    keys = [key for key, _, _ in found]
    with transaction.atomic():
        # The job of a run is one at a time, but the column may have been deleted meanwhile.
        ScoredColumn.objects.select_for_update().get(pk=column.pk)
        RowScores.objects.filter(column=column, trajectory__in=keys).delete()
        locked = column.run.trajectories.select_for_update(of=("self",)).filter(pk__in=keys).order_by("pk")
        there = set(locked.values_list("pk", flat=True))
        scored = [entry for entry in found if entry[0] in there]
        own = reserve_keys(RowScores, len(scored))
        insert_whole([_stored(next(own), column, *entry) for entry in scored])


def _stored(key: int, column: ScoredColumn, trajectory: int, rows: Sequence[Row], values: Sequence[Floats]) -> Any:
    gap = gap_of_rows(_compared(row, row.logprobs, scores) for row, scores in zip(rows, values, strict=True))
    return bare(
        RowScores,
        id=key,
        column_id=column.pk,
        trajectory_id=trajectory,
        rows=[number for row in rows for number in mark_of(row)],
        values=np.concatenate([NO_IDS.astype(np.float32), *values]),
        gap=None if gap is None or column.is_of_kept_sets else gap.to_json(),
    )


def end_column(column: ScoredColumn) -> None:
    """Sum the figures of a column and offer it. It may be called again when trajectories were added."""
    n, tokens, gaps = 0, 0, GapFigures()
    for gap, values in column.scores.order_by("pk").values_list("gap", "values").iterator(100):
        n, tokens = n + 1, tokens + int(np.count_nonzero(~np.isnan(values)))
        if gap is not None:
            gaps = added([gaps, GapFigures.from_json(gap)])
    column.n_trajectories, column.n_tokens, column.finished_at = n, tokens, timezone.now()
    column.gap = gaps.to_json() if gaps.tokens else None
    column.save(update_fields=["n_trajectories", "n_tokens", "finished_at", "gap"])


def delete_column(column: ScoredColumn) -> None:
    """Remove a column with its scores."""
    with transaction.atomic():
        scores = RowScores.objects.filter(column=column)
        scores._raw_delete(scores.db)
        column.delete()


@dataclass(frozen=True)
class LogprobColumn:
    """A column of log-probabilities of a run."""

    name: str
    """For addresses and :func:`load_compared`: ``sampler``, a trainer's column, or ``scored:CODE``."""
    title: str
    """For people."""
    model: str = ""
    """Of a scored column: the served model."""
    engine: str = ""
    """Of a scored column: the engine and its version."""
    weights: str = ""
    """Of a scored column: a digest of the weights; empty = not known."""
    temperature: float | None = None
    """Of a scored column: the one that it was made at; None = it was recorded."""
    made_at: datetime | None = None
    """When an engine made it; None = it was recorded."""


def columns_of(run: Run) -> list[LogprobColumn]:
    """The columns of a run that can be compared: the sampler's, the trainer's, the teachers', then the scored ones by
    their age. What was recorded is looked for in the first :data:`SAMPLED_TRAJECTORIES` finished trajectories. Scored
    columns that are not whole are left out. A fixed number of queries."""
    done = run.trajectories.filter(status=StoredTrajectory.Status.DONE).order_by("index")
    values = load_trajectories(list(done[:SAMPLED_TRAJECTORIES]))
    rows = [row for value in values for row in value.rows or merged_rows(value.steps)]
    names = [SAMPLER] if any(row.logprobs is not None for row in rows) else []
    names += [name for name in TRAINER_LOGPROBS if any(name in row.columns for row in rows)]
    columns = [LogprobColumn(name, "sampler, as recorded" if name == SAMPLER else f"trainer, {name}") for name in names]
    teachers = sorted({name for row in rows for name in row.columns if is_teacher(name)})
    columns += [LogprobColumn(name, f"teacher, {name}") for name in teachers]
    whole = [column for column in scored_columns(run) if column.finished_at is not None]
    return columns + [scored_value(column) for column in whole if not column.is_of_kept_sets]


def _compared(row: Row, sampler: Floats | None, trainer: Floats | None) -> Row:
    """The row with these two columns ``[T]`` in place of those of sampler and trainer; None = none."""
    columns = {name: values for name, values in row.columns.items() if name not in TRAINER_LOGPROBS}
    if trainer is not None:
        columns[TRAINER_LOGPROBS[0]] = trainer
    return replace(row, logprobs=sampler, columns=columns)


def scored_value(column: ScoredColumn) -> LogprobColumn:
    """A scored column as a value."""
    engine = f"{column.engine} {column.engine_version}".strip()
    return LogprobColumn(
        f"{SCORED}{column.code}", str(column), column.model, engine, column.weights, column.temperature,
        column.finished_at,
    )


def scored_columns(run: Run) -> list[ScoredColumn]:
    """The columns that engines made of a run, the oldest first, those included that are not whole. One query."""
    return list(run.scored_columns.select_related("created_by").order_by("pk"))


def passes_of(run: Run) -> tuple[list[EnginePass], str]:
    """What engines say of a run that scored it with a replay, the oldest first. Beside it stands the name of the oldest
    column of the mass of kept sets; empty = there is none. One query."""
    whole = [column for column in scored_columns(run) if column.finished_at is not None]

    def made_by(column: ScoredColumn) -> tuple[str, str, str]:
        engine = f"{column.engine.removesuffix(DECODED)} {column.engine_version}".strip()
        return engine, f"{column.model} {column.weights}".strip(), f"{column.temperature:g}"

    read = {made_by(column): column for column in whole if not column.is_decoded}
    replays = [
        EnginePass(f"{SCORED}{read[key].code}", f"{SCORED}{column.code}", *key[:2])
        for column in whole if column.is_decoded and (key := made_by(column)) in read
    ]
    return replays, next((f"{SCORED}{column.code}" for column in whole if column.is_of_kept_sets), "")


def has_kept_sets(run: Run) -> bool:
    """Whether calls of a run told which ids a token could be drawn from, in sets that are small enough to keep. One
    query."""
    return StoredStep.objects.filter(trajectory__run=run, least_kept__lte=MAX_KEPT).exists()


def newest_noise(run: Run) -> dict[str, Any] | None:
    """How far an engine differed from itself when a run was last scored with a calibration. One query."""
    done = run.jobs.filter(kind="rescore", status=Job.Status.DONE, report__noise__isnull=False).order_by("-pk")
    return next((job.report["noise"] | {"by": job.options["engine"]} for job in done[:1] if job.report), None)


def find_scored_column(run: Run, code: str) -> ScoredColumn | None:
    """A column of a run by its code. One query."""
    return run.scored_columns.filter(code=code[:16].replace("\0", "")).first()


def load_compared(
    trajectories: Sequence[StoredTrajectory], sampler: str = SAMPLER, trainer: str = "", more: Sequence[str] = ()
) -> Iterator[Trajectory]:
    """The values of some trajectories of one run, whose ``rows`` hold two columns to compare.

    ``sampler`` and ``trainer`` are names of :func:`columns_of`; an empty ``trainer`` leaves the recorded columns. Each
    row has the first as its ``logprobs`` and the second as its trainer's column, None where the trajectory lacks it.
    So :func:`gap_of_rows` compares any two. ``more``: scored columns that each row holds besides, by their names. The
    rows of a trajectory that has steps alone follow from them. A fixed number of queries for all of them; an unknown
    name compares nothing.
    """
    names = {name.removeprefix(SCORED): name for name in (sampler, trainer, *more) if name.startswith(SCORED)}
    scores = _scores(trajectories, list(names))
    for record, value in zip(trajectories, load_trajectories(trajectories), strict=True):
        rows = value.rows or tuple(merged_rows(value.steps))
        values_of = {name: _values(scores.get((record.pk, code)), rows) for code, name in names.items()}

        def column(row: Row, index: int, name: str, held: Mapping[str, Sequence[Any]] = values_of) -> Floats | None:
            return held[name][index] if name in held else row.logprobs if name == SAMPLER else row.columns.get(name)

        compared = (
            _compared(row, column(row, n, sampler), column(row, n, trainer))
            if trainer
            else replace(row, logprobs=column(row, n, sampler))
            for n, row in enumerate(rows)
        )
        beside = [
            {name: values for name in more if (values := column(row, n, name)) is not None}
            for n, row in enumerate(rows)
        ]
        rows = tuple(replace(row, columns={**row.columns, **columns})
                     for row, columns in zip(compared, beside, strict=True))
        yield replace(value, rows=rows)


def gap_of_columns(run: Run, sampler: str, trainer: str) -> GapFigures:
    """How far two columns of a run lie apart: the second minus the first, over the tokens under the loss mask. It reads
    every finished trajectory, so a page asks it of small runs alone."""
    done = run.trajectories.filter(status=StoredTrajectory.Status.DONE).order_by("index")
    total = GapFigures()
    for batch in trajectory_batches(done, BATCH):
        gaps = (gap_of_rows(value.rows) for value in load_compared(batch, sampler, trainer))
        total = added([total, *(gap for gap in gaps if gap is not None)])
    return total


def _scores(trajectories: Sequence[StoredTrajectory], codes: Sequence[str]) -> dict[tuple[int, str], RowScores]:
    if not codes:
        return {}
    scores = RowScores.objects.filter(
        trajectory__in=[row.pk for row in trajectories], column__code__in=codes, column__finished_at__isnull=False
    ).select_related("column")
    return {(row.trajectory_id, row.column.code): row for row in scores}


def _values(held: RowScores | None, rows: Sequence[Row]) -> list[Floats | None]:
    """The scores ``[T]`` of each row. None where none are stored, or where they were stored for other ids."""
    if held is None:
        return [None] * len(rows)
    values: list[Floats | None] = [None] * len(rows)
    start = 0
    for n, (length, mark) in enumerate(held.rows.reshape(-1, 2).tolist()):
        if n < len(rows) and (length, mark) == mark_of(rows[n]):
            values[n] = held.values[start : start + length]
        start += length
    return values


def mark_of(row: Row) -> tuple[int, int]:
    """By what stored scores know the row again that they belong to: its number of ids, and their checksum."""
    return len(row.ids), checksum(np.asarray(row.ids))


def not_scored(column: ScoredColumn, found: QuerySet[StoredTrajectory]) -> QuerySet[StoredTrajectory]:
    """Those of a query that have no scores in a column."""
    return found.exclude(pk__in=RowScores.objects.filter(column=column).values("trajectory"))


def count_scored(column: ScoredColumn) -> int:
    """How many trajectories have scores in a column. One query."""
    return int(column.scores.aggregate(n=Count("pk"))["n"])


class NamedCause(NamedTuple):
    """A cause of :data:`rollout_inspector.diagnose.gap.cause_kinds.CAUSES` in a run."""

    cause: str  # Its name.
    from_step: int | None  # The first training step that shows it; None = the run has no training steps.


def newest_report(run: Run) -> tuple[str, int, str] | None:
    """Key of the newest report, trajectories that the run had finished then (0 = not told), and column of the trainer
    (empty = as recorded). None = no report. Those of a teacher are left out. One query."""
    done = run.jobs.filter(kind="gap", status=Job.Status.DONE, report__key__isnull=False).order_by("-pk")
    done = done.exclude(options__has_key="teacher")
    for key, finished, compared in done.values_list("report__key", "report__finished", "report__compared")[:1]:
        return key, finished or 0, (compared or ["", ""])[1]
    return None


def named_causes(runs: Collection[Run]) -> dict[int, list[NamedCause]]:
    """Key of a run -> the causes that its newest report names, in the order of the rules. One query. A report of two
    other columns than the recorded ones does not speak of sampler and trainer, and is left out."""
    done = Job.objects.filter(run__in=[run.pk for run in runs], kind="gap", status=Job.Status.DONE)
    by_run: dict[int, list[NamedCause]] = {}
    for key, causes, compared in done.order_by("pk").values_list("run_id", "report__causes", "report__compared"):
        if key is not None and causes is not None and not (compared or ["", ""])[1]:
            by_run[key] = [NamedCause(cause["cause"], cause["from_step"]) for cause in causes]
    return by_run


RECENT = 200  # Trajectories at the end of a run that are asked for a gap where the answer must be cheap.


def has_gap(run: Run, recent: int | None = None) -> bool:
    """Whether a trajectory of a run has a gap. ``recent``: one of so many last ones, which is cheap in a large run."""
    if recent is None:
        return run.trajectories.exclude(gap=None).exists()
    return _recent_with_gap(run, recent).exists()


def shows_gap(run: Run) -> bool:
    """Whether one of its last trajectories has a gap, or two of its columns were compared. One query."""
    compared = Exists(run.jobs.filter(kind="gap"))
    return Run.objects.filter(Exists(_recent_with_gap(run, RECENT)) | compared, pk=run.pk).exists()


def _recent_with_gap(run: Run, recent: int) -> QuerySet[StoredTrajectory]:
    last = run.trajectories.order_by("-index").values("pk")[:recent]
    return StoredTrajectory.objects.filter(pk__in=last).exclude(gap=None)


def trajectories_with_gap(run: Run, recorded: bool) -> tuple[list[tuple[int, int]], int, int]:
    """Key and tokens of the finished trajectories; the tokens that they train; how many were left out. Three queries.
    ``recorded``: those without a recorded gap are left out."""
    finished, n_without = finished_trajectories(run), 0
    if recorded:
        n_without = finished.filter(gap__isnull=True).count()
        finished = finished.exclude(gap=None)
    trained: int = finished.order_by().aggregate(n=Sum("n_trained", default=0))["n"]
    return list(finished.values_list("pk", "n_tokens")), trained, n_without
