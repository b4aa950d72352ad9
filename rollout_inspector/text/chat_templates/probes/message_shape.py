"""The form in which a chat template takes messages: arguments as dict or string, ids, empty content, reasoning's field.
Templates are probed in the form they accept, and the report says which. Every part of a probe carries its own marker
word, because a probe that uses one word for everything cannot see a message vanish."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.messages import REASONING
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer

Tool = Mapping[str, Any]
CALC, SEARCH = "calc", "search"


def _schema(name: str, argument: str, description: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": "The input"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: tuple[Tool, ...] = (_schema(CALC, "expr", "Evaluate an expression"), _schema(SEARCH, "q", "Search the web"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


@dataclass(frozen=True)
class MessageShape:
    """How the messages of a probe are written."""

    arguments: str = "dict"  # ``dict`` or ``string``: what ``function.arguments`` holds.
    ids: bool = False  # Calls and results carry 9-character ids.
    content: str = "empty"  # Of an assistant message that only calls: ``empty`` string or ``none``.
    tools: bool = False  # The template renders calls only when tools are defined.
    calls: bool = True  # False = the template renders a call and its result in no form that was tried.
    reasoning: str = ""
    """The field that holds reasoning, ``inline`` = a think block in the content, empty = reasoning is not rendered."""
    parts: bool = False  # Content is a list of parts, ``[{"type": "text", "text": ...}]``, where others take a string.

    def describe(self) -> str:
        """The form in words, for the page."""
        words = ["content as a list of parts"] if self.parts else []
        if not self.calls:
            return ", ".join([*words, "the template renders no tool calls or no tool results"])
        words.append(f"arguments as {'an object' if self.arguments == 'dict' else 'a JSON string'}")
        if self.ids:
            words.append("9-character call ids")
        if self.content == "none":
            words.append("content null beside calls")
        if self.tools:
            words.append("tools defined")
        reasoning = {"": "reasoning not rendered", "inline": "reasoning as a think block in the content"}
        words.append(reasoning.get(self.reasoning, f"reasoning in the field {self.reasoning}"))
        return ", ".join(words)

    def call(self, *calls: tuple[str, Mapping[str, Any]], content: str = "", reasoning: str = "") -> dict[str, Any]:
        """An assistant message with one or more calls."""
        written = []
        for n, (name, arguments) in enumerate(calls):
            value = dict(arguments) if self.arguments == "dict" else json.dumps(arguments)
            call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": value}}
            if self.ids:
                call["id"] = self.call_id(n)
            written.append(call)
        message = {**self.assistant(content, reasoning), "tool_calls": written}
        if not message["content"] and self.content == "none":
            message["content"] = None
        return message

    def assistant(self, content: str, reasoning: str = "") -> dict[str, Any]:
        """An assistant message in plain text, with reasoning where the template knows a place for it."""
        message = {"role": "assistant", "content": content}
        if reasoning and self.reasoning == "inline":
            message["content"] = f"<think>\n{reasoning}\n</think>\n\n{content}"
        elif reasoning:
            message[self.reasoning or "reasoning_content"] = reasoning
        return message

    def result(self, name: str, content: Any, n: int = 0) -> dict[str, Any]:
        """The message of the n-th call's result."""
        message = {"role": "tool", "name": name, "content": content}
        if self.ids:
            message["tool_call_id"] = self.call_id(n)
        return message

    def written(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with their content as the template takes it; a list or an object stays as it is."""
        if not self.parts:
            return list(messages)
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    @staticmethod
    def call_id(n: int) -> str:
        return f"call0000{n % 10}"


PLAIN_TEXT_UNREAD = "content that is a string is not rendered"


def candidates(
    parts: bool, tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None
) -> list[tuple[MessageShape, Conversation]]:
    """The forms that are tried, the plainest first, each with a call and its result written in it."""
    shapes = []
    for with_tools, content, ids, arguments in itertools.product(
        (False, True), ("empty", "none"), (False, True), ("dict", "string")
    ):
        form = MessageShape(arguments, ids, content, with_tools, parts=parts)
        messages = [user("UQ1"), form.call((CALC, {"expr": "ARGX1"})), form.result(CALC, "RESX1")]
        offered = list(TOOLS) if with_tools and tools is None else tools
        shapes.append((form, Conversation(form.written(messages), offered, kwargs, False)))
    return shapes


def find_message_shape(
    renderer: TemplateRenderer, tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None
) -> tuple[MessageShape, dict[MessageShape, str]]:
    """The first form in which a call and its result are rendered, and the error of each refused form."""
    unread = _reads_parts_alone(renderer, tools, kwargs)
    shapes = candidates(bool(unread), tools, kwargs)
    refused: dict[MessageShape, str] = {MessageShape(): unread} if unread else {}
    rendered: list[MessageShape] = []
    chosen: MessageShape | None = None
    for part in (shapes[:1], shapes[1:]):  # most templates take the plainest
        outcomes = [] if chosen else renderer.render_many([conversation for _, conversation in part], lines=True)
        for (form, _), outcome in zip(part, outcomes, strict=False):
            if outcome.error:
                refused[form] = outcome.error
                continue
            rendered.append(form)
            if "ARGX1" in outcome.text and "RESX1" in outcome.text:
                chosen = form
                break
    if chosen is None:
        chosen = replace(rendered[0] if rendered else shapes[0][0], calls=False)
    return _with_reasoning(renderer, chosen, tools, kwargs), refused


def _reads_parts_alone(
    renderer: TemplateRenderer, tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None
) -> str:
    """What the template does with content that is a string, if it renders only lists of parts; else empty."""
    messages = [user("UQ1"), MessageShape().assistant("ANSX1")]
    forms = (MessageShape(), MessageShape(parts=True))
    plain, parts = renderer.render_many([Conversation(form.written(messages), tools, kwargs) for form in forms], True)
    read = [not render.error and "UQ1" in render.text and "ANSX1" in render.text for render in (plain, parts)]
    return plain.error or PLAIN_TEXT_UNREAD if read == [False, True] else ""


def _with_reasoning(
    renderer: TemplateRenderer, form: MessageShape, tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None
) -> MessageShape:
    """The same form with the field in which the template renders reasoning."""
    offered = list(TOOLS) if form.tools and tools is None else tools
    fields = [*REASONING, "inline"] if "</think>" in renderer.chat_template else list(REASONING)
    tried = [replace(form, reasoning=field) for field in fields]
    conversations = []
    for candidate in tried:
        answer = candidate.assistant("ANSX1", "THINKX1")
        call = candidate.call((CALC, {"expr": "ARGX1"}), reasoning="THINKX1")
        conversations += [
            Conversation(form.written([user("UQ1"), message]), offered, kwargs) for message in (answer, call)
        ]
    outcomes = renderer.render_many(conversations, lines=True)
    for n, candidate in enumerate(tried):
        if any("THINKX1" in outcome.text for outcome in outcomes[2 * n : 2 * n + 2]):
            return candidate
    return form
