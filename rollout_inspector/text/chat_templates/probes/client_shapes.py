"""Checks of what clients really send: null content, parts, arguments as text, parallel calls, forged turns."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.snippets import quoted_or_nothing
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.probes.compare import RenderComparison
from rollout_inspector.text.chat_templates.probes.conversations import markers_of
from rollout_inspector.text.chat_templates.probes.message_shape import CALC, SEARCH, MessageShape, user
from rollout_inspector.text.chat_templates.probes.render_cache import CheckFunction, RenderCache
from rollout_inspector.text.chat_templates.probes.report import Check, Purpose

LONG_ID = "call_" + "a1b2c3d4" * 8
NO_CALLS = "The template renders no tool calls."
_PYTHON = re.compile(r"\{'\w+': |\b(?:True|False|None)\b")
"""What a dict, a truth value or nothing of Python looks like, where a model was trained on JSON."""
_TURNS = {
    "<|im_start|>": ("<|im_end|>",), "<start_of_turn>": ("<end_of_turn>",), "<|turn>": ("<turn|>",),
    "[INST]": ("[/INST]",), "<|start|>": ("<|end|>", "<|call|>", "<|return|>"),
    "<|start_header_id|>": ("<|eot_id|>", "<|eom_id|>"), "<|START_OF_TURN_TOKEN|>": ("<|END_OF_TURN_TOKEN|>",),
}
"""The mark that opens a turn -> those that close one."""


def like_a_string(
    name: str, title: str, build: Callable[[MessageShape], tuple[list[Message], list[Message]]], decisive: bool = True
) -> CheckFunction:
    """The check whether a message in another form is rendered like the one that every template takes. ``build`` returns
    the conversation with the usual message, then the one with the other."""
    question = Check(name, title, Purpose.CLIENTS, decisive=decisive)

    def answer(cache: RenderCache) -> Check:
        usual, other = build(cache.form)
        rendered, again = cache.renders(*(Conversation(it, cache.tools, cache.kwargs) for it in (usual, other)))
        if failed := question.raised(rendered, again):
            return failed
        if any(marker not in rendered.text and marker not in again.text for marker in markers_of(usual)):
            return question.unsupported("The template renders such a message in neither form.")
        comparison = RenderComparison(rendered, again, whole=True)
        if comparison.text_passed:
            return question.ok("It is rendered like the usual form.")
        lost, gained = map(quoted_or_nothing, comparison.lost_and_gained())
        return question.broken(f"It is rendered in another way: {gained} in place of {lost}.", comparison=comparison)

    return answer


def is_sound(
    name: str, title: str, build: Callable[[MessageShape], list[Any]],
    look: Callable[[str], str] | None = None, needs_calls: bool = True, sends_tools: bool = True,
) -> CheckFunction:
    """The check whether a render holds every marker of its messages, and ``look`` has no sentence against it."""
    question = Check(name, title, Purpose.CLIENTS)

    def answer(cache: RenderCache) -> Check:
        if needs_calls and not cache.form.calls:
            return question.unsupported(NO_CALLS)
        messages = build(cache.form)
        tools = cache.tools if sends_tools else None
        side = cache.side(Conversation(cache.form.written(messages), tools, cache.kwargs))
        if failed := question.raised(side):
            return failed
        if lacking := [marker for marker in markers_of(messages) if marker not in side.text]:
            return question.broken(f"The render lacks {lacking[0]!r}.")
        start = side.text.index("UQ1")
        if look is not None and (fault := look(side.text[start:])):
            return question.broken(fault, line=side.rendered.line_at(max(side.text.find("ARGX1"), start)))
        return question.ok("It is rendered whole.")

    return answer


def forged_role(cache: RenderCache) -> Check:
    """Can a tool result open a turn of its own?"""
    question = Check("forged_role", "Turn marks in a tool result", Purpose.CLIENTS, decisive=False)
    form, ask = cache.form, user("UQ1")
    if not form.calls:
        return question.unsupported(NO_CALLS)
    turns = cache.side(cache.conversation([ask, form.assistant("ANSX1"), user("UQ2")]))
    if failed := question.raised(turns):
        return failed
    seam = turns.text.partition("ANSX1")[2].partition("UQ2")[0]
    if not cache.control_tokens(seam):
        return question.unsupported("The template writes no control token between two turns.")
    side = cache.side(cache.conversation([ask, _call(form), form.result(CALC, f"RESX1{seam}UQ2")]))
    if failed := question.raised(side):
        return failed
    place = side.text.find(f"RESX1{seam}UQ2")
    if place < 0:
        return question.ok("The template rewrites such text.")
    detail = (
        f"A tool result that contains {seam!r} opens a turn of the user. Encode results apart, with control tokens "
        "split, if they are not trusted."
    )
    return question.broken(detail, line=side.rendered.line_at(place))


def _call(form: MessageShape, **more: Any) -> dict[str, Any]:
    return form.call((CALC, {"expr": "ARGX1", **more}))


def _after(form: MessageShape, *pair: Any) -> tuple[list[Message], list[Message]]:
    """Two conversations that differ in their last message."""
    before = [user("UQ1"), *([_call(form)] if pair[0]["role"] == "tool" else [])]
    usual, other = (form.written([*before, message]) for message in pair)
    return usual, other


def _other_arguments(form: MessageShape) -> tuple[list[Message], list[Message]]:
    other = replace(form, arguments="string" if form.arguments == "dict" else "dict")
    return _after(form, _call(form), _call(other))


def _empty_reasoning(form: MessageShape) -> tuple[list[Message], list[Message]]:
    field = "reasoning_content" if form.reasoning in ("", "inline") else form.reasoning
    return _after(form, _call(form), {**_call(form), field: ""})


def _parallel(form: MessageShape) -> list[Any]:
    both = form.call((CALC, {"expr": "ARGX1"}), (SEARCH, {"q": "ARGX2"}))
    return [user("UQ1"), both, form.result(CALC, "RESX1"), form.result(SEARCH, "RESX2", 1)]


def _cycle(form: MessageShape) -> list[Any]:
    cycle = [_call(form), form.result(CALC, "RESX1")] if form.calls else [form.assistant("ANSX2"), user("UQ2")]
    return [user("UQ1"), *cycle, form.assistant("ANSX1")]


def _long_id(form: MessageShape) -> list[Any]:
    call = _call(form)
    call["tool_calls"][0]["id"] = LONG_ID
    return [user("UQ1"), call, {**form.result(CALC, "RESX1"), "tool_call_id": LONG_ID}]


def _python(text: str) -> str:
    match = _PYTHON.search(text)
    return f"A call is rendered as Python, not as JSON: {match[0]!r}." if match else ""


def _unbalanced(text: str) -> str:
    for opening, closing in _TURNS.items():
        # The first turn was opened before its text.
        opened, closed = text.count(opening) + 1, sum(map(text.count, closing))
        if opened > 1 and opened != closed:
            return f"{opened} turns are opened by {opening!r} and {closed} are closed."
    return ""


CLIENT_SHAPES: tuple[CheckFunction, ...] = (
    like_a_string("content_as_list", "Content as a list of parts",
                  lambda form: ([user("UQ1")], [{"role": "user", "content": [{"type": "text", "text": "UQ1"}]}])),
    like_a_string("result_as_list", "A tool result as a list of parts", lambda form: _after(
        form, form.result(CALC, "RESX1"), form.result(CALC, [{"type": "text", "text": "RESX1"}]))),
    like_a_string("result_as_object", "A tool result that is an object", lambda form: _after(
        form, form.result(CALC, json.dumps({"value": "RESX1"})), form.result(CALC, {"value": "RESX1"})), False),
    like_a_string("content_null", "Content null beside a call", lambda form: _after(
        form, {**_call(form), "content": ""}, {**_call(form), "content": None})),
    like_a_string("arguments_other_form", "Arguments in the other form", _other_arguments),
    like_a_string("empty_reasoning", "An empty reasoning beside a call", _empty_reasoning),
    is_sound("python_in_call", "Arguments with a truth value and a null",
             lambda form: [user("UQ1"), _call(form, exact=True, unit=None)], _python),
    is_sound("parallel_calls", "Two calls in one turn, with their results", _parallel),
    is_sound("tools_not_sent_again", "Calls in the history, without tools", _cycle, sends_tools=False),
    is_sound("turn_marks", "As many turns closed as opened", _cycle, _unbalanced, needs_calls=False),
    is_sound("long_id", "A call id of 69 characters", _long_id),
    forged_role,
)
