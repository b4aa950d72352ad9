"""Checks one step by itself: missing or made-up ids, ids against the text, canonical form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.diagnose.finding import Cost, Fault, Finding, Severity
from rollout_inspector.diagnose.finding_makers import finding_on_step
from rollout_inspector.streams import message_places as msg
from rollout_inspector.streams.canonical import canonical_check_batch
from rollout_inspector.streams.dropped_text import holds_all, unheld_tokens
from rollout_inspector.streams.message_view import reply_in, texts_of
from rollout_inspector.streams.retokenized import EncodedAgain
from rollout_inspector.streams.snippets import clipped, counted, listed
from rollout_inspector.streams.token_origins import byte_offsets
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Message, Step

_CONSTANT = 4
_PLACES = 20
# What closes reasoning. No part is unbounded, so that hostile text costs no more time than its length.
_THINK = rb"[\w:.\-]{0,20}(?:think|thought|reason|reflection)[\w:.\-]{0,20}"
_CLOSE = re.compile(
    rb"<\|?/\|?" + _THINK + rb"\|?>|<\|?end_of_" + _THINK + rb"\|?>|\[/" + _THINK + rb"\]|"
    + "◁/".encode() + _THINK + "▷".encode() + rb"|<\|channel\|>(?:final|commentary)", re.IGNORECASE,
)


def missing_ids(case: DiagnosisContext, index: int) -> Finding | None:
    """Ids are absent, outside the vocabulary, or one id many times although the reply says something else.

    Ids outside the vocabulary are reported at the first step that holds some: later prompts repeat them.
    """
    step = case.steps[index]
    n = len(step.prompt_ids)
    reason = _unknown(case, step)
    if reason is not None and any(_unknown(case, case.steps[earlier]) for earlier in case.no_ids):
        case.no_ids.add(index)
        return None
    reason = reason or _missing(case, step)
    if reason is None:
        return None
    case.no_ids.add(index)
    which, start, stop = reason
    cost = Cost(trained_tokens_wrong=len(step.completion_ids) if start >= n else 0, rows=case.n_rows)
    fault = Fault("token_ids_missing", f"Step {index}: {which}.", start, stop)
    return finding_on_step(case, index, fault, cost=cost)


def _parts(step: Step) -> tuple[tuple[str, Ids, int], ...]:
    return ("prompt", step.prompt_ids, 0), ("completion", step.completion_ids, len(step.prompt_ids))


def _unknown(case: DiagnosisContext, step: Step) -> tuple[str, int, int] | None:
    """The ids of a step that are outside the vocabulary, and the place of the first."""
    limit = 2**31 if case.codec is None else case.codec.vocab_size
    for name, ids, start in _parts(step):
        if len(ids) and int(ids.view(np.uint32).max()) >= limit:  # as unsigned, a negative id is a huge one
            unknown = (ids < 0) | (ids >= limit)
            place = int(unknown.argmax())
            what = f"the {name} has {counted(int(unknown.sum()), 'id')} outside the vocabulary, first {int(ids[place])}"
            return what, start + place, start + place + 1
    return None


def _missing(case: DiagnosisContext, step: Step) -> tuple[str, int, int] | None:
    n = len(step.prompt_ids)
    if not n:
        return "the prompt has no ids", 0, 0
    if not len(step.completion_ids):
        # An aborted call may have sampled nothing. Every other call samples at least one token.
        silent = step.finish_reason == "abort" or step.text == ""
        return None if silent else ("the completion has no ids", n, n)
    for name, ids, start in _parts(step):
        if ids[0] == ids[-1] and (ids == ids[0]).all() and _made_up(case, step, ids, name == "completion"):
            times = f"{len(ids)} time{'s' * (len(ids) != 1)}"
            return f"the {name} holds only the id {int(ids[0])} ({times})", start, start + len(ids)
    return None


def _made_up(case: DiagnosisContext, step: Step, ids: Ids, is_completion: bool) -> bool:
    """Whether a stretch of one id was not sampled: its text differs from the reply of the source."""
    if not is_completion:
        return len(ids) >= _CONSTANT or int(ids[0]) == 0
    text = _said(step)
    stops = () if case.codec is None else (case.codec.eos_id, *getattr(case.codec, "stop_ids", ()))
    if len(ids) == 1 and not text and (text is not None or int(ids[0]) in stops):
        return False  # the model stopped at once
    if text is not None and case.codec is not None:
        return text != "" and not case.has_trace(text, case.bytes_of(ids))
    return int(ids[0]) == 0 or len(ids) >= 2 * _CONSTANT


def _said(step: Step) -> str | None:
    """What the model said, by the source. None when the source does not tell."""
    if step.text is not None:
        return step.text
    if step.reply is None:
        return None
    content = msg.text_of(step.reply.get("content"))
    parts = [content if isinstance(content, str) else "", msg.reasoning_of(step.reply)]
    parts += [text for call in msg.calls_of(step.reply) for text in msg.strings_in(call)]
    return "\n".join(part for part in parts if part)


def inconsistent(case: DiagnosisContext, index: int) -> Finding | None:
    """The ids disagree with the logprobs, or with the returned text."""
    step = case.steps[index]
    n, sampled = len(step.prompt_ids), len(step.completion_ids)
    cost = Cost(trained_tokens_wrong=sampled, rows=case.n_rows)
    if step.logprobs is not None and len(step.logprobs) != sampled:
        fault = Fault(
            "engine_ids_inconsistent",
            f"Step {index} sampled {counted(sampled, 'id')} and came with {counted(len(step.logprobs), 'logprob')}.",
            n, n + sampled,
        )
        finding = finding_on_step(case, index, fault, cost=cost)
        return replace(finding, actual_ids=NO_IDS, evidence=fault.evidence)  # the ids may be right
    if case.codec is None:
        return None
    if (place := _text_differs(case, index)) is not None:
        evidence = f"The decoded ids of step {index} differ from the text that came with them."
        text = clipped(step.text if step.text is not None else _said(step) or "", 1000)
        fault = Fault("engine_ids_inconsistent", evidence, n + place, n + sampled)
        return finding_on_step(case, index, fault, cost=cost, expected_text=text)
    return None


def _text_differs(case: DiagnosisContext, index: int) -> int | None:
    """The offset in the completion at which ids and text differ. None = no difference is known."""
    step = case.steps[index]
    data = case.completion_bytes[index]
    if step.text is None:
        silent = step.reply is None or _reply_has_trace(case, step.reply, data) or not _said(step)
        return None if silent else 0
    # Decoding with special tokens skipped often leaves out fewer tokens than all control tokens.
    skipped = np.isin(step.completion_ids, sorted(getattr(case.codec, "skipped_ids", ())))
    left_out_sets = (np.zeros_like(skipped), case.is_special(step.completion_ids), skipped)
    as_decoded = [case.text(step.completion_ids[~left_out]).strip() for left_out in left_out_sets]
    if any(_cut_from(step.text.strip(), whole) for whole in as_decoded):
        return None
    if any(_cut_from(case.as_decoded(step.text).strip(), whole) for whole in as_decoded):
        return None  # the tokenizer does not restore text exactly
    decoded = data.decode("utf-8", "replace")
    same = next((i for i, (a, b) in enumerate(zip(decoded, step.text, strict=False)) if a != b), 0)
    assert case.codec is not None
    sizes = np.cumsum([len(piece) for piece in case.codec.token_bytes(step.completion_ids)])
    return int(np.searchsorted(sizes, len(decoded[:same].encode("utf-8", "replace")), side="right"))


def _cut_from(text: str, whole: str) -> bool:
    """Whether a text is the start of the whole one: a stop string or stop token may be cut, nothing at the front."""
    return whole.startswith(text) or (text.endswith("�") and whole.startswith(text.rstrip("�")))


def _reply_has_trace(case: DiagnosisContext, reply: Message, data: bytes) -> bool:
    """Whether some of the reply's text is in the sampled bytes, in any order, because parsers move parts."""
    empty = True
    for value in _spoken(reply):
        if value.strip():
            empty = False
            if case.has_trace(value, data):
                return True
    return empty


def _spoken(reply: Message) -> Iterator[str]:
    content = msg.text_of(reply.get("content"))
    if isinstance(content, str):
        yield content
    yield msg.reasoning_of(reply)
    for call in msg.calls_of(reply):
        yield str(call["name"] or "")


def reply_text_lost(case: DiagnosisContext, index: int) -> Finding | None:
    """Sampled text that no part of the parsed message holds. It is worth a note alone where all of it is reasoning."""
    ids, message = case.steps[index].completion_ids, case.message_of(index)
    if case.codec is None or message is None or not len(ids):
        return None
    decoded = case.completion_bytes[index].decode("utf-8", "surrogateescape")
    if isinstance(message, Mapping) and holds_all(decoded, texts_of(message)):
        return None  # most replies
    reply = reply_in(message)
    lost = unheld_tokens(ids, case.is_special(ids), case.codec.joined_bytes, reply.held if reply is not None else "")
    if not lost:
        return None
    start, closed = len(case.steps[index].prompt_ids), _reasoning_stop(case, index)
    is_reasoning = lost[-1][2] <= closed
    what = "reasoning that was sampled" if is_reasoning else "sampled text"
    more = f" and at {counted(len(lost) - 1, 'more place')}" if len(lost) > 1 else ""
    places = tuple((start + first, start + stop) for _, first, stop in lost[:_PLACES])
    fault = Fault(
        "reply_text_lost",
        f"The message of step {index} does not hold {what}: “{clipped(lost[0][0], 100)}”{more}.",
        *places[0], severity=Severity.INFO if is_reasoning else None, places=places if len(places) > 1 else (),
    )
    return finding_on_step(case, index, fault)


def _reasoning_stop(case: DiagnosisContext, index: int) -> int:
    """The token of a completion at which its reasoning is closed for the last time; 0 = nothing closes any."""
    assert case.codec is not None
    data, ends = case.codec.joined_bytes(case.steps[index].completion_ids)
    at = max((match.start() for match in _CLOSE.finditer(data)), default=None)
    return 0 if at is None else int(np.searchsorted(ends, at, side="right"))


def doubled_bos(case: DiagnosisContext, index: int) -> Finding | None:
    """BOS stands twice at the start of the first prompt of a chain."""
    bos = case.codec.bos_id if case.codec else None
    prompt_ids = case.steps[index].prompt_ids
    if bos is None or len(prompt_ids) < 2 or int(prompt_ids[0]) != bos or int(prompt_ids[1]) != bos:
        return None
    fault = Fault("bos_mismatch", f"The prompt of step {index} starts with BOS (id {bos}) twice.", 1, 2)
    return finding_on_step(case, index, fault)


def noncanonical(case: DiagnosisContext, indices: Sequence[int]) -> Iterator[Finding]:
    """Completions that were kept verbatim and would change if their text were encoded again. Nothing is wrong."""
    if case.codec is None:
        return
    indices = [index for index in indices if len(case.steps[index].completion_ids)]
    streams = [case.steps[index].completion_ids for index in indices]
    data = [case.completion_bytes[index] for index in indices]
    for index, drifts in zip(indices, canonical_check_batch(streams, case.codec, data), strict=True):
        case.again.append(EncodedAgain(index, None, case.steps[index].completion_ids, drifts))
        if not drifts:
            continue
        start, drift = len(case.steps[index].prompt_ids), drifts[0]
        others = len(drifts) - 1
        more = f", and at {others} more place{'s' * (others > 1)}" if others else ""
        half = " It holds bytes that are not a whole character." if any(d.invalid_utf8 for d in drifts) else ""
        fault = Fault(
            "noncanonical_sampling",
            f"Step {index} sampled {listed(drift.actual_ids)} where the encoder chooses "
            f"{listed(drift.expected_ids)}{more}; it would drift if it were encoded again.{half}",
            start + drift.start, start + drift.stop,
            severity=Severity.INFO, expected_ids=drift.expected_ids,
        )
        yield finding_on_step(case, index, fault)


def control_text_in(
    content: object, data: bytes, case: DiagnosisContext, ids: Ids, pieces: Sequence[bytes]
) -> tuple[int, int] | None:
    """The first control token that was encoded from a message's text, as ``[start, stop)`` among ``ids``."""
    special = case.is_special(ids)
    if not special.any():
        return None
    offsets = byte_offsets(pieces)
    names = {pieces[int(i)] for i in np.flatnonzero(special)} - {b""}
    if not names:
        return None
    pattern = re.compile(b"(" + b"|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) + b")")
    for forms in case.content_forms(content):
        for form in forms:
            parts = pattern.split(form)
            if len(parts) == 1:
                continue
            # SentencePiece may put a space after a control token. WordPiece drops spaces around it, and capitals.
            match = re.search(b" *".join(re.escape(part.strip(b" ")) for part in parts), data, re.IGNORECASE)
            if match is None:
                continue
            first = int(np.searchsorted(offsets, match.start(), side="left"))
            last = int(np.searchsorted(offsets, match.end(), side="right")) - 1
            inside = np.flatnonzero(special[first:last])
            if inside.size:
                return first + int(inside[0]), first + int(inside[0]) + 1
            break
    return None
