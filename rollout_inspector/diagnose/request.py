"""Breaks that the request explains: template, tools, system text, BOS, cut context, changed messages."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.context import kwargs_of
from rollout_inspector.diagnose.finding import Fault
from rollout_inspector.diagnose.template import request_render
from rollout_inspector.diagnose.text import call_regions
from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.prefix import common_length, common_prefix
from rollout_inspector.streams.snippets import clipped, contrast, counted, quoted
from rollout_inspector.streams.trajectory import Message, Step

_MIN_KEPT = 4
_KEEP_IDS = "Keep the sampled ids from call to call (token-in-token-out), or repair the chat template."


def chat_template_changed(b: Break) -> Fault | None:
    """The two steps have different templates, or different template switches."""
    before, after = b.parent.chat_template_sha256, b.step.chat_template_sha256
    if before != after and before and after:
        return Fault(
            "chat_template_changed",
            f"Step {b.parent_index} used chat template {before[:12]}, step {b.index} used {after[:12]}.",
        )
    if b.parent.request is None or b.step.request is None:
        return None
    old, new = kwargs_of(b.parent), kwargs_of(b.step)
    for key in sorted(set(old) | set(new)):
        if old.get(key) != new.get(key):
            return Fault(
                "chat_template_changed",
                f"The template switch {key} was {_short(old.get(key))} at step {b.parent_index} and is "
                f"{_short(new.get(key))} at step {b.index}.",
            )
    return None


def request_changed(b: Break) -> Fault | None:
    """Tools or system text differ, and so do the streams inside the first prompt."""
    if b.known_messages is None:
        return None
    root = b.case.steps[b.case.root(b.parent_index)]
    if b.start >= len(root.prompt_ids):
        return None
    return changed_request(b)


def changed_request(b: Break) -> Fault | None:
    """Tools or system text differ. The streams may differ anywhere."""
    if b.known_messages is None:
        return None
    old, new = tools_of(b.parent), tools_of(b.step)
    if old != new:
        what = f"step {b.parent_index} sent {counted(len(old), 'tool')} and step {b.index} sent {len(new)}"
        if len(old) == len(new):
            what = f"the tools of step {b.index} are not those of step {b.parent_index}"
        return Fault("request_changed", what[0].upper() + what[1:] + ".")
    before, after = (leading_system(messages) for messages in b.known_messages)
    if before != after and (before or after):
        old_text, new_text = ("\n".join(map(_words, texts)) for texts in (before, after))
        was, now = contrast(old_text, new_text)
        return Fault(
            "request_changed", f"The system text was {was} at step {b.parent_index} and is {now} at step {b.index}.",
            message_index=0,
        )
    return None


def tools_of(step: Step) -> list[Any]:
    return list(step.request.tools or ()) if step.request else []


def leading_system(messages: Sequence[Message]) -> list[Any]:
    """The system texts at the start of a conversation."""
    n = len(messages) - len(msg.without_system(messages))
    return [msg.text_of(message.get("content")) for message in messages[:n]]


def bos_mismatch(b: Break) -> Fault | None:
    """BOS stands twice at the start, or in one stream only."""
    if b.start > 1 or not len(b.actual) or not len(b.expected):
        return None
    bos = b.case.codec.bos_id if b.case.codec else int(b.expected[0])
    if bos is None:
        return None
    old, new = _leading(b.expected, bos), _leading(b.actual, bos)
    if old == new or (old > 1 and new > 1):
        return None
    n = min(4, len(b.expected) - old, len(b.actual) - new)
    if n <= 0 or not np.array_equal(b.expected[old : old + n], b.actual[new : new + n]):
        return None  # the start was cut or rewritten, together with its BOS
    words = {0: "no BOS", 1: "one BOS"}
    return Fault(
        "bos_mismatch",
        f"The stream of step {b.parent_index} starts with {words.get(old, f'{old} BOS')} (id {bos}), the prompt of "
        f"step {b.index} with {words.get(new, f'{new} BOS')}.",
    )


def _leading(ids: Any, bos: int) -> int:
    head = np.asarray(ids[:4]) == bos
    return int(head.argmin()) if not head.all() else len(head)


def context_truncated(b: Break) -> Fault | None:
    """The prompt starts with the part of the sampled stream after a cut, at once or after the system block."""
    if b.start > b.head_stop or (b.start and b.texts_lost is False):
        return None
    expected, actual = b.expected, b.actual[b.start :]
    if len(actual) < _MIN_KEPT:
        return None
    needle, haystack = actual[:_MIN_KEPT].tobytes(), expected.tobytes()
    place = haystack.find(needle, (b.start + 1) * expected.itemsize)
    while place >= 0:
        k, offset = divmod(place, expected.itemsize)
        n_kept = len(expected) - k
        if not offset and n_kept <= len(actual) and np.array_equal(expected[k:], actual[:n_kept]):
            moved = k - b.start >= _MIN_KEPT and expected[b.start : k].tobytes() in actual[n_kept:].tobytes()
            lost = b.texts_lost or (not b.start and b.known_messages is not None)
            rendered = None if moved and not lost else request_render(b.case, b.index)
            if (moved and not lost) or (rendered is not None and np.array_equal(rendered, b.actual)):
                return None  # no cut: the template moved something away
            where = f"after the first {counted(b.start, 'id')}" if b.start else "at the start"
            return Fault(
                "context_truncated",
                f"Gone: {counted(k - b.start, 'id')} {where} of the stream of step {b.parent_index}. The rest, "
                f"{counted(n_kept, 'id')}, follows unchanged. The prompt has {len(b.actual)} ids.",
            )
        place = haystack.find(needle, place + 1)
    return None


def history_rewritten(b: Break) -> Fault | None:
    """An earlier message of another role than assistant was edited, removed or summarised."""
    if b.first_changed is None or b.known_messages is None:
        return None
    before, after = b.known_messages
    for index in range(b.first_changed, len(before)):
        old, new = before[index], after[index] if index < len(after) else {}
        if index >= len(after) or not (old.get("role") == new.get("role") == "assistant" or msg.same(old, new)):
            break
    else:
        return None
    role = old.get("role")
    if index >= len(after):
        what = f"of step {b.parent_index} is gone at step {b.index}"
    elif new.get("role") != role:
        what = f"of step {b.parent_index} is a message of the role {new.get('role')} at step {b.index}"
    else:
        old_text, new_text = (_words(msg.text_of(side.get("content"))) for side in (old, new))
        was, now = contrast(old_text, new_text)
        what = f"was {was} at step {b.parent_index} and is {now} at step {b.index}"
    n = len(after)
    sent = f", which sends {n} message{'s' * (n != 1)} where step {b.parent_index} sent {len(before)}"
    return Fault(
        "history_rewritten", f"Message {index} ({role}) {what}{sent * (n < len(before))}.",
        message_index=min(index, max(0, len(after) - 1)),
    )


def assistant_rewritten(b: Break) -> Fault | None:
    """The assistant's message came back as something else."""
    if b.known_messages is None:
        return None
    before, after = b.known_messages
    index = b.first_changed
    if index is not None:  # an earlier assistant message; history_rewritten has handled the other roles
        return _rewritten(b, index, before[index], after[index])
    index = len(before)
    if index >= len(after):
        return None
    reply, sent = b.parent.reply, after[index]
    if sent.get("role") != "assistant":
        if reply is None and not len(b.parent.completion_ids):
            return None
        return Fault(
            "assistant_rewritten",
            f"The assistant's answer of step {b.parent_index} is missing from the messages of step {b.index}.",
            message_index=index,
        )
    if reply is None:
        return _untraced(b, index, sent)
    if not msg.same(reply, sent):
        last = b.case.render(b.step, after[: index + 1], False)
        if last is not None and np.array_equal(last[: len(b.expected)], b.expected):
            return None  # as the last message it is what was sampled: the template writes it otherwise later
        return _rewritten(b, index, reply, sent)
    old, new = msg.call_ids(reply), msg.call_ids(sent)
    window = b.case.widened(b.actual, b.start, b.actual_stop) if old != new and b.case.codec is not None else ""
    if any(name in window for name in set(new) - set(old)):
        return Fault(
            "assistant_rewritten",
            f"The tool call ids of message {index} were renamed from {_short(old)} to {_short(new)}.",
            message_index=index,
        )
    return None


def _rewritten(b: Break, index: int, old: Message, new: Message) -> Fault:
    old_fields, new_fields = msg.plain(old), msg.plain(new)
    key = next((key for key in (*old_fields, *new_fields) if old_fields.get(key) != new_fields.get(key)), "content")
    was, now = contrast(_words(old_fields.get(key)), _words(new_fields.get(key)))
    return Fault(
        "assistant_rewritten",
        f"The {key.replace('_', ' ')} of the assistant's message {index} came back changed: {was} became {now}.",
        message_index=index,
    )


def _untraced(b: Break, index: int, sent: Message) -> Fault | None:
    """The reply was not parsed, and a sent message holds words that were not sampled."""
    if b.case.codec is None:
        return None
    sampled = b.case.bytes_of(b.parent.completion_ids)
    parts = [("content", sent.get("content")), ("reasoning", msg.reasoning_of(sent))]
    parts += [("tool call", text) for call in msg.calls_of(sent) for text in msg.strings_in(call)]
    for name, value in parts:
        if value and not b.case.has_trace(value, sampled):
            return Fault(
                "assistant_rewritten",
                f"The {name} of the assistant's message {index} ({quoted(_words(value))}) is not in what step "
                f"{b.parent_index} sampled.",
                message_index=index,
            )
    return None


def template_edits_turn(b: Break) -> Fault | None:
    """The template adds or leaves out words of an assistant's turn, outside its calls."""
    edit = _edit(b)
    if edit is None or bool(edit.dropped.strip()) == bool(edit.added.strip()):
        return None
    reply = edit.turn.reply or b.sent_back or {}
    calls, content = msg.calls_of(reply), str(msg.text_of(reply.get("content")) or "")
    for text, words in ((edit.old, edit.dropped), (edit.new, edit.added)):
        inside = any(start <= edit.place < stop - 1 for start, stop in call_regions(text, calls))
        if (words.strip() and not any(map(str.isalnum, words))) or (inside and words.strip() not in content):
            return None
    return _edited(b, edit, "template_not_append_only")


def template_rewrites_turn(b: Break) -> Fault | None:
    """The template writes an assistant's turn otherwise than it was sampled, and no other rule says how."""
    edit = _edit(b)
    if edit is None:
        return None
    has_calls = msg.calls_of(edit.turn.reply or b.sent_back or {})
    return _edited(b, edit, "tool_call_reserialized" if has_calls else "template_not_append_only")


class _Edit(NamedTuple):
    """What differs in an assistant's turn: ``old[place:]`` begins with ``dropped``, ``new[place:]`` with ``added``."""

    turn: Step
    old: str
    new: str
    place: int
    dropped: str
    added: str


def _edit(b: Break) -> _Edit | None:
    """The edit of the turn of the break, where the template's own render makes it and the messages are equal."""
    turn = b.turn_at(b.text_start) if b.case.codec is not None and b.messages_equal and not b.same_text else None
    rendered = None if turn is None else request_render(b.case, b.index)
    if turn is None or rendered is None or common_prefix(rendered, b.actual) < min(b.actual_stop + 1, len(b.actual)):
        return None
    old, new = b.text_from(len(turn.prompt_ids))
    old = old[: len(b.case.text(turn.completion_ids))]
    place = common_length(old, new)
    end = b.case.text(turn.completion_ids[-1:]) if b.case.is_control(int(turn.completion_ids[-1])) else ""
    stop = new.find(end, place) if end else -1
    if stop < 0 or place >= len(old):
        return None
    new = new[: stop + len(end)]
    shared = min(common_length(old[::-1], new[::-1]), len(old) - place, len(new) - place)
    return _Edit(turn, old, new, place, old[place : len(old) - shared], new[place : len(new) - shared])


def _edited(b: Break, edit: _Edit, kind: str) -> Fault:
    message = len(edit.turn.request.messages) if edit.turn.request else None
    dropped, added = (quoted(clipped(text, 80)) for text in (edit.dropped, edit.added))
    step = next(index for index, step in enumerate(b.case.steps) if step is edit.turn)
    where = f"message {message}" if message is not None else "the assistant's turn"
    if not edit.added.strip():
        evidence = f"The template leaves {dropped} out of {where}, which step {step} sampled."
    elif not edit.dropped.strip():
        evidence = f"The template adds {added} to {where}, which step {step} did not sample."
    else:
        evidence = f"The template writes {added} in {where} where step {step} sampled {dropped}."
    return Fault(kind, evidence, message_index=message, remedy=_KEEP_IDS)


def _short(value: Any) -> str:
    """A setting as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    head = clipped(text, 60)
    return "not set" if value is None else head if len(head) == len(text) else f"{head} …"


def _words(value: Any) -> str:
    """A field of a message as text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
