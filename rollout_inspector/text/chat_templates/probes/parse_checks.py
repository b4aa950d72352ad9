"""Does a renderer read what it writes? ``parse(render(m)) = m`` and ``render(parse(ids)) = ids``, on replies of probes."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollout_inspector.streams.snippets import quoted_or_nothing
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.package_renderer import PackageRenderer
from rollout_inspector.text.chat_templates.probes.compare import RenderComparison
from rollout_inspector.text.chat_templates.probes.conversations import Probe, markers_of
from rollout_inspector.text.chat_templates.probes.message_shape import CALC, user
from rollout_inspector.text.chat_templates.probes.render_cache import CheckFunction, RenderCache, key_of
from rollout_inspector.text.chat_templates.probes.report import Check, Purpose, what_changed
from rollout_inspector.text.replies.audit import reading_of

_NAMES = {Purpose.PARSED_MESSAGES: "parsed_message", Purpose.PARSED_IDS: "parsed_ids"}


def parse_checks(cache: RenderCache, probes: Iterable[Probe]) -> list[CheckFunction]:
    """Both checks of each reply of the probes, where the cache has a renderer that parses; else none."""
    if not isinstance(cache.renderer, PackageRenderer):
        return []
    replies = list(_replies(cache, probes))
    return [partial(read_back, reply, purpose) for purpose in _NAMES for reply in replies]


def _replies(cache: RenderCache, probes: Iterable[Probe]) -> Iterator[Probe]:
    """The last reply of each probe, after what the model was prompted with for it; each once."""
    typed = (user("UQ1"), cache.form.call((CALC, {"expr": "ARGX1", "exact": True, "unit": None, "digits": 3})))
    named = [(probe, (*probe.before, *probe.appended)) for probe in probes]
    if named and cache.form.calls:
        shape = replace(named[0][0], name="typed_arguments", title="A call with a truth value, a null and a number")
        named.append((shape, tuple(cache.form.written(typed))))
    seen = set[str]()
    for probe, messages in named:
        place = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        title = f"The last reply of “{probe.title}”"
        reply = replace(
            probe, title=title, before=messages[:place], appended=messages[place : place + 1], prompted=True
        )
        key = key_of(reply.conversations()[1])
        if place and key not in seen:
            seen.add(key)
            yield reply


def read_back(probe: Probe, purpose: Purpose, cache: RenderCache) -> Check:
    """Is a reply what its own ids are parsed to; and are the ids of what was parsed the same?"""
    question = Check(f"{_NAMES[purpose]}_{probe.name}", probe.title, purpose, decisive=probe.decisive)
    prompt, history = cache.renders(*probe.conversations())
    if failed := question.raised(prompt, history):
        return failed
    sampled = RenderComparison(prompt, history)
    if not sampled.passed:
        return question.unsupported("The history does not go on as the model was prompted: nothing tells its ids.")
    (message,) = probe.appended
    if any(marker not in history.text for marker in markers_of([message])):
        return question.unsupported("A part of the reply is not rendered.")
    renderer: Any = cache.renderer
    stops = np.flatnonzero(np.isin(sampled.delta_ids, renderer.stop_ids(probe.kwargs)))
    completion = sampled.delta_ids[: stops[0] + 1] if len(stops) else sampled.delta_ids
    try:
        reply = renderer.parse(prompt.ids, completion, probe.tools, probe.kwargs)
    except Exception as error:
        return question.broken(f"The renderer cannot parse what it wrote: {type(error).__name__}: {error}")
    if purpose is Purpose.PARSED_MESSAGES:
        changed = _changed(message, reply)
        return question.broken(changed) if changed else question.ok("What is parsed is what was rendered.")
    messages = cache.form.written([_with_ids(reply, message)])
    again = cache.side(history.conversation._replace(messages=(*probe.before, *messages)))
    if failed := question.raised(again):
        return failed
    comparison = RenderComparison(history, again, whole=True)
    if comparison.passed:
        return question.ok("What is parsed is rendered to the same ids.", comparison=comparison)
    detail = f"What is parsed is rendered to other ids, from token {comparison.index} on: {what_changed(comparison)}."
    return question.broken(detail, comparison=comparison)


def _changed(message: Message, reply: Message) -> str:
    """The first part that differs, as a sentence; empty = none."""
    was, now = reading_of(message), reading_of(reply)
    was_calls, now_calls = (
        json.dumps([[call.name, call.arguments] for call in reading.calls]) if reading.calls else ""
        for reading in (was, now)
    )
    parts = (("content", was.content, now.content), ("reasoning", was.reasoning, now.reasoning))
    for what, before, after in (*parts, ("calls", was_calls, now_calls)):
        if before != after:
            return f"The {what} {quoted_or_nothing(before)} of a reply: parsed as {quoted_or_nothing(after)}."
    return ""


def _with_ids(reply: Message, message: Message) -> Message:
    """A parsed reply whose calls have the ids of the message, where their text holds none: a trainer gives ids too."""
    ids = [call["id"] for call in message.get("tool_calls") or () if "id" in call]
    calls = reply.get("tool_calls") or ()
    if not ids or len(ids) < len(calls):
        return reply
    return {**reply, "tool_calls": [{"id": ids[n], **call} for n, call in enumerate(calls)]}
