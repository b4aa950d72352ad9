"""Checks one step by itself: missing or made-up ids, ids against the text, canonical form."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.diagnose.context import DiagnosisContext, special_in
from rollout_inspector.diagnose.finding import Cost, Fault, Finding, Severity
from rollout_inspector.diagnose.finding_makers import finding_on_step
from rollout_inspector.diagnose.thinking import CLOSE
from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.canonical import EncodedAgain, canonical_check_batch, is_utf8
from rollout_inspector.streams.dropped_text import holds_all, unheld_tokens
from rollout_inspector.streams.messages import reply_in, texts_of
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.snippets import clipped, counted, listed, quoted
from rollout_inspector.streams.token_origins import byte_offsets
from rollout_inspector.streams.trajectory import NO_IDS, OTHER_FIELDS, Ids, Message, Step

_CONSTANT = 4
_PLACES = 20
_SPACES = str.maketrans(dict.fromkeys("\u0120\u010a\u0109\u010d\u2581", " "))
"""What byte-level vocabularies and SentencePiece write for spaces and line ends."""
_ALPHABET = re.compile("[!-~\u00a1-\u0143]+")  # What byte-level vocabularies write for bytes.
_CLOSE = re.compile(rf"{CLOSE.pattern}|<\|channel\|>(?:final|commentary)", CLOSE.flags)  # What closes reasoning.


def missing_ids(case: DiagnosisContext, index: int) -> Finding | None:
    """Ids are absent, outside the vocabulary, or one id many times although the reply says something else. Ids outside
    the vocabulary are reported at the first step that holds some: later prompts repeat them."""
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
    cost = Cost(trained_tokens_wrong=len(step.completion_ids) if start >= n else 0)
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
    if len(ids) == 1 and not text and (text is not None or int(ids[0]) in case.stops):
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
    """The ids disagree with the logprobs, with another field that tells them, or with the returned text."""
    step = case.steps[index]
    n, sampled = len(step.prompt_ids), len(step.completion_ids)
    cost = Cost(trained_tokens_wrong=sampled)
    if step.logprobs is not None and len(step.logprobs) != sampled:
        fault = Fault(
            "engine_ids_inconsistent",
            f"Step {index} sampled {counted(sampled, 'id')} and came with {counted(len(step.logprobs), 'logprob')}.",
            n, n + sampled,
        )
        finding = finding_on_step(case, index, fault, cost=cost)
        return replace(finding, actual_ids=NO_IDS, evidence=fault.evidence)  # the ids may be right
    for part, ids, first in _parts(step):
        if (difference := _other_field(case, step, part, ids)) is not None:
            fault = Fault(
                "engine_ids_inconsistent", f"Step {index}: {difference[0]}", first + difference[1], first + len(ids)
            )
            return finding_on_step(case, index, fault, cost=cost if first == n else Cost(rows=case.n_rows))
    if case.codec is None:
        return None
    if (differs_at := _text_differs(case, index)) is not None:
        evidence = f"The decoded ids of step {index} differ from the text that came with them."
        text = clipped(step.text if step.text is not None else _said(step) or "", 1000)
        fault = Fault("engine_ids_inconsistent", evidence, n + differs_at, n + sampled)
        return finding_on_step(case, index, fault, cost=cost, expected_text=text)
    return None


def _other_field(case: DiagnosisContext, step: Step, part: str, ids: Ids) -> tuple[str, int] | None:
    """Where a field of the answer (``OTHER_FIELDS``) contradicts the ids of a part: a sentence, and a place in them. A
    server may leave the stop token out of what it counts or lists."""
    fields = step.extra.get(OTHER_FIELDS)
    others = fields.get(part) if isinstance(fields, Mapping) else None
    for name, value in others.items() if isinstance(others, Mapping) else ():
        own = ids
        n = len(value) if isinstance(value, list) else value
        if part == "completion" and type(n) is int:
            repeated = len(ids) > 1 and ids[-1] == ids[-2]
            if n == len(ids) - 1 and not repeated and (case.codec is None or case.is_control(int(ids[-1]))):
                own = ids[:-1]
            elif n == len(ids) + 1 and _ends_without_stop(case, step, value):
                value, n = (value[:-1] if isinstance(value, list) else n - 1), n - 1
        if type(value) is int and n != len(own):
            return f"the {part} has {counted(len(ids), 'id')}, and {name} is {value}.", 0
        if isinstance(value, list) and (difference := _token_differs(case, own, value)) is not None:
            place, words = difference
            return f"the {part} and {name} differ from token {place} on: {words}.", place
    return None


def _ends_without_stop(case: DiagnosisContext, step: Step, value: Any) -> bool:
    """Whether a completion may lack the stop token that a list of tokens or a count has behind it."""
    last = value[-1] if isinstance(value, list) else None
    if step.finish_reason in ("length", "abort") or case.is_control(int(step.completion_ids[-1])):
        return False
    return type(last) is not int or case.codec is None or case.is_control(last)


def _token_differs(case: DiagnosisContext, ids: Ids, tokens: Sequence[Any]) -> tuple[int, str] | None:
    """The first token that another list of ids or texts names otherwise, and both names."""
    pieces = None if case.codec is None else case.codec.token_bytes(ids)
    for place, (token_id, token) in enumerate(zip(ids.tolist(), tokens, strict=False)):
        if type(token) is int and token != token_id:
            return place, f"{token_id} against {token}"
        if isinstance(token, str) and pieces is not None and not _spells(pieces[place], token):
            return place, f"{quoted(case.text(ids[place : place + 1]))} against {quoted(token)}"
    if len(ids) != len(tokens):
        return min(len(ids), len(tokens)), f"{len(ids)} tokens against {len(tokens)}"
    return None


def _spells(piece: bytes, text: str) -> bool:
    """Whether a server may have written a token so: in its own spelling of spaces, and half a character anyhow."""
    try:
        own = piece.decode()
    except UnicodeDecodeError:
        return True
    if own == text or not text or "\ufffd" in text or text.startswith(("bytes:", "<0x")):
        return True
    if not own.isascii() and _ALPHABET.fullmatch(text):
        return True  # each byte is a letter of its own
    visible, other = ("".join(word.translate(_SPACES).split()).casefold() for word in (own, text))
    return visible == other or visible == other.removeprefix("##")


def _text_differs(case: DiagnosisContext, index: int) -> int | None:
    """The offset in the completion at which ids and text differ. None = no difference is known."""
    step = case.steps[index]
    data = case.completion_bytes[index]
    assert case.codec is not None
    if step.text is None:
        bare = case.bytes_of(step.completion_ids[~case.is_special(step.completion_ids)])  # a decode may skip them
        reply = step.reply if _said(step) else None
        if reply is None:
            return None
        # Some of the reply's text is in the sampled bytes, in any order, because parsers move parts.
        parts = [msg.text_of(reply.get("content")), msg.reasoning_of(reply), *(c["name"] for c in msg.calls_of(reply))]
        texts = [text for text in parts if isinstance(text, str) and text.strip()]
        if (place := data.find("\ufffd".encode())) >= 0 and not any("\ufffd" in text for text in msg.strings_in(reply)):
            return int(np.searchsorted(case.codec.joined_bytes(step.completion_ids)[1], place, side="right"))
        has_trace = not texts or any(case.has_trace(text, sampled) for sampled in (data, bare) for text in texts)
        return None if has_trace else 0
    # Decoding with special tokens skipped often leaves out fewer tokens than all control tokens.
    skipped = special_in(step.completion_ids, case.codec, getattr(case.codec, "skipped_ids", frozenset()))
    left_out_sets = (np.zeros_like(skipped), case.is_special(step.completion_ids), skipped)
    as_decoded = [case.text(step.completion_ids[~left_out]).strip() for left_out in left_out_sets]
    if not step.text.strip() and not step.stop_reason.strip("0123456789") and step.finish_reason != "abort":
        return None if "" in as_decoded else 0  # nothing tells why a text without words came with words
    if any(_cut_from(step.text.strip(), whole) for whole in as_decoded):
        return None
    if any(_cut_from(case.as_decoded(step.text).strip(), whole) for whole in as_decoded):
        return None  # the tokenizer does not restore text exactly
    decoded = data.decode("utf-8", "replace")
    same = next((i for i, (a, b) in enumerate(zip(decoded, step.text, strict=False)) if a != b), 0)
    sizes = case.codec.joined_bytes(step.completion_ids)[1]
    return int(np.searchsorted(sizes, len(decoded[:same].encode("utf-8", "replace")), side="right"))


def _cut_from(text: str, whole: str) -> bool:
    """Whether a text is the start of the whole one: a stop string or stop token may be cut, nothing at the front."""
    whole_characters = text.rstrip("�")
    return whole.startswith(text) or (len(text) > len(whole_characters) > 0 and whole.startswith(whole_characters))


def past_stop_string(case: DiagnosisContext, index: int) -> int | None:
    """The first token of a completion that goes past the returned text, where a stop string cut the text. Else None.

    https://github.com/NovaSky-AI/SkyRL/issues/778
    """
    step, message = case.steps[index], case.message_of(index)
    stops = _stop_strings(case, step)
    if case.codec is None or not stops or (step.text is None and message is None):
        return None
    data, ends = case.codec.joined_bytes(step.completion_ids)
    plain = np.flatnonzero(~case.is_special(step.completion_ids))
    decoded = data.decode("utf-8", "surrogateescape")
    last = len(data[: ends[plain[-1]] if plain.size else 0].decode("utf-8", "surrogateescape"))
    places = [_past_stop(decoded, last, step.text, message or {}, stop) for stop in stops if stop in decoded]
    place = min((place for place in places if place is not None), default=None)
    if place is None:
        return None
    cut = int(np.searchsorted(ends, len(decoded[:place].encode("utf-8", "surrogateescape")), side="right"))
    return None if case.is_special(step.completion_ids[cut:]).all() else cut


def _stop_strings(case: DiagnosisContext, step: Step) -> list[str]:
    """The string that ended a completion; those of its request where neither the answer nor a token tells the end."""
    if step.finish_reason in ("length", "abort") or not len(step.completion_ids):
        return []
    if step.stop_reason:
        return [] if step.stop_reason.isdigit() else [step.stop_reason]
    if step.finish_reason != "stop" or case.is_control(int(step.completion_ids[-1])):
        return []
    sent = (step.extra.get(name) for name in ("request", "sampling_params"))
    stops = [fields.get("stop") for fields in sent if isinstance(fields, Mapping)]
    strings = [text for stop in stops for text in (stop if isinstance(stop, list) else [stop])]
    return [text for text in strings if isinstance(text, str) and text][:_PLACES]


def _past_stop(decoded: str, last: int, text: str | None, message: Message, stop: str) -> int | None:
    """Where a decoded completion goes past its returned text, at the stop string or behind it. None = it does not.
    ``last``: behind it are control tokens alone. ``text``: as the server returned it; None = the ``message``, whose
    parser may have stripped it."""
    calls = msg.calls_of(message) if text is None else []
    if calls:  # a parser took them, with or without the string that ended them
        place = decoded.find(stop) + len(stop)
        is_inside = any(str(call["name"]) in decoded[place:] for call in calls)
        return None if is_inside or not decoded[place:last].strip() else place
    content = msg.text_of(message.get("content"))
    spoken = content if isinstance(content, str) and content.strip() else msg.reasoning_of(message)
    returned = spoken.strip() if text is None else text
    start = decoded.find(returned) if text is None else 0
    if returned and decoded[:last].endswith(returned):
        return None
    for _ in range(_PLACES):  # a short reply may stand in the reasoning too
        if start < 0 or not decoded.startswith(returned, start):
            return None
        end = start + len(returned)
        space = 0 if text is not None else len(decoded[end:]) - len(decoded[end:].lstrip())
        for place in (end, end + space):
            if decoded.startswith(stop, place):
                return place
        if returned.endswith(stop if text is not None else stop.rstrip()):
            return end if end < last else None
        start = -1 if text is not None else decoded.find(returned, start + 1)
    return None


def reply_text_lost(case: DiagnosisContext, index: int) -> Finding | None:
    """Sampled text that no part of the parsed message holds. It is worth a note alone where all of it is reasoning."""
    ids, message = case.steps[index].completion_ids, case.message_of(index)
    if case.codec is None or message is None or not len(ids):
        return None
    ids = ids[: past_stop_string(case, index)]  # a stop string, and no parser, took what is behind it
    decoded = case.bytes_of(ids).decode("utf-8", "surrogateescape")
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
        "reply_text_lost", f"The message of step {index} does not hold {what}: “{clipped(lost[0][0], 100)}”{more}.",
        *places[0], severity=Severity.INFO if is_reasoning else None, places=places if len(places) > 1 else (),
    )
    return finding_on_step(case, index, fault)


def _reasoning_stop(case: DiagnosisContext, index: int) -> int:
    """The token of a completion at which its reasoning is closed for the last time; 0 = nothing closes any."""
    assert case.codec is not None
    data, ends = case.codec.joined_bytes(case.steps[index].completion_ids)
    text = data.decode("utf-8", "surrogateescape")
    at = max((match.start() for match in _CLOSE.finditer(text)), default=None)
    return 0 if at is None else int(np.searchsorted(ends, len(text[:at].encode("utf-8", "surrogateescape")), "right"))


def doubled_bos(case: DiagnosisContext, index: int) -> Finding | None:
    """BOS stands twice at the start of the first prompt of a chain."""
    bos = case.codec.bos_id if case.codec else None
    prompt_ids = case.steps[index].prompt_ids
    if bos is None or len(prompt_ids) < 2 or int(prompt_ids[0]) != bos or int(prompt_ids[1]) != bos:
        return None
    fault = Fault("bos_mismatch", f"The prompt of step {index} starts with BOS (id {bos}) twice.", 1, 2)
    return finding_on_step(case, index, fault)


def head_lost(case: DiagnosisContext, index: int) -> Finding | None:
    """The first prompt of a chain lacks ids that the template writes for its request, or has a stop token more.

    Without the first id alone, what follows may differ too; more ids are missing only where all others are equal. What
    is missing further on is a fault if it was the text of a message.
    https://github.com/vllm-project/vllm/issues/27477
    """
    step, messages = case.steps[index], case.request_messages(index)
    rendered = None if messages is None else case.render(step, messages, True, key=("prompt", index))
    if rendered is None or case.codec is None or not len(rendered):
        return None
    start, n = common_prefix(rendered, step.prompt_ids), len(rendered) - len(step.prompt_ids)
    added = step.prompt_ids[start : start - n]
    is_added = len(added) and np.array_equal(rendered[start:], step.prompt_ids[start - n :])
    if start and is_added and case.stops.issuperset(added.tolist()):
        what = f"The prompt of step {index} holds {quoted(case.text(added))} where the template does not write it."
        return finding_on_step(case, index, Fault("delta_differs", what, start, start - n))
    if n <= 0 or not np.array_equal(rendered[start + n :], step.prompt_ids[start:]):
        n = 1 if not start and common_prefix(rendered[1:], step.prompt_ids) >= _CONSTANT else 0
    if not n:
        return None
    lost, is_bos = rendered[start : start + n], n == 1 and int(rendered[0]) == case.codec.bos_id
    data, whole = case.bytes_of(step.prompt_ids), case.bytes_of(rendered)
    contents = [message["content"] for message in messages or () if message.get("content")]
    cut = any(case.stands_in(content, whole) and not case.stands_in(content, data) for content in contents)
    if start == len(step.prompt_ids) and messages and messages[-1].get("role") != "assistant":
        bare = case.render(step, messages, False, key=("prompt", index))
        if bare is not None and common_prefix(bare, rendered) <= start and step.completion_ids[:1] != lost[:1]:
            words = f"The prompt of step {index} ends without the assistant header; the template writes"
            words = f"{words} {quoted(case.text(lost))}."
            return finding_on_step(
                case, index, Fault("generation_prompt_missing", words, start, start, expected_ids=lost)
            )
    if start and not cut:
        return None
    kind = "bos_mismatch" if is_bos else "context_truncated" if n > 1 and cut else "delta_differs"
    evidence = (
        f"The prompt of step {index} lacks {counted(n, 'id')} that the template writes at "
        f"{f'offset {start}' if start else 'its start'}: {quoted(case.text(lost))}."
    )
    return finding_on_step(case, index, Fault(kind, evidence, start, start, expected_ids=lost))


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
        half = " It holds bytes that are not a whole character." if not is_utf8(case.completion_bytes[index]) else ""
        fault = Fault(
            "noncanonical_sampling",
            f"Step {index} sampled {listed(drift.actual_ids)} where the encoder chooses "
            f"{listed(drift.expected_ids)}{more}; it would drift if it were encoded again.{half}",
            start + drift.start, start + drift.stop, severity=Severity.INFO, expected_ids=drift.expected_ids,
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
            # SentencePiece may put a space after a control token. WordPiece drops spaces around it, and capitals. An
            # added token may take the white space beside it (``lstrip``, ``rstrip``).
            match = re.search(rb"\s*".join(re.escape(part.strip()) for part in parts), data, re.IGNORECASE)
            if match is None:
                continue
            first = int(np.searchsorted(offsets, match.start(), side="left"))
            last = int(np.searchsorted(offsets, match.end(), side="right")) - 1
            inside = np.flatnonzero(special[first:last])
            if inside.size:
                return first + int(inside[0]), first + int(inside[0]) + 1
            break
    return None
