"""The probes: for each property the smallest pair of conversations that shows whether a chat template has it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.jinja_source.scan import scan
from rollout_inspector.text.chat_templates.probes.message_shape import (
    CALC, SEARCH, TOOLS, MessageShape, Tool, system, user
)
from rollout_inspector.text.chat_templates.probes.report import Purpose

DUMMY_CALL = [{"type": "function", "function": {"name": "dummy", "arguments": {}}}]
TITO_POST_PREFIX: tuple[Message, ...] = (
    {"role": "user", "content": "dummy"},
    {"role": "assistant", "content": "", "tool_calls": DUMMY_CALL},
)
TITO_POST_RESULT: Message = {"role": "tool", "name": "dummy", "content": "dummy"}
"""The twelve lines that the TITO post checks a template with, word for word."""


@dataclass(frozen=True)
class Probe:
    """Does ``render(before)`` begin ``render(before + appended)``?"""

    name: str
    title: str
    purpose: Purpose
    before: tuple[Message, ...]
    appended: tuple[Message, ...]
    tools: Sequence[Tool] | None = None
    kwargs: Mapping[str, Any] | None = None
    prompted: bool = False
    """True: ``before`` is rendered with the generation prompt, and the appended message is the model's own."""
    decisive: bool = True
    markers: tuple[str, ...] = ()  # Words that must be in the longer render, else a pass is void.

    def conversations(self) -> tuple[Conversation, Conversation]:
        """The two conversations that are rendered."""
        longer = Conversation((*self.before, *self.appended), self.tools, self.kwargs, not self.prompted)
        return Conversation(self.before, self.tools, self.kwargs, self.prompted), longer


# No word boundary before it: repr writes a line break as a letter.
_MARKER = re.compile(r"(?:ARGX|RESX|ANSX|UQ|SYSX|CONX|THINKX)\d\b")


def markers_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """The marker words of a conversation."""
    return tuple(dict.fromkeys(_MARKER.findall(repr(messages))))


def append_probes(
    form: MessageShape, tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None
) -> Iterator[Probe]:
    """Every probe of the kind *appending changes nothing before*, in the form that the template accepts."""
    offered = list(TOOLS) if form.tools and tools is None else tools
    ask = user("UQ1 please compute")
    call1 = form.call((CALC, {"expr": "ARGX1"}))
    call2 = form.call((SEARCH, {"q": "ARGX2"}))
    call3 = form.call((CALC, {"expr": "ARGX3"}))
    result1, result2 = form.result(CALC, "RESX1"), form.result(SEARCH, "RESX2")
    answer, reasoned = form.assistant("ANSX1 it is"), form.assistant("ANSX1 it is", "THINKX1 hm")
    thinking = form.call((CALC, {"expr": "ARGX1"}), reasoning="THINKX1 hm")
    thinking2 = form.call((SEARCH, {"q": "ARGX2"}), reasoning="THINKX2 hm")
    both = form.call((CALC, {"expr": "ARGX1"}), (SEARCH, {"q": "ARGX2"}))
    later = user("UQ2 thanks")
    parallel2 = form.result(SEARCH, "RESX2", 1)

    def probe(name: str, title: str, purpose: Purpose, before: list[Any], appended: list[Any], **options: Any) -> Probe:
        with_tools = options.pop("tools", offered)
        with_kwargs = {**(kwargs or {}), **options.pop("kwargs", {})} or None
        markers = options.pop("markers", markers_of([*before, *appended]))
        return Probe(
            name, title, purpose, tuple(form.written(before)), tuple(form.written(appended)), with_tools, with_kwargs,
            markers=markers, **options,
        )

    to, us, ge = Purpose.TOOLS, Purpose.USERS, Purpose.GENERATION
    yield probe("tool_append_marked", "A tool result after a call", to, [ask, call1], [result1])
    yield probe(
        "tool_append_empty_arguments", "After a call without arguments", to,
        [ask, form.call((CALC, {}))], [result1], markers=("UQ1", "RESX1"),
    )
    yield probe("tool_append_after_content", "After a call with content", to,
                [ask, form.call((CALC, {"expr": "ARGX1"}), content="CONX1 let me see")], [result1])
    yield probe("tool_append_after_reasoning", "After a call with reasoning", to, [ask, thinking], [result1])
    yield probe("tool_append_parallel", "Two results after two parallel calls", to, [ask, both], [result1, parallel2])
    yield probe("tool_append_one_by_one", "The second of two parallel results", to,
                [ask, both, result1], [parallel2], decisive=False)
    yield probe("tool_append_second_cycle", "In the second tool cycle", to, [ask, call1, result1, call2], [result2])
    yield probe("tool_append_third_cycle", "After two tool cycles", to,
                [ask, call1, result1, call2, result2, call3], [form.result(CALC, "RESX3")])
    yield probe("tool_append_reasoned_cycles", "In the second tool cycle, with reasoning", to,
                [ask, thinking, result1, thinking2], [result2])
    yield probe("tool_append_later_turn", "In a later user turn", to, [ask, answer, later, call2], [result2])
    yield probe(
        "tool_append_with_system", "With a system message", to, [system("SYSX1 be brief"), ask, call1], [result1]
    )
    yield probe("tool_append_with_tools", "With tools defined", to, [ask, call1], [result1], tools=tools or list(TOOLS))
    yield probe("user_append", "A user message after an answer", us, [ask, answer], [later])
    yield probe("user_append_after_reasoning", "A user message after a reasoned answer", us, [ask, reasoned], [later])
    yield probe("user_append_after_cycle", "A user message after a completed tool cycle", us,
                [ask, call1, result1, answer], [later])
    yield probe("user_append_after_reasoned_cycle", "A user message after a tool cycle with reasoning", us,
                [ask, thinking, result1, reasoned], [later])
    yield probe("user_append_with_system", "A user message, with a system message", us,
                [system("SYSX1 be brief"), ask, answer], [later])
    yield probe("system_in_the_middle", "A system message after an answer", us,
                [ask, answer], [system("SYSX2 now"), later], decisive=False)
    yield probe("two_user_messages", "A user message after a user message", us, [ask], [later], decisive=False)
    yield probe("generation_answer", "Before an answer", ge, [ask], [answer], prompted=True)
    yield probe("generation_call", "Before a call", ge, [ask], [call1], prompted=True)
    yield probe("generation_reasoned_answer", "Before a reasoned answer", ge, [ask], [reasoned], prompted=True)
    yield probe("generation_reasoned_call", "Before a reasoned call", ge, [ask], [thinking], prompted=True)
    yield probe("generation_after_tool", "Before the answer to a tool result", ge,
                [ask, call1, result1], [answer], prompted=True)
    yield probe("generation_after_reasoned_cycle", "Before the answer, after a call with reasoning", ge,
                [ask, thinking, result1], [reasoned], prompted=True)
    yield probe("generation_second_turn", "Before the second answer", ge,
                [ask, answer, later], [form.assistant("ANSX2 so")], prompted=True)


def thinking_switch(chat_template: str) -> str | None:
    """The kwarg that turns thinking on and off, if a condition of the template reads one."""
    for name in ("enable_thinking", "thinking"):
        reads = re.compile(rf"\b(?:not|if|and|or|elif) {name}\b|(?<!\. ){name} is\b")
        for piece in scan(chat_template) if name in chat_template else ():
            # Words inside a string, such as the message of an exception, are no condition.
            if reads.search(" ".join("''" if token.kind == "string" else token.text for token in piece.tokens)):
                return name
    return None


def thinking_probes(
    form: MessageShape, tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None, switch: str
) -> Iterator[Probe]:
    """The most telling probes again, with thinking on and with thinking off."""
    names = {"tool_append_marked", "user_append", "generation_answer", "generation_call"}
    for value, word, more in ((True, "on", {"tool_append_after_reasoning"}), (False, "off", set[str]())):
        for probe in append_probes(form, tools, {**(kwargs or {}), switch: value}):
            if probe.name in names | more:
                name, title = f"thinking_{word}_{probe.name}", f"{probe.title}, thinking {word}"
                yield replace(probe, name=name, title=title, decisive=False)


def conversation_probes(
    messages: Sequence[Message], tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None
) -> Iterator[Probe]:
    """Probes of a user's own conversation, one for each place where messages follow an assistant message. Messages are
    counted from 0, as findings and pages count them."""
    for n in range(1, len(messages)):
        if messages[n - 1].get("role") != "assistant" or messages[n].get("role") == "assistant":
            continue
        stop = n + 1
        while stop < len(messages) and messages[stop].get("role") != "assistant":
            stop += 1
        role = messages[n].get("role")
        purpose = Purpose.TOOLS if role == "tool" else Purpose.USERS
        yield Probe(
            f"conversation_{n}", f"Your conversation, message {n} ({role}) appended", purpose,
            tuple(messages[:n]), tuple(messages[n:stop]), tools, kwargs,
        )
