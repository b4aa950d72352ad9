"""The steps of a page as a conversation: messages with their tokens and findings, calls with their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, ClassVar
from urllib.parse import parse_qs

import numpy as np
from django.urls import reverse
from django.utils.safestring import SafeString, mark_safe

from inspector.html.markdown import hostile_markdown, n_characters
from inspector.trajectories.place import PagePlace, View
from inspector.trajectories.tokens import page_queries as reads
from inspector.trajectories.tokens.findings import DrawnFinding, read_findings
from inspector.trajectories.tokens.turns import Turn
from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.streams.align import TrainedTokens, place_in_row, trained_tokens
from rollout_inspector.streams.dropped_text import unheld_tokens
from rollout_inspector.streams.figures import trained_words
from rollout_inspector.streams.messages import ChatMessage, Media, media_of, media_parts
from rollout_inspector.streams.roles import role_turns
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.html.text import text_html
from rollout_inspector.text.tokenizers.byte_table import special_tokens
from rollouts.store import models
from rollouts.store.trajectories import trajectory_parts as parts
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

FOLDED = 1_500  # A longer text of a tool or of a system prompt is folded.
MAX_READ_TOKENS = 200_000
"""The most new tokens of a page's steps that are read, to find messages in them and to decode completions."""
MAX_ALIGNED_TOKENS = 20_000
"""The most tokens of a trajectory whose messages are looked for in a row that does not follow from its steps."""
MAX_UNHELD = 5
MARKDOWN_CHARACTERS = 100_000
"""The most characters of a page that are drawn as Markdown; a further text stays text, and says so."""
PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
TEXT_NOTE = "the text of the completion"
"""The note at a reply that is a text; the check of texts compares it with the ids."""
CUT = "shown"  # The name of the field that says how much is shown of a message which is too long.
_MEDIA_NAMES = (b"image", b"audio", b"video", b"vision", b"img")


@dataclass(frozen=True)
class MessagePlace:
    """Tokens ``[start, stop)`` of a row, as a message shows them."""

    tokens: str
    trained: str
    url: str  # Empty where no row holds them.
    findings: list[tuple[DrawnFinding, str]]  # Each with its address.
    is_here: bool  # The reader came from here.
    row: int
    start: int  # Where its tokens begin.
    turn: int = 0
    """The number of its turn, as the tokens page counts; 0 where the trajectory is too long to be counted."""
    is_near: bool = False  # It is the nearest message: none holds the token that the reader came from.


@dataclass
class Text:
    """A text, or a media part."""

    html: str = ""  # Escaped already where it is not empty.
    summary: str = ""  # Where it is folded: what it is, and how it begins.
    media: Media | None = None
    media_url: str = ""
    media_tokens: str = ""
    is_markdown: bool = False
    is_picture: bool = False  # A media part that the browser draws.
    too_long: bool = False  # Markdown was asked for, and it stays text.


@dataclass
class Pictures:
    """The pictures of a page: how many are drawn, of how many bytes, and how many are left out by the bounds."""

    BYTES_OF_ONE: ClassVar[int] = 2_000_000  # In a message, or within its text.
    BYTES: ClassVar[int] = 20_000_000
    MOST: ClassVar[int] = 100  # A browser asks for each by itself.
    n_drawn: int = 0
    n_bytes: int = 0
    n_left_out: int = 0

    def draws(self, n_bytes: int) -> bool:
        """Whether one more is drawn. It is counted either way."""
        is_drawn = n_bytes <= min(self.BYTES_OF_ONE, self.BYTES - self.n_bytes) and self.n_drawn < self.MOST
        self.n_drawn, self.n_left_out = self.n_drawn + is_drawn, self.n_left_out + (not is_drawn)
        self.n_bytes += n_bytes * is_drawn
        return is_drawn


@dataclass
class DrawnCall:
    """A tool call with the results that answer it."""

    id: str
    name: SafeString
    arguments: list[tuple[str, SafeString]]
    """Name and value; one value without a name where the arguments are no object."""
    results: list[DrawnMessage] = field(default_factory=list)


@dataclass
class DrawnMessage:
    """A message as the template draws it."""

    role: str
    note: str
    texts: list[Text]
    reasoning: list[Text]
    calls: list[DrawnCall]
    others: list[tuple[str, SafeString]]
    is_error: bool
    place: MessagePlace | None = None
    parsers_url: str = ""  # Of a sampled reply: where it is told how parsers read it.
    unheld: list[tuple[SafeString, str]] = field(default_factory=list)
    """Sampled text that it does not hold, each with its address."""


@dataclass
class DrawnStep:
    """A step: what it read and what it sampled, then its other fields."""

    index: int
    messages: list[DrawnMessage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    place: MessagePlace | None = None  # Of all that it read, where the messages cannot be told apart in the ids.
    reply: DrawnMessage | None = None
    is_empty: bool = False
    findings: list[tuple[DrawnFinding, str]] = field(default_factory=list)
    """Its errors and warnings, and notes that no message shows; each with the address of its tokens, or nothing."""
    others: list[tuple[str, SafeString, str]] = field(default_factory=list)
    """Name and text of each field that is no message, and how much of it is shown."""
    facts: list[tuple[str, Any]] = field(default_factory=list)  # Name and value of each field that is no text.


def html_of(text: str) -> SafeString:
    """A hostile text as HTML, invisible characters marked."""
    # A page cannot hold a lone surrogate.
    return mark_safe(text_html(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))


def place_asked(query: str) -> tuple[int, int] | None:
    """Row and token of the place that one came from: the address of the tokens page, without ``?``."""
    fields = {name: values[0] for name, values in parse_qs(query).items()}
    first = fields.get("t", "").partition("-")[0]
    row = fields.get("row", "0")
    return (int(row), int(first)) if first.isdecimal() and row.isdecimal() and len(first + row) < 20 else None


def step_of_place(steps: Sequence[StepSummary], at: tuple[int, int] | None) -> int | None:
    """The step that read or sampled a token of a row; None when no step did."""
    if at is None:
        return None
    summaries = (s for s in steps if s.row == at[0] and at[1] < s.prompt_length + s.completion_length)
    return min((step.index for step in summaries), default=None)


class ChatPainter:
    """Draws the steps of one page. Two queries: findings, and the arrays of the steps; more where a row has its own."""

    def __init__(
        self, trajectory: models.StoredTrajectory, rows: Sequence[RowSummary], steps: Sequence[StepSummary],
        shown: Sequence[int], at: tuple[int, int] | None, as_markdown: bool = False,
    ) -> None:
        self.trajectory, self.at = trajectory, at
        self.markdown_left = MARKDOWN_CHARACTERS if as_markdown else None
        """Characters that may still be drawn as Markdown; None: all is shown as text, and no picture is drawn."""
        self.pictures = Pictures()
        self.places: list[tuple[int, DrawnMessage]] = []  # First token and message of each place in the row of ``at``.
        self.steps, self.rows = {step.index: step for step in steps}, {row.index: row for row in rows}
        self.turns: dict[int, list[Turn]] = {}  # Row -> its turns.
        self.follows = {row.index: row for row in rows if row.follows_steps}
        self.trained_in = {step: row for row in rows if not row.follows_steps for step in row.steps}
        """Step -> the row with arrays of its own that trains it."""
        self.with_arrays = [row.index for row in rows if not row.follows_steps]
        self.whole: Trajectory | None = None
        self.compared: TrainedTokens | None = None
        """The trajectory with all its arrays, read when a message is looked for in a row of its own."""
        self.findings = read_findings(trajectory, steps, rows)
        self.findings_at: dict[int | None, list[DrawnFinding]] = {}  # Step -> the findings that are told at it.
        for item in self.findings:
            self.findings_at.setdefault(self.step_of(item), []).append(item)
        self.table, _ = reads.table_of(trajectory.run.tokenizer)
        here = [self.steps[index] for index in shown if index in self.steps]
        n = sum(max(s.prompt_length - s.shared_length, 0) + s.completion_length for s in here)
        readable = self.table is not None and 0 < n <= MAX_READ_TOKENS
        self.arrays = parts.steps_with_tokens(trajectory, [s.index for s in here]) if readable else {}
        self.calls: dict[int, list[DrawnCall]] = {}  # Step -> the calls of its reply.
        self.in_messages: set[int] = set()  # Numbers of the findings that a message shows.

    def step(
        self, index: int, said: Sequence[ChatMessage], reply: ChatMessage | None, note: str,
        numbers: Mapping[int, int], echo: ChatMessage | None,
    ) -> DrawnStep:
        """A step. ``said``: its new messages; ``echo``: the message among them that repeats the parent's reply."""
        drawn_step = DrawnStep(index)
        summary = self.steps.get(index)
        fresh = [fresh_message for fresh_message in said if fresh_message is not echo]
        if echo is not None:
            drawn_step.notes.append("The request repeats the reply of the step before, which is shown there.")
        ranges = self._ranges(index, fresh)
        media = self._media_tokens(
            index, sum(media_of(t) is not None for fresh_message in fresh for t in fresh_message.texts)
        )
        parent = summary.parent if summary else None
        pending = self.calls.get(-1 if parent is None else parent, [])
        n_placed = 0
        for number, fresh_message in enumerate(fresh):
            message = self._message(index, fresh_message, numbers, media)
            if ranges:
                self._put(message, index, *ranges[number], sampled=False)
            call = _answered(fresh_message, pending) if fresh_message.is_result else None
            if call is not None:
                message.note = f"read by step {index}"
                call.results.append(message)
                n_placed += 1
            else:
                drawn_step.messages.append(message)
        if n_placed:
            word = "result" if n_placed == 1 else "results"
            drawn_step.notes.append(f"It read {n_placed} tool {word}, shown under the call above.")
        if summary and not ranges:
            start = summary.shared_length if summary.parent is not None else 0
            drawn_step.place = self._place(index, start, summary.prompt_length, sampled=False)
        self._reply(drawn_step, summary, reply, note, numbers)
        drawn_step.findings = [
            (item, "" if item.drawn_row is None else self._url(item.drawn_row, *item.drawn_places[0]))
            for item in self.findings_at.get(index, ())
            if item.weight != Severity.INFO or item.number not in self.in_messages
        ]
        drawn_step.is_empty = not (drawn_step.messages or drawn_step.notes or drawn_step.reply)
        return drawn_step

    def step_of(self, item: DrawnFinding) -> int | None:
        """The step at which a finding is told; None: no step holds its place."""
        if item.step is not None or item.drawn_row is None:
            return item.step
        if item.drawn_row in self.follows:
            return step_of_place(list(self.steps.values()), (item.drawn_row, item.drawn_places[0][0]))
        return next((step for step, row in self.trained_in.items() if row.index == item.drawn_row), None)

    def _reply(
        self, drawn: DrawnStep, summary: StepSummary | None, reply: ChatMessage | None, note: str,
        numbers: Mapping[int, int],
    ) -> None:
        tokens = self.arrays.get(drawn.index)
        ids = tokens.tokens.completion_ids if tokens else None
        is_told = reply is not None and note != TEXT_NOTE and CUT not in reply.others
        if reply is None:
            decoded = ""
            if ids is not None and self.table is not None:
                decoded = self.table.text(ids[~special_tokens(self.table, ids)])
            if not summary or not summary.completion_length:
                return
            note = "decoded from the sampled ids: the source holds no message of it"
            reply = ChatMessage("assistant", [decoded] if decoded else [])
        drawn.reply = self._message(drawn.index, reply, numbers, "")
        drawn.reply.note = note
        self.calls[drawn.index] = drawn.reply.calls
        if summary and summary.completion_length:
            start = summary.prompt_length
            drawn.reply.parsers_url = (
                reverse("trajectory-parsers", args=[self.trajectory.code]) + f"?step={drawn.index}"
            )
            self._put(drawn.reply, drawn.index, start, start + summary.completion_length, sampled=True)
            if is_told and ids is not None and self.table is not None:
                lost = unheld_tokens(ids, special_tokens(self.table, ids), self.table.joined, reply.held)
                linked = drawn.reply.place is not None and bool(drawn.reply.place.url)
                drawn.reply.unheld = [
                    (html_of(text), self._url(summary.row, start + first, start + stop) if linked else "")
                    for text, first, stop in lost[:MAX_UNHELD]
                ]

    def _message(self, step: int, said: ChatMessage, numbers: Mapping[int, int], media_tokens: str) -> DrawnMessage:
        texts = []
        for text in said.texts:
            medium = media_of(text)
            if medium is None:
                fold = said.is_result or said.role in ("system", "developer")
                texts.append(self._as_markdown(text, said.is_result) or _text(text, said.role, fold))
                continue
            number = numbers.get(id(text))
            at = [self.trajectory.code, step, number]
            url = reverse("trajectory-media", args=at) if number is not None and medium.n_bytes else ""
            may_be_drawn = self.markdown_left is not None and bool(url) and medium.type in PICTURE_TYPES
            is_picture = may_be_drawn and self.pictures.draws(medium.n_bytes or 0)
            texts.append(Text(media=medium, media_url=url, media_tokens=media_tokens, is_picture=is_picture))
        return DrawnMessage(
            said.role, f"result of {said.name}" if said.is_result and said.name else said.name, texts,
            [self._as_markdown(t, False, "reasoning") or _text(t, "reasoning", True, 0) for t in said.reasoning],
            [DrawnCall(call.id, html_of(call.name), _arguments(call.arguments)) for call in said.calls],
            [(name, html_of(json_text(value))) for name, value in said.others.items()], said.is_error,
        )

    def _as_markdown(self, value: Any, is_result: bool, fold: str = "") -> Text | None:
        """A text as Markdown; None where that is not asked for, or it is what a tool wrote."""
        if self.markdown_left is None or is_result or not isinstance(value, str):
            return None
        n, pictures = n_characters(value), replace(self.pictures)
        html = hostile_markdown(value, pictures.draws) if n <= self.markdown_left else None
        if html is None:
            return Text(html_of(value), too_long=True)
        self.markdown_left, self.pictures = self.markdown_left - n, pictures
        return Text(html, f"{fold} · {len(value):,} characters" if fold else "", is_markdown=True)

    def mark_nearest(self) -> str:
        """Mark the message nearest to the place that one came from where none holds it; a sentence if there is none."""
        if self.at is None or any(message.place and message.place.is_here for _, message in self.places):
            return ""
        row, token = self.at
        if not self.places:
            return f"No message on this page holds token {token:,} of row {row}."
        before = [(start, message) for start, message in self.places if start <= token]
        _, nearest = max(before, key=itemgetter(0)) if before else min(self.places, key=itemgetter(0))
        if nearest.place is not None:
            nearest.place = replace(nearest.place, is_here=True, is_near=True)
        return ""

    def _put(self, message: DrawnMessage, index: int, start: int, stop: int, sampled: bool) -> None:
        """Give a message its place."""
        message.place = self._place(index, start, stop, sampled)
        if message.place and message.place.url and self.at is not None and message.place.row == self.at[0]:
            self.places.append((message.place.start, message))

    def _ranges(self, index: int, said: Sequence[ChatMessage]) -> list[tuple[int, int]]:
        """The tokens of each message that a step read, by the role headers in its ids; empty when they do not fit."""
        summary, step_arrays = self.steps.get(index), self.arrays.get(index)
        if summary is None or step_arrays is None or not said or self.table is None:
            return []
        start, ids = 0 if summary.parent is None else summary.shared_length, step_arrays.tokens.delta_ids
        turns = role_turns(ids, special_tokens(self.table, ids), self.table.token_bytes)
        if turns and turns[-1][2] == "assistant" and said[-1].role != "assistant":
            turns = turns[:-1]  # the generation prompt
        turns = turns[-len(said) :]
        roles = [(role, message.role) for (_, _, role), message in zip(turns, said, strict=False)]
        alike = all(
            a == b or (a, b) in (("user", "tool"), ("tool", "function"), ("system", "developer")) for a, b in roles
        )
        if len(turns) != len(said) or not alike:
            return []
        return [(start + first, start + stop) for first, stop, _ in turns]

    def _media_tokens(self, index: int, n: int) -> str:
        step_arrays = self.arrays.get(index)
        if not n or step_arrays is None or self.table is None:
            return ""
        ids = step_arrays.tokens.delta_ids
        names = self.table.token_bytes(ids[special_tokens(self.table, ids)])
        n_placeholders = sum(any(word in name.lower() for word in _MEDIA_NAMES) for name in names)
        return f"{n_placeholders:,} media tokens in what the step read" if n_placeholders else ""

    def _place(self, index: int, start: int, stop: int, sampled: bool) -> MessagePlace | None:
        summary = self.steps[index]
        if stop <= start:
            return None
        n = stop - start
        row = self.follows.get(summary.row)
        trained = "" if row is None else trained_words(n if sampled and index in row.steps else 0, n)
        places_in_row = [
            (item, self._url(item.drawn_row if item.drawn_row is not None else summary.row, *item.drawn_places[0]))
            for item in self.findings
            if self._is_of(item, index, row, start, stop)
        ]
        self.in_messages.update(item.number for item, _ in places_in_row)
        words = f"{n:,} token{'s' * (n != 1)}"
        url, row_shown = (self._url(summary.row, start, stop) if row else ""), summary.row
        if row is None and (trained_place := self._in_trained_row(index, start, stop)):
            row_shown, start, stop, trained = trained_place
            words += "" if stop - start == n else f", {stop - start:,} in row {row_shown}"
            url = self._url(row_shown, start, stop)
        at = self.at
        is_here = bool(url) and at is not None and at[0] == row_shown and start <= at[1] < stop
        return MessagePlace(
            words, trained, url, places_in_row, is_here, row_shown, start, self._turn(row_shown, start) if url else 0
        )

    def _turn(self, row: int, start: int) -> int:
        """The number of the turn that holds a token of a row. Two queries for each row of the page."""
        if row not in self.turns:
            summary, steps = self.rows[row], list(self.steps.values())
            self.turns[row] = []
            if summary.n_tokens <= MAX_READ_TOKENS:
                tokens = reads.read_tokens(self.trajectory, summary, 0, summary.n_tokens, steps)
                self.turns[row] = reads.read_turns(self.trajectory, summary, steps, [], tokens)
        return next((turn.number for turn in self.turns[row] if turn.start <= start < turn.stop), 0)

    def _in_trained_row(self, index: int, start: int, stop: int) -> tuple[int, int, int, str] | None:
        """Row, start and stop of the tokens that stand in a trained row for those of a step, and how many are trained.
        None where no such row trains the step, or where the trajectory is too long to be aligned for a page."""
        row = self.trained_in.get(index)
        if row is None or self.trajectory.n_tokens > MAX_ALIGNED_TOKENS:
            return None
        if self.whole is None:
            (self.whole,) = load_trajectories([self.trajectory])
            self.compared = trained_tokens(self.whole.steps, self.whole.rows)
        trained_row = self.whole.rows[self.with_arrays.index(row.index)]
        place = place_in_row(self.whole.steps, trained_row, index, start, stop)
        if place is None:
            return None
        sampled_from = self.steps[index].prompt_length
        if self.compared is None or start < sampled_from:
            n, of = int(trained_row.loss_mask[place[0] : place[1]].sum()), place[1] - place[0]
        else:  # as the header counts: sampled tokens that are trained as they were sampled
            n = int(np.count_nonzero(self.compared.times[index][start - sampled_from : stop - sampled_from]))
            of = stop - start
        return row.index, *place, trained_words(n, of)

    @staticmethod
    def _is_of(item: DrawnFinding, index: int, row: RowSummary | None, start: int, stop: int) -> bool:
        """Whether a finding begins in tokens of a step, or in the same tokens of its row."""
        if item.step is not None:
            return item.step == index and start <= item.start < stop
        return row is not None and item.drawn_row == row.index and start <= item.drawn_places[0][0] < stop

    def _url(self, row: int, start: int, stop: int) -> str:
        place = PagePlace(row=row, view=View.TOKENS)
        return reverse("trajectory", args=[self.trajectory.code]) + place.marked(start, stop)


def media_numbers(bodies: Sequence[Any]) -> dict[int, int]:
    """The number of each media part in the stored values of a step, as :func:`media` counts."""
    return {id(part): n for n, part in enumerate(part for body in bodies for part in media_parts(body))}


def _answered(said: ChatMessage, calls: Sequence[DrawnCall]) -> DrawnCall | None:
    """The call that a result answers: by its id, else the first of its name that has no result."""
    if said.result_of:
        return next((call for call in calls if call.id == said.result_of), None)
    free = [call for call in calls if not call.results]
    return next((call for call in free if not said.name or str(call.name) == str(html_of(said.name))), None)


def _text(value: Any, role: str, fold: bool, least: int = FOLDED) -> Text:
    text = value if isinstance(value, str) else json_text(value)
    if not fold or len(text) <= (0 if role in ("system", "developer") else least):
        return Text(html_of(text))
    first = " ".join(text[:200].split())[:80]
    return Text(html_of(text), f"{role} · {len(text):,} characters · {first}{'…' * (len(text) > 80)}")


def _arguments(value: Any) -> list[tuple[str, SafeString]]:
    if isinstance(value, dict):
        return [(name, html_of(json_text(item))) for name, item in value.items()]
    return [] if value in (None, "") else [("", html_of(json_text(value)))]


def json_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, indent=None if len(str(value)) < 200 else 1)
