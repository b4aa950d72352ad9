"""What a strategy is: the rule that turns completions and observations into the next prompt, and into rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollouts.tito.codec import Codec, Renderer
from rollouts.tito.segments import delta_origins
from rollouts.tito.trajectory import Floats, Ids, Mask, Message, Origins, Row, Step

Tools = Sequence[Mapping[str, Any]] | None
MOST_REMEMBERED = 2048


class StrategyRefused(Exception):
    """The strategy cannot work with this chat template or conversation; the message says why and what would help."""


@dataclass(frozen=True)
class Context:
    """What the strategies of one run share."""

    codec: Codec
    renderer: Renderer
    stop_ids: frozenset[int]
    """The ids that end a completion: EOS and what else the model stops at."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """Renders that many trajectories need alike."""

    def remember(self, key: Any, make: Callable[[], Ids]) -> Ids:
        """The ids under a key, made when they are not there. What is kept is bounded: keys may hold a call's own id."""
        found: Ids | None = self.memo.get(key)
        if found is None:
            if len(self.memo) >= MOST_REMEMBERED:
                self.memo.clear()
            found = self.memo[key] = make()
        return found

    def origins(self, delta: Ids, messages: Sequence[Message]) -> Origins:
        """Which ids of a delta the template wrote and which are text of the new messages."""
        return delta_origins(self.codec.token_bytes(delta), self.are(delta, self.codec.special_ids), messages)

    def are(self, ids: Ids, wanted: frozenset[int]) -> Mask:
        """``[n]``: which of the ids are wanted ones."""
        return np.isin(ids, np.fromiter(wanted, dtype=np.int64, count=len(wanted)))

    def after_last(self, ids: Ids, stops: frozenset[int]) -> int:
        """The place right behind the last stop token; 0 where there is none."""
        places = np.flatnonzero(self.are(ids, stops))
        return int(places[-1]) + 1 if places.size else 0


def changed_past(
    slug: str, context: Context, messages: Sequence[Message], shorter: Ids, longer: Ids, shared: int
) -> str:
    """The sentence about a template that rewrites what stood before the new messages."""
    before, after = (repr(context.codec.decode(ids[shared : shared + 8])) for ids in (shorter, longer))
    role = messages[0].get("role", "tool") if messages else "tool"
    return (
        f"The chat template is not prefix-preserving: appending a {role} message changes what was rendered before it, "
        f"from token {shared} of the probe on ({before} becomes {after}). {slug} cannot use it; repair the template "
        "(manage.py check_template --repair) or choose another strategy."
    )


@runtime_checkable
class TakesRecorded(Protocol):
    """A strategy whose rows follow from the steps as they were recorded: nothing has to be rendered to replay it."""

    def take_recorded(self, steps: Sequence[Step]) -> None: ...


class Strategy(Protocol):
    """One trajectory under a strategy."""

    slug: str
    rows_follow_from_steps: bool
    """Whether ``rows()`` is what merging the steps gives, so that nothing else needs to be stored."""
    continues_message: bool
    """Whether a prompt may end in the middle of the assistant's own message, so that it says nothing to a parser."""
    delta_origin: Origins | None
    """Of the ids that the last prompt added behind what it shares with the stream before; None = not said."""

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        """The first prompt. Raises :class:`StrategyRefused` before anything is sampled in vain."""
        ...

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        """A completion, verbatim, and the message it was parsed to (routing only under TITO)."""
        ...

    def observe(self, messages: Sequence[Message]) -> Ids:
        """The next prompt, after all the messages of a turn together."""
        ...

    def rows(self) -> list[Row]:
        """The training rows so far."""
        ...
