"""Where findings are drawn over a row: marks, the places where tokens are missing, and the two sides of a card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from inspector.html.token_diff import token_diff
from inspector.trajectories.discussion import CommentValues
from inspector.trajectories.place import PagePlace
from inspector.trajectories.tokens.findings import DrawnFinding
from rollout_inspector.diagnose.context import MAX_STRETCH
from rollout_inspector.diagnose.finding import Axis, Severity
from rollout_inspector.streams.align import align_ids
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Origin, Tokens
from rollout_inspector.text.html.text import bytes_text
from rollout_inspector.text.html.tokens import MAX_GAP_TEXT, Html, Marks, TokenPainter, comment_mark, gap_html, pin_html
from rollouts.store.trajectories.trajectory_parts import StepSummary

NOT_SAMPLED = {
    "row_not_sampled", "observation_trained", "generation_prompt_trained", "appended_eos_trained", "separator_trained",
}
"""Kinds whose places are trained tokens that were not sampled as they stand."""

Break = tuple[int, int]  # A step, and the offset at which its prompt leaves the stream of its parent.

CONTEXT = 3  # Tokens that a card shows on each side of a difference.


@dataclass(frozen=True, eq=False)
class DiffIds:
    """The ids of the two sides, the left ones as they were sampled or as the template writes them."""

    item: DrawnFinding
    left_name: str
    left: Ids
    right_name: str
    right: Ids
    is_missing_left: bool  # The row holds the right side, and the left one is what it lacks.


def finding_diffs(
    findings: Sequence[DrawnFinding], ids: Sequence[tuple[Ids, Ids]], steps: Sequence[StepSummary]
) -> list[DiffIds | None]:
    """The sides of the first findings; None where a finding has one side. ``ids``: expected and actual ids of each."""
    by_index = {step.index: step for step in steps}
    breaks = {(step.index, step.shared_length): _was_sampled(step, by_index) for step in steps if step.breaks}
    return [_diff(item, *both, breaks) for item, both in zip(findings, ids, strict=False)]


def _was_sampled(step: StepSummary, by_index: Mapping[int, StepSummary]) -> bool:
    """Whether the token at which a prompt leaves the stream of its parent was sampled, and not read by the engine."""
    earlier = by_index.get(-1 if step.parent is None else step.parent)
    while earlier is not None:
        if step.shared_length >= earlier.prompt_length:
            return step.shared_length < earlier.prompt_length + earlier.completion_length
        earlier = None if earlier.parent is None or earlier.breaks else by_index.get(earlier.parent)
    return False


def _diff(item: DrawnFinding, expected: Ids, actual: Ids, breaks: Mapping[Break, bool]) -> DiffIds | None:
    if not len(expected) and not len(actual):
        return None
    if item.severity == Severity.INFO:
        again = item.kind == "noncanonical_sampling"
        return DiffIds(item, "sampled", actual, "encoded again", expected, False) if again else None
    if item.kind == "duplicate_call":
        return None  # both answers are whole, each in its row
    if item.step is not None and (item.step, item.start) in breaks:
        left_name = "sampled" if breaks[item.step, item.start] else "read before"
        return DiffIds(item, left_name, expected, "read next", actual, True)
    if item.axis == Axis.DELTA:
        return DiffIds(item, "template", expected, "stands here", actual, True)
    if item.kind == "row_not_sampled" and len(expected):
        return DiffIds(item, "sampled", expected, "trained", actual, True)
    return None


def row_marks(
    place: PagePlace, findings: Sequence[DrawnFinding], diffs: Sequence[DiffIds | None], tokens: Tokens, n_tokens: int,
    painter: TokenPainter, comments: Mapping[int, str] | None = None,
) -> Marks:
    """What findings and comments draw over the row that the place names. ``comments``: row offset -> their sign."""
    here = [item for item in findings if item.drawn_row == place.row]
    noted, wrong = ([i for i in here if (i.weight == Severity.INFO) == info] for info in (True, False))
    gaps: dict[int, str] = {}
    for diff in filter(None, diffs):
        if diff.item.drawn_row != place.row or not diff.is_missing_left or not len(diff.left):
            continue
        for start, part in _parts(diff):
            text = bytes_text(b"".join(piece or b"" for piece in painter.pieces(part.left[:MAX_GAP_TEXT])))
            gaps.setdefault(min(start, n_tokens), gap_html(_gap_words(part), text, f"#finding-{diff.item.number}"))
    for item in here if place.most else ():
        offset = min(item.drawn_places[0][0], n_tokens)
        gaps[offset] = gaps.get(offset, "") + pin_html(item.number, item.title)
    for offset, sign in (comments or {}).items():
        gaps[min(offset, n_tokens)] = gaps.get(min(offset, n_tokens), "") + sign
    has_origin = tokens.origin_known and bool((tokens.origin == Origin.SAMPLED).any())
    return Marks(
        faults=[span for item in wrong for span in item.drawn_places],
        notes=[span for item in noted for span in item.drawn_places],
        foreign=[span for item in here if item.kind in NOT_SAMPLED for span in item.drawn_places],
        origins_tell=has_origin, chosen=place.mark, gaps=gaps,
    )


def _parts(diff: DiffIds) -> list[tuple[int, DiffIds]]:
    """Row offset and ids of each place where the row lacks tokens: several only where the finding names several."""
    start = diff.item.drawn_places[0][0]
    if len(diff.item.drawn_places) == 1 or not diff.item.is_held:
        return [(start, diff)]
    groups = [group for group in align_ids(diff.left, diff.right) if not group.equal]
    if any(group.right_start < group.right_stop for group in groups):
        return [(start, diff)]  # other tokens stand there
    return [(start + g.right_start, replace(diff, left=diff.left[g.left_start : g.left_stop], right=NO_IDS))
            for g in groups]


def _gap_words(diff: DiffIds) -> str:
    n = len(diff.left)
    count = f"{n:,}{' or more' * (n >= MAX_STRETCH)}"
    if not len(diff.right):
        return f"{count} token{'s' * (n != 1)} missing here"
    what = "sampled token" if diff.left_name == "sampled" else "token"
    return f"{count} {what}{'s' * (n != 1)} replaced here"


def drawn_diff(diff: DiffIds | None, place: PagePlace, tokens: Tokens, painter: TokenPainter) -> list[tuple[str, Html]]:
    """The name and the HTML of each side of a card, between a few tokens of the row where the page has read them."""
    if diff is None:
        return []
    before = behind = NO_IDS
    right_name = diff.right_name
    if diff.item.drawn_row == place.row and diff.item.drawn_places:
        start, stop = diff.item.drawn_places[0]
        if diff.item.is_held:
            stop = start + (len(diff.right) if diff.is_missing_left else len(diff.left))
        a, b = start - tokens.start, stop - tokens.start
        if 0 <= a <= b <= len(tokens):
            before, behind = tokens.ids[max(a - CONTEXT, 0) : a], tokens.ids[b : b + CONTEXT]
            if right_name == "read next" and bool(np.any(tokens.loss_mask[a:b])):
                right_name = "trained"
    sides = token_diff(painter, diff.left, diff.right, before, behind)
    return list(zip((diff.left_name, right_name), sides, strict=True))


def comment_marks(comments: Sequence[CommentValues], row: int) -> dict[int, str]:
    """Row offset -> the HTML of the sign of the open comments that begin there."""
    by_start: dict[int, list[CommentValues]] = {}
    for comment in comments:
        if comment.row == row and comment.start is not None and comment.resolved_at is None:
            by_start.setdefault(comment.start, []).append(comment)
    return {
        start: comment_mark([comment.author for comment in here], f"#comment-{here[0].code}")
        for start, here in by_start.items()
    }
