"""What differs between two sides as HTML: all of a comparison, or a finding with a box for each token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rollout_inspector.streams.align import AlignedGroup, align_ids
from rollout_inspector.streams.trajectory import Ids, Tokens
from rollout_inspector.text.html.text import bytes_text_html
from rollout_inspector.text.html.tokens import Html, TokenPainter

MAX_BOXES = 12
"""The most differing tokens of one side that are drawn."""

MARGIN = 4
"""A character has at most four bytes, so it reaches over at most so many tokens."""


def marked(html: str, tag: str) -> Html:
    """Tokens that one side alone has: ``del`` where the other side lacks them, ``ins`` where it has them besides.

    ``html`` is escaped already. Of no tokens nothing is drawn.
    """
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
