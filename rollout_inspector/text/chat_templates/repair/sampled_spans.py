"""Which characters of a render the model sampled: behind the generation prompt, up to the stop token."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.text.chat_templates.probes.conversations import markers_of
from rollout_inspector.text.chat_templates.probes.render_cache import key_of
from rollout_inspector.text.chat_templates.repair.regression_set import RegressionSet


class CannotMark(Exception):
    """There is no place for the tags; the message says why."""


@dataclass
class SampledSpans:
    """What was sampled in one render, and how far that is known."""

    sampled: list[tuple[int, int]] = field(default_factory=list)
    """Characters ``[start, stop)``, one pair for each answer that is not empty."""
    limit: int = 0  # Up to this character ``sampled`` is known.
    is_told: bool = False
    """At least one answer follows what the model was prompted with, so its span is known and no guess."""
    is_proved: bool = True  # Every answer follows what the model was prompted with, and later messages keep it.


def sampled_spans(regressions: RegressionSet, stop: str | None) -> dict[str, SampledSpans]:
    """What was sampled in each conversation with an assistant message, by the conversation's key. Raises
    :class:`CannotMark` where no conversation tells."""
    spans_by_key = {}
    for key, conversation in regressions.conversations.items():
        roles = [message["role"] for message in conversation.messages]
        if "assistant" in roles and regressions.original[key] is not None:
            spans_by_key[key] = _spans(regressions, conversation, stop)
    if not any(spans.sampled and spans.is_told for spans in spans_by_key.values()):
        raise CannotMark(
            "what the model is prompted with is in no probe how the history goes on, so that nothing tells what of the "
            "render was sampled"
        )
    return spans_by_key


def _spans(regressions: RegressionSet, conversation: Conversation, stop: str | None) -> SampledSpans:
    messages, whole = conversation.messages, regressions.original[key_of(conversation)] or ""
    spans, position = SampledSpans(), 0
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, prompt, history = (
            regressions.original[key_of(conversation._replace(messages=messages[:n], add_generation_prompt=prompted))]
            if n
            else ""
            for n, prompted in ((k, False), (k, True), (k + 1, False))
        )
        if before is None or prompt is None or history is None:
            spans.limit, spans.is_proved = position, False
            return spans
        spans.is_proved &= whole.startswith(prompt) and whole.startswith(history)
        if whole.startswith(prompt):
            begin, spans.is_told = len(prompt), True
        else:
            begin = _behind_header(whole, position, prompt[common_length(before, prompt) :], markers_of([message]))
        end = whole.find(stop, begin) + len(stop) if stop and stop in whole[max(begin, 0) :] else -1
        if whole.startswith(history):
            first = history.find(stop, max(begin, 0)) if stop else -1
            end = first + len(stop) if stop and first >= 0 else len(history)
            if messages[k + 1 : k + 2] and messages[k + 1]["role"] != "system":  # no model stops at a system header
                end = regressions.cache.behind_header(whole, end, stop)
        if begin < 0 or end < begin:
            spans.limit, spans.is_proved = position, False
            return spans
        if end > begin:
            spans.sampled.append((begin, end))
        position = end
    spans.limit = len(whole)
    return spans


def _behind_header(whole: str, position: int, header: str, markers: Sequence[str]) -> int:
    """The character at which an answer begins in a render that rewrote it; -1 where none is found. The answer begins
    behind the generation prompt, or behind its first lines where the render drops the others."""
    lines = header.splitlines(keepends=True)
    for n in range(len(lines), 0, -1):
        head = "".join(lines[:n])
        place = whole.find(head, position)
        # A header after the message's own words belongs to another message.
        if place >= 0 and not any(marker in whole[position:place] for marker in markers):
            return place + len(head)
    return -1
