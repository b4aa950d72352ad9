"""What differs between two sides as HTML: all of a comparison, or a finding with a box for each token."""

from collections.abc import Iterable

import numpy as np

from rollout_inspector.diagnose.finding import Axis
from rollout_inspector.streams.align import AlignedGroup, align_ids
from rollout_inspector.streams.prefix import merge_steps
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Tokens, Trajectory, plain_tokens
from rollout_inspector.text.html.text import bytes_text_html
from rollout_inspector.text.html.tokens import Html, Marks, TokenPainter
from rollouts.store.models import StoredFinding

MAX_BOXES = 12  # The most differing tokens of one side that are drawn.

MARGIN = 4  # A character has at most four bytes, so it reaches over at most so many tokens.


def marked(html: str, tag: str) -> Html:
    """Tokens that one side alone has: ``del`` where the other side lacks them, ``ins`` where it has them besides.
    ``html`` is escaped already. Of no tokens nothing is drawn."""
    return Html(f"<{tag}>{html}</{tag}>" if html else "")


def marked_tokens(painter: TokenPainter, left: Tokens, right: Tokens) -> tuple[Html, Html]:
    """Both sides of a difference. Tokens that the other side lacks stand in ``<del>`` and ``<ins>``."""
    if np.array_equal(left.ids, right.ids):  # another mask alone
        return painter.window(left), painter.window(right)
    common = len(left) > 1 and len(right) > 1 and np.isin(left.ids, right.ids).any()
    groups = align_ids(left.ids, right.ids) if common else [AlignedGroup(0, len(left), 0, len(right), False)]
    return (
        _marked(painter, left, "del", [(group.left_start, group.left_stop, group.equal) for group in groups]),
        _marked(painter, right, "ins", [(group.right_start, group.right_stop, group.equal) for group in groups]),
    )


def _marked(painter: TokenPainter, tokens: Tokens, tag: str, spans: Iterable[tuple[int, int, bool]]) -> Html:
    html = []
    for start, stop, equal in spans:
        if start < stop:
            margin = min(start, MARGIN), min(len(tokens) - stop, MARGIN)
            part = tokens.slice(tokens.start + start - margin[0], tokens.start + stop + margin[1])
            window = painter.window(part, margin=margin)
            html.append(window if equal else marked(window, tag))
    return Html("".join(html))


def token_diff(painter: TokenPainter, left: Ids, right: Ids, before: Ids, behind: Ids) -> tuple[Html, Html]:
    """Both sides between the tokens that stand ``before`` and ``behind`` them. What differs is ``<del>`` and ``<ins>``.
    A side of more than ``MAX_BOXES`` tokens ends with the number of the others, and both sides end there."""
    groups = align_ids(left, right)
    is_whole = max(len(left), len(right)) <= MAX_BOXES
    tail = _boxes(painter, behind) if is_whole else ""
    head = _boxes(painter, before)
    sides = []
    for ids, tag, spans in (
        (left, "del", [(group.left_start, group.left_stop, group.equal) for group in groups]),
        (right, "ins", [(group.right_start, group.right_stop, group.equal) for group in groups]),
    ):
        html = [head]
        for start, stop, equal in spans:
            boxes = _boxes(painter, ids[start : min(stop, MAX_BOXES)])
            html.append(boxes if equal else marked(boxes, tag))
        if not len(ids):
            html.append("<em>nothing</em>")
        n_more = len(ids) - MAX_BOXES
        html.append(f" <em>and {n_more:,} more</em>" if n_more > 0 else "")
        sides.append(Html("".join([*html, tail])))
    return sides[0], sides[1]


def _boxes(painter: TokenPainter, ids: Ids) -> str:
    pieces = painter.pieces(ids)
    return "".join(
        f"<i>{'' if piece is None else bytes_text_html(piece, spaces=True)}<small>{token_id}</small></i>"
        for token_id, piece in zip(ids.tolist(), pieces, strict=True)
    )


BEFORE, BEHIND = 3, 2
MAX_TOKENS = 8  # The most tokens of a fault that are drawn.

Strip = list[tuple[str, Html]]  # Name and HTML of each side.


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
