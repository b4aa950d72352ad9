"""What is drawn of a row at a place: the bar, the legend, the map, the strips, and the turns with their tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any
from urllib.parse import urlencode

import numpy as np
from django.urls import reverse

from inspector.html.charts import drawn_map, extent, strip_means, strip_path
from inspector.runs.muted import MutedValues
from inspector.trajectories.compare.sampled_compare import can_compare
from inspector.trajectories.frame import PageLink, base_url, fingerprint
from inspector.trajectories.place import MAX_FINDINGS, MAX_RUN_VIEW_TOKENS, VIEW_NAMES, WINDOW, View
from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens.finding_marks import comment_marks, drawn_diff, finding_diffs, row_marks
from inspector.trajectories.tokens.findings import FindingGroup, InRun, group_findings, markdown_of, worst_finding
from inspector.trajectories.tokens.lane_tree import drawn_lanes, lane_address
from inspector.trajectories.tokens.lens_values import lens_links
from inspector.trajectories.tokens.lenses import Legend, Scale, scale_of
from inspector.trajectories.tokens.token_view import TokenView
from inspector.trajectories.tokens.tokens_page import check_lines
from inspector.trajectories.tokens.turns import Turn, TurnSection
from rollout_inspector.diagnose.checks import all_clear, check_sentence, totals
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.formats import lacks_of
from rollout_inspector.streams.lanes import Lane
from rollout_inspector.streams.trajectory import Floats, Origin, Tokens
from rollout_inspector.text.html.tokens import Block, Marks, TokenPainter, foreign_tokens, painter_of
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import engine_columns as beside
from rollouts.store.trajectories.findings import worst_severity

CHOOSE_TOKENIZER = "Choose a tokenizer for the run, under “Diagnose again” on its page."
"""What the page says where a finding needs a tokenizer: it has the form that chooses one."""
MAX_OUTLINE = 400
MAX_ROWS = 60
RUNS_BYTES = 2_000_000
"""The most HTML of one response of the run view. The browser fetches the rest as the reader scrolls."""
BLOCK = 128  # Tokens of a block in the token view. The browser lays out a block only when the reader comes near.


Part = tuple[Turn, int, int]  # A turn, and the row offsets ``[start, stop)`` of it that are drawn.


class Reader:
    """Draws a :class:`TokenView`. A template makes only what it names, and nothing here reads the database."""

    def __init__(self, view: TokenView, in_run: InRun | None = None) -> None:
        self.view, self.place, self.own = view, view.place, base_url(view.trajectory)
        self.in_run = in_run or {}
        self.n_tokens, self.text_missing = view.n_tokens, view.text_missing
        self.checks = check_lines(view.trajectory)
        self.painter = painter_of(view.table)
        comments = view.discussion.comments or []
        self.comment_signs = comment_marks(comments, view.place.row)
        self.diffs = finding_diffs(view.findings, view.sides, view.steps)
        self.lens = lenses.find(view.place.lens)
        self.scale = None if view.lens_values is None else scale_of(view.place.lens, view.lens_values)
        self.marks = replace(
            row_marks(view.place, view.findings, self.diffs, view.tokens, self.n_tokens, self.painter,
                      self.comment_signs),
            classes=self._classes(),
        )
        self.start = view.place.window
        self.stop, self.sections = self._sections()
        self.tokens = view.tokens.slice(self.start, self.stop)
        is_part = self.stop - self.start < self.n_tokens
        self.map_window = extent(self.start, self.stop, self.n_tokens) if is_part else None
        n_rows, n_turns = len(view.rows) - MAX_ROWS, len(view.turns) - MAX_OUTLINE
        self.rows_rest = f"and {n_rows:,} more: ?row=N opens them" if n_rows > 0 else ""
        self.outline_rest = f"and {n_turns:,} more turns" if n_turns > 0 else ""
        self.has_foreign = any(section.n_foreign for section in self.sections)
        self.here = "in this window" if view.place.view == View.TOKENS else "in this row"
        self.window_text = f"tokens {self.start:,}-{self.stop:,} of {self.n_tokens:,}"
        self.mark_text = "{}-{}".format(*view.place.mark) if view.place.mark else ""
        self.map_mark = extent(*view.place.mark, self.n_tokens) if view.place.mark else None
        self.anchor = f"row-{view.place.row}-" if view.place.most else ""
        """Tells the turns of the rows of a file apart."""

    def _classes(self) -> np.ndarray | None:
        """The class of each token of the row, where the lens is no built-in one that the tokens tell by themselves."""
        if self.scale is not None and self.view.lens_values is not None:
            return self.scale.classes(self.view.lens_values, self.n_tokens)
        if self.lens is None or self.lens.classes is None:
            return None
        classes = np.zeros(self.n_tokens, np.int64)
        classes[self.view.tokens.start : self.view.tokens.stop] = self.lens.classes(self.view.tokens)
        return classes

    def _sections(self) -> tuple[int, list[TurnSection]]:
        """Where the drawn tokens end, and the turns with them. The window limits time and size, not the row."""
        place, tokens, n_tokens = self.place, self.view.tokens, self.n_tokens
        start, stop = place.window, min(place.window + place.size, n_tokens)
        ranges = [(turn, max(turn.start, start), min(turn.stop, stop)) for turn in self.view.turns]
        parts: list[Part] = [(turn, a, b) for turn, a, b in ranges if a < b or (a == b and not turn.n_tokens)]
        # A gap behind the last token is drawn at the end of the row alone.
        gaps = {at: gap for at, gap in self.marks.gaps.items() if start <= at < stop or at == n_tokens}
        marks = replace(self.marks, gaps=gaps)
        if place.view == View.TOKENS:
            turn_blocks = _token_blocks(parts, tokens, self.painter, marks)
        else:
            splits = self.lens is not None and self.lens.splits_runs
            turn_blocks = _run_blocks(parts, tokens.slice(start, stop), self.painter, marks, splits)
        foreign = np.concatenate([[0], np.cumsum(foreign_tokens(tokens, marks))])
        turn_url = place.marked_template(view=View.TOKENS)
        sections = []
        for (turn, a, b), blocks in zip(parts, turn_blocks, strict=False):
            drawn_to = blocks[-1][1] if blocks else b
            n_foreign = int(foreign[drawn_to - tokens.start] - foreign[a - tokens.start])
            url = turn_url.format(turn.start, max(turn.stop, turn.start + 1))
            sections.append(TurnSection(turn, a, drawn_to, url, blocks, n_foreign))
        if len(turn_blocks) < len(parts) or (sections and sections[-1].stop < parts[-1][2]):
            stop = sections[-1].stop  # the rest did not fit into this response
        return stop, sections

    # The window ------------------------------------------------------------------------------------------------------

    @property
    def solo(self) -> int:
        """The turn that is shown alone, where it is among these."""
        return self.place.solo if any(part.turn.number == self.place.solo for part in self.sections) else 0

    @property
    def previous_url(self) -> str:
        before = max(self.start - WINDOW, 0) if self.place.view == View.TOKENS else 0
        return self.place.query(window=before, mark=None) if self.start > 0 else ""

    @property
    def next_url(self) -> str:
        return self._rest_url if self.place.view == View.TOKENS else ""

    @property
    def more_url(self) -> str:
        """In the run view: the address of the part that did not fit into this response."""
        return self._rest_url if self.place.view == View.RUNS else ""

    @property
    def _rest_url(self) -> str:
        return self.place.query(window=self.stop, mark=None) if self.stop < self.n_tokens else ""

    @property
    def mixes_directions(self) -> bool:
        """Each token is a box of its own in the token view, and boxes stand from left to right."""
        return self.place.view == View.TOKENS and self.painter.runs_right_to_left(self.tokens.ids)

    @property
    def card_url(self) -> str:
        query = self.place.query(view=View.TOKENS, mark=None, window=self.start, find="", keep=())
        return f"{self.own}/card.json{query}"

    @cached_property
    def record_url(self) -> str:
        trajectory = self.view.trajectory
        return reverse("trajectory-record", args=[trajectory.code]) if trajectory.n_steps else ""

    @cached_property
    def conversation_url(self) -> str:
        """The message that holds the mark, else the first token of the window."""
        first, stop = self.place.mark or (self.start, self.start + 1)
        at = self.place.query(mark=(first, stop), keep=())[1:]
        return self.record_url and f"{self.record_url}?{urlencode([*self.place.keep, ('place', at)])}#here"

    @property
    def nothing_here(self) -> str:
        if is_active(self.view.trajectory):
            return "No step has finished yet. This page grows by itself."
        return "This trajectory has no tokens" + (
            ": the source recorded none." if not self.view.trajectory.error else "."
        )

    # The bar ---------------------------------------------------------------------------------------------------------

    @cached_property
    def row_tabs(self) -> list[PageLink]:
        """The rows above the pane, each opened at its worst finding."""
        links = []
        for row in self.view.rows[:MAX_ROWS]:
            worst = worst_finding(self.view.findings, row.index)
            query = self.place.query(row=row.index, mark=worst.drawn_places[0] if worst else None, window=0)
            tone = worst_severity(item.weight for item in self.view.findings if item.drawn_row == row.index)
            note, is_here = f"{row.n_tokens:,}", row.index == self.place.row
            links.append(PageLink(f"row {row.index}", self.own + query, is_here, note=note, tone=tone))
        return links

    @property
    def view_choices(self) -> list[PageLink]:
        return [
            PageLink(name, self.own + self.place.query(view=view, window=self._window_for(view)),
                     view == self.place.view)
            for view, name in VIEW_NAMES.items()
        ]

    def _window_for(self, view: View) -> int:
        if self.place.mark:
            return 0
        if view == View.TOKENS:
            return self.place.window // WINDOW * WINDOW
        return 0 if self.n_tokens <= MAX_RUN_VIEW_TOKENS else self.place.window

    @property
    def lens_choices(self) -> list[PageLink]:
        return lens_links(self.place, self.own, self.view.row_lenses)

    @property
    def lens_label(self) -> str:
        return next((choice.name for choice in self.lens_choices if choice.current), "")

    @cached_property
    def split_url(self) -> str:
        """What was sampled beside what the row holds, as the page “Side by side” compares it."""
        row = self.view.row
        if row is None or not row.n_tokens:
            return ""
        first = next((step for step in self.view.steps if step.row == row.index), None)
        compared: dict[str, object] = {"row": row.index, "side": "trained"}
        if not can_compare(row):
            is_broken = first is not None and first.breaks
            compared = {"step": first.index, "side": "prompt"} if first and is_broken else {"row": row.index}
        place = self.place.query(keep=())[1:]
        return f"{reverse('trajectory-compare', args=[self.view.trajectory.code])}?" + urlencode(
            [*compared.items(), *self.place.keep, *([("place", place)] if place else [])]
        )

    @property
    def go_fields(self) -> list[tuple[str, str]]:
        place = self.place
        fields = [
            ("row", str(place.row) if place.row else ""),
            ("view", "tokens" if place.view == View.TOKENS else ""),
            ("lens", place.lens if place.lens != lenses.DEFAULT else ""),
            ("find", place.find),
        ]
        return [(name, value) for name, value in [*fields, *place.keep] if value]

    # The lens --------------------------------------------------------------------------------------------------------

    @property
    def lens_paint(self) -> str:
        """The lens as the style sheet knows it: a trainer's column is ``value`` or ``signed``."""
        return self.lens.paint if self.lens is not None else self.scale.paint if self.scale is not None else ""

    @property
    def legends(self) -> list[tuple[str, Legend]]:
        column = [(self.place.lens, self.scale.legend(self.place.lens))] if self.scale is not None else []
        return [*((lens.slug, lens.legend) for lens in lenses.LENSES), *column]

    @property
    def has_gaps(self) -> bool:
        return any(gap != self.comment_signs.get(at) for at, gap in self.marks.gaps.items())

    @property
    def lens_notes(self) -> dict[str, str]:
        """Lens -> why it colours none of these tokens."""
        return lenses.notes(self.view.tokens, self.here)

    @cached_property
    def value_note(self) -> str:
        """Why a trainer's column colours none of the tokens shown; empty when it colours some."""
        values, scale, lens = self.view.lens_values, self.scale, self.place.lens
        if values is None or scale is None:
            return ""
        finite = values[self.start : self.stop]
        finite = finite[np.isfinite(finite)]
        if (np.abs(finite) >= scale.edges[0]).any():
            return ""
        why = f"every value {self.here} is {'0' if not finite.any() else f'closer to 0 than {scale.edges[0]:g}'}"
        if not finite.size:
            why = self.view.lens_lacks or f"it has no value {self.here}"
        elif lens == beside.BEHIND:
            why += ": each sampled token is the likeliest one, as at temperature 0"
        elif lens.startswith(lenses.WEIGHT):
            why += ": each advantage is 0, or each token is clipped or masked"
        elif "advantage" in lens:
            why += ", as when every sample of a group has the same reward: no learning signal"
        return f"The lens “{lenses.column_label(lens)}” colours nothing: {why}."

    # The map and the strips ------------------------------------------------------------------------------------------

    @property
    def map_address(self) -> str:
        """What ``str.format`` turns into the address of the tokens ``[start, stop)`` of the map of the row. It tells
        one map from another, because it names row, view and lens."""
        view = View.TOKENS if self.n_tokens > MAX_RUN_VIEW_TOKENS else self.place.view
        return self.own + self.place.marked_template(view=view)

    @cached_property
    def map(self) -> dict[str, Any]:
        """The minimap of the row: what stands there in every window."""
        if not self.view.part.has_map:
            return {}
        n, turns = self.n_tokens, self.view.turns
        here = [item for item in self.view.findings[:MAX_FINDINGS] if item.drawn_row == self.place.row]
        pieces, trained = drawn_map(turns, n, self.map_address)
        counts = f"{len(turns)} turns, {n:,} tokens, {sum(turn.n_trained or 0 for turn in turns):,} trained"
        return {
            "pieces": pieces,
            "trained": trained,
            # The turns were found by role headers, because nobody recorded the origins.
            "by_roles": any(turn.part == "reply" for turn in turns),
            "text": f"{counts}, {len(here)} finding{'s' * (len(here) != 1)}",
            "findings": [
                {"severity": item.weight, **extent(start, start, n)} for item in here for start, _ in item.drawn_places
            ],
        }

    @property
    def strips(self) -> Iterator[tuple[str, str, bool, str]]:
        """The strip of the log-probability, and that of a trainer's column that is shown: means of equal stretches. The
        map of the row shows mask and origin. A strip of one height says nothing and is left out. A strip is its lens,
        its path in a viewBox of 1000 x 40, whether it has a sign, and its caption."""
        tokens, values, scale = self.tokens, self.view.lens_values, self.scale
        if not len(tokens):
            return
        sampled = tokens.origin == Origin.SAMPLED
        # A trainer's row may hold 0.0 for a token that was not sampled. That 0.0 does not mean certainty.
        if tokens.logprobs is not None and _varies(surprise := np.where(sampled, -tokens.logprobs, np.nan)):
            yield self._strip("logprob", surprise, lenses.SURPRISE, "surprise of sampled tokens in nats")
        if values is not None and scale is not None:
            part = values[self.start : self.stop]
            part = -part if scale.is_surprise else part
            if _varies(part):
                name = lenses.column_label(self.place.lens)
                what = ("minus " if scale.is_surprise else "") + name + (f" in {scale.unit}" if scale.unit else "")
                yield self._strip(self.place.lens, part, scale, what)

    def _strip(self, lens: str, values: Floats, scale: Scale, what: str) -> tuple[str, str, bool, str]:
        edges, means = strip_means(values)
        finite = values[np.isfinite(values)]
        is_share = scale is lenses.SHARE
        mean = f"{100 * finite.mean():.3g} %" if is_share else f"{finite.mean():.3g} {scale.unit}".rstrip()
        marks = "full height is 100 %" if is_share else f"steps at {', '.join(scale.edge_texts)}"
        path = strip_path(edges, scale.heights(means), scale.is_signed)
        return lens, path, scale.is_signed, f"{what}, {marks} · mean {self.here} {mean}"

    # The lists beside the pane ---------------------------------------------------------------------------------------

    @property
    def lacks(self) -> list[str]:
        trajectory = self.view.trajectory
        return lacks_of(trajectory.run.format) if trajectory.n_steps and not trajectory.n_tokens else []

    @cached_property
    def findings(self) -> list[dict[str, Any]]:
        """The findings, each with its addresses and what is drawn of it."""
        view, place, code = self.view, self.place, self.view.trajectory.code
        compare, deltas = (reverse(name, args=[code]) for name in ("trajectory-compare", "trajectory-deltas"))
        breaks = {(step.index, step.shared_length) for step in view.steps if step.breaks}
        entries = []
        for number, item in enumerate(view.findings[:MAX_FINDINGS]):
            mark = item.drawn_places[0]
            where = f"step {item.step}" if item.step is not None else f"row {item.row}"
            is_probe = item.step is None and item.row is None  # refused before anything was sampled
            if is_probe:
                where = "the template’s probe"
            stop = f"-{item.stop:,}" if item.stop > item.start + 1 else ""
            query = {"step": item.step, **({"side": "prompt"} if (item.step, item.start) in breaks else {})}
            compare_url = f"{compare}?{urlencode(query)}" if item.is_comparable else ""
            repair = {"row": item.drawn_row or 0, "side": "repair"}
            of_template = view.steps and item.kind in KINDS and KINDS[item.kind].probe
            delta_url = f"{deltas}?step={item.step}" if item.axis == "delta" and item.step is not None else ""
            lens = lenses.lens_of(item.kind, view.lenses.get(item.drawn_row or 0, ()))
            lens = place.lens if lens == lenses.DEFAULT else lens
            at = mark if item.drawn_row is not None else None
            url = self.own + place.query(row=item.drawn_row or 0, mark=at, window=0, lens=lens)
            diff = self.diffs[number] if number < len(self.diffs) else None
            lacks_tokenizer = item.kind == "not_decidable" and item.missing == "tokenizer"
            entries.append({
                "item": item,
                "remedy": CHOOSE_TOKENIZER if lacks_tokenizer else item.remedy,
                "place": f"{where}, token{'s' * bool(stop)} {item.start:,}{stop}",
                "trained_place": "" if item.is_held else f"row {item.drawn_row}, token {mark[0]:,}",
                # When a strategy made other rows, no row holds the stream of the step. Then another page shows it.
                "url": url if item.drawn_row is not None else compare_url or delta_url or url,
                # Another lens shows it: its link is followed, and no script lights it in this one.
                "needs_lens": lens != place.lens,
                "diff": drawn_diff(diff, place, view.tokens, self.painter),
                "ids": [] if diff is None else [(diff.left_name, diff.left), (diff.right_name, diff.right)],
                "current": item.drawn_row == place.row and place.mark == mark,
                "compare_url": compare_url,
                "script_url": "" if is_probe else reverse("finding-script", args=[code, item.number]),
                "delta_url": delta_url,
                "repair_url": f"{compare}?{urlencode(repair)}" if of_template else "",
            })
        for entry in entries:
            entry["markdown"] = markdown_of(entry, view.trajectory)
        return entries

    @cached_property
    def finding_groups(self) -> list[FindingGroup]:
        """The cards of what is not muted."""
        return group_findings([entry for entry in self.findings if not entry["item"].muted], self.in_run)

    @property
    def muted_findings(self) -> list[dict[str, Any]]:
        return [entry for entry in self.findings if entry["item"].muted]

    @property
    def muted_groups(self) -> list[FindingGroup]:
        return group_findings(self.muted_findings, self.in_run)

    @property
    def muted_rules(self) -> list[MutedValues]:
        kinds = {item.kind for item in self.view.findings}
        return [rule for rule in self.view.discussion.muted if rule.kind in kinds]

    @property
    def no_findings(self) -> str:
        trajectory = self.view.trajectory
        if is_active(trajectory):
            return "None yet: the diagnosis runs when the trajectory ends."
        if trajectory.status != StoredTrajectory.Status.DONE:
            return "Not checked: the trajectory did not reach its end."
        return all_clear(totals([(trajectory.checks, 1)]))

    @property
    def check_sentence(self) -> str:
        return check_sentence(totals([(self.view.trajectory.checks, 1)]))

    @cached_property
    def lanes(self) -> dict[str, Any]:
        rows = {row.index: row for row in self.view.rows}

        def address_of(lane: Lane) -> str:
            return "" if lane.row is None else self.own + lane_address(self.place, lane, rows[lane.row])

        return drawn_lanes(self.view.trajectory, self.view.lanes, self.view.rows, address_of, self.place.row)

    @property
    def outline(self) -> list[tuple[Turn, str]]:
        """The turns, each with its address."""
        marked = self.own + self.place.marked_template()
        return [
            (
                turn,
                f"#turn-{turn.number}"
                if self.start <= turn.start < self.stop
                else marked.format(turn.start, turn.start + 1),
            )
            for turn in self.view.turns[:MAX_OUTLINE]
        ]

    @property
    def live_url(self) -> str:
        """The address that the page of a growing trajectory asks."""
        trajectory = self.view.trajectory
        return f"{self.own}{self.place.query()}&have={fingerprint(trajectory)}" if is_active(trajectory) else ""

    # In a saved file -------------------------------------------------------------------------------------------------

    @property
    def part_text(self) -> str:
        if self.stop - self.start == self.n_tokens:
            return f"all {self.n_tokens:,} tokens"
        return f"{self.window_text}: a file holds a limited number of tokens"


def _varies(values: Floats) -> bool:
    """Whether some known values differ."""
    known_values = values[np.isfinite(values)]
    return bool(known_values.size) and bool(np.ptp(known_values))


def _token_blocks(parts: Sequence[Part], tokens: Tokens, painter: TokenPainter, marks: Marks) -> list[list[Block]]:
    """The blocks of each part, an element per token."""
    spans = [(a, b) for _, a, b in parts]
    cuts = painter.cuts(tokens, spans, BLOCK)
    blocks = [list(pairwise([a, *block_cuts, b])) for (a, b), block_cuts in zip(spans, cuts, strict=True)]
    html = iter(painter.windows(tokens, list(chain(*blocks)), marks) if blocks else ())
    return [[(a, b, next(html)) for a, b in block_cuts] for block_cuts in blocks]


def _run_blocks(
    parts: Sequence[Part], tokens: Tokens, painter: TokenPainter, marks: Marks, splits: bool
) -> list[list[Block]]:
    """The blocks of the first parts, text in runs, until ``RUNS_BYTES`` are written."""
    blocks_of_parts: list[list[Block]] = []
    blocks = painter.blocks(tokens, marks, splits, parts=[(a, b) for _, a, b in parts])
    written = 0
    for _, a, b in parts:
        blocks_of_parts.append([])
        while a < b:
            block = next(blocks)
            blocks_of_parts[-1].append(block)
            a, written = block[1], written + len(block[2].encode())
            if written > RUNS_BYTES:
                return blocks_of_parts
    return blocks_of_parts
