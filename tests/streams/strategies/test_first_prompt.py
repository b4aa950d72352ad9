"""Siblings of a group start with one render of their prompt."""

from typing import Any, cast

from rollout_inspector.streams.interfaces import Codec, Conversation, Renderer
from rollout_inspector.streams.strategies import Context
from rollout_inspector.streams.trajectory import Ids, ids_array


class Counting:
    """A renderer that writes how many renders it has made."""

    n = 0

    def render_ids(self, conversation: Conversation) -> Ids:
        assert conversation.add_generation_prompt
        self.n += 1
        return ids_array([self.n])


def test_equal_conversations_in_a_row_are_rendered_once() -> None:
    context = Context(cast(Codec, None), cast(Renderer, Counting()), frozenset())

    def prompt(text: str, tools: Any = None, kwargs: Any = None) -> int:
        # New objects each time: each trajectory has its task from the database.
        return int(context.first_prompt([{"role": "user", "content": text}], tools, kwargs or {})[0])

    assert [prompt("a"), prompt("a"), prompt("b"), prompt("b")] == [1, 1, 2, 2]
    assert prompt("b", tools=[{"name": "f"}]) == 3
    assert prompt("b", tools=[{"name": "f"}], kwargs={"thinking": True}) == 4
    assert prompt("b", tools=[{"name": "f"}], kwargs={"thinking": True}) == 4
