"""What a comparison shows, counted in one sentence: what is missing, added, replaced, moved or masked, and where."""

from collections.abc import Sequence

import numpy as np

from inspector.html.inspector_tags import plural
from rollout_inspector.streams.align import AlignedGroup
from rollout_inspector.streams.trajectory import Ids, Mask, Tokens

MAX_CLAUSES = 3  # The most places that are told one by one; of more only the sums are told.
MOVED_LEAST = 2
"""The fewest tokens that count as moved: a single line break that is gone here and new there is no move."""


def difference_words(
    left: Tokens, right: Tokens, sites: Sequence[AlignedGroup], sampled: Mask | None = None, n_new: int = 0
) -> str:
    """The sentence above the table. ``sites``: the stretches that differ, counted from the first token of each side.
    ``sampled [left]`` bool: the left tokens that are known as sampled. ``n_new``: tokens with which the right side goes
    on where the left side ends."""
    if not sites:
        new = f"; {plural(n_new, 'token')} follow{'s' * (n_new == 1)}, as new" if n_new else ""
        return f"Both sides hold the same {plural(len(left), 'token')}{new}." if len(left) else "Both sides are empty."
    if not len(right):
        return f"The right side is empty: {plural(len(left), 'token')} {_are(len(left))} missing."
    if not len(left):
        return f"The left side is empty: {plural(len(right), 'token')} {_are(len(right))} added."
    if len(sites) > MAX_CLAUSES:
        return _sums(left, right, sites, sampled)
    moves = _moves(left.ids, right.ids, sites)
    moved = [id(site) for move in moves for site in move]
    clauses = [_clause(left, right, site, sampled) for site in sites if id(site) not in moved]
    clauses += [
        f"{plural(_n_left(gone), 'token')} moved from token {left.start + gone.left_start:,} to token "
        f"{left.start + new.left_start:,}"
        for gone, new in moves
    ]
    n_behind = len(left) - sites[0].left_stop
    tail = f"; the other {n_behind:,} follow unchanged" if len(sites) == 1 and n_behind else ""
    return f"{'; '.join(clauses)}{tail}."


def mask_words(left: Tokens, right: Tokens, groups: Sequence[AlignedGroup]) -> str:
    """How many tokens of equal stretches only one side trains, as a sentence; empty where both train the same."""
    gained = lost = 0
    for group in groups:
        if group.equal:
            before = left.loss_mask[group.left_start : group.left_stop]
            after = right.loss_mask[group.right_start : group.right_stop]
            gained, lost = gained + int((after & ~before).sum()), lost + int((before & ~after).sum())
    clauses = [f"{n:,} {words}" for n, words in ((gained, "more are trained"), (lost, "are no longer trained")) if n]
    return f" Of the equal tokens {' and '.join(clauses)}." if clauses else ""


def _n_left(site: AlignedGroup) -> int:
    return site.left_stop - site.left_start


def _n_right(site: AlignedGroup) -> int:
    return site.right_stop - site.right_start


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _moves(left: Ids, right: Ids, sites: Sequence[AlignedGroup]) -> list[tuple[AlignedGroup, AlignedGroup]]:
    """Pairs of a stretch that is missing, and of one where the same tokens are added."""
    added: dict[bytes, list[AlignedGroup]] = {}
    for site in sites:
        if not _n_left(site) and _n_right(site) >= MOVED_LEAST:
            added.setdefault(right[site.right_start : site.right_stop].tobytes(), []).append(site)
    return [
        (site, places.pop())
        for site in sites
        if not _n_right(site) and (places := added.get(left[site.left_start : site.left_stop].tobytes()))
    ]


def _kind(site: AlignedGroup, sampled: Mask | None) -> str:
    whole = sampled is not None and bool(sampled[site.left_start : site.left_stop].all())
    return "sampled " if whole and _n_left(site) else ""


def _clause(left: Tokens, right: Tokens, site: AlignedGroup, sampled: Mask | None) -> str:
    sort, n, n_right = _sort(left, right, site), _n_left(site), _n_right(site)
    words, at = plural(n, f"{_kind(site, sampled)}token"), f"token {left.start + site.left_start:,}"
    ends = site.left_stop == len(left)
    if sort == "added":
        return f"{plural(n_right, 'token')} {_are(n_right)} added {'at the end' if ends else f'at {at}'}"
    if sort == "missing":
        return f"{words} {_are(n)} missing {f'at the end, from {at} on' if ends else f'at {at}'}"
    if sort == "masked":
        if bool(left.loss_mask[site.left_start : site.left_stop].all()):
            return f"{words} at {at} {_are(n)} not trained"
        return f"{words} at {at} {_are(n)} trained, and {'was' if n == 1 else 'were'} not sampled"
    return f"{words} at {at} {_are(n)} replaced by {n_right:,}"


def _sort(left: Tokens, right: Tokens, site: AlignedGroup) -> str:
    if not _n_left(site):
        return "added"
    if not _n_right(site):
        return "missing"
    ids = left.ids[site.left_start : site.left_stop], right.ids[site.right_start : site.right_stop]
    return "masked" if np.array_equal(*ids) else "replaced"


def _sums(left: Tokens, right: Tokens, sites: Sequence[AlignedGroup], sampled: Mask | None) -> str:
    parts: list[str] = []
    gone, new, masked, changed = (
        [site for site in sites if _sort(left, right, site) == sort]
        for sort in ("missing", "added", "masked", "replaced")
    )
    for places, words in ((gone, "missing"), (masked, "under another mask"), (changed, "replaced")):
        if places:
            n, of_all = sum(map(_n_left, places)), all(_kind(site, sampled) for site in places)
            by = f" by {sum(map(_n_right, places)):,}" if places is changed else ""
            parts.append(f"{plural(n, 'sampled ' * of_all + 'token')} {_are(n)} {words}{by}")
    if new:
        n = sum(map(_n_right, new))
        parts.append(f"{plural(n, 'token')} {_are(n)} added")
    listed = ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1]
    return f"In {len(sites):,} places: {listed}. The first is at token {left.start + sites[0].left_start:,}."
