"""Faults of the delta: the prompt extends the parent's stream, but adds other tokens than the template would."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from rollout_inspector.diagnose.context import REFUSED, DiagnosisContext
from rollout_inspector.diagnose.delta import Delta
from rollout_inspector.diagnose.finding import Axis, Fault, Finding, Severity
from rollout_inspector.diagnose.finding_makers import finding_on_step
from rollout_inspector.diagnose.request import leading_system
from rollout_inspector.diagnose.step_checks import control_text_in
from rollout_inspector.streams.prefix import common_length, common_prefix
from rollout_inspector.streams.snippets import clipped, quoted, quoted_or_nothing
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Message

_AROUND = 32  # So many bytes of what the template writes around a text say where the text belongs.
_BESIDE = 4
_TIMES = {0: "not at all", 1: "once", 2: "twice"}
_SEND_ONCE = "Add only the messages that are new since the last call, each of them once."


def special_tokens_injected(d: Delta) -> Fault | None:
    """A control token inside the text of a message."""
    messages = enumerate(d.new_messages or ())
    suspects = ((_message_index(d, n), message) for n, message in messages if message.get("role") != "assistant")
    return _injected(d.case, d.ids, d.pieces, d.data, suspects)


def _injected(
    case: DiagnosisContext, ids: Ids, pieces: Sequence[bytes], data: bytes,
    suspects: Iterable[tuple[int | None, Message]], severity: Severity | None = None,
) -> Fault | None:
    for index, message in suspects:
        if (place := control_text_in(message.get("content"), data, case, ids, pieces)) is not None:
            return Fault(
                "special_tokens_injected",
                f"The text of a {message.get('role')} message spells {case.text(ids[slice(*place)])}, which was "
                f"encoded as the control token {int(ids[place[0]])}.",
                *place, severity=severity, message_index=index,
            )
    return None


def stop_token_doubled(d: Delta) -> Fault | None:
    """The sampled stop token stands a second time at the start of the delta."""
    if d.stop_id is None or not len(d.ids) or int(d.ids[0]) != d.stop_id:
        return None
    answer = (d.messages or ())[: -len(d.new_messages or ()) or None][-1:]
    is_spelled = any(d.case.text(d.ids[:1]) in str(message.get("content")) for message in answer)
    twice = d.full is not None and ((d.full[1:] == d.stop_id) & (d.full[:-1] == d.stop_id)).any()
    if not is_spelled and (d.is_templates or twice):
        return None  # the template itself writes it twice
    return Fault(
        "stop_token_doubled",
        f"Step {d.parent_index} sampled the stop token {d.case.text(d.ids[:1])} and the delta of step {d.index} holds "
        "it again.",
        0, 1,
    )


def turn_left_open(d: Delta) -> Fault | None:
    """The delta begins behind the stop token that the template writes, and the completion ends before it.

    https://github.com/ai-dynamo/dynamo/issues/14302
    """
    end, last = d.before[1:], d.parent.completion_ids[-1:]
    if not np.array_equal(d.before[:1], last) or np.array_equal(end, last) or not d.case.is_special(end).any():
        return None
    return Fault(
        "delta_differs",
        f"The completion of step {d.parent_index} has no stop token, and the prompt of step {d.index} leaves the turn "
        f"open: the template writes {quoted(d.case.text(end))} there.",
        0, 0, expected_ids=end,
    )


def message_dropped(d: Delta) -> Fault | None:
    """A new message leaves no trace in the delta."""
    if not d.new_messages:
        return None
    remaining, gap = d.data, 0
    spans = d.spans(d.new_messages)
    for start, stop in filter(None, reversed(spans)):
        remaining = remaining[:start] + b"\0" + remaining[stop:]
    for position, (message, span) in enumerate(zip(d.new_messages, spans, strict=True)):
        gap = gap if span is None else span[1]
        # Words that a message shares with a present message are not a trace of it.
        content = message.get("content")
        if message.get("role") == "assistant" or d.case.stands_in(content, d.data):
            continue
        if d.case.has_trace(content, remaining) or _is_begun(d, position, remaining):
            continue
        delta = d.full if d.expected is None else d.expected
        drops = delta is not None and not d.case.has_trace(content, d.case.bytes_of(delta))
        who = "the chat template leaves it out" if drops else "the delta leaves it out"
        ends = np.cumsum([len(piece) for piece in d.pieces])
        place = int(np.searchsorted(ends, gap, side="right")) if gap else 0
        start, stop, expected = (place, place, d.ids[:0]) if drops or d.difference is None else d.difference
        return Fault(
            "message_dropped", f"A {message.get('role')} message of step {d.index} has no trace in its prompt: {who}.",
            start, stop, expected_ids=expected, message_index=_message_index(d, position),
        )
    return None


def _is_begun(d: Delta, position: int, rest: bytes) -> bool:
    """Whether a message's first or last character stands in the delta, next to what the template writes around it.
    ``rest`` is the delta without the texts of the other messages."""
    if d.expected is None or d.new_messages is None:
        return False
    expected = d.case.bytes_of(d.expected)
    spans = d.spans(d.new_messages, expected)
    span = spans[position]
    if span is None:
        return False
    others = [other for other in spans if other is not None and other != span]
    before = expected[max([stop for _, stop in others if stop <= span[0]], default=0) : span[0]][-_AROUND:]
    behind = expected[span[1] : min([start for start, _ in others if start >= span[1]], default=None)][:_AROUND]
    text = expected[slice(*span)].decode("utf-8", "replace")
    begins, ends = before + text[:1].encode(), text[-1:].encode() + behind
    return (before != b"" and begins in rest) or (behind != b"" and ends in rest)


def generation_prompt_missing(d: Delta) -> Fault | None:
    """The delta equals the template's up to the generation prompt, and ends without it or with another one."""
    prompt = d.generation_prompt
    if not len(prompt) or d.full is None:
        return None
    stem = d.full[: len(d.full) - len(prompt)]
    expected = d.expected
    if expected is not None and len(expected) >= len(prompt):
        body = len(expected) - len(prompt)
        shared = common_prefix(expected, d.ids)
        if shared < body or shared == len(expected) == len(d.ids):
            return None
        cut = shared if shared == len(d.ids) else body
        ends_right = np.array_equal(d.ids[len(d.ids) - len(prompt) :], prompt)
        if cut < len(d.ids) and ends_right:
            return None  # the header is there; other tokens came in between
    else:
        if not d.ends_with(stem, d.ids):
            return None
        shared = cut = len(d.ids)
    what = "without the assistant header" if cut == len(d.ids) else "with another assistant header"
    missing = (expected if expected is not None else np.concatenate([d.ids, prompt]))[shared:]
    return Fault(
        "generation_prompt_missing",
        f"The prompt of step {d.index} ends {what}; the template writes {d.case.text(prompt)!r}.",
        shared, len(d.ids), expected_ids=missing,
    )


def turn_separator_lost(d: Delta) -> Fault | None:
    """The text that the template writes right after the stop token is missing, and nothing else."""
    expected, lost = d.expected, _usual_separator(d) if d.expected is None else d.ids[:0]
    if expected is not None and np.array_equal(expected[(n := max(len(expected) - len(d.ids), 0)) :], d.ids):
        lost = expected[:n]
    if not len(lost) or d.case.is_special(lost).any() or d.case.text(lost).strip():
        return None
    return Fault(
        "turn_separator_lost",
        f"The template writes {d.case.text(lost)!r} after the stop token; the delta of step {d.index} starts with "
        f"{d.case.text(d.ids[:1])!r}.",
        0, 0, expected_ids=lost,
    )


def _usual_separator(d: Delta) -> Ids:
    """Without a render: the token that follows this stop token everywhere else in the prompt; empty = it does here."""
    if d.stop_id is None or not len(d.ids) or not d.case.is_control(int(d.ids[0])):
        return NO_IDS
    earlier = d.step.prompt_ids[: d.start - 1]
    places = np.flatnonzero(earlier[:-1] == d.stop_id)
    following = earlier[places + 1]
    return following[:1] if (following == following[:1]).all() else NO_IDS


def system_prompt_injected(d: Delta) -> Fault | None:
    """The additional tokens start like a conversation: with BOS, or with the header of the system block."""
    if any(message.get("role") in ("system", "developer") for message in d.new_messages or ()):
        return None
    heads = (head(d, with_tools) for head in (_system_header, _preamble) for with_tools in (True, False))
    starts = [head for head in heads if len(head)]
    bos = d.case.codec.bos_id if d.case.codec else None
    own = {d.case.as_decoded(text).strip() for text in leading_system(d.messages or ()) if isinstance(text, str)} - {""}
    extra, differs = [(0, len(d.ids))], 0
    if d.expected is not None:
        differs = common_prefix(d.expected, d.ids)
        extra = [(group.right_start, group.right_stop) for group in d.groups if not group.equal]
    for start, stop in extra:
        added = d.case.text(d.ids[start:stop]).strip()
        if added in own:
            return Fault(
                "system_prompt_injected",
                f"The delta of step {d.index} holds the conversation's system text once more: {quoted(added)}.",
                max(start, differs), max(start, differs, stop),
            )
        for place in range(max(0, start - 3), min(stop, start + 4)):
            ids = d.ids[place:]
            has_bos = bos is not None and len(ids) > 0 and int(ids[0]) == bos and bos != d.stop_id
            has_header = any(np.array_equal(ids[: len(head)], head) and _too_many(d, head) for head in starts)
            if has_bos or has_header:
                return Fault(
                    "system_prompt_injected",
                    f"The delta of step {d.index} holds the start of a conversation in the middle of the stream: "
                    f"{quoted(d.case.text(ids[:48]))}.",
                    max(place, differs), max(place + 1, differs, stop),
                )
    return None


def _too_many(d: Delta, head: Ids) -> bool:
    """Whether the delta holds these ids more often than the template writes them there."""
    actual, expected = (ids.tobytes() for ids in (d.ids, d.ids[:0] if d.expected is None else d.expected))
    return actual.count(head.tobytes()) > expected.count(head.tobytes())


def _system_header(d: Delta, with_tools: bool) -> Ids:
    """The first ids that the template writes before a system text, as many as are needed to recognise them."""
    renders = [
        d.case.render(
            d.step, [{"role": "system", "content": text}, {"role": "user", "content": "Hello."}], False,
            key=("header", text, d.step.chat_template_sha256), with_tools=with_tools,
        )
        for text in ("Alpha beta.", "9 gamma?")
    ]
    first, second = renders
    if first is None or second is None:
        head = d.case.steps[d.case.root(d.index)].prompt_ids
        return head[:3] if d.case.is_special(head[:1]).any() else head[:0]
    header = first[: common_prefix(first, second)]
    bos = d.case.codec.bos_id if d.case.codec else None
    header = header[1:] if len(header) and bos is not None and int(header[0]) == bos else header
    heads = _user_headers(d, with_tools)
    # Some templates put the system text into the first user turn, which starts like every other turn.
    if heads is not None and np.array_equal(heads[1][len(heads[1]) - len(header) :], header):
        return header[:0]
    if heads is None or not d.case.is_special(header).any():
        return header if len(header) > 1 else header[:0]
    # Ids that also start a user's turn prove nothing, and a date after the header may be of another day.
    start = heads[0][1:] if bos is not None and int(heads[0][0]) == bos else heads[0]
    return header[: common_prefix(header, start) + 1]


def _user_headers(d: Delta, with_tools: bool) -> tuple[Ids, Ids] | None:
    """The ids of a conversation without system message up to its first user text, and up to its second."""
    first, later = "Alpha beta.", "9 gamma?"
    turns = (("user", first), ("assistant", "Yes."), ("user", later))
    messages = [{"role": role, "content": text} for role, text in turns]
    key = ("start", d.step.chat_template_sha256)
    rendered = d.case.render(d.step, messages, False, key=key, with_tools=with_tools)
    if rendered is None or d.case.codec is None:
        return None
    data, ends = d.case.codec.joined_bytes(rendered)
    heads = []
    for text in (first, later):
        place = data.find(text.encode())
        if place < 0:
            return None
        heads.append(rendered[: int(np.searchsorted(ends, place, side="right"))])
    return heads[0], heads[1]


def _preamble(d: Delta, with_tools: bool) -> Ids:
    """The ids that start a conversation without system message and that no later turn has; at most four."""
    heads = _user_headers(d, with_tools)
    if heads is None:
        return d.ids[:0]
    shared = common_prefix(heads[0][::-1], heads[1][::-1])
    preamble = heads[0][: len(heads[0]) - shared]
    return preamble[:4] if len(preamble) > 3 or d.case.is_special(preamble).any() else preamble[:0]


def message_repeated(d: Delta) -> Fault | None:
    """A message of the request stands in the delta more often than the template writes it there."""
    if d.expected is None or d.full is None or d.difference is None or not d.messages:
        return None
    whole, expected = d.case.bytes_of(d.full), d.case.bytes_of(d.expected)
    for index, (message, span) in enumerate(zip(d.messages, d.spans(d.messages, whole), strict=True)):
        if span is None or message.get("role") in ("system", "developer"):
            continue
        text = whole[max(0, span[0] - _BESIDE) : span[1] + _BESIDE]  # a short text alone may stand in another one
        n, n_written = d.data.count(text), expected.count(text)
        if n > n_written:
            start, stop, ids = d.difference
            what = f"message {index} ({message.get('role')})"
            if message.get("role") == "tool" and message.get("tool_call_id"):
                what = f"the result of call {clipped(str(message['tool_call_id']), 60)} (message {index})"
            times, times_written = (_TIMES.get(count, f"{count} times") for count in (n, n_written))
            return Fault(
                "delta_differs",
                f"What step {d.index} adds to the prompt holds {what} {times}; the template writes it there "
                f"{times_written}.",
                start, stop, expected_ids=ids, message_index=index, remedy=_SEND_ONCE,
            )
    return None


def tool_messages_split(d: Delta) -> Fault | None:
    """A run of tool messages has more turns in the delta than in the template's render."""
    tools = [m for m in d.new_messages or () if m.get("role") == "tool"]
    if len(tools) < 2 or d.expected is None:
        return None
    spans = [span for span in d.spans(tools) if span is not None]
    if len(spans) < 2:
        return None
    offsets = np.cumsum([0, *(len(piece) for piece in d.pieces)])
    for group in d.groups:
        if group.equal:
            continue
        extra = d.case.is_special(d.ids[group.right_start : group.right_stop]).sum()
        n_expected = d.case.is_special(d.expected[group.left_start : group.left_stop]).sum()
        place, end = int(offsets[group.right_start]), int(offsets[group.right_stop])
        between = any(stop <= end and place <= start for (_, stop), (start, _) in pairwise(spans))
        if between and extra > n_expected:
            return Fault(
                "tool_messages_split",
                f"The {len(tools)} tool messages of step {d.index} were rendered one by one: the template does not end "
                f"the turn between them.",
                group.right_start, group.right_stop, expected_ids=d.expected[group.left_start : group.left_stop],
            )
    return None


def delta_differs(d: Delta) -> Fault | None:
    """All other differences from the template."""
    if d.expected is None or d.difference is None:
        return None
    start, stop, expected = d.difference
    texts = [d.case.text(expected), d.case.text(d.ids[start:stop])]
    expected_text, actual = (quoted_or_nothing(text) for text in texts)
    how = f"{actual} stands" if texts[0] != texts[1] else "other ids spell it"
    where = f"where the template writes {expected_text}, {how}"
    evidence = (
        f"After the completion of step {d.parent_index} the template writes {len(d.expected)} ids, and the prompt of "
        f"step {d.index} has {len(d.ids)}: {where}."
    )
    position, cut = _cut_message(d)
    if position is not None:
        role = (d.new_messages or ())[position].get("role")
        evidence = f"A {role} message of step {d.index} is cut in its prompt, {cut}: {where}."
    return Fault(
        "delta_differs", evidence, start, stop,
        expected_ids=expected, message_index=None if position is None else _message_index(d, position),
    )


def _cut_message(d: Delta) -> tuple[int | None, str]:
    """The new message of which a part is missing, and which part. None when the difference is another one."""
    assert d.expected is not None
    expected, actual = d.case.bytes_of(d.expected), d.data
    start = common_length(expected, actual)
    tail = common_length(expected[start:][::-1], actual[start:][::-1])
    stop, added = len(expected) - tail, len(actual) - tail - start
    for position, span in enumerate(d.spans(d.new_messages or (), expected)):
        if span is None:
            continue
        first, last = start, stop
        # With equal text on both sides of a cut, the same bytes are missing a little earlier.
        while not added and last > span[1] and first > span[0] and expected[first - 1] == expected[last - 1]:
            first, last = first - 1, last - 1
        # A mark of the cut may stand in place of a much longer end.
        ends_early = not added or (last == span[1] and 2 * added < last - first)
        if span[0] <= first and last <= span[1] and first < last and ends_early:
            size, n_written = (len(expected[a:b].decode("utf-8", "ignore")) for a, b in (span, (span[0], first)))
            return position, f"after {n_written} of its {size} characters"
    return None, ""


# The first rule that matches names the fault. The rules in the first list need no render.
BY_IDS = (special_tokens_injected, message_dropped)
BY_RENDER = (
    stop_token_doubled,
    turn_separator_lost,
    system_prompt_injected,
    message_repeated,
    tool_messages_split,
    generation_prompt_missing,
    delta_differs,
)


def _message_index(d: Delta, position: int) -> int | None:
    return None if d.messages is None else len(d.messages) - len(d.new_messages or ()) + position


def check_delta(case: DiagnosisContext, index: int) -> Finding | None:
    """The fault of a step that extends its parent, or None."""
    if case.codec is None:
        return None
    d = Delta(case, index)
    fault = next((match for rule in BY_IDS if (match := rule(d)) is not None), None)
    if fault is None and d.is_templates:
        fault = turn_left_open(d) or stop_token_doubled(d)
    elif fault is None:
        # The delta may hold another step's answer as it was sampled. No render can tell whether that is right.
        answers = any(message.get("role") == "assistant" for message in d.new_messages or ())
        is_known = d.is_templates is False and not answers
        rules = BY_RENDER if is_known else (stop_token_doubled, turn_separator_lost)
        fault = next((match for rule in rules if (match := rule(d)) is not None), None)
        if fault is None and not is_known:
            is_refused = d.new_messages is not None and d.full is None
            case.undecided["delta"] = REFUSED if is_refused else "render of the new messages"
    if fault is None:
        return None
    placed = replace(fault, start=d.start + fault.start, stop=d.start + fault.stop)
    return finding_on_step(case, index, placed, Axis.DELTA)


def control_text_in_prompt(case: DiagnosisContext, index: int) -> Finding | None:
    """Control tokens that were encoded from the text of a user or tool message, in the first prompt of a chain."""
    step = case.steps[index]
    messages = case.request_messages(index)
    if case.codec is None or not messages:
        return None
    suspects = [(n, message) for n, message in enumerate(messages) if message.get("role") in ("user", "tool")]
    if not suspects or not case.is_special(step.prompt_ids).any():
        return None
    pieces = case.codec.token_bytes(step.prompt_ids)
    fault = _injected(case, step.prompt_ids, pieces, b"".join(pieces), suspects, Severity.WARNING)
    return None if fault is None else finding_on_step(case, index, fault, Axis.DELTA)
