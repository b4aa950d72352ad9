"""A renderer that prefetches: many renders in one round trip, none of them twice."""

from collections.abc import Callable, Sequence
from typing import Any

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.trajectory import Ids
from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer, TemplateTokenizer
from rollout_inspector.text.processes import Faults

MAX_MESSAGES = 6_000  # Messages over all renders of one series: it has the computing time of a single render.

_LASTING = ("raises", "syntax", "forbidden", "depth")
"""Kinds of failure that the same render meets again on every machine."""

Key = tuple[Any, ...]


def _key(conversation: Conversation) -> Key:
    # By identity: comparing the contents of conversations would cost more than a short render.
    messages, tools, kwargs, generation = conversation
    return (*map(id, messages), 0 if tools is None else id(tools), id(kwargs) if kwargs else 0, generation)


class Foreseen:
    """Prefetched renders. Keeps their messages, tools and kwargs alive, because the keys are made of object ids."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.rendered: dict[Key, client.Rendered] = {}


class PrefetchingRenderer(TemplateRenderer):
    """A :class:`TemplateRenderer` that remembers the renders of one :meth:`foresee`. Not safe in several threads."""

    def __init__(
        self, tokenizer: TemplateTokenizer, chat_template: str, encode: Callable[[str], Ids], now: str = "",
        prefetch: Callable[[Sequence[str]], None] | None = None, faults: Faults | None = None,
    ) -> None:
        """``prefetch`` is told of texts that ``encode`` will be called with."""
        super().__init__(tokenizer, chat_template, now, faults)
        self._encode, self._prefetch = encode, prefetch
        self._foreseen = Foreseen()
        self._ids: dict[Key, Ids] = {}

    def foresee(self, asks: Sequence[Conversation]) -> Foreseen:
        """Render in one round trip; safe in another thread. A render that ran out of time or memory is left out."""
        foreseen = Foreseen()
        series = [self._series(part, foreseen.kept) for part in _parts(asks)]
        try:
            outcomes = self._outcomes([job for job, _ in series])
        except RenderFailed:
            return foreseen  # the render meets the failure when it is asked for
        for (_, keys), outcome in zip(series, outcomes, strict=True):
            for key, rendered in zip(keys, outcome.series, strict=False):
                if rendered.ok or rendered.kind in _LASTING:
                    foreseen.rendered[key] = rendered
        return foreseen

    def use(self, foreseen: Foreseen) -> None:
        """Answer from these renders from now on, in place of those before."""
        self._foreseen = foreseen
        self._ids = {}
        if self._prefetch is not None:
            self._prefetch([rendered.text for rendered in foreseen.rendered.values() if rendered.ok])

    def rendered(self, conversation: Conversation) -> client.Rendered:
        """The render of one conversation, remembered or made now. Raises :class:`RenderFailed`."""
        render = self._foreseen.rendered.get(_key(conversation))
        return super().rendered(conversation) if render is None else render.or_raise()

    def render_ids(self, conversation: Conversation) -> Ids:
        """As :meth:`TemplateRenderer.render_ids`. The array is shared: do not write to it."""
        key = _key(conversation)
        ids = self._ids.get(key)
        if ids is None:
            ids = self._encode(self.rendered(conversation).text)
            if key in self._foreseen.rendered:
                self._ids[key] = ids
        return ids

    def _series(self, asks: Sequence[Conversation], kept: list[Any]) -> tuple[client.RenderJob, list[Key]]:
        messages, tools, kwargs = _Table(), _Table(), _Table()
        kwargs.place({})
        renders, keys = [], []
        for ask in asks:
            clean = self.template_kwargs_of(ask.kwargs) if ask.kwargs else {}
            renders.append((
                messages.places(ask.messages), None if ask.tools is None else tools.place(ask.tools),
                kwargs.place(clean, ask.kwargs) if clean else 0, ask.add_generation_prompt,
            ))
            keys.append(_key(ask))
        kept.extend((*messages.values, *tools.values, *(ask.kwargs for ask in asks if ask.kwargs)))
        base = self.base_variables()
        return client.RenderJob(base, False, messages.values, tools.values, kwargs.values, renders), keys


class _Table:
    """A list of objects without repetition, and the index of each."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[int, int] = {}

    def place(self, value: Any, stands_for: Any = None) -> int:
        key = id(value if stands_for is None else stands_for)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.values)
            self.values.append(value)
        return place

    def places(self, values: Sequence[Any]) -> list[int]:
        places = [*map(self._places.get, map(id, values))]
        return [place for place in places if place is not None] if None not in places else [*map(self.place, values)]


def _parts(asks: Sequence[Conversation]) -> list[list[Conversation]]:
    parts: list[list[Conversation]] = []
    n = MAX_MESSAGES
    for ask in asks:
        n += len(ask.messages)
        if n > MAX_MESSAGES:
            parts.append([])
            n = len(ask.messages)
        parts[-1].append(ask)
    return parts
