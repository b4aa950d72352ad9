"""Setups to plant faults in: a tokenizer, a chat template, and turns made by rendering and splitting.

Nothing here is shared with the diagnosis: a fault is planted in ids or messages, and its name is known.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import Ids, Request, Step, Trajectory, ids_array

CITIES = ["Cusco", "Tromsø", "Nairobi", "Çanakkale", "札幌", "Lisbon"]
TOPICS = ["tides", "bridge cables", "moth migration", "harpsichord tuning"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expr": {"type": "string"}, "exact": {"type": "boolean"}},
                "required": ["expr"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a fact up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    },
]


class CannotPlant(Exception):
    """The template or the tokenizer has no place for this fault."""


@dataclass
class Case:
    """A planted trajectory and what must be found in it."""

    name: str
    trajectory: Trajectory
    kind: str | None
    step: int | None
    also: tuple[str, ...] = ()
    """Other names that are as right."""
    start: int | None = None
    """The first wrong token of the step's stream; None = not looked at."""


@dataclass
class ModelSetup:
    """A tokenizer with a chat template, and what a conversation of them needs."""

    name: str
    codec: Any
    renderer: Any
    rng: random.Random
    tools: bool = True
    system: bool = True
    string_arguments: bool = False
    kwargs: dict[str, Any] | None = None
    history: bool = False
    """Whether the first prompt holds an earlier exchange."""

    # -- conversation

    def opening(self) -> list[dict[str, Any]]:
        city, topic = self.rng.choice(CITIES), self.rng.choice(TOPICS)
        self.a, self.b = self.rng.randrange(100, 999), self.rng.randrange(100, 999)
        messages = [{"role": "user", "content": f"In {city}, someone asks about {topic}: what is {self.a} * {self.b}?"}]
        if self.history:
            messages = [
                {"role": "user", "content": "Hello there."},
                {"role": "assistant", "content": "Hello."},
                *messages,
            ]
        if self.system:
            messages.insert(0, {"role": "system", "content": f"You are a careful assistant for {topic}."})
        return messages

    def call(self, name: str = "calculator", ident: str = "callaaaa1", /, **arguments: Any) -> dict[str, Any]:
        arguments = arguments or {"expr": f"{self.a}*{self.b}", "exact": False}
        value: Any = json.dumps(arguments) if self.string_arguments else arguments
        return {"id": ident, "type": "function", "function": {"name": name, "arguments": value}}

    def calling(self, *calls: dict[str, Any], content: str = "") -> dict[str, Any]:
        return {"role": "assistant", "content": content, "tool_calls": list(calls) or [self.call()]}

    def result(self, content: Any = None, name: str = "calculator", ident: str = "callaaaa1") -> dict[str, Any]:
        content = str(self.a * self.b) if content is None else content
        return {"role": "tool", "name": name, "tool_call_id": ident, "content": content}

    # -- rendering

    def render(self, messages: list[dict[str, Any]], gen: bool = True, **changes: Any) -> Ids:
        return self.codec.encode(self.text(messages, gen, **changes))

    def text(self, messages: list[dict[str, Any]], gen: bool = True, **changes: Any) -> str:
        tools = changes.get("tools", TOOLS if self.tools else None)
        kwargs = changes.get("kwargs", self.kwargs or {})
        try:
            return str(self.renderer.render_text(Conversation(messages, tools, kwargs, gen)))
        except RenderFailed as error:
            raise CannotPlant(str(error)) from error

    def bytes(self, ids: Ids) -> bytes:
        return b"".join(self.codec.token_bytes(ids))

    def decode(self, ids: Ids) -> str:
        return self.bytes(ids).decode("utf-8", "replace")

    def special(self, ids: Ids) -> Any:
        return np.isin(ids, list(self.codec.special_ids))

    def answer(self, messages: list[dict[str, Any]], reply: dict[str, Any]) -> tuple[str, str]:
        """The prompt's text and the completion's text, stop token included, as the template writes a last message."""
        prompt, whole = self.text(messages), self.text([*messages, reply], gen=False)
        if not whole.startswith(prompt):
            return prompt, self._thought(messages, reply, prompt, whole)
        for call in reply.get("tool_calls", ()):
            if call["function"]["name"] not in whole[len(prompt) :]:
                raise CannotPlant("the template does not write tool calls")
        ids = self.codec.encode(whole[len(prompt) :])
        ends = np.flatnonzero(self.special(ids))
        if not ends.size or self.decode(ids[ends[-1] + 1 :]).strip() or _closes_markup(self.decode(ids)):
            return prompt, self._up_to_next_header(messages, reply, prompt, whole)
        return prompt, self.decode(ids[: ends[-1] + 1])

    def _thought(self, messages: list[dict[str, Any]], reply: dict[str, Any], prompt: str, whole: str) -> str:
        """Where the generation prompt opens a think block: a completion that closes it and goes on."""
        head = prompt[: prompt.rfind("<think>")]
        closed = re.fullmatch(r"<think>\s*</think>\s*", prompt[len(head) :])
        if not (closed or prompt.rstrip().endswith("<think>")) or not whole.startswith(head):
            raise CannotPlant("the generation prompt is no prefix of the answer")
        ids = self.codec.encode(whole[len(head) :])
        ends = np.flatnonzero(self.special(ids))
        if not ends.size or self.decode(ids[ends[-1] + 1 :]).strip() or _closes_markup(self.decode(ids)):
            raise CannotPlant("the template does not end the assistant's turn")
        if closed:
            return self.decode(ids[: ends[-1] + 1])
        reply["reasoning_content"] = "Let me see."
        return "Let me see.\n</think>\n\n" + self.decode(ids[: ends[-1] + 1]).removeprefix("<think>\n\n</think>\n\n")

    def _up_to_next_header(self, messages: list[dict[str, Any]], reply: dict[str, Any], prompt: str, whole: str) -> str:
        """Where the next turn's header is the stop token."""
        follow = self.result() if reply.get("tool_calls") else {"role": "user", "content": "Next."}
        longer = self.text([*messages, reply, follow])
        if not longer.startswith(whole):
            raise CannotPlant("the template does not end the assistant's turn")
        behind = self.codec.encode(longer[len(whole) :])
        if not len(behind) or not self.special(behind[:1])[0]:
            raise CannotPlant("the template does not end the assistant's turn")
        return longer[len(prompt) : len(whole)] + self.decode(behind[:1])

    def delta(self, messages: list[dict[str, Any]], stop: str, first_new: str) -> str:
        """What the template writes behind the answer's stop token."""
        whole = self.text(messages)
        place = whole.rfind(first_new)
        if place < 0:
            raise CannotPlant("the template does not write the new message")
        seam = whole.rfind(stop, 0, place)
        if seam < 0:
            raise CannotPlant("the template writes another stop token in the past")
        return whole[seam + len(stop) :]

    # -- steps

    def step(self, messages: list[dict[str, Any]], prompt: Ids, completion: Ids, reply: dict[str, Any] | None,
             tools: Any = 0, kwargs: dict[str, Any] | None = None, **fields: Any) -> Step:
        tools = (TOOLS if self.tools else None) if tools == 0 else tools
        request = Request(tuple(copy.deepcopy(messages)), None if tools is None else tuple(tools),
                          self.kwargs or {} if kwargs is None else kwargs)
        n = len(completion)
        logprobs = np.array([-0.01 - self.rng.random() for _ in range(n)], dtype=np.float32)
        fields = {"logprobs": logprobs, "finish_reason": "stop", "chat_template_sha256": "", **fields}
        return Step(ids_array(prompt), ids_array(completion), request=request, reply=copy.deepcopy(reply), **fields)

    def final(self, messages: list[dict[str, Any]], prompt: Ids, text: str = "") -> Step:
        """A last step that says something short."""
        text = text or f"The answer is {self.a * self.b}."
        stop = self.stop(messages)
        return self.step(messages, prompt, self.codec.encode(text + stop), {"role": "assistant", "content": text})

    def stop(self, messages: list[dict[str, Any]]) -> str:
        first = next(i for i, m in enumerate(messages) if m["role"] == "user") + 1
        _, completion = self.answer(messages[:first], {"role": "assistant", "content": "Well."})
        return self.decode(self.codec.encode(completion)[-1:])

    def turn(self, reply: dict[str, Any] | None = None, new: list[dict[str, Any]] | None = None) -> Turn:
        """One answer and what follows it, token in, token out."""
        messages = self.opening()
        if reply is None:
            reply = self.calling() if self.tools else {"role": "assistant", "content": "One moment."}
        if new is None:
            new = [self.result()] if self.tools else [{"role": "user", "content": "Please go on."}]
        prompt, completion = self.answer(messages, reply)
        stop = self.decode(self.codec.encode(completion)[-1:])
        after = [*messages, reply, *new]
        delta = self.delta(after, stop, str(new[0]["content"]))
        return Turn(self, messages, reply, new, prompt, completion, stop, delta)


def _closes_markup(text: str) -> bool:
    """Whether a text ends with the closing tag of a call or of thinking, which is no end of a turn."""
    return text.rstrip().endswith(("</call>", "</tool_call>", "</think>"))


@dataclass
class Turn:
    setup: ModelSetup
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    new: list[dict[str, Any]]
    prompt: str
    completion: str
    stop: str
    delta: str

    @property
    def after(self) -> list[dict[str, Any]]:
        return [*self.messages, self.reply, *self.new]

    @property
    def p(self) -> Ids:
        return self.setup.codec.encode(self.prompt)

    @property
    def g(self) -> Ids:
        return self.setup.codec.encode(self.completion)

    @property
    def d(self) -> Ids:
        return self.setup.codec.encode(self.delta)

    def first(self, g: Ids | None = None, **fields: Any) -> Step:
        return self.setup.step(self.messages, self.p, self.g if g is None else g, self.reply, **fields)

    def trajectory(self, *steps: Step) -> Trajectory:
        return Trajectory("planted", steps)

    def tito(self, g: Ids | None = None, d: Ids | None = None) -> Trajectory:
        """Two steps, the second on top of what was sampled."""
        g, d = self.g if g is None else g, self.d if d is None else d
        return self.trajectory(self.first(g), self.setup.final(self.after, np.concatenate([self.p, g, d])))


Planter = Callable[[ModelSetup], Case]
PLANTERS: dict[str, Planter] = {}


def planter(function: Planter) -> Planter:
    PLANTERS[function.__name__] = function
    return function


def split_token(s: ModelSetup, ids: Ids, start: int = 0) -> tuple[Ids, int]:
    """The same text with one token cut in two, and where."""
    table = {piece: i for i, piece in reversed(list(enumerate(s.codec.token_bytes(np.arange(s.codec.vocab_size)))))}
    places = [i for i in range(start, len(ids)) if not s.special(ids[i : i + 1])[0]]
    s.rng.shuffle(places)
    for i in places:
        piece = s.codec.token_bytes(ids[i : i + 1])[0]
        for cut in range(1, len(piece)):
            a, b = table.get(piece[:cut]), table.get(piece[cut:])
            if a is None or b is None or a in s.codec.special_ids or b in s.codec.special_ids:
                continue
            new = np.concatenate([ids[:i], [a, b], ids[i + 1 :]]).astype(np.int32)
            if np.array_equal(s.codec.encode(s.decode(new)), ids):
                return new, i
    raise CannotPlant("no token can be cut")


def two_tools(s: ModelSetup, *contents: str) -> Turn:
    if not s.tools:
        raise CannotPlant("no tools")
    calls = s.call(), s.call("lookup", "callbbbb2", query="x")
    one, other = contents or (None, "found it")
    return s.turn(s.calling(*calls), [s.result(one), s.result(other, "lookup", "callbbbb2")])


def first_wrong(turn: Turn, d: Ids) -> int:
    """Where a second prompt with the delta ``d`` leaves what the template writes."""
    return len(turn.p) + len(turn.g) + common_prefix(turn.d, d)


def eos_text(s: ModelSetup) -> str:
    assert s.codec.eos_id is not None
    return s.decode(ids_array([s.codec.eos_id]))
