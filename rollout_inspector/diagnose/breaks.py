"""A break: the place where a prompt leaves the stream that it should start with. Computed lazily."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.align import AlignedGroup, align_ids, align_same_bytes
from rollout_inspector.streams.prefix import common_prefix, stream_length
from rollout_inspector.streams.token_origins import byte_offsets
from rollout_inspector.streams.trajectory import Ids, Link, Message, Step


class Break:
    """A step whose prompt does not start with its parent's stream. *Expected* is that stream, *actual* the prompt."""

    def __init__(self, case: DiagnosisContext, index: int, link: Link) -> None:
        assert link.parent is not None
        self.case = case
        self.index = index
        self.parent_index = link.parent
        self.step = case.steps[index]
        self.parent = case.steps[link.parent]
        self.expected: Ids = self.parent.stream
        self.actual: Ids = self.step.prompt_ids
        self.start = link.shared_length  # The first offset at which the two streams differ.

    # -- messages before and after

    @cached_property
    def known_messages(self) -> tuple[Sequence[Message], Sequence[Message]] | None:
        before, after = self.case.request_messages(self.parent_index), self.case.request_messages(self.index)
        return None if before is None or after is None else (before, after)

    @cached_property
    def first_changed(self) -> int | None:
        """Index of the parent's first message that the later request changed. None = the later request extends them."""
        if self.known_messages is None:
            return None
        before, after = self.known_messages
        index = msg.first_difference(before, after)
        return index if index < len(before) else None

    @cached_property
    def sent_back(self) -> Message | None:
        """The assistant's message as the later request sends it, if it does."""
        if self.known_messages is None or self.first_changed is not None:
            return None
        before, after = self.known_messages
        if len(after) > len(before) and after[len(before)].get("role") == "assistant":
            return after[len(before)]
        return None

    @cached_property
    def messages_equal(self) -> bool:
        """Whether no message was changed, and the assistant's came back as its reply, or else as it was sampled."""
        if self.sent_back is None or self.parent.reply is not None:
            return self.sent_back is not None and msg.same(self.parent.reply or {}, self.sent_back)
        if self.case.codec is None:
            return False
        sampled = self.case.bytes_of(self.parent.completion_ids)
        texts = [text for text in msg.strings_in(list(msg.plain(self.sent_back).values())[1:]) if text.strip()]
        return bool(texts) and all(self.case.has_trace(text, sampled) for text in texts)

    # -- the difference

    @cached_property
    def same_text(self) -> bool:
        """Whether the prompt goes on with the same bytes as the sampled stream, up to the end of that stream."""
        expected, actual = self.expected[self.start :], self.actual[self.start :]
        return len(expected) > 0 and self.case.same_bytes(expected, actual, is_start=True)

    @cached_property
    def _expected_tail_bytes(self) -> bytes:
        return self.case.bytes_of(self.expected[self.start :])

    @cached_property
    def _actual_tail_bytes(self) -> bytes:
        return self.case.bytes_of(self.actual[self.start :])

    @cached_property
    def text_start(self) -> int:
        """The first offset of the sampled stream with another text. Before it only token cuts may differ."""
        if self.case.codec is None:
            return self.start
        tails = self._expected_tail_bytes, self._actual_tail_bytes[: len(self._expected_tail_bytes)]
        same = common_prefix(*(np.frombuffer(tail, np.uint8).astype(np.int32) for tail in tails))
        ends = self.case.codec.joined_bytes(self.expected[self.start :])[1]
        return self.start + int(np.searchsorted(ends, same, side="right"))

    def text_from(self, start: int) -> tuple[str, str]:
        """The rest of both streams as text, from an offset of the sampled stream at or before ``text_start``."""
        gone = len(self.case.bytes_of(self.expected[self.start : start]))
        before = self.case.bytes_of(self.expected[start : self.start])
        expected, actual = (before + tail[gone:] for tail in (self._expected_tail_bytes, self._actual_tail_bytes))
        return expected.decode("utf-8", "replace"), actual.decode("utf-8", "replace")

    @cached_property
    def groups(self) -> list[AlignedGroup]:
        """Both streams from ``start`` on, aligned. Offsets count from ``start``."""
        expected, actual = self.expected[self.start :], self.actual[self.start :]
        if self.case.codec is not None and self.same_text:
            return self._same_text_groups(expected, actual)
        stop = self.same_turn_end(expected, actual)
        groups = align_ids(expected, actual[:stop])
        behind = AlignedGroup(len(expected), len(expected), stop, len(actual), False)
        return [*groups, behind] if stop < len(actual) else groups

    def same_turn_end(self, left: Ids, right: Ids) -> int:
        """Where the sampled stream ends in the prompt: after as many stop tokens as the sampled stream has."""
        if not len(left) or not self.case.is_control(int(left[-1])):
            return len(right)
        n = int(np.count_nonzero(left == left[-1]))
        ends = np.flatnonzero(right == left[-1])
        if len(ends) < n or ends[n - 1] + 1 > 4 * len(left) + 64:
            return len(right)
        return int(ends[n - 1]) + 1

    def _same_text_groups(self, left: Ids, right: Ids) -> list[AlignedGroup]:
        assert self.case.codec is not None
        left_bytes, right_bytes = self.case.codec.token_bytes(left), self.case.codec.token_bytes(right)
        size = len(self._expected_tail_bytes)
        # The prompt's token that reaches over the end of the sampled bytes belongs to the last group.
        n_right = int(np.searchsorted(byte_offsets(right_bytes), size))
        over = sum(map(len, right_bytes[:n_right])) - size
        if not over:
            return align_same_bytes(left_bytes, right_bytes[:n_right], left, right[:n_right])
        cut = right_bytes[n_right - 1][: len(right_bytes[n_right - 1]) - over]
        groups = align_same_bytes(left_bytes, [*right_bytes[: n_right - 1], cut], left, right[:n_right])
        last = groups[-1]
        return [*groups[:-1], AlignedGroup(last.left_start, last.left_stop, last.right_start, last.right_stop, False)]

    @cached_property
    def _stops(self) -> tuple[int, int]:
        """Where the differing stretch ends in both streams: after the last difference within the sampled stream."""
        groups, n_left = self.groups, len(self.expected) - self.start
        inside = [g for g in groups if g.left_start < n_left or (g.left_start == g.left_stop == n_left and not g.equal)]
        while inside and inside[-1].left_start == n_left:
            inside.pop()  # the delta alone, which was not sampled
        if inside and not inside[-1].equal and inside[-1].left_stop == n_left:
            last = inside[-1]
            return self.start + last.left_stop, self.start + self._turn_end(last)
        for group in reversed(inside):
            if not group.equal:
                return self.start + group.left_stop, self.start + group.right_stop
        return self.start, self.start

    def _turn_end(self, group: AlignedGroup) -> int:
        """Where a difference up to the sampled stream's end ends in the prompt: at the latest at the turn's end."""
        if self.case.codec is None or self.same_text:
            return group.right_stop
        right = self.actual[self.start + group.right_start : self.start + group.right_stop]
        last = self.expected[-1]
        ends = np.flatnonzero(right == last) if self.case.is_special(self.expected[-1:]).any() else np.zeros(0, int)
        return group.right_start + (int(ends[0]) + 1 if ends.size else len(right))

    @property
    def expected_stop(self) -> int:
        return self._stops[0]

    @property
    def actual_stop(self) -> int:
        return self._stops[1]

    @cached_property
    def first_group(self) -> AlignedGroup | None:
        return next((group for group in self.groups if not group.equal), None)

    @property
    def expected_stretch(self) -> Ids:
        """The differing ids of the sampled stream."""
        return self.expected[self.start : self.expected_stop]

    @property
    def actual_stretch(self) -> Ids:
        """The ids in their place in the prompt."""
        return self.actual[self.start : self.actual_stop]

    @cached_property
    def a(self) -> str:
        """The sampled text of the difference."""
        return self.case.text(self.expected_stretch)

    @cached_property
    def b(self) -> str:
        """The text in its place in the prompt."""
        return self.case.text(self.actual_stretch)

    @property
    def in_completion(self) -> bool:
        """Whether the first difference lies in the parent's own completion."""
        return self.start >= len(self.parent.prompt_ids)

    def turn_at(self, start: int) -> Step | None:
        """The step of the chain that sampled this offset of the sampled stream; None = no step did."""
        chain = (self.case.steps[index] for index in self.case.chain(self.parent_index))
        turn = next((step for step in chain if len(step.prompt_ids) <= start), None)
        return turn if turn is not None and start < stream_length(turn) else None

    def sampled_at(self, start: int, stop: int) -> bool:
        """Whether ``[start, stop)`` of the sampled stream lies inside one completion of the chain."""
        turn = self.turn_at(start)
        return turn is not None and stop <= stream_length(turn)

    # -- the head

    @cached_property
    def head_stop(self) -> int:
        """Where the text of the first user message starts in the chain's first prompt: what stands before is no turn's
        text. Without messages, some ids behind the second occurrence of the first control token."""
        case = self.case
        root = case.steps[case.root(self.parent_index)]
        start = case.user_text_start(root)
        if start is not None:
            return start
        for token in root.prompt_ids[case.is_special(root.prompt_ids)][:4]:
            places = np.flatnonzero(root.prompt_ids == token)
            if len(places) > 1:
                return int(places[1]) + 4
        return 0

    @cached_property
    def texts_lost(self) -> bool | None:
        """Whether the prompt holds a message's text less often than its request does. None = no text tells. Texts that
        the sampled stream does not hold as they are, such as escaped ones, tell nothing."""
        if self.known_messages is None or self.case.codec is None:
            return None
        before, after = map(_texts, self.known_messages)
        expected, actual = self.case.bytes_of(self.expected), self.case.bytes_of(self.actual)
        tells = False
        for text in dict.fromkeys(before):
            form = self.case.as_decoded(text).encode("utf-8", "replace")
            if not form.strip() or expected.count(form) < sum(other.count(text) for other in before):
                continue
            tells = True
            if actual.count(form) < sum(other.count(text) for other in after):
                return True
        return False if tells else None


def _texts(messages: Sequence[Message]) -> list[str]:
    """The texts of the messages that no assistant wrote, without white space around them."""
    contents = [msg.text_of(message.get("content")) for message in messages if message.get("role") != "assistant"]
    return [content.strip() for content in contents if isinstance(content, str) and content.strip()]
