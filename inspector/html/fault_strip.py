"""A picture of a fault, a few tokens wide: the real tokens around its place, with what is wrong marked."""

from __future__ import annotations

import numpy as np

from inspector.html.token_diff import token_diff
from rollout_inspector.diagnose.finding import Axis
from rollout_inspector.streams.prefix import merge_steps
from rollout_inspector.streams.trajectory import NO_IDS, Tokens, Trajectory, plain_tokens
from rollout_inspector.text.html.tokens import Html, Marks, TokenPainter
from rollouts.store.models import StoredFinding

BEFORE, BEHIND = 3, 2
MAX_TOKENS = 8
"""The most tokens of a fault that are drawn."""

Strip = list[tuple[str, Html]]
"""Name and HTML of each side."""


def fault_strip(painter: TokenPainter, trajectory: Trajectory, finding: StoredFinding) -> Strip:
    """Both sides of a break, or the faulty tokens of a row. Empty where the finding is about no tokens."""
    tokens, expected = _stream(trajectory, finding), finding.expected_ids
    expected = NO_IDS if expected is None else expected
    start, stop = finding.start, min(finding.stop, finding.start + MAX_TOKENS)
    if start == stop and not len(expected):
        return []
    if finding.axis == Axis.ROW and not len(expected):
        around = tokens.slice(max(start - BEFORE, 0), stop + BEHIND)
        return [("trained" if around.loss_mask.any() else "row", painter.window(around, Marks(((start, stop),))))]
    is_whole = max(finding.stop - start, len(expected)) <= MAX_TOKENS
    before, behind = tokens.ids[max(start - BEFORE, 0) : start], tokens.ids[stop : stop + BEHIND * is_whole]
    sides = token_diff(painter, expected[:MAX_TOKENS], tokens.ids[start:stop], before, behind)
    name = "template" if finding.axis == Axis.DELTA else "sampled"
    return [(name, sides[0]), ("trained" if finding.axis == Axis.ROW else "read next", sides[1])]


def _stream(trajectory: Trajectory, finding: StoredFinding) -> Tokens:
    """The tokens that the place of a finding counts in."""
    if finding.step_index is not None:
        return plain_tokens(trajectory.steps[finding.step_index].stream)
    index = finding.row_index or 0
    if not trajectory.rows:
        return plain_tokens(trajectory.steps[merge_steps(trajectory.steps)[index][-1]].stream)
    row = trajectory.rows[index]
    is_whole = len(row.loss_mask) == len(row.ids)
    return plain_tokens(row.ids, mask=np.asarray(row.loss_mask, dtype=np.bool_) if is_whole else None)
