"""What the rules see: one trajectory with its tokenizer and templates. Computed lazily."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.align import TrainedTokens, trained_tokens
from rollout_inspector.streams.canonical import EncodedAgain, bytes_of_each
from rollout_inspector.streams.interfaces import Codec, Conversation, Renderer
from rollout_inspector.streams.prefix import common_prefix, links_of, merge_steps, shared_with_stream, stream_length
from rollout_inspector.streams.recorded_renders import Form, first_rendered, has_null, kwargs_of_record, with_text
from rollout_inspector.streams.snippets import window_text
from rollout_inspector.streams.token_origins import content_forms
from rollout_inspector.streams.trajectory import Ids, Link, Mask, Message, Step, Trajectory

RendererFor = Callable[[str], "Renderer | None"]
# Up to this many ids of a differing stretch are stored on each side.
MAX_STRETCH = 256
REFUSED = "chat template that takes the messages"
"""What a check lacks where the file holds the messages, and the chat template that was named refuses them."""
_WIDEN = 512


@lru_cache(maxsize=8)
def _table(vocab_size: int, of: frozenset[int]) -> Mask:
    """``[vocab_size + 2]``: whether id - 1 is one of these. Both ends are for ids outside the vocabulary."""
    table: Mask = np.zeros(vocab_size + 2, dtype=np.bool_)
    table[1 + np.fromiter(of, np.int64)] = True
    return table


def special_in(ids: Ids, codec: Codec | None, of: frozenset[int] | None = None) -> Mask:
    """``[n]``: which of the ids are control tokens, or other tokens of the vocabulary."""
    table = _table(codec.vocab_size, codec.special_ids if of is None else of) if codec else _table(0, frozenset())
    return table.take(np.asarray(ids, dtype=np.int64) + 1, mode="clip")


@lru_cache(maxsize=16)
def _keeps_ascii(codec: Codec) -> bool:
    """Whether a tokenizer restores plain text as it was: its case and its spaces."""
    text = " A  b.\n\n\tC, d "
    return b"".join(codec.token_bytes(codec.encode(text))) == text.encode()


class DiagnosisContext:
    """One trajectory during its diagnosis."""

    def __init__(
        self, trajectory: Trajectory, codec: Codec | None, renderer_for: RendererFor | None, rows_template: str = ""
    ) -> None:
        self.trajectory = trajectory
        self.rows_template = rows_template  # The hash of the chat template of the rows; empty = the run's template.
        self.steps: Sequence[Step] = trajectory.steps
        self.codec = codec
        self._renderer_for = renderer_for
        self._renderers: dict[str, Renderer | None] = {}
        self._renders: dict[Any, Ids | None] = {}
        self._kwargs: dict[int, list[Mapping[str, Any]]] = {}
        self._decoded: dict[str, str] = {}
        self.links: list[Link] = links_of(trajectory)
        self.merged: list[tuple[int, ...]] = merge_steps(self.steps, self.links)
        """For each row that follows from the steps, the indices of its steps."""
        self.n_rows: int = len(trajectory.rows) or len(self.merged)
        self.of_another_template: list[int] = []
        """First prompts with another text than the template writes, whose ids their text does not explain either."""
        self.no_ids: set[int] = set()
        """Steps whose ids are missing or made up. Faults that follow from that are not reported again."""
        self.aside: set[int] = set()
        """Steps that the trajectory does not continue: side calls and retries. Rules for branches add to it."""
        self.again: list[EncodedAgain] = []
        """The completions that were encoded again. The rule that does so adds to it."""
        self.other_renders: dict[int, str] = {}  # Step -> the input of its template that fits its prompt, in words.
        self.undecided: dict[str, str] = {}
        """Check that a rule could not decide, although its fields are there -> what the rule lacked."""
        self.media_lacks: list[str] = []
        """Of each row or stream with media, what is not known of it; empty = nothing. The rule of media adds to it."""

    # -- tokens

    def is_special(self, ids: Ids) -> Mask:
        """``[n]``: which of the ids are control tokens."""
        return special_in(ids, self.codec)

    def is_control(self, token_id: int) -> bool:
        """:meth:`is_special` for one id."""
        return self.codec is not None and token_id in self.codec.special_ids

    @property
    def stops(self) -> frozenset[int | None]:
        """The stop tokens that the tokenizer names."""
        return frozenset((self.codec.eos_id, *getattr(self.codec, "stop_ids", ())) if self.codec else ())

    def bytes_of(self, ids: Ids) -> bytes:
        """The bytes of a stretch of ids. Needs a tokenizer."""
        assert self.codec is not None
        return self.codec.joined_bytes(ids)[0]

    def same_bytes(self, one: Ids, other: Ids, is_start: bool = False) -> bool:
        """Whether two stretches are the same text. Ids without bytes have no text, so they agree with nothing.
        ``is_start``: the other one may go on."""
        assert self.codec is not None
        data, (other_data, ends) = self.bytes_of(one), self.codec.joined_bytes(other)
        if is_start:
            other_data, other = other_data[: len(data)], other[: int(np.searchsorted(ends, len(data))) + 1]
        return data == other_data and self.all_have_bytes(one) and self.all_have_bytes(other)

    def all_have_bytes(self, ids: Ids) -> bool:
        """Whether each id is in the vocabulary and stands for at least one byte."""
        assert self.codec is not None
        return bool((np.diff(self.codec.joined_bytes(ids)[1], prepend=0) > 0).all())

    @cached_property
    def completion_bytes(self) -> list[bytes]:
        """The bytes of each step's completion, gathered in one call."""
        assert self.codec is not None
        return bytes_of_each([step.completion_ids for step in self.steps], self.codec)

    def text(self, ids: Ids) -> str:
        """The exact text of ids, control tokens kept. Empty without a tokenizer."""
        return self.bytes_of(ids).decode("utf-8", "replace") if self.codec else ""

    def as_decoded(self, text: str) -> str:
        """A text after encoding and decoding: some tokenizers compose accents, lower its case or drop characters."""
        if self.codec is None or (text.isascii() and _keeps_ascii(self.codec)):
            return text
        if text not in self._decoded:
            self._decoded[text] = self.text(self.codec.encode(text))
        return self._decoded[text]

    def content_forms(self, content: object) -> Iterator[tuple[bytes, ...]]:
        """:func:`token_origins.content_forms`, as this tokenizer spells them."""
        return content_forms(content, self.as_decoded)

    def has_trace(self, content: object, data: bytes) -> bool:
        """:func:`messages.has_trace`, as this tokenizer spells the content."""
        return msg.has_trace(content, data, self.as_decoded)

    def stands_in(self, content: object, data: bytes) -> bool:
        """:func:`messages.stands_in`, as this tokenizer spells the content."""
        return msg.stands_in(content, data, self.as_decoded)

    def widened(self, ids: Ids, start: int, stop: int) -> str:
        """The text of a stretch, widened to the nearest control token on both sides so that a person can read it."""
        if self.codec is None:
            return ""
        low, high = max(0, start - _WIDEN), min(len(ids), stop + _WIDEN)
        before = np.flatnonzero(self.is_special(ids[low:start]))
        after = np.flatnonzero(self.is_special(ids[stop:high]))
        first = low + int(before[-1]) if before.size else low
        whole = stop + int(after[0]) + 1 if after.size else high
        last = min(whole, first + 4 * _WIDEN)
        cut_before, cut_behind = first > 0 and not before.size, last < len(ids) and (last < whole or not after.size)
        return window_text(self.bytes_of(ids[first:last]), cut_before, cut_behind)

    # -- renders

    def renderer(self, step: Step) -> Renderer | None:
        return self.renderer_of(step.chat_template_sha256)

    def renderer_of(self, key: str) -> Renderer | None:
        """The chat template with a sha256; empty = the run's template."""
        if key not in self._renderers:
            self._renderers[key] = self._renderer_for(key) if self._renderer_for else None
        return self._renderers[key]

    def render(
        self, step: Step, messages: Sequence[Message], generation_prompt: bool, key: object = None,
        with_tools: bool = True,
    ) -> Ids | None:
        """A render with the step's template, tools, switches and date. None when there is no template or it refuses.
        ``key`` names the messages in the cache. A render without a key is not cached."""
        renderer = self.renderer(step)
        request = step.request
        if renderer is None or request is None:
            return None
        memo = (key, generation_prompt, with_tools)
        if key is not None and memo in self._renders:
            return self._renders[memo]
        tools = request.tools if with_tools else None
        conversation = Conversation(self.as_sent(messages), tools, self.kwargs_of_record(step)[0], generation_prompt)
        rendered = first_rendered(renderer, conversation)
        result = None if rendered is None else rendered[1]
        if key is not None:
            self._renders[memo] = result
        return result

    def user_text_start(self, step: Step) -> int | None:
        """The offset in a prompt at which its first user message's text starts. None when it is not there."""
        messages = step.request.messages if step.request else ()
        first = next((message for message in messages if message.get("role") == "user"), None)
        if first is None or self.codec is None:
            return None
        data, ends = self.codec.joined_bytes(step.prompt_ids)
        forms = next(iter(self.content_forms(first.get("content"))), ())
        places = [place for form in forms if (place := data.find(form)) >= 0]
        return int(np.searchsorted(ends, min(places), side="right")) if places else None

    def as_sent(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as the engine passed them to the template."""
        return self._content_form(messages) if has_null(messages) else messages

    @cached_property
    def _content_form(self) -> Form:
        """How a content that is null was rendered: as null, or as an empty text. The recorded prompts show it."""
        for step in self.steps:
            renderer, request = self.renderer(step), step.request
            if renderer is None or request is None or not len(step.prompt_ids) or not has_null(request.messages):
                continue
            shared = {}
            for form in (list, with_text):
                messages = form(request.messages)
                rendered = first_rendered(
                    renderer, Conversation(messages, request.tools, self.kwargs_of_record(step)[0], True)
                )
                shared[form] = -1 if rendered is None else common_prefix(rendered[1], step.prompt_ids)
            return max(shared, key=shared.__getitem__)
        return list

    def kwargs_of_record(self, step: Step) -> list[Mapping[str, Any]]:
        """The template kwargs of a step's request with the date of the record; two where the date is not known."""
        renderer = self.renderer(step)
        if self.codec is None or renderer is None or step.request is None:
            return [kwargs_of(step)]
        if id(step) not in self._kwargs:
            self._kwargs[id(step)] = kwargs_of_record(step, step.request, renderer, self.codec)
        return self._kwargs[id(step)]

    # -- messages

    def request_messages(self, index: int) -> Sequence[Message] | None:
        request = self.steps[index].request
        return None if request is None else request.messages

    def conversation(self, index: int) -> list[Message] | None:
        """The conversation when a step had ended: its messages and its reply."""
        messages = self.request_messages(index)
        if messages is None:
            return None
        reply = self.steps[index].reply
        return [*messages, reply] if reply is not None else list(messages)

    def continues(self, index: int, later: int) -> bool | None:
        """Whether a later request continues a step's conversation, under any system text. None when it is unknown."""
        before, after = self.conversation(index), self.request_messages(later)
        if before is None or after is None:
            return None
        previous, current = msg.without_system(before), msg.without_system(after)
        n = len(msg.without_system(self.request_messages(index) or ()))
        if len(current) <= n or msg.first_difference(previous, current) < n:
            return False
        return len(previous) == n or msg.same(previous[n], current[n])

    @cached_property
    def _next(self) -> dict[int, int]:
        """Each step that another one follows -> the first that does."""
        following = ((link.parent, index) for index, link in enumerate(self.links) if link.parent is not None)
        return dict(sorted(following, reverse=True))

    def message_of(self, index: int) -> Message | None:
        """What the harness made of a completion: the reply of the source, else the message that the next request holds.
        None where the source has no such message."""
        step, later = self.steps[index], self._next.get(index)
        if step.reply is not None or step.text is not None or later is None:
            return step.reply
        before, after = self.request_messages(index), self.request_messages(later)
        if before is None or after is None or msg.first_difference(before, after) < len(before):
            return None
        return next((message for message in after[len(before) :][:1] if message.get("role") == "assistant"), None)

    @cached_property
    def trained(self) -> TrainedTokens:
        """What the rows train of what the steps sampled."""
        return trained_tokens(self.steps, self.trajectory.rows)

    def n_lost(self, stretches: Sequence[tuple[int, int]]) -> int | None:
        """How many tokens no row trains as sampled, of completions from an offset on. None when it is not known."""
        if self.trained.n_lost is None:
            return None
        return sum(int(np.count_nonzero(self.trained.times[index][first:] == 0)) for index, first in stretches)

    @cached_property
    def continued(self) -> set[int]:
        """The steps whose whole stream starts a later prompt."""
        return {link.parent for link in self.links if link.parent is not None and link.extends}

    def link_of(self, index: int) -> Link:
        """The link of a step. A side call is never a parent, so a break is measured against the main conversation."""
        link = self.links[index]
        if link.extends or link.parent not in self.aside:
            return link
        best = link
        for candidate in range(index - 1, -1, -1):
            if candidate in self.aside:
                continue
            shared = shared_with_stream(self.steps[index].prompt_ids, self.steps[candidate])
            if best.parent in self.aside or shared > best.shared_length:
                best = Link(candidate, shared, stream_length(self.steps[candidate]))
        return best

    def chain(self, index: int) -> list[int]:
        """The step and its ancestors, latest first, while each extends the one before."""
        chain = [index]
        while (parent := self.links[chain[-1]].parent) is not None and self.links[chain[-1]].extends:
            chain.append(parent)
        return chain

    def root(self, index: int) -> int:
        """The first step of the chain that a step belongs to."""
        return self.chain(index)[-1]


def kwargs_of(step: Step) -> Mapping[str, Any]:
    return step.request.chat_template_kwargs if step.request else {}
