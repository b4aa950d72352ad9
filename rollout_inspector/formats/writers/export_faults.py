"""Why a row must not be written for a trainer: the kind of finding that the diagnosis has for the fault."""

from collections.abc import Sequence

import numpy as np

from rollout_inspector.diagnose import row_checks as checks
from rollout_inspector.diagnose.finding import Fault
from rollout_inspector.diagnose.kinds import KINDS
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
