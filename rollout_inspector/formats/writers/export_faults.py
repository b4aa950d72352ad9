"""Why a row must not be written for a trainer: the kind of finding that the diagnosis has for the fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_inspector.diagnose import row_checks as checks
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.diagnose.row_checks import RowFault
from rollout_inspector.streams.trajectory import Row, Trajectory


@dataclass(frozen=True)
class ExportFault:
    """Why a row or a trajectory is not written."""

    reason: str
    """A sentence."""
    kind: str = ""
    """The kind of finding; empty = the row has no fault, but lacks something that the target needs."""

    def __str__(self) -> str:
        if not self.kind:
            return self.reason
        remedy = KINDS[self.kind].remedy
        return f"finding {self.kind}: {self.reason} {remedy}"


def row_fault(
    row: Row, needs_logprobs: bool, needs_prompt: bool = False, longest: int | None = None, advantages: bool = True
) -> ExportFault | None:
    """The first fault of a row's arrays; None = there is none. ``advantages``: the target writes advantages."""
    if not len(row.ids):
        return ExportFault("It has no token ids: there is nothing to train on.")
    if (fault := checks.length_mismatch(row) or checks.mask_overrun(row, False)) is not None:
        return _named(fault)
    if not row.loss_mask.any():
        return ExportFault("None of its tokens is under the gradient.", "mask_overrun")
    if needs_logprobs:
        if row.logprobs is None:
            return ExportFault("It has no log-probabilities, and the target needs one for each trained token.")
        if (fault := checks.logprob_invalid(row) or _above_zero(row)) is not None:
            return _named(fault)
    fault = checks.advantage_misplaced(row) if advantages else None
    # An advantage beside every token, as NeMo RL writes it, is no fault: masked tokens are written with 0.
    if fault is not None and fault.severity != "warning":
        return _named(fault)
    if needs_prompt and row.loss_mask[0]:
        return ExportFault("Its first token is under the gradient, and nothing stands before it that could predict it.")
    if longest is not None and len(row.ids) > longest:
        return ExportFault(f"It has {len(row.ids)} tokens, and rows are padded to {longest}.")
    return None


def _named(found: RowFault) -> ExportFault:
    return ExportFault(found.evidence, found.kind)


def _above_zero(row: Row) -> RowFault | None:
    assert row.logprobs is not None
    bad = np.flatnonzero(row.loss_mask & (row.logprobs > 1e-3))
    if not len(bad):
        return None
    place = int(bad[0])
    return RowFault("logprob_invalid", place, place + 1, f"The logprob at offset {place} is above 0.")


def one_row(trajectory: Trajectory, rows: Sequence[Row]) -> ExportFault | None:
    """A batch of whole trajectories has one element for each prompt."""
    if len(rows) == 1:
        return None
    if not rows:
        return ExportFault("It has no rows.")
    step = rows[1].step_indices[0] if rows[1].step_indices else None
    continues = np.array_equal(rows[1].ids[: len(rows[0].ids)], rows[0].ids)  # as a source of one row a step has them
    where = "" if step is None or continues else f": step {step} does not continue what came before it"
    return ExportFault(
        f"It is {len(rows)} rows{where}, and a batch of whole trajectories holds one for each. "
        "Export it as skyrl_step_wise, or with a strategy that keeps one row."
    )


def has_reward(trajectory: Trajectory, rows: Sequence[Row]) -> ExportFault | None:
    """The trajectory needs a reward, or each row a column ``rewards``."""
    if trajectory.reward is not None or all("rewards" in row.columns for row in rows):
        return None
    return ExportFault("It has no reward, and the target needs one.")
