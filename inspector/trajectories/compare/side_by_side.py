"""Two token streams as the rows of one table. The left side is what the model sampled; equal stretches are folded. Both
sides of a line come from one group of an alignment, so that they cannot drift apart."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from django.http import QueryDict

from inspector.html.token_diff import marked_tokens
from inspector.trajectories.compare.difference_words import difference_words
from inspector.trajectories.place import PagePlace, View
from inspector.web.twins import whole_number
from rollout_inspector.streams.align import AlignedGroup, align_ids, fold
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Mask, Tokens
from rollout_inspector.text.html.tokens import Html, TokenPainter

CONTEXT = 24  # Equal tokens that are shown before and after a difference.

OPENED = 2_000  # A fold of up to twice as many equal tokens opens whole; a longer one shows its first so many.

STRAY = 3  # A shorter equal stretch between two differences is chance where the sides hold different texts.

FOLD_LEAST = 12  # A fold hides at least this many tokens.

MAX_SITES = 100  # The most differences that one page shows. The next page begins at the token of the next difference.

MAX_TOKENS = 1_000_000  # The most tokens of each side that one request aligns. Longer streams are compared up to there.

MAX_SIDE_TOKENS = 2048  # The most tokens that are drawn of one side of one difference.


@dataclass(frozen=True)
class AlignedLine:
    """One line of the table: equal tokens, a fold that hides some, or a site where the sides differ."""

    kind: str  # ``equal``, ``fold``, ``site`` or ``new`` (the right side goes on).
    left_start: int
    left_stop: int
    right_start: int
    right_stop: int
    number: int = 0  # Of a site, from 1.
    cause: str = ""  # Of a site: why the sides differ.
    left: Html | None = None
    right: Html | None = None
    left_ids: tuple[int, ...] = ()
    right_ids: tuple[int, ...] = ()
    url: str = ""  # The left side on the tokens page; empty when no stored row holds it.
    open_url: str = ""  # Of a fold: this page with the fold open.
    n_cut: int = 0  # Tokens of its longer side that are not drawn.

    @property
    def n_hidden(self) -> str:
        return f"{self.left_stop - self.left_start:,}"

    @property
    def left_ids_text(self) -> str:
        return _ids(self.left_ids)

    @property
    def right_ids_text(self) -> str:
        return _ids(self.right_ids)

    @property
    def place(self) -> str:
        """Offsets on the left, and on the right where they differ."""
        left = _span(self.left_start, self.left_stop)
        right = _span(self.right_start, self.right_stop)
        return left if left == right else f"{left} | {right}"


def _ids(ids: tuple[int, ...]) -> str:
    more = f", … {len(ids) - 64:,} more" if len(ids) > 64 else ""
    return "[" + ", ".join(map(str, ids[:64])) + more + "]" if ids else ""


def _span(a: int, b: int) -> str:
    return f"{a:,}" if b <= a + 1 else f"{a:,}-{b:,}"


@dataclass(frozen=True)
class TokenComparison:
    """Two streams side by side."""

    lines: tuple[AlignedLine, ...]
    n_sites: int
    n_left: int
    n_right: int
    left_changed: int  # Left tokens that the right side lacks.
    right_changed: int
    site_places: tuple[int, ...] = field(default=())  # Left offset of each site.
    words: str = ""  # What the table shows, counted in a sentence.
    n_before: int = 0  # Sites before the first that is drawn.
    next_from: int | None = None
    """The left offset of the first site behind those that are drawn; None when there is none."""
    earlier_url: str = ""  # This page from the first site on, when ``n_before`` are not drawn.
    next_url: str = ""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Cause in words -> number of sites, the most frequent first."""

    @property
    def last_shown(self) -> int:
        """The number of the last site that is drawn, from 1."""
        return min(self.n_sites, self.n_before + MAX_SITES)


@dataclass(frozen=True)
class PairWords:
    """The words of a comparison: the names of both sides, a note under each name, and the verdict."""

    title: str
    left: str
    left_note: str
    right: str
    right_note: str
    verdict: str
    tone: str = ""  # ``yes`` or ``no`` when the sides should be equal: whether they are. Otherwise empty.
    note: str = ""
    masks: str = ""  # What the masks mean with which the sides are drawn; empty = they are drawn without.


def linked(
    comparison: TokenComparison, row: int | None, base: str, query: QueryDict, side: str = "left"
) -> TokenComparison:
    """The comparison with the address of each line's ``side``, in a row of the tokens page at ``base``. ``row`` None:
    no row holds that side. ``query``: that of this page, for the folds and for the other differences."""
    place = None if row is None else PagePlace(row=row, view=View.TOKENS)
    lines = []
    for line in comparison.lines:
        span = (line.left_start, line.left_stop) if side == "left" else (line.right_start, line.right_stop)
        url = "" if place is None else base + place.marked(*span)
        lines.append(replace(line, url=url, open_url=_opening(query, line.left_start) if line.kind == "fold" else ""))
    return replace(
        comparison, lines=tuple(lines), earlier_url=_from(query, None) if comparison.n_before else "",
        next_url="" if comparison.next_from is None else _from(query, comparison.next_from),
    )


def _from(query: QueryDict, start: int | None) -> str:
    """This page from a token of the left side on; from its start without one."""
    address = query.copy()
    address.pop("from", None)
    address.pop("open", None)
    if start is not None:
        address["from"] = str(start)
    return f"?{address.urlencode()}#side-by-side"


def _opening(query: QueryDict, start: int) -> str:
    address = query.copy()
    address.setlist("open", [*query.getlist("open")[-MAX_OPEN + 1 :], str(start)])
    return f"?{address.urlencode()}#at-{start}"


MAX_OPEN = 40  # The most folds that an address opens.


def opened_folds(query: QueryDict) -> frozenset[int]:
    """The left offsets of the folds that the address opens."""
    starts = (whole_number(start, 18) for start in query.getlist("open")[-MAX_OPEN:])
    return frozenset(start for start in starts if start is not None)


def first_shown(query: QueryDict) -> int:
    """The token of the left side from which the address has differences shown."""
    return whole_number(query.get("from"), 18) or 0


def up_to(n_tokens: int, notices: list[str]) -> int:
    """How many tokens of a side are compared, and a notice where that is not all of them."""
    if n_tokens > MAX_TOKENS and not any("are compared" in notice for notice in notices):
        notices.append(f"The first {MAX_TOKENS:,} tokens of each side are compared; there are {n_tokens:,}.")
    return min(n_tokens, MAX_TOKENS)


def without_stray(left: Ids, right: Ids, groups: Sequence[AlignedGroup]) -> list[AlignedGroup]:
    """The groups; an equal stretch of under ``STRAY`` tokens between two differences is part of the difference."""
    clean_groups = list(groups)
    for index in range(1, len(clean_groups) - 1):
        group = clean_groups[index]
        if group.equal and group.left_stop - group.left_start < STRAY:
            clean_groups[index] = replace(group, equal=False)
    # What was inserted before such a stretch and is missing behind it may be the same.
    return merge(
        group if group.equal else replace(group, equal=np.array_equal(left[_left(group)], right[_right(group)]))
        for group in merge(clean_groups)
    )


def _left(group: AlignedGroup) -> slice:
    return slice(group.left_start, group.left_stop)


def _right(group: AlignedGroup) -> slice:
    return slice(group.right_start, group.right_stop)


def align_texts(left: Ids, right: Ids) -> list[AlignedGroup]:
    """The groups of two streams with different texts, without equal stretches that are chance."""
    return without_stray(left, right, align_ids(left, right))


def merge(groups: Iterable[AlignedGroup]) -> list[AlignedGroup]:
    """Groups with neighbours of one kind joined."""
    merged: list[AlignedGroup] = []
    for group in groups:
        if merged and merged[-1].equal == group.equal:
            last = merged.pop()
            group = replace(group, left_start=last.left_start, right_start=last.right_start)
        merged.append(group)
    return merged


def compare(
    left: Tokens, right: Tokens, groups: Iterable[AlignedGroup], painter: TokenPainter, tail_is_new: bool = False,
    opened: frozenset[int] = frozenset(), first: int = 0, sampled: Mask | None = None, most: int = MAX_SIDE_TOKENS,
) -> TokenComparison:
    """The table of an alignment of two streams, each drawn with its own token states.

    The offsets of ``groups`` count from the first token of each side. The offsets of the table are the sides' own.
    ``tail_is_new``: the tokens of the right side after the end of the left side are new, not a difference.
    ``opened``: left offsets of folds that are shown. ``first``: the left offset from which differences are drawn; all
    of them are counted. ``sampled`` bool ``[left]``: the left tokens that are known as sampled, for the sentence.
    ``most``: tokens that are drawn of one side of one line.
    """

    def line(kind: str, part: AlignedGroup, number: int = 0) -> AlignedLine:
        a, b = left.start + part.left_start, left.start + part.left_stop
        c, d = right.start + part.right_start, right.start + part.right_stop
        if kind == "fold":
            return AlignedLine(kind, a, b, c, d)
        ids, other = left.slice(a, min(b, a + most)), right.slice(c, min(d, c + most))
        n_cut = max(b - a, d - c) - max(len(ids), len(other))
        if kind != "site":
            return AlignedLine(kind, a, b, c, d, number, "", painter.window(ids), painter.window(other), n_cut=n_cut)
        boxes = marked_tokens(painter, ids, other)
        return AlignedLine(
            kind, a, b, c, d, number, causes[number - 1], *boxes, tuple(ids.ids.tolist()), tuple(other.ids.tolist()),
            n_cut=n_cut,
        )

    joined = merge(groups)
    is_new = tail_is_new and bool(joined) and joined[-1].left_start == joined[-1].left_stop == len(left)
    sites = [group for group in (joined[:-1] if is_new else joined) if not group.equal]
    causes = _causes(left.ids, right.ids, sites, painter)
    n_before = bisect_left(sites, first - left.start, key=lambda site: site.left_start) if first else 0
    last = min(n_before + MAX_SITES, len(sites))
    lines: list[AlignedLine] = []
    number = 0
    for part in _with_opened(fold(joined, CONTEXT, FOLD_LEAST), frozenset(group - left.start for group in opened)):
        if not part.equal and number < len(sites):
            number += 1
            if number > last:
                break
            if number > n_before:
                lines.append(line("site", part, number))
        elif number >= n_before:
            lines.append(line("fold" if part.is_folded else "equal" if part.equal else "new", part))
    return TokenComparison(
        tuple(lines),
        n_sites=len(sites),
        n_left=len(left),
        n_right=len(right),
        left_changed=sum(site.left_stop - site.left_start for site in sites),
        right_changed=sum(site.right_stop - site.right_start for site in sites),
        site_places=tuple(left.start + site.left_start for site in sites),
        words=difference_words(
            left, right, sites, sampled, joined[-1].right_stop - joined[-1].right_start if is_new else 0
        ),
        n_before=n_before,
        next_from=left.start + sites[last].left_start if last < len(sites) else None,
        causes=dict(Counter(causes).most_common()),
    )


def _with_opened(parts: Iterable[AlignedGroup], opened: frozenset[int]) -> Iterator[AlignedGroup]:
    for part in parts:
        while part.is_folded and part.left_start in opened:
            a, b, n = part.left_start, part.right_start, part.left_stop - part.left_start
            n_shown = n if n <= 2 * OPENED else OPENED
            yield AlignedGroup(a, a + n_shown, b, b + n_shown, True)
            part = AlignedGroup(a + n_shown, part.left_stop, b + n_shown, part.right_stop, True, True)
        if not part.is_folded or part.left_stop > part.left_start:
            yield part


def _causes(left: Ids, right: Ids, sites: Sequence[AlignedGroup], painter: TokenPainter) -> list[str]:
    """Why the sides differ at each site, in words that a number may stand before."""
    sides = [(left[_left(site)], right[_right(site)]) for site in sites]
    pieces = iter(painter.pieces(np.concatenate([NO_IDS, *(ids for pair in sides for ids in pair)])))
    return [_cause(*pair, *(list(islice(pieces, len(ids))) for ids in pair)) for pair in sides]


def _cause(one: Ids, other: Ids, pieces: list[bytes | None], others: list[bytes | None]) -> str:
    if not len(one):
        return "only on the right"
    if not len(other):
        return "only on the left"
    if np.array_equal(one, other):
        return "another mask"
    if None in pieces or None in others:
        return "other ids"
    if b"".join(filter(None, pieces)) != b"".join(filter(None, others)):
        return "other text"
    return (
        "merged on the right"
        if len(other) < len(one)
        else "split on the right"
        if len(other) > len(one)
        else "cut elsewhere"
    )


COUNTS = ("n_left", "n_right", "n_sites", "left_changed", "right_changed", "causes", "n_before", "next_from")
SITE_FIELDS = ("left_start", "left_stop", "right_start", "right_stop", "left_ids", "right_ids")


def as_json(comparison: TokenComparison, painter: TokenPainter) -> dict[str, Any]:
    """A comparison without its HTML: its counts, and at most 100 ``sites`` from ``from=`` on. A site has tokens
    ``[start, stop)`` of each side, and their texts when the tokenizer is known. ``n_before`` sites lie before that
    token, and ``next_from`` is the ``from=`` of those that follow."""
    sites: list[dict[str, Any]] = []
    for line in comparison.lines:
        if line.kind == "site":
            sites.append({name: getattr(line, name) for name in SITE_FIELDS})
            if painter.table is not None:
                sites[-1]["left_text"] = painter.table.text(line.left_ids)
                sites[-1]["right_text"] = painter.table.text(line.right_ids)
    return {name: getattr(comparison, name) for name in COUNTS} | {"sites": sites}


def by_cause(comparison: TokenComparison) -> str:
    """The causes of several differences, as a sentence; empty for one, of which the table tells it."""
    if comparison.n_sites < 2:
        return ""
    counts = ", ".join(f"{n:,} {cause}" for cause, n in comparison.causes.items())
    return f"{comparison.n_sites:,} difference{'s' * (comparison.n_sites != 1)}: {counts}."
