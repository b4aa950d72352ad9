"""Does a renderer read what it writes? ``parse(render(m)) = m`` and ``render(parse(ids)) = ids`` for each reply."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from rollout_inspector.streams.snippets import quoted_or_nothing
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.probes.compare import RenderComparison
from rollout_inspector.text.chat_templates.probes.conversations import Probe, markers_of
from rollout_inspector.text.chat_templates.probes.message_shape import TOOLS, user
from rollout_inspector.text.chat_templates.probes.render_cache import CheckFunction, RenderCache, key_of
from rollout_inspector.text.chat_templates.probes.report import Check, Purpose, what_changed
from rollout_inspector.text.replies.audit import reading_of

_TYPES = {"exact": "boolean", "digits": "integer", "text": "string", "expr": "string"}
_SCHEMA = {"type": "object", "properties": {name: {"type": of} for name, of in _TYPES.items()}}
_COUNT = {"type": "function", "function": {"name": "count", "description": "Count", "parameters": _SCHEMA}}
_NAMES = {Purpose.PARSED_MESSAGES: "parsed_message", Purpose.PARSED_IDS: "parsed_ids"}


def parse_checks(cache: RenderCache, probes: Iterable[Probe]) -> list[CheckFunction]:
    """Both checks of each reply of the probes, where the cache has a renderer that parses; else none."""
    replies = [] if cache.renderer.parse is None else list(_replies(cache, probes))
    return [partial(read_back, reply, purpose) for purpose in _NAMES for reply in replies]


def _replies(cache: RenderCache, probes: Iterable[Probe]) -> Iterator[Probe]:
    """The last reply of each probe after what the model was prompted with, as it is and with reasoning; each once."""
    call = cache.form.call(("count", {"exact": True, "digits": 3, "text": "3", "expr": "ARGX1"}))
    title = "A call with a truth value, a number and digits as text"
    typed = Probe("typed_arguments", title, Purpose.TOOLS, (), tuple(cache.form.written([user("UQ1"), call])))
    thoughts: list[tuple[str, str, Message]] = [("", "", {})]
    if cache.form.reasoning:
        thoughts.append(("_reasoned", ", with reasoning", {cache.form.reasoning: "THINKX1 hm"}))
    keys = set[str]()
    for probe in (*probes, typed):
        messages = (*probe.before, *probe.appended)
        place = max(n for n, message in enumerate(messages) if message["role"] == "assistant" or not n)
        for suffix, words, thought in thoughts:
            reply = replace(
                probe, name=probe.name + suffix, title=f"The last reply of “{probe.title}”{words}", prompted=True,
                before=messages[:place], appended=({**messages[place], **thought},),
                tools=[*(cache.tools or TOOLS), _COUNT],  # without them, XML parsers guess the types of arguments
            )
            key = key_of(reply.conversations()[1])
            if place and key not in keys:
                keys.add(key)
                yield reply


def read_back(probe: Probe, purpose: Purpose, cache: RenderCache) -> Check:
    """Is a reply what its own ids are parsed to; and are the ids of what was parsed the same?"""
    question = Check(f"{_NAMES[purpose]}_{probe.name}", probe.title, purpose, decisive=probe.decisive)
    prompt, history = cache.renders(*probe.conversations())
    if failed := question.raised(prompt, history):
        return failed
    sampled = RenderComparison(prompt, history)
    (message,) = probe.appended
    unrendered = "" if sampled.passed else "what the model was prompted with"
    if any(marker not in history.text for marker in markers_of([message])):
        unrendered = "a part of the reply"
    if unrendered:
        return question.unsupported(f"The history does not hold {unrendered}.", void=True, unrendered=unrendered)
    assert cache.renderer.parse is not None
    try:
        reply = cache.renderer.parse(prompt.ids, sampled.delta_ids, probe.tools, probe.kwargs)
    except Exception as error:
        return question.broken(f"The renderer cannot parse what it wrote: {type(error).__name__}: {error}")
    if purpose is Purpose.PARSED_MESSAGES:
        was, now = reading_of(message), reading_of(reply)
        if was.key == now.key:
            return question.ok("What is parsed is what was rendered.")
        words = (quoted_or_nothing(" ".join(reading.held.split())) for reading in (was, now))
        return question.broken("The reply {} is parsed as {}.".format(*words))
    again = cache.side(history.conversation._replace(messages=(*probe.before, *cache.form.written([reply]))))
    if failed := question.raised(again):
        return failed
    comparison = RenderComparison(history, again, whole=True)
    if comparison.passed:
        return question.ok("What is parsed is rendered to the same ids.", comparison=comparison)
    detail = f"What is parsed is rendered to other ids, from token {comparison.index} on: {what_changed(comparison)}."
    return question.broken(detail, comparison=comparison)
