"""Breaks that the template or the tokenizer explains: template text that comes and goes, another vocabulary."""

from __future__ import annotations

import numpy as np

from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.diagnose.finding import Fault, Finding
from rollout_inspector.diagnose.finding_makers import finding_on_step
from rollout_inspector.streams import message_places as msg
from rollout_inspector.streams.prefix import common_prefix, stream_length
from rollout_inspector.streams.snippets import quoted_or_nothing
from rollout_inspector.streams.trajectory import Step

_FOREIGN = "Decoded with this tokenizer, the prompt of step {} does not hold the text of its messages."


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
    if b.known_messages is None:
        return False
    first = b.case.render(b.parent, b.known_messages[0], True, key=("prompt", b.parent_index))
    second = b.case.render(b.step, b.known_messages[1], True, key=("prompt", b.index))
    if first is None or second is None:
        return False
    # A date in the text before may make the sent prompts longer or shorter than the renders.
    start = common_prefix(first, second)
    n = min(8, len(first) - start)
    expected, actual = b.expected[b.start : b.start + n], b.actual[b.start : b.start + 8]
    return (
        n > 0
        and np.array_equal(first[start : start + n], expected)
        and np.array_equal(second[start : start + 8], actual)
    )


def tokenizer_mismatch(b: Break) -> Fault | None:
    """With this tokenizer the prompt's text is not that of the request's messages."""
    if b.known_messages is None or not foreign(b.case, b.index):
        return None
    return Fault("tokenizer_mismatch", _FOREIGN.format(b.index))


def foreign(case: DiagnosisContext, index: int) -> bool:
    """Whether most message texts of a request are missing in its decoded prompt."""
    messages = case.request_messages(index)
    if case.codec is None or not messages:
        return False
    data = case.bytes_of(case.steps[index].prompt_ids)
    contents = [m["content"] for m in messages if m.get("content") and m.get("role") in ("system", "user", "tool")]
    traces = [case.has_trace(content, data) for content in contents]
    return len(traces) > 0 and sum(traces) * 2 < len(traces)


def first_prompt(case: DiagnosisContext, index: int) -> Finding | None:
    """The first prompt of a chain has the template's text, but another tokenizer's ids."""
    step = case.steps[index]
    messages = case.request_messages(index)
    if case.codec is None or messages is None or index in case.no_ids:
        return None
    if foreign(case, index):
        fault = Fault("tokenizer_mismatch", _FOREIGN.format(index), 0, len(step.prompt_ids))
        return finding_on_step(case, index, fault)
    rendered = case.render(step, messages, True, key=("prompt", index))
    if rendered is None:
        case.undecided["first_prompt"] = "render of the first messages"
        return None
    start = common_prefix(rendered, step.prompt_ids)
    if start == len(rendered) == len(step.prompt_ids):
        return None
    if case.bytes_of(rendered[start:]) != case.bytes_of(step.prompt_ids[start:]):
        if not np.array_equal(case.codec.encode(case.text(step.prompt_ids)), step.prompt_ids):
            case.of_another_template.append(index)
            case.undecided["first_prompt"] = "chat template of the first prompt"
        return None
    names = case.codec.token_bytes(rendered[start:][case.is_special(rendered[start:])])
    missing = len(names) - int(case.is_special(step.prompt_ids[start:]).sum())
    if missing and missing <= _spelled(set(names), step):
        return None  # content whose control tokens were encoded as text, which is right
    tail = common_prefix(rendered[start:][::-1], step.prompt_ids[start:][::-1])
    stop = len(step.prompt_ids) - tail
    fault = Fault(
        "tokenizer_mismatch",
        f"The prompt of step {index} has the text that the template writes for its messages, but from offset "
        f"{start} on other ids than this tokenizer writes.",
        start, stop,
        expected_ids=rendered[start : len(rendered) - tail],
    )
    return finding_on_step(case, index, fault)


def _spelled(names: set[bytes], step: Step) -> int:
    """How often the messages and tools of a request spell one of these control tokens."""
    request = step.request
    texts = msg.strings_in([list(request.messages), list(request.tools or ())]) if request else []
    return sum(text.count(name.decode("utf-8", "replace")) for text in texts for name in names)
