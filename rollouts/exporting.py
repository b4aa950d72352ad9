"""Stored trajectories written in any format that we write, with their own rows or with those of another strategy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import IO

from django.db.models import QuerySet

from rollouts import models, replays, selectors
from rollouts.diagnosis import codec_of
from rollouts.formats import FORMATS, exports
from rollouts.formats.exports import EXPORTS, Export, ExportRefused
from rollouts.tito.diagnose.finding import Axis, Severity
from rollouts.tito.strategies import STRATEGIES
from rollouts.tito.strategies.replay import replay
from rollouts.tito.trajectory import Row, Trajectory

BATCH = 50
WRITERS = (*(one.name for one in FORMATS.values() if one.write), *EXPORTS)
"""Names of what can be written: whole trajectories, then rows."""


def is_rows(name: str) -> bool:
    """Whether a format holds training rows; else it holds trajectories."""
    return name in EXPORTS


def suffix_of(name: str) -> str:
    return EXPORTS[name].suffix if name in EXPORTS else FORMATS[name].suffix


def write_run(
    run: models.Run,
    wanted: QuerySet[models.Trajectory],
    name: str,
    file: IO[bytes],
    *,
    force: bool = False,
    strategy: str = "",
    target: Export | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> int:
    """Write the finished ones of ``wanted``; gives how many rows or trajectories.

    ``strategy`` replaces the rows by those that it would have made; ``target`` stands in for the format's own (rows
    that are padded). Raises :class:`ExportRefused` with a sentence. With ``force``, a trajectory that the strategy
    cannot be replayed over is left out, and ``tell`` is called with a sentence about it.
    """
    records = wanted.filter(status=models.Trajectory.Status.DONE).order_by("index").iterator(BATCH)
    # A refusal leaves in the middle, and the cursor must not outlive its connection.
    with closing(loaded(records)) as values:
        del records
        return _write(run, values, name, file, force, strategy, target, tell)


def _write(
    run: models.Run,
    values: Iterator[Trajectory],
    name: str,
    file: IO[bytes],
    force: bool,
    strategy: str,
    target: Export | None,
    tell: Callable[[str], object],
) -> int:
    if strategy:
        values = _under(strategy, run, values, force, tell)
    if not is_rows(name):
        write = FORMATS[name].write
        assert write is not None
        return write(values, file)
    codec = codec_of(run)
    return exports.write(
        target or EXPORTS[name],
        values,
        file,
        force,
        rows=_own_rows if strategy else None,
        decode=None if codec is None else codec.decode,
        cause=lambda value: cause_of(run, value),
    )


def loaded(records: Iterable[models.Trajectory]) -> Generator[Trajectory, None, None]:
    """Their values, some at a time."""
    pile: list[models.Trajectory] = []
    for record in records:
        pile.append(record)
        if len(pile) == BATCH:
            yield from selectors.load_trajectories(pile)
            pile = []
    if pile:
        yield from selectors.load_trajectories(pile)


def _own_rows(trajectory: Trajectory) -> Sequence[Row]:
    return trajectory.rows


def _under(
    slug: str, run: models.Run, values: Iterator[Trajectory], force: bool, tell: Callable[[str], object]
) -> Iterator[Trajectory]:
    """The same trajectories with the rows that a strategy would have made."""
    try:
        context, tokenizer = replays.context_of(run)
    except replays.CannotReplay as error:
        raise ExportRefused(str(error)) from error
    for value in values:
        made = replay(replays.complete_replies(value, tokenizer), STRATEGIES[slug], context)
        if not made.refused:
            yield replace(value, rows=made.rows)
            continue
        sentence = f"Trajectory {value.external_id!r} has no rows under {slug}: {made.refused}"
        if not force:
            raise ExportRefused(f"{sentence} Choose another strategy, or leave such trajectories out with --force.")
        tell(f"Left out: {sentence}")


def cause_of(run: models.Run, value: Trajectory) -> str:
    """The stored finding that made a trajectory more than one row, as a sentence; empty = none is stored."""
    found = (
        models.Finding.objects.filter(run=run, trajectory__external_id=value.external_id, axis=Axis.STREAM)
        .exclude(severity=Severity.INFO)
        .order_by("step_index", "start")
        .first()
    )
    return "" if found is None else f"Finding {found.kind} at step {found.step_index}: {found.evidence}"
