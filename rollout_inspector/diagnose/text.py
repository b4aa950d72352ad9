"""Breaks that the two texts explain: dropped control tokens, half characters, JSON, white space, merges."""

import ast
import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.finding import Fault
from rollout_inspector.diagnose.template import foreign, request_render
from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.canonical import is_utf8
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.snippets import contrast, listed
from rollout_inspector.streams.trajectory import Ids, Step

_TAG_BEFORE = re.compile(r"(?:<[^<>]{1,64}>|\[[A-Z_/]{2,64}\])\s*\Z")
_REPLACEMENT = "�".encode()
_TAG_BEHIND = re.compile(r"\s*(?=<[^<>]{1,64}>|\[/?[A-Z_]{2,64}\])")


def special_tokens_dropped(b: Break) -> Fault | None:
    """Every missing token is a control token."""
    if b.case.codec is None:
        return None
    expected, actual = b.expected_stretch, b.actual_stretch
    dropped = b.case.is_special(expected)
    fewer = int(b.case.is_special(actual).sum()) < int(dropped.sum())
    alone = fewer and b.case.same_bytes(expected[~dropped], actual)
    if alone or (dropped.any() and _text_alone_came_back(b)):
        lost = np.flatnonzero(dropped)
    elif _stop_alone_is_lost(b):
        lost = np.arange(len(b.expected) - b.start)
    else:
        lost = _gone_for_good(b)
    if not len(lost):
        return None
    gone = b.expected[b.start :][lost]
    kinds = list(dict.fromkeys(gone.tolist()))
    names = ", ".join(b.case.text(np.array([kind])) for kind in kinds[:4]) + " and others" * (len(kinds) > 4)
    places = b.start + _lost_at(b, lost, alone)
    return Fault(
        "special_tokens_dropped", f"Only control tokens are missing from the prompt of step {b.index}: {names}.",
        stops=(b.start + int(lost[-1]) + 1, int(places[-1])),
        places=tuple((place, place) for place in np.unique(places).tolist()),
    )


def _lost_at(b: Break, lost: NDArray[np.intp], exact: bool) -> NDArray[np.intp]:
    """Where sampled tokens are missing in the prompt. ``lost`` and the result count from the break. The texts between
    control tokens are compared by bytes, without white space unless ``exact``. A place inside a token of the prompt
    becomes the start of that token."""
    before, behind = (_text_offsets(b, ids[b.start :], exact) for ids in (b.expected, b.actual))
    sought = before[lost]
    places = np.minimum(np.searchsorted(behind, sought), len(behind) - 1)
    return places - (behind[places] > sought)


def _text_offsets(b: Break, ids: Ids, exact: bool) -> NDArray[np.int64]:
    """The number of bytes before each token and after the last, without those of control tokens: ``[n + 1]``."""
    assert b.case.codec is not None
    pieces = b.case.codec.token_bytes(ids)
    sizes = [len(piece if exact else b"".join(piece.split())) for piece in pieces]
    return np.append(0, np.cumsum(np.where(b.case.is_special(ids), 0, sizes))).astype(np.int64)


def _text_alone_came_back(b: Break) -> bool:
    """Whether the rest of the sampled text came back whole, except for control tokens, up to an end of turn."""
    expected, actual = b.expected[b.start :], b.actual[b.start :]
    dropped = b.case.is_special(expected)
    sampled_text = b.case.bytes_of(expected[~dropped]) if b.in_completion and dropped[:-1].any() else b""
    special = np.flatnonzero(b.case.is_special(actual))
    text = b.case.bytes_of(actual[: int(special[0])] if special.size else actual)
    return bool(sampled_text.strip()) and text.strip() == sampled_text.strip()


def _gone_for_good(b: Break) -> NDArray[np.intp]:
    """Offsets from the break of the control tokens that no longer stand in a prompt with otherwise the sampled text.
    Empty = the text differs too."""
    expected, actual = b.expected[b.start :], b.actual[b.start :]
    lost = np.flatnonzero(b.case.is_special(expected) & ~np.isin(expected, actual))
    gone = expected[lost]
    expected_words, actual_words = (b.case.text(ids).split() for ids in (expected[~np.isin(expected, gone)], actual))
    as_decoded = "".join(expected_words)
    return lost if len(lost) > 1 and as_decoded and "".join(actual_words).startswith(as_decoded) else lost[:0]


def _stop_alone_is_lost(b: Break) -> bool:
    """Whether the template writes the sampled stop token, followed by exactly what the later prompt holds."""
    lost, behind = b.expected[b.start :], b.actual[b.start :]
    if not len(behind) or not b.case.is_special(lost).all():
        return False
    rendered = request_render(b.case, b.index)
    return rendered is not None and np.array_equal(rendered[-len(lost) - len(behind) :], np.append(lost, behind))


def invalid_utf8(b: Break) -> Fault | None:
    """Half a character was sampled, or the prompt has U+FFFD where the completion has none. A token of the difference
    may hold half a character although the text is whole."""
    if b.case.codec is None or b.same_text or "�" not in b.a + b.b or foreign(b.case, b.index):
        return None
    turn = b.turn_at(b.start)
    sampled = b.case.bytes_of(b.expected_stretch if turn is None else turn.completion_ids)
    replaced = b.case.bytes_of(b.actual_stretch).count(_REPLACEMENT) > sampled.count(_REPLACEMENT)
    if not replaced and is_utf8(sampled):
        return None
    return Fault(
        "invalid_utf8",
        f"What step {b.parent_index} sampled holds bytes that are not a whole character. As text they became U+FFFD, "
        "which encodes to other tokens.",
    )


def tool_call_reserialized(b: Break) -> Fault | None:
    """The texts differ inside a tool call, and the values of the call are equal."""
    turn = b.turn_at(b.text_start)
    if b.case.codec is None or b.same_text or turn is None:
        return None
    old, new = b.text_from(len(turn.prompt_ids))
    place = common_length(old, new)
    if _only_white_space(b) and place >= len(_said(b, turn)):
        return None  # after the call, not in it
    if not any(start <= place < max(stop, start + 1) for start, stop in call_regions(old, _calls(b, turn))):
        return None
    if b.messages_equal:
        values = "the values are the same, as the messages show"
    else:
        before, after = ([value for _, _, value in json_objects(text)] for text in (old, new))
        if not before or before != after[: len(before)]:
            return None
        values = "the values are the same"
    was, now = contrast(old, new)
    return Fault(
        "tool_call_reserialized",
        f"The tool call was parsed and written again: {was} became {now}; {values}.",
        message_index=len(b.known_messages[0]) if b.known_messages and turn is b.parent else None,
    )


def whitespace_changed(b: Break) -> Fault | None:
    """The texts are equal except for white space."""
    if b.case.codec is None or b.same_text or not _only_white_space(b):
        return None
    sampled, came = contrast(b.a, b.b)
    return Fault("whitespace_changed", f"Only white space differs: {sampled} was sampled, {came} came back.")


def _only_white_space(b: Break) -> bool:
    same = b.a != b.b and "".join(b.a.split()) == "".join(b.b.split())
    return same and all(map(b.case.all_have_bytes, (b.expected_stretch, b.actual_stretch)))


def _said(b: Break, step: Step) -> str:
    """A completion up to its last visible character, without the control tokens that end it."""
    text = np.flatnonzero(~b.case.is_special(step.completion_ids))
    while text.size and not b.case.text(step.completion_ids[text[-1:]]).strip():
        text = text[:-1]
    return b.case.text(step.completion_ids[: int(text[-1]) + 1]).rstrip() if text.size else ""


def boundary_merge(b: Break) -> Fault | None:
    """The same text in other tokens, across the seam of two pieces that were encoded separately."""
    if b.case.codec is None or not b.same_text or _inside_sampled(b):
        return None
    return Fault(
        "boundary_merge",
        f"The text is the same. Tokens {listed(b.expected_stretch)} were joined from pieces and "
        f"became {listed(b.actual_stretch)} when the text was encoded as a whole.",
    )


def noncanonical_sampling(b: Break) -> Fault | None:
    """The same text in other tokens. All of them were sampled."""
    if b.case.codec is None or not b.same_text or not _inside_sampled(b):
        return None
    return Fault(
        "noncanonical_sampling",
        f"The text is the same. The model sampled {listed(b.expected_stretch)} where the encoder "
        f"chooses {listed(b.actual_stretch)}.",
        message_index=len(b.known_messages[0]) if b.known_messages and b.in_completion else None,
    )


def _inside_sampled(b: Break) -> bool:
    group = b.first_group
    if group is None:
        return b.sampled_at(b.start, b.start + 1)
    if not b.sampled_at(b.start + group.left_start, b.start + group.left_stop):
        return False
    # A token of the prompt that reaches over the end of the sampled bytes belongs to the text after them too.
    dropped = b.case.bytes_of(b.expected[b.start + group.left_start : b.start + group.left_stop])
    added = b.case.bytes_of(b.actual[b.start + group.right_start : b.start + group.right_stop])
    return len(dropped) == len(added)


def _calls(b: Break, turn: Step) -> list[dict[str, Any]]:
    """The calls of a turn, as they were parsed and as they came back, in plain text and as the tokenizer spells it."""
    replies = [turn.reply or {}]
    if turn.request is not None:
        replies += (b.case.request_messages(b.index) or ())[len(turn.request.messages) :][:1]
    calls = [call for message in replies for call in msg.calls_of(message)]
    texts = [(str(call["name"]), json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]
    spelled = [{"name": b.case.as_decoded(name), "arguments": b.case.as_decoded(text)} for name, text in texts]
    return calls + msg.calls_of({"tool_calls": spelled})


def call_regions(text: str, calls: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where tool calls stand in a completion: the payload, and the white space between it and its tags. ``calls`` are
    those of the message. A JSON object is a call that holds its name, or its arguments behind its name. Without calls,
    an object with a name and arguments is one. A call without JSON goes from its name to the end."""
    regions: list[tuple[int, int]] = []
    for start, stop, value in json_objects(text):
        has_name = any(call["name"] and call["name"] in msg.strings_in(value) for call in calls)
        names = [str(call["name"]) for call in calls if call["arguments"] == value]
        if has_name or (not calls and _is_call(value)):
            regions.append(_padded(text, start, stop))
        elif names:
            behind = regions[-1][1] if regions else 0
            places = [place for name in names if (place := text.rfind(name, behind, start)) >= 0]
            regions.append(_padded(text, min(places, default=start), stop))
    for name in {call["name"]: None for call in calls}:
        place = text.find(name) if isinstance(name, str) and name else -1
        if place >= 0 and not any(name in text[start:stop] for start, stop in regions):
            before = max(text.rfind(mark, 0, place) for mark in ("<", "[", "{", "\n"))
            regions.append(_padded(text, before + 1 if before >= 0 else place, len(text)))
    return regions


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return bool(value.get("name") and {"arguments", "parameters"} & set(value)) or isinstance(
        value.get("function"), str | dict
    )


def _padded(text: str, start: int, stop: int) -> tuple[int, int]:
    if match := _TAG_BEFORE.search(text[max(0, start - 80) : start]):
        start -= len(match.group()) - len(match.group().rstrip())
    if match := _TAG_BEHIND.match(text, stop):
        stop = match.end()
    return start, stop + 1


def json_objects(text: str) -> list[tuple[int, int, Any]]:
    """Objects ``(start, stop, value)`` in a text, as JSON or in Python's notation; the first 64."""
    decoder = json.JSONDecoder(strict=False)
    objects: list[tuple[int, int, Any]] = []
    place = text.find("{")
    while place >= 0 and len(objects) < 64:
        try:
            value, stop = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            value, stop = _python_object(text, place)
        if stop > place:
            objects.append((place, stop, value))
        place = text.find("{", max(stop, place + 1))
    return objects


def _python_object(text: str, start: int) -> tuple[Any, int]:
    depth = 0
    for place in range(start, min(len(text), start + 20_000)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            source = text[start : place + 1]
            for form in (source, re.sub(r"\btrue\b", "True", source.replace("false", "False").replace("null", "None"))):
                try:
                    return ast.literal_eval(form), place + 1
                except (ValueError, SyntaxError, MemoryError, RecursionError):
                    continue
            return None, start
    return None, start
