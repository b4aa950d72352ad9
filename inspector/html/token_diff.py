"""The two sides of a finding as HTML: a box for each token, with its text and its id."""

from __future__ import annotations

from django.utils.safestring import SafeString, mark_safe

from inspector.html.text import bytes_text_html
from inspector.html.tokens import TokenPainter
from rollouts.tito.align import align_ids
from rollouts.tito.trajectory import Ids

MAX_BOXES = 12
"""The most differing tokens of one side that are drawn."""


def token_diff(painter: TokenPainter, left: Ids, right: Ids, before: Ids, behind: Ids) -> tuple[SafeString, SafeString]:
    """Both sides between the tokens that stand ``before`` and ``behind`` them. What differs is ``<del>`` and ``<ins>``.

    A side of more than ``MAX_BOXES`` tokens ends with the number of the others, and both sides end there.
    """
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
            if drawn := _boxes(painter, ids[start : min(stop, MAX_BOXES)]):
                html.append(drawn if equal else f"<{tag}>{drawn}</{tag}>")
        if not len(ids):
            html.append(f"<{tag}><em>nothing</em></{tag}>")
        rest = len(ids) - MAX_BOXES
        html.append(f" <em>and {rest:,} more</em>" if rest > 0 else "")
        sides.append(mark_safe("".join([*html, tail])))
    return sides[0], sides[1]


def _boxes(painter: TokenPainter, ids: Ids) -> str:
    pieces = painter.pieces(ids)
    return "".join(
        f"<i>{'' if piece is None else bytes_text_html(piece, spaces=True)}<small>{token_id}</small></i>"
        for token_id, piece in zip(ids.tolist(), pieces, strict=True)
    )
