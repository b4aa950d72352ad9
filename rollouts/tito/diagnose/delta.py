"""Faults of the delta: the prompt extends the parent's stream, but adds other tokens than the template would."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from rollouts.tito.align import AlignedGroup, align_ids
from rollouts.tito.diagnose.context import DiagnosisContext
from rollouts.tito.diagnose.finding import Axis, Finding, Severity
from rollouts.tito.diagnose.request import leading_system
from rollouts.tito.diagnose.step_checks import control_text_in
from rollouts.tito.diagnose.verdict import StepSpan, Verdict, finding_on_step
from rollouts.tito.prefix import common_prefix
from rollouts.tito.snippets import quoted, quoted_or_nothing
from rollouts.tito.trajectory import Ids, Message, Step

_AROUND = 32
"""So many bytes of what the template writes around a text say where the text belongs."""


class Delta:
    """The tokens that a step adds to its parent's stream, and those that the template writes for the same messages."""

    def __init__(self, case: DiagnosisContext, index: int) -> None:
        link = case.links[index]
        assert link.parent is not None
        self.case = case
        self.index = index
        self.step: Step = case.steps[index]
        self.parent: Step = case.steps[link.parent]
        self.parent_index = link.parent
        self.start = link.shared_length
        self.ids: Ids = self.step.prompt_ids[self.start :]
        before = self.parent.completion_ids if len(self.parent.completion_ids) else self.parent.prompt_ids
        self.stop_id = int(before[-1]) if len(before) and case.is_control(int(before[-1])) else None
        """The control token that ended the parent's completion; None when no control token did."""

    @cached_property
    def messages(self) -> Sequence[Message] | None:
        return self.case.request_messages(self.index)

    @cached_property
    def new_messages(self) -> list[Message] | None:
        """The messages after the parent's answer; None when the requests do not tell."""
        before, after = self.case.request_messages(self.parent_index), self.messages
        if before is None or after is None or len(after) <= len(before):
            return None
        if after[len(before)].get("role") != "assistant":
            return list(after[len(before) :])
        return list(after[len(before) + 1 :])

    @cached_property
    def pieces(self) -> list[bytes]:
        return self._pieces(self.ids)

    @cached_property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    # -- what the template writes

    @cached_property
    def is_templates(self) -> bool | None:
        """Whether a render by the stored template ends with exactly these ids. None = unknown.

        A short conversation is rendered first, because its cost does not grow with the trajectory. Then the whole one
        is.
        """
        if self.messages is None or self.new_messages is None:
            return None
        for messages in (self._short(), self.messages):
            rendered = self.case.render(self.step, messages, True)
            if rendered is not None and (self._ends_with(rendered, self.ids) or self._splits_content(rendered)):
                return True
        return None if self.full is None else False

    def _short(self) -> list[Message]:
        """System and first user message, the assistant's last message, and the new messages."""
        assert self.messages is not None and self.new_messages is not None
        n = len(self.messages) - len(self.new_messages)
        head: list[Message] = []
        for message in self.messages[:n]:
            head.append(message)
            if message.get("role") == "user":
                break
        last = self.messages[n - 1]
        return [*head, *([last] if last.get("role") == "assistant" else []), *self.new_messages]

    def _ends_with(self, rendered: Ids, delta: Ids) -> bool:
        n = len(delta)
        if len(rendered) <= n or not np.array_equal(rendered[len(rendered) - n :], delta):
            return False
        before = int(rendered[len(rendered) - n - 1])
        if self.stop_id is None:
            return True
        if n and int(delta[0]) == self.stop_id and before != self.stop_id:
            return False  # the sampled stop token is there twice
        return before == self.stop_id or self.case.is_control(before)

    def _splits_content(self, rendered: Ids) -> bool:
        """Whether a render ends with the delta, except for control tokens that the text of a message spells.

        Content whose control tokens were encoded as text is right. Then the render, which encodes them as tokens, is
        wrong.
        """
        special, kept = self.case.is_special(rendered), self.case.is_special(self.ids)
        names = {name: int(id_) for name, id_ in zip(self._pieces(rendered[special]), rendered[special], strict=True)}
        pattern = _any_of(names)
        contents = [
            forms[0] for message in self.new_messages or () for forms in self.case.content_forms(message.get("content"))
        ]
        as_decoded = Counter(names[name] for content in contents for name in pattern.findall(content))
        places = np.flatnonzero(special)
        n = int(kept.sum()) + as_decoded.total()
        if (
            not as_decoded
            or len(places) <= n
            or (self.stop_id is not None and len(kept) and self.ids[0] == self.stop_id)
        ):
            return False
        tail = rendered[int(places[-n - 1]) + 1 :]
        if Counter(tail[self.case.is_special(tail)].tolist()) != Counter(self.ids[kept].tolist()) + as_decoded:
            return False
        written = {name for name, id_ in names.items() if id_ in as_decoded}
        wanted, found = (_loose(b"".join(self._pieces(ids)), written) for ids in (tail, self.ids))
        return wanted == found or (self.stop_id is None and wanted.endswith(found))

    def _pieces(self, ids: Ids) -> list[bytes]:
        assert self.case.codec is not None
        return self.case.codec.token_bytes(ids)

    @cached_property
    def full(self) -> Ids | None:
        """The ids of the whole conversation, with the generation prompt."""
        return self.case.render(self.step, self.messages or (), True, key=("full", self.index))

    @cached_property
    def full_without_prompt(self) -> Ids | None:
        return self.case.render(self.step, self.messages or (), False, key=("full", self.index))

    @cached_property
    def generation_prompt(self) -> Ids:
        """The ids of the assistant header that the template writes at the end of a prompt; empty when unknown."""
        if self.full is None or self.full_without_prompt is None:
            return self.ids[:0]
        n = len(self.full_without_prompt)
        if np.array_equal(self.full[:n], self.full_without_prompt):
            return self.full[n:]
        return self.full[common_prefix(self.full, self.full_without_prompt) :]

    @cached_property
    def expected(self) -> Ids | None:
        """The ids that the template writes after the answer's stop token. None when that place cannot be found."""
        full, messages, new = self.full, self.messages, self.new_messages
        if full is None or messages is None or new is None:
            return None
        seam = self._seam(full, list(messages[: len(messages) - len(new)]))
        return None if seam is None else full[seam:]

    def _seam(self, full: Ids, before: list[Message]) -> int | None:
        base = self.case.render(self.step, before, False)
        if base is not None and len(base) and np.array_equal(full[: len(base)], base):
            ends = np.flatnonzero(self.case.is_special(base))
            if ends.size and not self.case.text(base[int(ends[-1]) + 1 :]).strip():
                return self._past_header(full, int(ends[-1]) + 1)
            return self._past_header(full, len(base))
        # The template rewrites the messages before. Look for the stop token before the first new text instead.
        place = self._first_new_text(full)
        if place is None or self.stop_id is None:
            return None
        stops = np.flatnonzero(full[:place] == self.stop_id)
        return int(stops[-1]) + 1 if stops.size else None

    def _past_header(self, full: Ids, seam: int) -> int:
        # If the sampled stop token is also the next turn's header, the answer's turn ends without one.
        if self.stop_id is not None and seam < len(full) and int(full[seam]) == self.stop_id:
            return seam + 1
        return seam

    def _first_new_text(self, full: Ids) -> int | None:
        assert self.case.codec is not None
        pieces = self.case.codec.token_bytes(full)
        data = b"".join(pieces)
        for message in self.new_messages or ():
            for forms in self.case.content_forms(message.get("content")):
                places = [place for form in forms if (place := data.rfind(form)) >= 0]
                if places:
                    return int(np.searchsorted(np.cumsum([len(piece) for piece in pieces]), max(places), side="right"))
        return None

    @cached_property
    def groups(self) -> list[AlignedGroup]:
        assert self.expected is not None
        return align_ids(self.expected, self.ids)

    @cached_property
    def difference(self) -> tuple[int, int, Ids] | None:
        """Where the delta leaves what the template writes, ``[start, stop)``, and the ids that the template has there.

        None when it is not known what the template writes.
        """
        if self.expected is None:
            return None
        start = common_prefix(self.expected, self.ids)
        tail = common_prefix(self.expected[start:][::-1], self.ids[start:][::-1])
        return start, len(self.ids) - tail, self.expected[start : len(self.expected) - tail]

    def spans(self, messages: Sequence[Message], data: bytes | None = None) -> list[tuple[int, int] | None]:
        """The byte range of each message's text in the delta or in ``data``, in order. None = it is not found."""
        data = self.data if data is None else data
        found: list[tuple[int, int] | None] = []
        cursor = 0
        for message in messages:
            forms = next(self.case.content_forms(message.get("content")), ())
            places = [(place, place + len(form)) for form in forms if (place := data.find(form, cursor)) >= 0]
            span = min(places, key=lambda place: (place[0], -place[1]), default=None)
            found.append(span)
            cursor = cursor if span is None else span[1]
        return found


def _any_of(names: Iterable[bytes]) -> re.Pattern[bytes]:
    """Matches any of the names, longest first. Without names it matches nothing."""
    ordered = sorted(filter(None, names), key=len, reverse=True)
    return re.compile(b"|".join(map(re.escape, ordered)) or b"(?!)")


def _loose(data: bytes, names: Iterable[bytes]) -> str:
    """The text without what tokenizers change around control tokens in text: spaces, the mark ``▁``, capitals."""
    mark = "\u2581"
    ordered = sorted((name.decode("utf-8", "replace").replace(mark, "") for name in names), key=len, reverse=True)
    spaced = "|".join(" *".join(map(re.escape, name)) for name in ordered)
    text = data.decode("utf-8", "replace").replace(mark, " ")
    return re.sub(f" *(?:{spaced}) *", lambda found: found.group().replace(" ", "").lower(), text, flags=re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class DeltaFault:
    """What a rule about the delta found. Offsets count in the delta."""

    kind: str
    evidence: str
    start: int
    stop: int
    expected_ids: Ids
    message_index: int | None = None


def special_tokens_injected(d: Delta) -> DeltaFault | None:
    """A control token inside the text of a message."""
    for position, message in enumerate(d.new_messages or ()):
        if message.get("role") == "assistant":
            continue
        place = control_text_in(message.get("content"), d.data, d.case, d.ids, d.pieces)
        if place is not None:
            start, stop = place
            return DeltaFault(
                "special_tokens_injected",
                f"The text of a {message.get('role')} message spells {d.case.text(d.ids[start:stop])}, which was "
                f"encoded as the control token {int(d.ids[start])}.",
                start, stop, d.ids[:0], _message_index(d, position),
            )
    return None


def stop_token_doubled(d: Delta) -> DeltaFault | None:
    """The sampled stop token stands a second time at the start of the delta."""
    if d.stop_id is None or not len(d.ids) or int(d.ids[0]) != d.stop_id:
        return None
    if d.full is not None:
        pair = (d.full[1:] == d.stop_id) & (d.full[:-1] == d.stop_id)
        if pair.any():
            return None  # the template itself writes it twice
    return DeltaFault(
        "stop_token_doubled",
        f"Step {d.parent_index} sampled the stop token {d.case.text(d.ids[:1])} and the delta of step {d.index} holds "
        "it again.",
        0, 1, d.ids[:0],
    )


def message_dropped(d: Delta) -> DeltaFault | None:
    """A new message leaves no trace in the delta."""
    if not d.new_messages:
        return None
    rest, gap = d.data, 0
    spans = d.spans(d.new_messages)
    for start, stop in filter(None, reversed(spans)):
        rest = rest[:start] + b"\0" + rest[stop:]
    for position, (message, span) in enumerate(zip(d.new_messages, spans, strict=True)):
        gap = gap if span is None else span[1]
        # Words that a message shares with a present message are not a trace of it.
        content = message.get("content")
        if message.get("role") == "assistant" or d.case.stands_in(content, d.data) or d.case.has_trace(content, rest):
            continue
        if _is_begun(d, position, rest):
            continue
        wanted = d.full if d.expected is None else d.expected
        drops = wanted is not None and not d.case.has_trace(content, d.case.bytes_of(wanted))
        who = "the chat template leaves it out" if drops else "the delta leaves it out"
        ends = np.cumsum([len(piece) for piece in d.pieces])
        place = int(np.searchsorted(ends, gap, side="right")) if gap else 0
        start, stop, expected = (place, place, d.ids[:0]) if drops or d.difference is None else d.difference
        return DeltaFault(
            "message_dropped",
            f"A {message.get('role')} message of step {d.index} has no trace in its prompt: {who}.",
            start, stop, expected, _message_index(d, position),
        )
    return None


def _is_begun(d: Delta, position: int, rest: bytes) -> bool:
    """Whether a message's first or last character stands in the delta, next to what the template writes around it.

    ``rest`` is the delta without the texts of the other messages.
    """
    if d.expected is None or d.new_messages is None:
        return False
    wanted = d.case.bytes_of(d.expected)
    spans = d.spans(d.new_messages, wanted)
    span = spans[position]
    if span is None:
        return False
    others = [other for other in spans if other is not None and other != span]
    before = wanted[max([stop for _, stop in others if stop <= span[0]], default=0) : span[0]][-_AROUND:]
    behind = wanted[span[1] : min([start for start, _ in others if start >= span[1]], default=len(wanted))][:_AROUND]
    text = wanted[slice(*span)].decode("utf-8", "replace")
    begins, ends = before + text[:1].encode(), text[-1:].encode() + behind
    return (before != b"" and begins in rest) or (behind != b"" and ends in rest)


def generation_prompt_missing(d: Delta) -> DeltaFault | None:
    """The delta equals the template's up to the generation prompt, and ends without it or with another one."""
    prompt = d.generation_prompt
    if not len(prompt) or d.full is None:
        return None
    stem = d.full[: len(d.full) - len(prompt)]
    expected = d.expected
    if expected is not None and len(expected) >= len(prompt):
        body = len(expected) - len(prompt)
        shared = common_prefix(expected, d.ids)
        if shared < body or shared == len(expected) == len(d.ids):
            return None
        cut = shared if shared == len(d.ids) else body
        ends_right = np.array_equal(d.ids[len(d.ids) - len(prompt) :], prompt)
        if cut < len(d.ids) and ends_right:
            return None  # the header is there; other tokens came in between
    else:
        if not d._ends_with(stem, d.ids):
            return None
        shared = cut = len(d.ids)
    what = "without the assistant header" if cut == len(d.ids) else "with another assistant header"
    missing = (expected if expected is not None else np.concatenate([d.ids, prompt]))[shared:]
    return DeltaFault(
        "generation_prompt_missing",
        f"The prompt of step {d.index} ends {what}; the template writes {d.case.text(prompt)!r}.",
        shared, len(d.ids), missing,
    )


def turn_separator_lost(d: Delta) -> DeltaFault | None:
    """The text that the template writes right after the stop token is missing, and nothing else."""
    expected = d.expected
    if expected is not None:
        n = len(expected) - len(d.ids)
        lost = expected[: max(n, 0)]
        if n <= 0 or not np.array_equal(expected[n:], d.ids) or d.case.is_special(lost).any():
            return None
        if d.case.text(lost).strip():
            return None
    else:
        lost_ids = _usual_separator(d)
        if lost_ids is None:
            return None
        lost = lost_ids
    return DeltaFault(
        "turn_separator_lost",
        f"The template writes {d.case.text(lost)!r} after the stop token; the delta of step {d.index} starts with "
        f"{d.case.text(d.ids[:1])!r}.",
        0, 0, lost,
    )


def _usual_separator(d: Delta) -> Ids | None:
    """Without a render: the token that follows this stop token everywhere else in the prompt, but not here."""
    if d.stop_id is None or not len(d.ids) or not d.case.is_control(int(d.ids[0])):
        return None
    earlier = d.step.prompt_ids[: d.start - 1]
    places = np.flatnonzero(earlier[:-1] == d.stop_id)
    if not places.size:
        return None
    following = earlier[places + 1]
    if (following != following[0]).any() or d.case.is_control(int(following[0])):
        return None
    return following[:1] if not d.case.text(following[:1]).strip() else None


def system_prompt_injected(d: Delta) -> DeltaFault | None:
    """The additional tokens start like a conversation: with BOS, or with the header of the system block."""
    if any(message.get("role") in ("system", "developer") for message in d.new_messages or ()):
        return None
    heads = (head(d, with_tools) for head in (_system_header, _preamble) for with_tools in (True, False))
    starts = [head for head in heads if len(head)]
    bos = d.case.codec.bos_id if d.case.codec else None
    own = {d.case.as_decoded(text).strip() for text in leading_system(d.messages or ()) if isinstance(text, str)} - {""}
    extra, differs = [(0, len(d.ids))], 0
    if d.expected is not None:
        differs = common_prefix(d.expected, d.ids)
        extra = [(group.right_start, group.right_stop) for group in d.groups if not group.equal]
    for start, stop in extra:
        added = d.case.text(d.ids[start:stop]).strip()
        if added in own:
            return DeltaFault(
                "system_prompt_injected",
                f"The delta of step {d.index} holds the conversation's system text once more: {quoted(added)}.",
                max(start, differs), max(start, differs, stop), d.ids[:0],
            )
        for place in range(max(0, start - 3), min(stop, start + 4)):
            ids = d.ids[place:]
            has_bos = bos is not None and len(ids) > 0 and int(ids[0]) == bos and bos != d.stop_id
            has_header = any(np.array_equal(ids[: len(head)], head) and _too_many(d, head) for head in starts)
            if has_bos or has_header:
                return DeltaFault(
                    "system_prompt_injected",
                    f"The delta of step {d.index} holds the start of a conversation in the middle of the stream: "
                    f"{quoted(d.case.text(ids[:48]))}.",
                    max(place, differs), max(place + 1, differs, stop), d.ids[:0],
                )
    return None


def _too_many(d: Delta, head: Ids) -> bool:
    """Whether the delta holds these ids more often than the template writes them there."""
    actual, wanted = (ids.tobytes() for ids in (d.ids, d.ids[:0] if d.expected is None else d.expected))
    return actual.count(head.tobytes()) > wanted.count(head.tobytes())


def _system_header(d: Delta, with_tools: bool) -> Ids:
    """The first ids that the template writes before a system text, as many as are needed to recognise them."""
    renders = [
        d.case.render(
            d.step, [{"role": "system", "content": text}, {"role": "user", "content": "Hello."}], False,
            key=("header", text, d.step.chat_template_sha256), with_tools=with_tools,
        )
        for text in ("Alpha beta.", "9 gamma?")
    ]
    first, second = renders
    if first is None or second is None:
        head = d.case.steps[d.case.root(d.index)].prompt_ids
        return head[:3] if d.case.is_special(head[:1]).any() else head[:0]
    header = first[: common_prefix(first, second)]
    bos = d.case.codec.bos_id if d.case.codec else None
    header = header[1:] if len(header) and bos is not None and int(header[0]) == bos else header
    heads = _user_headers(d, with_tools)
    # Some templates put the system text into the first user turn, which starts like every other turn.
    if heads is not None and np.array_equal(heads[1][len(heads[1]) - len(header) :], header):
        return header[:0]
    if heads is None or not d.case.is_special(header).any():
        return header if len(header) > 1 else header[:0]
    # Ids that also start a user's turn prove nothing, and a date after the header may be of another day.
    return header[: common_prefix(header, heads[0]) + 1]


def _user_headers(d: Delta, with_tools: bool) -> tuple[Ids, Ids] | None:
    """The ids of a conversation without system message up to its first user text, and up to its second."""
    first, later = "Alpha beta.", "9 gamma?"
    messages: list[Message] = [{"role": "user", "content": first}, {"role": "assistant", "content": "Yes."}]
    messages.append({"role": "user", "content": later})
    key = ("start", d.step.chat_template_sha256)
    rendered = d.case.render(d.step, messages, False, key=key, with_tools=with_tools)
    if rendered is None or d.case.codec is None:
        return None
    pieces = d.case.codec.token_bytes(rendered)
    data, ends = b"".join(pieces), np.cumsum([len(piece) for piece in pieces])
    heads = []
    for text in (first, later):
        place = data.find(text.encode())
        if place < 0:
            return None
        heads.append(rendered[: int(np.searchsorted(ends, place, side="right"))])
    return heads[0], heads[1]


def _preamble(d: Delta, with_tools: bool) -> Ids:
    """The ids that start a conversation without system message and that no later turn has; at most four."""
    heads = _user_headers(d, with_tools)
    if heads is None:
        return d.ids[:0]
    shared = common_prefix(heads[0][::-1], heads[1][::-1])
    preamble = heads[0][: len(heads[0]) - shared]
    return preamble[:4] if len(preamble) > 3 or d.case.is_special(preamble).any() else preamble[:0]


def tool_messages_split(d: Delta) -> DeltaFault | None:
    """A run of tool messages has more turns in the delta than in the template's render."""
    tools = [m for m in d.new_messages or () if m.get("role") == "tool"]
    if len(tools) < 2 or d.expected is None:
        return None
    spans = [span for span in d.spans(tools) if span is not None]
    if len(spans) < 2:
        return None
    offsets = np.cumsum([0, *(len(piece) for piece in d.pieces)])
    for group in d.groups:
        if group.equal:
            continue
        extra = d.case.is_special(d.ids[group.right_start : group.right_stop]).sum()
        wanted = d.case.is_special(d.expected[group.left_start : group.left_stop]).sum()
        place, end = int(offsets[group.right_start]), int(offsets[group.right_stop])
        between = any(stop <= end and place <= start for (_, stop), (start, _) in pairwise(spans))
        if between and extra > wanted:
            return DeltaFault(
                "tool_messages_split",
                f"The {len(tools)} tool messages of step {d.index} were rendered one by one: the template does not end "
                f"the turn between them.",
                group.right_start, group.right_stop, d.expected[group.left_start : group.left_stop],
            )
    return None


def delta_differs(d: Delta) -> DeltaFault | None:
    """All other differences from the template."""
    if d.expected is None or d.difference is None:
        return None
    start, stop, expected = d.difference
    texts = [d.case.text(expected), d.case.text(d.ids[start:stop])]
    wanted, found = (quoted_or_nothing(text) for text in texts)
    how = f"{found} stands" if texts[0] != texts[1] else "other ids spell it"
    where = f"where the template writes {wanted}, {how}"
    evidence = (
        f"After the completion of step {d.parent_index} the template writes {len(d.expected)} ids, and the prompt of "
        f"step {d.index} has {len(d.ids)}: {where}."
    )
    position, cut = _cut_message(d)
    if position is not None:
        role = (d.new_messages or ())[position].get("role")
        evidence = f"A {role} message of step {d.index} is cut in its prompt, {cut}: {where}."
    return DeltaFault(
        "delta_differs", evidence, start, stop, expected, None if position is None else _message_index(d, position)
    )


def _cut_message(d: Delta) -> tuple[int | None, str]:
    """The new message of which a part is missing, and which part. None when the difference is another one."""
    assert d.expected is not None
    wanted, found = d.case.bytes_of(d.expected), d.data
    start = _shared(wanted, found)
    tail = _shared(wanted[start:][::-1], found[start:][::-1])
    stop, added = len(wanted) - tail, len(found) - tail - start
    for position, span in enumerate(d.spans(d.new_messages or (), wanted)):
        if span is None:
            continue
        first, last = start, stop
        # With equal text on both sides of a cut, the same bytes are missing a little earlier.
        while not added and last > span[1] and first > span[0] and wanted[first - 1] == wanted[last - 1]:
            first, last = first - 1, last - 1
        # A mark of the cut may stand in place of a much longer end.
        ends_early = not added or (last == span[1] and 2 * added < last - first)
        if span[0] <= first and last <= span[1] and first < last and ends_early:
            size, kept = (len(wanted[a:b].decode("utf-8", "ignore")) for a, b in (span, (span[0], first)))
            return position, f"after {kept} of its {size} characters"
    return None, ""


def _shared(one: bytes, other: bytes) -> int:
    return common_prefix(*(np.frombuffer(data, np.uint8).astype(np.int32) for data in (one, other)))


# The first rule that matches names the fault. The rules in the first list need no render.
BY_IDS = (special_tokens_injected, message_dropped)
BY_RENDER = (
    stop_token_doubled,
    turn_separator_lost,
    system_prompt_injected,
    tool_messages_split,
    generation_prompt_missing,
    delta_differs,
)


def _message_index(d: Delta, position: int) -> int | None:
    return None if d.messages is None else len(d.messages) - len(d.new_messages or ()) + position


def check_delta(case: DiagnosisContext, index: int, render: bool = True) -> Finding | None:
    """The fault of a step that extends its parent, or None."""
    if case.codec is None:
        return None
    d = Delta(case, index)
    fault = next((found for rule in BY_IDS if (found := rule(d)) is not None), None)
    if fault is None and not (render and d.is_templates):
        # The delta may hold another step's answer as it was sampled. No render can tell whether that is right.
        answers = any(message.get("role") == "assistant" for message in d.new_messages or ())
        known = render and d.is_templates is False and not answers
        rules = BY_RENDER if known else (stop_token_doubled, turn_separator_lost)
        fault = next((found for rule in rules if (found := rule(d)) is not None), None)
        if fault is None and render and not known:
            case.undecided["delta"] = "render of the new messages"
    if fault is None:
        return None
    verdict = Verdict(fault.kind, fault.evidence, message_index=fault.message_index)
    span = StepSpan(d.start + fault.start, d.start + fault.stop, d.ids[fault.start : fault.stop], fault.expected_ids)
    return finding_on_step(case, index, verdict, span, Axis.DELTA)


def control_text_in_prompt(case: DiagnosisContext, index: int) -> Finding | None:
    """Control tokens that were encoded from the text of a user or tool message, in the first prompt of a chain."""
    step = case.steps[index]
    messages = case.request_messages(index)
    if case.codec is None or not messages:
        return None
    suspects = [
        (position, message) for position, message in enumerate(messages) if message.get("role") in ("user", "tool")
    ]
    if not suspects or not case.is_special(step.prompt_ids).any():
        return None
    pieces = case.codec.token_bytes(step.prompt_ids)
    data = b"".join(pieces)
    for position, message in suspects:
        place = control_text_in(message.get("content"), data, case, step.prompt_ids, pieces)
        if place is not None:
            start, stop = place
            ids = step.prompt_ids[start:stop]
            evidence = (
                f"The text of a {message.get('role')} message spells {case.text(ids)}, which was encoded as the "
                f"control token {int(ids[0])}."
            )
            verdict = Verdict("special_tokens_injected", evidence, Severity.WARNING, position)
            return finding_on_step(case, index, verdict, StepSpan(start, stop, ids), Axis.DELTA)
    return None
