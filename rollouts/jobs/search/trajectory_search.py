"""Goes through the trajectories that one may see, run by run, and tells what it finds part by part. A part ends after
so many results or so much time, and names the place where the next one begins. So a page shows what is found so far,
nobody waits in a request, and a search stops when nobody asks for the next part."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import QuerySet

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.trajectory import Ids
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.jobs.search.patterns import PatternTooSlow
from rollouts.jobs.search.search_question import SearchQuestion
from rollouts.jobs.search.token_buffer import of_row, of_trajectories
from rollouts.store.chat_templates.tokenizers import byte_table, byte_table_of
from rollouts.store.jobs.jobs import refuse_opened
from rollouts.store.models import Run, StoredRow, StoredTrajectory
from rollouts.store.paging import cursor_of, read_cursor
from rollouts.store.people.access import Access
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.search_queries import (
    BODIES, findings_among, metadata_with, newest_first, rows_of_steps, searched_runs, sum_of_trajectories,
    tokenizer_files, trajectories_from
)

BATCH_TRAJECTORIES, BATCH_TOKENS = 400, 1 << 19  # Trajectories, and about how many tokens, that are read at once.
MAX_CHARACTERS = 2000  # Characters of a result; a longer one ends in an ellipsis.
CURSOR = "places"
ONLY_IDS = "Without a tokenizer only ids are found."


class _Place(NamedTuple):
    """Where a search goes on."""

    created_at: datetime
    run: int
    number: int  # The index of the trajectory in which it goes on.
    at: int  # How far that trajectory is searched: tokens of the buffer, or findings.
    done: int  # Trajectories in the runs before.
    total: int  # Trajectories of all the runs, counted for the first part.


@dataclass(frozen=True)
class FoundRange:
    """A range of tokens of a trajectory, or its metadata."""

    trajectory: str
    """Code of the trajectory."""
    external_id: str
    """Its name in the source."""
    row: int | None
    """The row that holds it; null = no row holds it, or it is metadata."""
    step: int | None
    """The step that brought the last of these tokens, or that has the finding; null = not known, or metadata."""
    start: int | None
    """First token: offset in the row, or in the stream of the step where ``row`` is null."""
    stop: int | None
    """Offset behind the last token."""
    text: str
    """The text of these tokens, or their ids where there is no tokenizer; of a finding what was found."""
    before: str
    """What stands before it."""
    after: str
    """What stands behind it."""
    kind: str
    """Kind of the finding; empty where something else was searched for."""


@dataclass(frozen=True)
class SearchHit(FoundRange):
    """A result with its run."""

    run: Run


@dataclass
class SearchedPart:
    """Part of what a search finds."""

    results: list[SearchHit] = field(default_factory=list)
    next: str = ""  # Where the next part begins; empty = everything was searched.
    done: int = 0  # Trajectories that were searched, in all parts.
    total: int = 0  # Trajectories of all the runs.
    notes: list[str] = field(default_factory=list)  # Sentences about what was not searched in this part.
    too_slow: bool = False  # A regular expression was stopped in this part.

    @property
    def complete(self) -> bool:
        """No limit of time or number left anything out."""
        return not self.next and not self.too_slow


def search(
    access: Access, question: SearchQuestion, run: Run | None = None, cursor: str = "", limit: int = 50,
    seconds: float = 0.25, project: str = "",
) -> SearchedPart:
    """A part of what a run, or all runs that may be seen, hold; the newest run first, each in its own order.
    ``project``: only its runs. The part ends after ``seconds`` at the latest batch that was begun by then. Raises
    :class:`Refusal` for a token text that no tokenizer knows, and ``ValueError`` for a cursor of another list."""
    if run is not None and question.pattern is not None:
        refuse_opened(run)
    runs = searched_runs(access, run, project)
    values = read_cursor(cursor, CURSOR, datetime, int, int, int, int, int)
    place = _Place(*values) if values else None
    if place is None and question.pattern is not None and question.pattern.token_texts:
        tables = [table for key in tokenizer_files(runs) if (table := _table(key))]
        if text := question.pattern.unknown(tables):
            raise Refusal(no_token(text))
    total = place.total if place is not None else sum_of_trajectories(runs)
    part = SearchedPart(total=total)
    _Walk(question, part, limit, time.monotonic() + seconds).go(runs, place)
    return part


def no_token(text: str) -> str:
    """The sentence for a text that is no token."""
    return f"“{text[:60]}” is no single token here. Search it as a text, or write its tokens one by one."


def _table(files_sha256: str) -> ByteTable | None:
    try:
        return byte_table(files_sha256)
    except (OSError, ValueError):
        return None


class _Looked(NamedTuple):
    """A trajectory that is looked at."""

    pk: int
    number: int  # Its index in its run.
    code: str
    external_id: str
    n_tokens: int


class _Walk:
    """One part of a search."""

    def __init__(self, question: SearchQuestion, part: SearchedPart, limit: int, late: float) -> None:
        self.question, self.part, self.limit, self.late = question, part, limit, late

    def go(self, runs: QuerySet[Run], place: _Place | None) -> None:
        """Search the runs from a place on."""
        done = place.done if place else 0
        for run in newest_first(runs, *place[:2]) if place else newest_first(runs):
            here = place if place is not None and place.run == run.pk else None
            if not self._search_run(run, here.number if here else 0, here.at if here else 0, done):
                return
            done += run.n_trajectories
            self.part.done = done

    def _search_run(self, run: Run, index: int, at: int, done: int) -> bool:
        """Search the trajectories of a run from ``index`` on. False = the part has ended."""
        table = byte_table_of(run)
        pattern = self.question.pattern
        if pattern is not None and table is None and pattern.needs_text:
            if run.n_tokens and not index:
                self.part.notes.append(f"“{run.name}” has no tokenizer that can be read; only ids are found in it.")
            return self._in_time(run, run.n_trajectories, done)
        while lines := trajectories_from(run, self.question.filters, index, BATCH_TRAJECTORIES):
            part = [_Looked(*line) for line in lines]
            at = at if part[0].number == index else 0
            for batch in batched(part, BATCH_TOKENS, lambda looked: looked.n_tokens):
                if not self._search_batch(run, table, batch, at, done):
                    return False
                at, index = 0, batch[-1].number + 1
                if not self._in_time(run, index, done):
                    return False
        return True

    def _in_time(self, run: Run, index: int, done: int) -> bool:
        if time.monotonic() < self.late:
            return True
        self._stop(run, index, 0, done)
        return False

    def _stop(self, run: Run, index: int, at: int, done: int) -> None:
        self.part.next = cursor_of(CURSOR, run.created_at, run.pk, index, at, done, self.part.total)
        self.part.done = done + min(index, run.n_trajectories)

    def _search_batch(self, run: Run, table: ByteTable | None, batch: Sequence[_Looked], at: int, done: int) -> bool:
        """Search some trajectories; ``at``: how far the first one is searched. False = the part has ended."""
        find = {"finding": self._findings, "metadata": self._metadata}.get(self.question.by, self._tokens)
        for looked, then, result in find(run, table, batch, at):
            if result is None:
                sentence = "The expression took too long in {}, and was stopped there. Make it more specific."
                self.part.notes.append(sentence.format(f"“{looked.external_id[:80]}”"))
                self.part.too_slow = True
                self._stop(run, looked.number + 1, 0, done)
                return False
            self.part.results.append(result)
            if len(self.part.results) >= self.limit:
                self._stop(run, looked.number, then, done)
                return False
        return True

    def _tokens(
        self, run: Run, table: ByteTable | None, batch: Sequence[_Looked], at: int
    ) -> Iterator[tuple[_Looked, int, SearchHit | None]]:
        """The trajectory, how far it is searched then, and a result; None = it takes too long."""
        pattern = self.question.pattern
        assert pattern is not None
        buffer = of_trajectories([looked.pk for looked in batch], pattern.carry)
        first = at
        try:
            for start, stop in pattern.find(buffer, table, at):
                if start < first or (spot := buffer.spot(start, stop)) is None:
                    continue
                looked = batch[spot.trajectory]
                first = start + 1 if pattern.shares_tokens else stop
                before, after = (_text(table, ids) for ids in buffer.around(start, stop))
                yield looked, first - buffer.first_of[spot.trajectory], SearchHit(
                    looked.code, looked.external_id, spot.row, spot.step, spot.start, spot.stop,
                    _text(table, buffer.ids[start:stop]), before.lstrip("\ufffd"), after.rstrip("\ufffd"), "", run,
                )
        except PatternTooSlow as slow:
            yield batch[slow.trajectory], 0, None

    def _findings(
        self, run: Run, table: ByteTable | None, batch: Sequence[_Looked], at: int
    ) -> Iterator[tuple[_Looked, int, SearchHit | None]]:
        by_key = {looked.pk: looked for looked in batch}
        findings = findings_among(run, list(by_key), self.question.filters)
        rows = rows_of_steps([item for item in findings if item.row_index is None and item.step_index is not None])
        n_of: dict[int, int] = {}
        for finding in sorted(findings, key=lambda finding: by_key[finding.trajectory_id].number):
            looked = by_key[finding.trajectory_id]
            n_of[looked.pk] = n_of.get(looked.pk, 0) + 1
            if looked is batch[0] and n_of[looked.pk] <= at:
                continue
            row = rows.get((finding.trajectory_id, finding.step_index), finding.row_index)
            yield looked, n_of[looked.pk], SearchHit(
                looked.code, looked.external_id, row, finding.step_index, finding.start, finding.stop,
                finding.evidence[:MAX_CHARACTERS], "", "", finding.kind, run,
            )

    def _metadata(
        self, run: Run, table: ByteTable | None, batch: Sequence[_Looked], at: int
    ) -> Iterator[tuple[_Looked, int, SearchHit | None]]:
        text, as_json = self.question.text, self.question.as_json
        by_key = {looked.pk: looked for looked in batch}
        for key, values in metadata_with(list(by_key), text, as_json):
            looked = by_key[key]
            if at and looked is batch[0]:
                continue
            field, before, match, after = _where(values, text, as_json)
            yield looked, 1, SearchHit(
                looked.code, looked.external_id, None, None, None, None, match, f"{field}: {before}", after, "", run,
            )


_AROUND = 80


def _where(values: dict[str, Any], text: str, as_json: str) -> tuple[str, str, str, str]:
    """The field that holds the text, and the text with what stands around it."""
    for name, value in values.items():
        needle = as_json if name in BODIES else text
        at = (value or "").lower().find(needle.lower())
        if at >= 0:
            end = at + len(needle)
            return name, value[max(at - _AROUND, 0) : at], value[at:end], value[end : end + _AROUND]
    return "external_id", "", str(values["external_id"]), ""


def _text(table: ByteTable | None, ids: Ids) -> str:
    first_ids = ids[:MAX_CHARACTERS]
    text = " ".join(map(str, first_ids.tolist())) if table is None else table.text(first_ids)
    return text if len(text) <= MAX_CHARACTERS and len(first_ids) == len(ids) else f"{text[:MAX_CHARACTERS]} …"


def find_in_row(
    trajectory: StoredTrajectory, row: StoredRow, question: SearchQuestion, table: ByteTable | None, limit: int
) -> tuple[list[tuple[int, int]], bool]:
    """The ranges of one row that match, and whether these are all. Raises :class:`Refusal` for what is not looked for
    in tokens, and :class:`PatternTooSlow`."""
    pattern = question.pattern
    if pattern is None:
        raise Refusal("A row is searched by text, ids or regex.")
    if table is None and pattern.needs_text:
        raise Refusal(ONLY_IDS)
    if table is not None and (text := pattern.unknown([table])):
        raise Refusal(no_token(text))
    buffer = of_row(row_window(trajectory, row, 0, row.n_tokens).ids)
    places: list[tuple[int, int]] = []
    first = 0
    for start, stop in pattern.find(buffer, table, 0):
        if start < first:
            continue
        if len(places) == limit:
            return places, False
        places.append((start, stop))
        first = start + 1 if pattern.shares_tokens else stop
    return places, True
