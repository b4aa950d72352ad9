"""Do the ``{% generation %}`` tags of a chat template mark exactly what the model sampled?"""

import re
from collections.abc import Sequence
from typing import Any

from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.probes.assistant_masks import merged, overrun
from rollout_inspector.text.chat_templates.probes.compare import RenderSide
from rollout_inspector.text.chat_templates.probes.message_shape import CALC, user
from rollout_inspector.text.chat_templates.probes.render_cache import RenderCache
from rollout_inspector.text.chat_templates.probes.report import Check, Purpose

NAME = "generation_masks"
_ASKED = Check(NAME, "Generation tags mark what was sampled", Purpose.MASKS)
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_HEADER = re.compile(r"\s*<[|｜]?[^<>]{1,30}>\s*(?:assistant|model|gpt)?\s*(?:<[|｜][^<>]{1,30}>\s*)?", re.IGNORECASE)


def has_generation_tags(chat_template: str) -> bool:
    """Whether a template has generation tags, by the pattern of ``transformers``."""
    return _TAG.search(chat_template) is not None


def _conversations(cache: RenderCache) -> list[list[Message]]:
    form = cache.form
    ask, answer, later = user("UQ1"), form.assistant("ANSX1"), user("UQ2")
    conversations: list[list[Message]] = [[ask, answer], [ask, answer, later, form.assistant("ANSX2")]]
    if form.reasoning:
        conversations.append([ask, form.assistant("ANSX1", "THINKX1")])
    if form.calls:
        call = form.call((CALC, {"expr": "ARGX1"}))
        conversations.append([ask, call, form.result(CALC, "RESX1"), answer])
    return conversations


def generation_masks(cache: RenderCache) -> Check:
    """Compare each marked span with what lies between the generation prompt and the stop token."""
    if not has_generation_tags(cache.template):
        return _ASKED.unsupported("The template has no {% generation %} tags.")
    conversations = _conversations(cache)
    cases = []
    for messages in conversations:
        cases.append(cache.conversation(messages))
        cases += [cache.conversation(messages[:n], True) for n in _assistants(messages)]
        cases += [cache.conversation(messages[: n + 1]) for n in _assistants(messages)]
    renders = {id(conversation): side for conversation, side in zip(cases, cache.renders(*cases), strict=True)}
    stop = cache.stop_text()
    position = n_compared = 0
    for messages in conversations:
        places = _assistants(messages)
        group = [renders[id(c)] for c in cases[position : position + 1 + 2 * len(places)]]
        position += 1 + 2 * len(places)
        whole, prompts, histories = group[0], group[1 : 1 + len(places)], group[1 + len(places) :]
        if failed := _ASKED.raised(*group):
            return failed
        fault, line = _fault(cache, whole, prompts, histories, stop)
        if fault:
            return _ASKED.broken(fault, line=line)
        extra = _overrun(cache, whole)
        if extra:
            detail = (
                f"transformers' return_assistant_tokens_mask marks {extra} tokens outside the tags: a span ends in "
                "white space that belongs to no token's offsets, and its mask runs on to the end of the row."
            )
            return _ASKED.broken(detail)
        n_compared += sum(_tells(whole, *pair) for pair in zip(prompts, histories, strict=True))
    if not n_compared:
        return _ASKED.unsupported("No render begins with what the model is prompted with, so nothing tells the mask.")
    return _ASKED.ok("The tags cover exactly what is sampled, with the token at which the model stops.")


def _assistants(messages: Sequence[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def _fault(
    cache: RenderCache, whole: RenderSide, prompts: Sequence[RenderSide], histories: Sequence[RenderSide],
    stop: str | None,
) -> tuple[str, int | None]:
    """A sentence about the first wrong span, and its template line; an empty sentence = all spans are right."""
    text, spans = whole.text, merged(whole.rendered.spans)
    if len(spans) != len(prompts):
        line = whole.rendered.line_at(spans[-1][0]) if spans else None
        return f"{len(prompts)} assistant messages have {len(spans)} marked spans.", line
    for (start, end), prompt, history in zip(spans, prompts, histories, strict=True):
        if not _tells(whole, prompt, history):
            continue  # this render does not tell what was sampled; the prefix probes say why
        begin, close = len(prompt.text), cache.behind_header(text, len(history.text), stop)
        if stop is not None and text.find(stop, begin, close) >= 0:
            close = text.find(stop, begin, close) + len(stop)  # the model stops at the first
        line = whole.rendered.line_at(start)
        if start > begin and _HEADER.fullmatch(text[begin:start]):
            begin = start  # a template without a generation prompt: nobody samples its header either
        if start < begin:
            return (
                f"The mask starts too early: {text[start:begin]!r} is not sampled, it is the generation prompt.",
                line,
            )
        if start > begin:
            return f"The mask starts too late: {text[begin:start]!r} is sampled and not trained.", line
        if end > close:
            return f"The mask ends too late: nobody samples {text[close:end]!r} after the stop token.", line
        if end < close:
            return f"The mask ends too early: {text[end:close]!r} is sampled and not trained.", line
    return "", None


def _tells(whole: RenderSide, prompt: RenderSide, history: RenderSide) -> bool:
    """Whether a render goes on as the model was prompted, so that it tells what was sampled."""
    return whole.text.startswith(prompt.text) and whole.text.startswith(history.text)


def _overrun(cache: RenderCache, whole: RenderSide) -> int:
    codec: Any = cache.codec
    if not hasattr(codec, "encode_offsets"):
        return 0
    return overrun(codec, whole.text, whole.rendered.tracked_spans)
