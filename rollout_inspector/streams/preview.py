"""What a trajectory was asked and what it answered, each as one short line for lists."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_inspector.streams.messages import as_text, calls_of, reasoning_of, text_in
from rollout_inspector.streams.trajectory import Ids, Row, Step

MAX_LINE = 160  # Characters of a line.
MAX_DECODED = 2_048  # Ids that are decoded for a line, where the source has no text.
MAX_READ = 20_000  # Characters of a text that are looked at for its first line.
Pieces = Callable[[Ids], Sequence[str]]  # Ids as texts, cut at control tokens.

_CONTROL = re.compile(r"<\|[^|<>]{1,40}\|>|</?s>|<(?:start|end)_of_turn>")
_ROLES = frozenset({"user", "assistant", "system", "tool", "model", "developer"})


class Preview(NamedTuple):
    """Empty = the source does not tell."""

    prompt: str  # The first line of the task: of the last user message of the first request.
    answer: str  # The first line of the last answer, without its reasoning.


def preview_of(
    steps: Sequence[Step], rows: Sequence[Row] = (), pieces: Pieces | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Preview:
    """The lines of a trajectory. Messages and texts count first, ids only where there are none. ``extra``: the further
    fields of the trajectory, which may hold the prompt of an episode without a call."""
    question = _asked_in(extra or {})
    if not steps:
        preview = _of_row(rows[0], pieces) if rows and pieces is not None else Preview("", "")
        return Preview(preview.prompt or question, preview.answer)
    first, last = steps[0], steps[-1]
    prompt, answer = _asked(first) or question, _answered(last)
    if pieces is not None:
        prompt = prompt or _of_pieces(pieces(first.prompt_ids[-MAX_DECODED:]), last=True)
        answer = answer or _of_pieces(pieces(last.completion_ids[:MAX_DECODED]))
    return Preview(prompt, answer)


def first_line(text: str) -> str:
    """The first line that says something, with single spaces, at most ``MAX_LINE`` characters."""
    for line in _CONTROL.sub(" ", text[:MAX_READ]).splitlines():
        line_text = " ".join(letters for letters in line.split() if letters)
        if line_text:
            return line_text if len(line_text) <= MAX_LINE else f"{line_text[: MAX_LINE - 1]}…"
    return ""


def _asked(step: Step) -> str:
    if step.request is not None:
        return _of_messages(step.request.messages)
    return _of_prompt(step.extra.get("prompt"))


def _asked_in(extra: Mapping[str, Any]) -> str:
    """The prompt in the fields of a record: its own, that of its task, or the input of a call of OpenAI's Responses."""
    holders: list[Any] = [extra]
    for name in ("task", "data", "responses_create_params"):
        holders += [holder.get(name) for holder in holders if isinstance(holder, Mapping)]
    names = ("prompt", "question", "instruction", "input")
    prompts = (_of_prompt(holder.get(name)) for holder in holders if isinstance(holder, Mapping) for name in names)
    return next((prompt for prompt in prompts if prompt), "")


def _of_prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return first_line(prompt)
    return _of_messages(prompt) if isinstance(prompt, list) else ""


def _of_messages(messages: Sequence[Any]) -> str:
    """Of the last user message; where there is none, of the last message at all."""
    mappings = [message for message in messages if isinstance(message, Mapping)]
    questions = [message for message in mappings if message.get("role") == "user"]
    return next((first_line(text_in(message)) for message in (questions or mappings)[-1:]), "")


def _answered(step: Step) -> str:
    reply = step.reply or {}
    if text := first_line(_without_thought(text_in(reply))):
        return text
    if calls := calls_of(reply):
        return first_line("calls " + ", ".join(f"{call['name']}({as_text(call['arguments'])})" for call in calls[:5]))
    if thought := reasoning_of(reply):
        return first_line(f"thinks: {thought}")
    return first_line(_without_thought(step.text or ""))


def _without_thought(text: str) -> str:
    """What follows the reasoning; all of it where nothing follows."""
    _, closed, answer = text.rpartition("</think>")
    return answer if closed and answer.strip() else text.replace("<think>", " ")


def _of_pieces(texts: Sequence[str], last: bool = False) -> str:
    """The first line of the last or of the first stretch between control tokens that is more than a role."""
    for text in reversed(texts) if last else texts:
        text_said = _without_thought(text)
        head, line_end, body = text_said.strip().partition("\n")
        if head.strip() in _ROLES:
            text_said = body if line_end else ""
        if line := first_line(text_said):
            return line
    return ""


def _of_row(row: Row, pieces: Pieces) -> Preview:
    """Of a row without steps: what stands before the first trained token, and the last trained stretch."""
    trained = np.flatnonzero(row.loss_mask[: len(row.ids)])
    if not len(trained):
        return Preview(_of_pieces(pieces(row.ids[-MAX_DECODED:]), last=True), "")
    start, stop = int(trained[0]), int(trained[-1]) + 1
    gaps = np.flatnonzero(np.diff(trained) > 1)
    begin = int(trained[gaps[-1] + 1]) if len(gaps) else start
    prompt = pieces(row.ids[max(0, start - MAX_DECODED) : start])
    return Preview(_of_pieces(prompt, last=True), _of_pieces(pieces(row.ids[begin : min(stop, begin + MAX_DECODED)])))
