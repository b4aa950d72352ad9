"""Breaks that the template or the tokenizer explains: template text that comes and goes, another vocabulary."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.context import REFUSED, DiagnosisContext
from rollout_inspector.diagnose.finding import Cost, Fault, Finding, Severity
from rollout_inspector.diagnose.finding_makers import finding_on_step
from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.prefix import common_length, common_prefix, stream_length
from rollout_inspector.streams.recorded_renders import DATE, NOW, first_rendered, kwargs_of_record
from rollout_inspector.streams.snippets import quoted_or_nothing
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Message

_ASKING = ("user", "tool", "function")
_TELLING = 4  # Fewer letters may stand in another text by chance.
_MARK = 64  # So many letters, or a quarter of those in whose place they stand, are more than the mark of a cut.


def template_not_append_only(b: Break) -> Fault | None:
    """The streams differ in text that the template wrote, and the messages are equal."""
    if b.known_messages is not None and b.first_changed is not None:
        return None
    start = b.text_start  # the template does not cause tokens that merge over the seam of prompt and completion
    turn = b.turn_at(start)
    in_prompt = turn is None
    tail = b.expected[start : None if turn is None else stream_length(turn)]
    if not in_prompt and not (len(tail) <= 4 and b.case.is_special(tail).all()):
        return None
    if b.case.codec is not None and b.same_text:
        return None
    tail_length = _tail_length(b) if in_prompt else 0
    if in_prompt and len(b.parent.prompt_ids) - start > tail_length and not _template_did_it(b):
        return None
    if not in_prompt:
        came = quoted_or_nothing(b.case.text(b.actual[start : start + len(tail)]))
        evidence = f"{quoted_or_nothing(b.case.text(tail))} was sampled, and the template writes {came} in its place"
    else:
        where = "at the end of" if tail_length >= len(b.parent.prompt_ids) - start else "in"
        was, came = quoted_or_nothing(b.a), quoted_or_nothing(b.b)
        evidence = f"The template wrote {was} {where} step {b.parent_index}'s prompt and {came} in its place"
    return Fault("template_not_append_only", f"{evidence} when messages followed.")


def _tail_length(b: Break) -> int:
    """How many ids at the end of the parent's prompt are its generation prompt."""
    messages = b.case.request_messages(b.parent_index)
    if messages is not None:
        with_prompt = b.case.render(b.parent, messages, True, key=("prompt", b.parent_index))
        without = b.case.render(b.parent, messages, False, key=("prompt", b.parent_index))
        if with_prompt is not None and without is not None:
            return max(len(with_prompt) - common_prefix(with_prompt, without), 0)
    special = np.flatnonzero(b.case.is_special(b.parent.prompt_ids[-64:]))
    return min(len(b.parent.prompt_ids), 64) - int(special[-1]) if special.size else 0


def _template_did_it(b: Break) -> bool:
    """Whether the stored template renders both prompts, so that it causes the difference."""
    first, second = (request_render(b.case, index) for index in (b.parent_index, b.index))
    if first is None or second is None:
        return False
    # A date in the text before may make the sent prompts longer or shorter than the renders.
    start = common_prefix(first, second)
    n = min(8, len(first) - start)
    expected, actual = b.expected[b.start : b.start + n], b.actual[b.start : b.start + 8]
    return n > 0 and len(actual) > 0 and np.array_equal(first[start : start + n], expected) and (
        np.array_equal(second[start : start + 8], actual)
    )


_MAX_SWITCHES = 4  # So many values of a template's switches are tried.
_WITHOUT = " without "
"""In the words for an input without what the request holds: what was sampled is no answer to that request."""
_WRITTEN = "Mxq7"  # A value by which a render shows where the template writes a switch.
_MAX_TOOLS = 16
_MAX_SEARCHES = 8
_RECORD_BOTH = "Record the messages together with the prompt that was made of them."
_FIXED_DATE = "Pass one fixed date_string (or strftime_now) for the whole trajectory."


def other_render(b: Break) -> Fault | None:
    """The start of a prompt is not what its template writes for its request, but what it writes for another input.
    Renders are made only where the streams differ inside the first prompt and no message was changed."""
    case, root = b.case, b.case.root(b.parent_index)
    if b.known_messages is None or b.first_changed is not None or case.codec is None:
        return None
    if b.start >= len(case.steps[root].prompt_ids) or b.same_text:
        return None
    if (dates := _dates(b, root)) is not None:
        return Fault(
            "chat_template_changed",
            f"The template writes the date: {dates[0]} in the prompt of step {root}, {dates[1]} in that of step "
            f"{b.index}.",
            remedy=_FIXED_DATE,
        )
    for index in (b.index, root):
        if words := _fitting(case, index, b.start):
            return Fault(
                "chat_template_changed",
                f"The prompt of step {index} is not what the template writes for its request: it is {words}.",
            )
    return None


def other_head(b: Break) -> Fault | None:
    """One of both prompts starts otherwise than its template writes it, and holds the texts of all its messages."""
    case = b.case
    root = case.root(b.parent_index)
    if b.start > b.head_stop or b.first_changed is not None or b.texts_lost is not False:
        return None
    first, later = (case.steps[index].prompt_ids for index in (root, b.index))
    starts = [case.user_text_start(case.steps[index]) for index in (root, b.index)]
    behind = first[len(first) if starts[0] is None else starts[0] :]
    turn = behind[: int(case.is_special(behind).argmax()) + 1]  # the first user text and the control token behind it
    if not len(turn) or starts[1] is None or not np.array_equal(turn, later[starts[1] :][: len(turn)]):
        return None  # more than the head differs
    agreed = {index: agrees_past(case, index, b.start) for index in (root, b.index)}
    odd = [index for index, agrees in agreed.items() if agrees is False]
    if len(odd) != 1 or None in agreed.values():
        return None
    return _odd_fault(b, odd[0])


def other_text(b: Break) -> Fault | None:
    """One prompt holds another text than its template writes for its request, which is not what was sent."""
    root = b.case.root(b.parent_index)
    if b.known_messages is None or b.first_changed is not None:
        return None
    indices = (root, b.index) if b.start < len(b.case.steps[root].prompt_ids) else (b.index,)
    agreed = [agrees_past(b.case, index, b.start) for index in indices]
    if None in agreed or agreed.count(False) != 1:
        return None
    return _odd_fault(b, indices[agreed.index(False)])


def _odd_fault(b: Break, index: int) -> Fault:
    """A prompt that is not the render of its request; if it lacks a text of it, it was made of other messages."""
    rendered, ids = request_render(b.case, index), b.case.steps[index].prompt_ids
    assert rendered is not None
    whole, data = b.case.bytes_of(rendered), b.case.bytes_of(ids)
    contents = [message.get("content") for message in b.case.request_messages(index) or ()]
    is_other = any(b.case.stands_in(text, whole) and not b.case.stands_in(text, data) for text in contents)
    there, written = (quoted_or_nothing(b.case.text(part[b.start : b.start + 12])) for part in (ids, rendered))
    return Fault(
        "engine_ids_inconsistent" if is_other else "chat_template_changed",
        f"The prompt of step {index} is not what the template writes for its request: from offset {b.start} it holds "
        f"{there} where the template writes {written}.",
        remedy=_RECORD_BOTH if is_other else "",
    )


def request_render(case: DiagnosisContext, index: int) -> Ids | None:
    """What the template of a step writes for its request; None when it refuses, or there is none."""
    messages = case.request_messages(index)
    return None if messages is None else case.render(case.steps[index], messages, True, key=("prompt", index))


def agrees_past(case: DiagnosisContext, index: int, start: int) -> bool | None:
    """Whether a prompt and the render of its request agree beyond an offset. None = there is no render."""
    rendered = request_render(case, index)
    return None if rendered is None else common_prefix(rendered, case.steps[index].prompt_ids) > start


def _dates(b: Break, root: int) -> tuple[str, str] | None:
    """The dates of both prompts, where they alone make the templates' texts differ at the break."""
    case = b.case
    old, new = (case.kwargs_of_record(case.steps[index])[0] for index in (root, b.index))
    key = next((key for key in (NOW, DATE) if old.get(key) != new.get(key) and old.get(key) and new.get(key)), None)
    if key is None or not (agrees_past(case, root, b.start) and agrees_past(case, b.index, b.start)):
        return None
    rendered = _render(case, b.index, kwargs={**new, key: old[key]})
    if rendered is None or common_prefix(rendered, b.expected) <= b.start:
        return None
    days = [str(kwargs[key]) for kwargs in (old, new)]
    same_day = days[0][:10] == days[1][:10]
    short = [day if key == DATE or same_day else day[:10] for day in days]
    return short[0], short[1]


def _render(
    case: DiagnosisContext, index: int, messages: Sequence[Message] | None = None, tools: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None, with_tools: bool = True,
) -> Ids | None:
    """A render of a step's request with some of its parts replaced. None when the template refuses."""
    step = case.steps[index]
    renderer, request = case.renderer(step), step.request
    if renderer is None or request is None:
        return None
    kwargs = case.kwargs_of_record(step)[0] if kwargs is None else kwargs
    tools = None if not with_tools else request.tools if tools is None else tools
    rendered = first_rendered(renderer, Conversation(case.as_sent(messages or request.messages), tools, kwargs, True))
    return None if rendered is None else rendered[1]


def _fitting(case: DiagnosisContext, index: int, start: int) -> str:
    """What a prompt is, in words, if another input of the template fits it. Empty = no input fits."""
    if agrees_past(case, index, start) is not False:
        return ""
    if index not in case.other_renders:
        if len(case.other_renders) >= _MAX_SEARCHES:
            return ""
        ids, head = case.steps[index].prompt_ids, case.user_text_start(case.steps[index])
        least = len(ids) if head is None else max(start, head) + 1
        fits = (
            words for words, rendered in _inputs(case, index)
            if rendered is not None and (common_prefix(rendered, ids) >= least or np.array_equal(rendered, ids))
        )
        case.other_renders[index] = next(fits, "")
    return case.other_renders[index]


def _inputs(case: DiagnosisContext, index: int) -> Iterator[tuple[str, Ids | None]]:
    """What servers give a template instead of a request, in words, and its render."""
    step, it_writes = case.steps[index], "what it writes"
    request, renderer = step.request, case.renderer(step)
    if request is None or renderer is None or case.codec is None:
        return
    kwargs = case.kwargs_of_record(step)[0]
    tools = list(request.tools or ())
    if tools:
        yield f"{it_writes}{_WITHOUT}its tools", _render(case, index, with_tools=False)
    for place in range(min(len(tools), _MAX_TOOLS) if len(tools) > 1 else 0):
        function = tools[place].get("function") if isinstance(tools[place], Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else place
        yield f"{it_writes}{_WITHOUT}the tool {name}", _render(case, index, tools=tools[:place] + tools[place + 1 :])
    for name in sorted(set(kwargs) - {NOW, DATE}):
        fewer = {key: value for key, value in kwargs.items() if key != name}
        yield f"{it_writes}{_WITHOUT}the switch {name}", _render(case, index, kwargs=fewer)
    switched = ((name, value) for name, value in _switched(case, index, kwargs) if kwargs.get(name) != value)
    for name, value in islice(switched, _MAX_SWITCHES):
        words = f"{it_writes} with {name}={json.dumps(value)}"
        yield words, _render(case, index, kwargs={**kwargs, name: value})
    for sha256 in dict.fromkeys((case.rows_template, *(other.chat_template_sha256 for other in case.steps))):
        other = case.renderer_of(sha256)
        if other is not None and other.chat_template_sha256 != renderer.chat_template_sha256:
            rendered = first_rendered(other, Conversation(request.messages, request.tools, kwargs, True))
            words = f"what the chat template {other.chat_template_sha256[:12]} writes"
            yield words, None if rendered is None else rendered[1]
    undated = {key: value for key, value in request.chat_template_kwargs.items() if key not in (NOW, DATE)}
    if len(undated) < len(request.chat_template_kwargs):
        dated = kwargs_of_record(step, replace(request, chat_template_kwargs=undated), renderer, case.codec)[0]
        yield f"{it_writes} with another date", _render(case, index, kwargs=dated)
    if request.messages and request.messages[0].get("role") in ("system", "developer"):
        yield f"{it_writes}{_WITHOUT}its system text", _render(case, index, messages=request.messages[1:])
    elif request.messages:
        empty = [{"role": "system", "content": ""}, *request.messages]
        yield f"{it_writes} with an empty system text", _render(case, index, messages=empty)
    turns = [(message.get("role"), msg.text_of(message.get("content")) or "") for message in request.messages]
    chatml = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    yield "plain ChatML", case.codec.encode(chatml + "<|im_start|>assistant\n")


def _switched(case: DiagnosisContext, index: int, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The switches that the template of a step reads, and their values: what its prompt holds, else what it compares. A
    renderer that does not know its switches (``switches``) has none here."""
    switches = getattr(case.renderer(case.steps[index]), "switches", {})
    for name, values in islice(switches.items(), 2 * _MAX_SWITCHES):
        ids = _render(case, index, kwargs={**kwargs, name: _WRITTEN}) if not values else None
        before, mark, behind = case.text(NO_IDS if ids is None else ids).partition(_WRITTEN)
        prompt = case.text(case.steps[index].prompt_ids)
        if mark and prompt.startswith(before):
            yield name, prompt[len(before) :].partition(behind[:_TELLING])[0][:_MARK]
        elif not mark:
            yield from ((name, value) for value in values or (True, False))


def tokenizer_mismatch(b: Break) -> Fault | None:
    """With this tokenizer the prompt's text is not that of the request's messages."""
    return None if b.known_messages is None else _foreign_fault(b.case, b.index)


def _foreign_fault(case: DiagnosisContext, index: int) -> Fault | None:
    """A prompt without the texts of its request: of another tokenizer, or, if it is this one's, of another request."""
    ids = case.steps[index].prompt_ids
    if foreign(case, index) and not _is_written_here(case, index):
        words = f"Decoded with this tokenizer, the prompt of step {index} does not hold the text of its messages."
        return Fault("tokenizer_mismatch", words, 0, len(ids))
    if not _is_of_another_request(case, index):
        return None
    return Fault(
        "engine_ids_inconsistent",
        f"The prompt of step {index} is not the render of its request: it lacks most texts of its messages, and ends "
        f"with {quoted_or_nothing(case.text(ids[-48:]))}.",
        0, len(ids), remedy=_RECORD_BOTH,
    )


def _is_of_another_request(case: DiagnosisContext, index: int) -> bool:
    """Whether a prompt holds other texts where the template writes those of users and tools. A cut prompt does not.
    Only letters and digits are compared, and of the texts only those that the template writes."""
    contents, ids = _asked(case.request_messages(index) or ()), case.steps[index].prompt_ids
    if case.codec is None or not contents or case.stands_in(contents[-1], case.bytes_of(ids)):
        return False  # most prompts
    if (rendered := request_render(case, index)) is None:
        return foreign(case, index) and _is_written_here(case, index)
    written, prompt = (msg.letters_of(case.text(part[~case.is_special(part)])) for part in (rendered, ids))
    forms = [form for content in contents for form in case.content_forms(content)]
    texts = [msg.letters_of(form[0].decode("utf-8", "replace")) for form in forms]
    lost = [text not in prompt for text in texts if len(text) >= _TELLING and text in written]
    if not lost or not (lost[0] and lost[-1]) or 2 * sum(lost) <= len(lost):
        return False
    start = common_length(written, prompt)
    stop = start + common_length(written[start:][::-1], prompt[start:][::-1])
    is_text = len(prompt) - stop >= min(_MARK, (len(written) - stop) / 4)
    return is_text and _is_written_here(case, index)


def _asked(messages: Sequence[Message]) -> list[Any]:
    """What users and tools said."""
    return [message["content"] for message in messages if message.get("content") and message.get("role") in _ASKING]


def _is_written_here(case: DiagnosisContext, index: int) -> bool:
    """Whether this tokenizer wrote a prompt: its text has these ids, or it ends as the render of its request."""
    assert case.codec is not None
    ids, rendered = case.steps[index].prompt_ids, request_render(case, index)
    n = 0 if rendered is None else common_prefix(rendered[::-1], ids[::-1])
    ends_alike = n > 2 and bool(case.is_special(ids[-n:]).any())
    return ends_alike or np.array_equal(case.codec.encode(case.text(ids)), ids)


def foreign(case: DiagnosisContext, index: int) -> bool:
    """Whether most message texts of a request are missing in its decoded prompt."""
    messages = case.request_messages(index)
    if case.codec is None or not messages:
        return False
    data = case.bytes_of(case.steps[index].prompt_ids)
    contents = [m["content"] for m in messages if m.get("content") and m.get("role") in ("system", *_ASKING)]
    traces = [
        case.has_trace(content, data) for content in contents
        if (content.strip() if isinstance(content, str) else any(case.content_forms(content)))
    ]
    return len(traces) > 0 and sum(traces) * 2 < len(traces)


def first_prompt(case: DiagnosisContext, index: int) -> Finding | None:
    """The first prompt of a chain has the template's text, but another tokenizer's ids."""
    step = case.steps[index]
    messages = case.request_messages(index)
    if case.codec is None or messages is None or index in case.no_ids:
        return None
    if (foreign_fault := _foreign_fault(case, index)) is not None:
        return finding_on_step(case, index, foreign_fault)
    rendered = case.render(step, messages, True, key=("prompt", index))
    if rendered is None:
        case.undecided["first_prompt"] = REFUSED
        return None
    start = common_prefix(rendered, step.prompt_ids)
    if start == len(rendered) == len(step.prompt_ids):
        return None
    if not case.same_bytes(rendered[start:], step.prompt_ids[start:]):
        if words := _fitting(case, index, start):
            fault = Fault(
                "chat_template_changed",
                f"The prompt of step {index} is not what the template writes for its request: it is {words}.",
                start, len(step.prompt_ids), severity=Severity.WARNING if _WITHOUT in words else Severity.INFO,
            )
            return finding_on_step(case, index, fault, cost=Cost())
        if not np.array_equal(case.codec.encode(case.text(step.prompt_ids)), step.prompt_ids):
            case.of_another_template.append(index)
            case.undecided["first_prompt"] = "chat template of the first prompt"
        return None
    names = case.codec.token_bytes(rendered[start:][case.is_special(rendered[start:])])
    missing = len(names) - int(case.is_special(step.prompt_ids[start:]).sum())
    request = step.request if missing else None
    spelled = msg.strings_in([list(request.messages), list(request.tools or ())]) if request else []
    n_spelled = sum(text.count(name.decode("utf-8", "replace")) for text in spelled for name in set(names))
    if missing and missing <= n_spelled:
        return None  # content whose control tokens were encoded as text, which is right
    tail = common_prefix(rendered[start:][::-1], step.prompt_ids[start:][::-1])
    stop = len(step.prompt_ids) - tail
    fault = Fault(
        "tokenizer_mismatch",
        f"The prompt of step {index} has the text that the template writes for its messages, but from offset "
        f"{start} on other ids than this tokenizer writes.",
        start, stop, expected_ids=rendered[start : len(rendered) - tail],
    )
    return finding_on_step(case, index, fault)
