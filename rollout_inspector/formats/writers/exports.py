"""Writes rows as other trainers take them: a JSON object on a line for each row, or one object of parallel lists. A row
that breaks the target's invariants is refused with the finding that names the fault, unless the caller forces it or
leaves its trajectory out."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import IO, Any

import msgspec
import numpy as np

from rollout_inspector.diagnose import row_checks as checks
from rollout_inspector.diagnose.finding import Fault
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.formats.registry import Join, join_lines
from rollout_inspector.formats.writers import export_records as records
from rollout_inspector.formats.writers.export_records import Decode, Skyrl, Start, per_row
from rollout_inspector.refusal import Refusal, Remedy
from rollout_inspector.streams.prefix import merged_rows, row_of
from rollout_inspector.streams.trajectory import Row, Trajectory


def row_fault(
    row: Row, needs_logprobs: bool, needs_prompt: bool = False, longest: int | None = None, advantages: bool = True
) -> str | None:
    """The first fault of a row's arrays as a sentence; None = there is none. ``advantages``: the target writes some."""
    if not len(row.ids):
        return "It has no token ids: there is nothing to train on."
    if (fault := checks.length_mismatch(row) or checks.mask_overrun(row, False)) is not None:
        return _finding(fault)
    if not row.loss_mask.any():
        return _finding(Fault("mask_overrun", "None of its tokens is under the gradient.", 0, len(row.ids)))
    if needs_logprobs:
        if row.logprobs is None:
            return "It has no log-probabilities, and the target needs one for each trained token."
        if (fault := checks.logprob_invalid(row) or _above_zero(row)) is not None:
            return _finding(fault)
    fault = checks.advantage_misplaced(row) if advantages else None
    # An advantage beside every token, as NeMo RL writes it, is no fault: masked tokens are written with 0.
    if fault is not None and fault.severity != "warning":
        return _finding(fault)
    if needs_prompt and row.loss_mask[0]:
        return "Its first token is under the gradient, and nothing stands before it that could predict it."
    if longest is not None and len(row.ids) > longest:
        return f"It has {len(row.ids)} tokens, and rows are padded to {longest}."
    return None


def _finding(fault: Fault) -> str:
    return f"finding {fault.kind}: {fault.evidence} {KINDS[fault.kind].remedy}"


def _above_zero(row: Row) -> Fault | None:
    assert row.logprobs is not None
    bad = np.flatnonzero(row.loss_mask & (row.logprobs > 1e-3))
    if not len(bad):
        return None
    place = int(bad[0])
    return Fault("logprob_invalid", f"The logprob at offset {place} is above 0.", place, place + 1)


def one_row(trajectory: Trajectory, rows: Sequence[Row]) -> str | None:
    """A batch of whole trajectories has one element for each prompt."""
    if len(rows) == 1:
        return None
    if not rows:
        return "It has no rows."
    step = rows[1].step_indices[0] if rows[1].step_indices else None
    continues = np.array_equal(rows[1].ids[: len(rows[0].ids)], rows[0].ids)  # as a source of one row a step has them
    where = "" if step is None or continues else f": step {step} does not continue what came before it"
    return (
        f"It is {len(rows)} rows{where}, and a batch of whole trajectories holds one for each. "
        "Export it as skyrl_step_wise, or with a strategy that keeps one row."
    )


def has_reward(trajectory: Trajectory, rows: Sequence[Row]) -> str | None:
    """The trajectory needs a reward, or each row a column ``rewards``."""
    if trajectory.reward is not None or all("rewards" in row.columns for row in rows):
        return None
    return "It has no reward, and the target needs one."


_SPOOL_BYTES = 8 << 20
RowsOf = Callable[[Trajectory], Sequence[Row]]
FaultOf = Callable[[Trajectory, Sequence[Row]], str | None]


def rows_of(trajectory: Trajectory) -> Sequence[Row]:
    """The rows of the source, else the rows that follow from the steps."""
    return trajectory.rows or merged_rows(trajectory.steps)


def step_rows_of(trajectory: Trajectory) -> Sequence[Row]:
    """One row for each step. If each row of the source has one step, these rows are kept: their masks may say more."""
    one_each = trajectory.rows and all(len(row.step_indices) == 1 for row in trajectory.rows)
    if not trajectory.steps or (one_each and len(trajectory.rows) == len(trajectory.steps)):
        return trajectory.rows
    return [row_of(trajectory.steps, (n,)) for n in range(len(trajectory.steps))]


@dataclass(frozen=True)
class Export:
    """A target: how one trainer takes rows."""

    name: str
    title: str
    start: Start
    rows: RowsOf = rows_of
    faults: tuple[FaultOf, ...] = ()  # Checks of a trajectory together with its rows.
    needs_logprobs: bool = True
    needs_prompt: bool = True
    longest: int | None = None
    writes_advantages: bool = False
    columns: tuple[str, ...] = ()
    """Empty = one object on each line; else one JSON object with these lists, which have an element for each row."""
    more: Mapping[str, Any] = field(default_factory=dict)  # Further fields of that one object.

    @property
    def join(self) -> Join | None:
        """Makes one file of those of parts. One object of lists is written in one."""
        return None if self.columns else join_lines

    @property
    def suffix(self) -> str:
        return ".json" if self.columns else ".jsonl"


def padded(target: Export, length: int, pad_id: int = 0) -> Export:
    """The target with rows padded to ``length`` tokens. A longer row is refused, or cut when the caller forces it."""
    return replace(target, start=records.padded_sft(length, pad_id), longest=length)


def write(
    target: Export, trajectories: Iterable[Trajectory], file: IO[bytes], force: bool = False, *,
    leave_out: Callable[[str], object] | None = None, rows: RowsOf | None = None, decode: Decode | None = None,
    cause: Callable[[Trajectory], str] | None = None,
) -> int:
    """Returns the number of rows written. Raises :class:`Refusal` at the first bad row unless ``force``.

    ``leave_out`` is called with a sentence about each trajectory that has a bad row; none of its rows is written.
    ``rows`` returns the rows of a trajectory, ``decode`` the text of ids, ``cause`` a sentence that says why a
    trajectory has several rows.
    """

    def refuse(why: str) -> None:
        raise Refusal(why, Remedy.LEAVE_OUT)

    on_fault = None if force else leave_out or refuse
    records = _records(target, trajectories, on_fault, rows or target.rows, decode, cause)
    if not target.columns:
        return sum(1 for record in records if file.write(msgspec.json.encode(record) + b"\n"))
    return _write_columns(target, records, file, may_be_empty=force or leave_out is not None)


def _records(
    target: Export, trajectories: Iterable[Trajectory], told: Callable[[str], object] | None, rows_of_one: RowsOf,
    decode: Decode | None, cause: Callable[[Trajectory], str] | None,
) -> Iterator[dict[str, Any]]:
    recorder = target.start(decode)
    for trajectory in trajectories:
        rows = rows_of_one(trajectory)
        if told is not None and (why := _fault(target, trajectory, rows, cause)):
            told(why)
        else:
            yield from recorder(trajectory, rows)


def _fault(
    target: Export, trajectory: Trajectory, rows: Sequence[Row], cause: Callable[[Trajectory], str] | None
) -> str:
    """Why a trajectory cannot be written, as a sentence; empty = it can."""
    for n, row in enumerate(rows):
        fault = row_fault(row, target.needs_logprobs, target.needs_prompt, target.longest, target.writes_advantages)
        if fault is not None:
            return _sentence(target, f"Row {n} of trajectory", trajectory, fault)
    for check in target.faults:
        fault = check(trajectory, rows)
        if fault is not None:
            why = cause(trajectory) if cause is not None and check is one_row else ""
            return _sentence(target, "Trajectory", trajectory, f"{fault} {why}".strip())
    return ""


def _sentence(target: Export, what: str, trajectory: Trajectory, why: str) -> str:
    return f"{what} {trajectory.external_id!r} cannot be exported as {target.name}: {why}"


def _write_columns(target: Export, found: Iterator[dict[str, Any]], file: IO[bytes], may_be_empty: bool) -> int:
    """Writes each list to its own temporary file first, so that memory does not grow with the run."""
    n = 0
    with ExitStack() as stack:
        spools = {
            key: stack.enter_context(tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)) for key in target.columns
        }
        for n, record in enumerate(found, start=1):
            for key, spool in spools.items():
                spool.write((b"," if n > 1 else b"") + msgspec.json.encode(record[key]))
        if not n and not may_be_empty:
            raise Refusal(f"There is no row to write, and {target.name} has no batch without rows.")
        for place, (key, spool) in enumerate(spools.items()):
            file.write((b"," if place else b"{") + msgspec.json.encode(key) + b":[")
            spool.seek(0)
            while piece := spool.read(1 << 20):
                file.write(piece)
            file.write(b"]")
        for key, value in target.more.items():
            file.write(b"," + msgspec.json.encode(key) + b":" + msgspec.json.encode(value))
        file.write(b"}\n")
    return n


_SKYRL = (
    "prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "trajectory_ids",
)
_SKYRL_MORE = {"rollout_metrics": None, "rollout_expert_indices": None}

EXPORTS: dict[str, Export] = {
    target_format.name: target_format
    for target_format in (
        Export(
            "skyrl", "SkyRL GeneratorOutput, whole trajectories", lambda _: Skyrl(False), faults=(one_row, has_reward),
            columns=_SKYRL, more={**_SKYRL_MORE, "is_last_step": None},
        ),
        Export(
            "skyrl_step_wise", "SkyRL GeneratorOutput, step-wise", lambda _: Skyrl(True), step_rows_of,
            faults=(has_reward,), columns=(*_SKYRL, "is_last_step"), more=_SKYRL_MORE,
        ),
        Export("nemo_message_log", "NeMo RL message log", records.nemo, needs_prompt=False),
        Export(
            "trl", "TRL rollout_func values", per_row(records.trl),
            columns=("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "external_id"),
        ),
        Export("verl", "verl AgentLoopOutput", lambda _: records.verl),
        Export(
            "prime_rl", "prime-rl TrainingSample", per_row(records.prime_rl), needs_prompt=False,
            writes_advantages=True,
        ),
        Export("tinker", "Tinker Datum", per_row(records.tinker), writes_advantages=True),
        Export("sft", "Rows for supervised training", per_row(records.sft), needs_logprobs=False),
    )
}
"""One line adds a target."""
