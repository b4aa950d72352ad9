"""The strategy with an object that knows the model's format. It extends the stream exactly, or refuses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.strategies.appending import Appending
from rollout_inspector.streams.strategies.protocol import Context, Extends, StrategyRefused, Tools
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Message


class Bridge(Appending):
    """``bridge_to_next_turn`` of the ``renderers`` library (source 3), written by hand for each family of models."""

    slug = "bridge"
    package = "renderers"
    about = "An object that knows the model's format extends the stream exactly, or refuses."

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._bridge: Extends | None = None
        self._prompt = self._completion = NO_IDS

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        if self._context.bridge is None:
            raise StrategyRefused("bridge needs the package renderers and a run's tokenizer. Here both are missing.")
        self._bridge = self._context.bridge(kwargs)
        self._prompt = super().begin(messages, tools, kwargs)
        return self._prompt

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        super().sampled(ids, logprobs, reply)
        self._completion = ids

    def observe(self, messages: Sequence[Message]) -> Ids:
        delta = self._delta(messages)
        self.delta_origin = self._context.origins(delta, messages)
        self._buffer.append_delta(delta, self.delta_origin)
        self._prompt = self._buffer.ids
        return self._prompt

    def _delta(self, messages: Sequence[Message]) -> Ids:
        assert self._bridge is not None
        stream = np.concatenate([self._prompt, self._completion])
        extended = self._bridge.extend(self._prompt, self._completion, messages, self._tools)
        if extended is None or common_prefix(stream, extended) < len(stream):
            roles = ", ".join(str(message.get("role")) for message in messages) or "no"
            raise StrategyRefused(
                f"The renderer {self._bridge.name} cannot extend this stream by {roles} messages without changing the "
                "text before them. Choose tool_delta, or another strategy."
            )
        return extended[len(stream) :]
