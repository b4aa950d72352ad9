"""Stored trajectories written in any format that we write, with their own rows or with those of another strategy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import IO, Any

from django.db.models import QuerySet

from rollouts import models, replays, selectors
from rollouts.diagnosis import codec_of
from rollouts.formats import FORMATS, exports
from rollouts.formats.exports import EXPORTS, Export, ExportRefused, padded
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


@dataclass(frozen=True)
class Wanted:
    """How a run is to be written. Raises ``ValueError`` with a sentence where the parts do not go together."""

    format: str = "own_jsonl"
    strategy: str = ""
    """Whose rows are written; empty = those that are stored."""
    force: bool = False
    """Rows that break the target's invariants are written too, and what the strategy refuses is left out."""
    pad_to: int | None = None
    pad_id: int = 0

    def __post_init__(self) -> None:
        if self.format not in WRITERS:
            raise ValueError(f"There is no format {self.format[:40]!r}. Known: {', '.join(WRITERS)}.")
        if self.strategy and self.strategy not in STRATEGIES:
            raise ValueError(f"There is no strategy {self.strategy[:40]!r}. Known: {', '.join(STRATEGIES)}.")
        if self.pad_to is not None and (self.format != "sft" or self.pad_to < 1):
            raise ValueError("Padding takes a number of tokens from 1 on, and goes with the format sft alone.")

    def as_options(self) -> dict[str, Any]:
        """As a job keeps it: what is not the default."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @property
    def target(self) -> Export | None:
        """The row format; None for whole trajectories."""
        if self.pad_to is not None:
            return padded(EXPORTS["sft"], self.pad_to, self.pad_id)
        return EXPORTS.get(self.format)


def write_run(
    run: models.Run,
    records: QuerySet[models.Trajectory],
    wanted: Wanted,
    file: IO[bytes],
    *,
    tell: Callable[[str], object] = lambda _: None,
    tick: Callable[[], object] = lambda: None,
) -> int:
    """Write the finished ones of ``records``; gives how many rows or trajectories.

    ``tick`` is called for each trajectory that has been read. Raises :class:`ExportRefused` with a sentence. With
    ``force``, what the strategy cannot be replayed over is left out, and ``tell`` is called with a sentence about it.
    """
    finished = records.filter(status=models.Trajectory.Status.DONE).order_by("index").iterator(BATCH)
    # A refusal leaves in the middle, and the cursor must not outlive its connection.
    with closing(loaded(finished)) as values:
        del finished
        n = _write(run, _ticking(values, tick), wanted, file, tell)
    if wanted.strategy and not n:
        name = wanted.strategy.replace("_", " ")
        raise ExportRefused(f"The strategy {name} makes no row of any trajectory here, so there is nothing to write.")
    return n


def _ticking(values: Iterator[Trajectory], tick: Callable[[], object]) -> Iterator[Trajectory]:
    for value in values:
        yield value
        tick()


def _write(
    run: models.Run, values: Iterator[Trajectory], wanted: Wanted, file: IO[bytes], tell: Callable[[str], object]
) -> int:
    if wanted.strategy:
        values = _under(wanted.strategy, run, values, wanted.force, tell)
    if (target := wanted.target) is None:
        write = FORMATS[wanted.format].write
        assert write is not None
        return write(values, file)
    codec = codec_of(run)
    return exports.write(
        target,
        values,
        file,
        wanted.force,
        rows=_own_rows if wanted.strategy else None,
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
