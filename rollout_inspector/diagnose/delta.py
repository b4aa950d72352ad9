"""The tokens that a step adds to its parent's stream, beside those that the template writes there."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.streams.align import AlignedGroup, align_ids
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Message, Step


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
        self.before: Ids = NO_IDS  # The last two ids that the template writes before these, from ``is_templates``.

    @cached_property
    def messages(self) -> Sequence[Message] | None:
        return self.case.request_messages(self.index)

    @cached_property
    def new_messages(self) -> list[Message] | None:
        """The messages after the parent's answer; None when the requests do not tell."""
        before, after = self.case.request_messages(self.parent_index), self.messages
        if before is None or after is None or len(after) <= len(before):
            return None
        return list(after[len(before) + (after[len(before)].get("role") == "assistant") :])

    @cached_property
    def pieces(self) -> list[bytes]:
        return self._pieces(self.ids)

    @cached_property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    # -- what the template writes

    @cached_property
    def is_templates(self) -> bool | None:
        """Whether a render by the stored template ends with exactly these ids. None = unknown. A short conversation is
        rendered first, because its cost does not grow with the trajectory. Then the whole one is."""
        if self.messages is None or self.new_messages is None:
            return None
        for messages in (self._short(), self.messages):
            rendered = self.case.render(self.step, messages, True)
            if rendered is None:
                continue
            if not len(self.ids) and self.stop_id is not None:  # every render ends with nothing
                return self.expected is not None and not len(self.expected)
            if self.ends_with(rendered, self.ids) or self._splits_content(rendered):
                self.before = rendered[: len(rendered) - len(self.ids)][-2:]
                return True
        return None if self.full is None else False

    def _short(self) -> list[Message]:
        """System and first user message, the assistant's last message, and the new messages."""
        assert self.messages is not None and self.new_messages is not None
        n = len(self.messages) - len(self.new_messages)
        users = (place for place, message in enumerate(self.messages[:n], 1) if message.get("role") == "user")
        head, last = self.messages[: next(users, n)], self.messages[n - 1]
        return [*head, *([last] if last.get("role") == "assistant" else []), *self.new_messages]

    def ends_with(self, rendered: Ids, delta: Ids) -> bool:
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
        """Whether a render ends with the delta, except for control tokens that the text of a message spells. Content
        whose control tokens were encoded as text is right. Then the render, which encodes them as tokens, is wrong."""
        special, is_special = self.case.is_special(rendered), self.case.is_special(self.ids)
        names = {name: int(id_) for name, id_ in zip(self._pieces(rendered[special]), rendered[special], strict=True)}
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        pattern = re.compile(b"|".join(map(re.escape, longest_first)) or b"(?!)")  # without names it matches nothing
        contents = [
            forms[0] for message in self.new_messages or () for forms in self.case.content_forms(message.get("content"))
        ]
        as_decoded = Counter(names[name] for content in contents for name in pattern.findall(content))
        places = np.flatnonzero(special)
        n = int(is_special.sum()) + as_decoded.total()
        if (
            not as_decoded
            or len(places) <= n
            or (self.stop_id is not None and len(is_special) and self.ids[0] == self.stop_id)
        ):
            return False
        tail = rendered[int(places[-n - 1]) + 1 :]
        if Counter(tail[self.case.is_special(tail)].tolist()) != Counter(self.ids[is_special].tolist()) + as_decoded:
            return False
        written = {name for name, id_ in names.items() if id_ in as_decoded}
        spaced = "|".join(map(self._spaced, sorted(written, key=len, reverse=True)))
        expected, actual = (_loose(b"".join(self._pieces(ids)), spaced) for ids in (tail, self.ids))
        return expected == actual or (self.stop_id is None and expected.endswith(actual))

    def _spaced(self, name: bytes) -> str:
        """A pattern of a control token's name in text, with the white space beside it that its encoder takes."""
        assert self.case.codec is not None
        text = name.decode("utf-8", "replace").replace("\u2581", "")
        encoded = self.case.text(self.case.codec.encode(f"a\n{text}\na"))
        before, behind = (" *" if beside in encoded else r"\s*" for beside in (f"\n{text}", f"{text}\n"))
        return before + " *".join(map(re.escape, text)) + behind

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
            at_end = ends.size and not self.case.text(base[int(ends[-1]) + 1 :]).strip()
            seam = int(ends[-1]) + 1 if at_end else len(base)
            # If the sampled stop token is also the next turn's header, the answer's turn ends without one.
            return seam + (self.stop_id is not None and seam < len(full) and int(full[seam]) == self.stop_id)
        # The template rewrites the messages before. Look for the stop token before the first new text instead.
        place = self._first_new_text(full)
        if place is None or self.stop_id is None:
            return None
        stops = np.flatnonzero(full[:place] == self.stop_id)
        return int(stops[-1]) + 1 if stops.size else None

    def _first_new_text(self, full: Ids) -> int | None:
        assert self.case.codec is not None
        data, ends = self.case.codec.joined_bytes(full)
        for message in self.new_messages or ():
            for forms in self.case.content_forms(message.get("content")):
                places = [place for form in forms if (place := data.rfind(form)) >= 0]
                if places:
                    return int(np.searchsorted(ends, max(places), side="right"))
        return None

    @cached_property
    def groups(self) -> list[AlignedGroup]:
        assert self.expected is not None
        return align_ids(self.expected, self.ids)

    @cached_property
    def difference(self) -> tuple[int, int, Ids] | None:
        """Where the delta leaves what the template writes, ``[start, stop)``, and the ids that the template has there.
        None when it is not known what the template writes."""
        if self.expected is None:
            return None
        start = common_prefix(self.expected, self.ids)
        tail = common_prefix(self.expected[start:][::-1], self.ids[start:][::-1])
        return start, len(self.ids) - tail, self.expected[start : len(self.expected) - tail]

    def spans(self, messages: Sequence[Message], data: bytes | None = None) -> list[tuple[int, int] | None]:
        """The byte range of each message's text in the delta or in ``data``, in order. None = it is not found."""
        data = self.data if data is None else data
        spans: list[tuple[int, int] | None] = []
        cursor = 0
        for message in messages:
            forms = next(self.case.content_forms(message.get("content")), ())
            places = [(place, place + len(form)) for form in forms if (place := data.find(form, cursor)) >= 0]
            span = min(places, key=lambda place: (place[0], -place[1]), default=None)
            spans.append(span)
            cursor = cursor if span is None else span[1]
        return spans


def _loose(data: bytes, pattern: str) -> str:
    """The text without what tokenizers change around control tokens in text: white space, the mark ``▁``, capitals."""
    text = data.decode("utf-8", "replace").replace("\u2581", " ")
    return re.sub(pattern, lambda match: "".join(match.group().split()).lower(), text, flags=re.IGNORECASE)
