"""Conversation: what the source holds beside the tokens: messages, replies and texts of the steps, and other fields. A
page shows a few steps. The texts of a page have at most two million characters, and each text gets an equal share."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.safestring import SafeString

from inspector.trajectories.conversation import (
    CUT, TEXT_NOTE, ChatPainter, DrawnStep, html_of, json_text, media_numbers, place_asked, step_of_place
)
from inspector.trajectories.frame import MAX_PLACE, TrajectoryHead, head_of
from inspector.web.access import reads_trajectory
from inspector.web.twins import wants_json, whole_number
from rollout_inspector.formats import lacks_of
from rollout_inspector.streams.messages import ChatMessage, media_data, media_parts, messages_in, reply_in, without_data
from rollouts.store import models
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import trajectory_parts

STEPS = 20
ROWS = 60
PAGE_CHARACTERS = 2_000_000
TEXT_CHARACTERS = 200_000
MEDIA_CHARACTERS = 8_000_000  # A longer text is cut, and media in it are not found.
MAX_LONG = 3  # The most texts of a page that are read whole for their media.
STEP_FIELDS = (
    "finish_reason", "stop_reason", "temperature", "top_p", "top_k", "engine", "policy_version", "logprobs_mode",
)
_BODIES = ("messages_new_id", "tools_id", "template_kwargs_id", "reply_id", "text_id", "extra_id")
_SAID = ("messages", "prompt", "new_messages", "items_before")
"""Fields of a step that hold the messages before the completion, in formats that keep no whole request."""


@dataclass(frozen=True)
class _Clipped:
    """The start of a stored JSON text that is longer than a page shows."""

    start: str
    n: int


RecordPart = tuple[str, SafeString, str]
"""A field of the source: its name, its text, and how much of it is shown where that is not all."""


@dataclass(frozen=True)
class RecordPage(TrajectoryHead):
    """What the source holds beside the tokens. A text that is too long is ``{"clipped": START, "characters": N}``."""

    lacks: list[str]
    """A sentence for each format of the run: what its files cannot tell."""
    first_step: int
    """The index of the first step on this page."""
    n_steps: int
    """Steps of the trajectory."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""
    fields: Any
    """The other fields of the trajectory."""
    rows: list[dict[str, Any]]
    """``index`` and ``fields`` of the rows that have other fields; only on the first page."""
    steps: list[dict[str, Any]]
    """At most 20 steps; each has its index, and the fields that the source filled."""


def record_page(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[RecordPage, dict[str, Any]]:
    """The page: a few steps, from the step that the address names, or with the place that one came from."""
    params = request.GET
    as_markdown = params.get("as") == "markdown"
    kept_query = "&as=markdown" * as_markdown
    at = place_asked(params.get("place", "")[:MAX_PLACE])
    rows_of, summaries = trajectory_parts.rows_and_steps(trajectory)
    step_text = params.get("step")
    first = (whole_number(step_text) or 0) if step_text else (step_of_place(summaries, at) or 0) // STEPS * STEPS
    notices = []
    if first and first >= trajectory.n_steps:
        there = f"steps run from 0 to {trajectory.n_steps - 1:,}" if trajectory.n_steps else "it came without steps"
        notices, first = [f"There is no step {first:,} here: {there}."], 0
    # The step behind the last one holds what the last one said, where the source keeps no replies.
    steps = trajectory_parts.step_values(trajectory, ("index", *_BODIES, *STEP_FIELDS), first, STEPS + 1)
    rows = [] if first else trajectory_parts.row_extras(trajectory, ROWS)
    keys = [trajectory.extra_id, *(key for _, key in rows), *(step[key] for step in steps for key in _BODIES)]
    bodies = _without_data(_read(keys))
    fields = bodies.get(trajectory.extra_id, {})
    row_fields = [(index, bodies[key]) for index, key in rows]
    recorded_steps = [_step(step, bodies) for step in steps]
    page = RecordPage(
        **head_of(trajectory), lacks=lacks_of(trajectory.run.format), first_step=first, n_steps=trajectory.n_steps,
        notices=notices, fields=_plain(fields),
        rows=[{"index": index, "fields": _plain(value)} for index, value in row_fields],
        steps=_plain(recorded_steps[:STEPS]),
    )
    here = reverse("trajectory-record", args=[trajectory.code])
    # A script asks for the values alone.
    chat = None if wants_json(request) else ChatPainter(
        trajectory, rows_of, summaries, [step["index"] for step in recorded_steps[:STEPS]], at, as_markdown,
    )
    drawn_steps = _drawn(chat, summaries, recorded_steps) if chat else []
    if chat and (sentence := chat.mark_nearest()):
        notices.append(sentence)
    return page, {
        "fields": _fields(fields),
        "rows": [{"index": index, "fields": _fields(value)} for index, value in row_fields],
        "steps": drawn_steps,
        "as_markdown": as_markdown,
        "pictures": chat.pictures if chat else None,
        "findings": [
            (item, _step_url(chat.step_of(item), first, kept_query)) for item in chat.findings
        ] if chat else [],
        "previous_url": f"{here}?step={max(first - STEPS, 0)}{kept_query}" if first else "",
        "rest_url": f"{here}?step={first + STEPS}{kept_query}" if first + STEPS < trajectory.n_steps else "",
        "rest": first + STEPS,
    }


def recorded_step(trajectory: models.StoredTrajectory, index: int) -> dict[str, Any]:
    """What the source recorded of a step beside its tokens, without what is empty. Two queries. A text that is too long
    is ``{"clipped": START, "characters": N}``."""
    (step,) = trajectory_parts.step_values(trajectory, ("index", *_BODIES, *STEP_FIELDS), index, 1)
    recorded = _step(step, _read(step[key] for key in _BODIES))
    plain: dict[str, Any] = _plain(
        {name: value for name, value in recorded.items() if name not in ("index", *STEP_FIELDS)}
    )
    return plain


def _read(keys: Iterable[str | None]) -> dict[str | None, Any]:
    """Stored values by key. One query reads the part of each text that the page shows."""
    hashes = sorted({key for key in keys if key})
    most = min(TEXT_CHARACTERS, PAGE_CHARACTERS // max(len(hashes), 1))
    starts = trajectory_parts.content_starts(hashes, most)
    return {key: json.loads(start) if n <= most else _Clipped(start, n) for key, n, start in starts}


def _step(step: Mapping[str, Any], bodies: Mapping[str | None, Any]) -> dict[str, Any]:
    fields = {"index": step["index"], **{name: step[name] for name in STEP_FIELDS if step[name] not in ("", None)}}
    for name, key in (("messages", "messages_new_id"), ("tools", "tools_id"), ("kwargs", "template_kwargs_id"),
                      ("reply", "reply_id"), ("text", "text_id"), ("fields", "extra_id")):
        if step[key] and bodies[step[key]] not in ({}, []):
            fields[name] = bodies[step[key]]
    return fields


def _without_data(bodies: dict[str | None, Any]) -> dict[str | None, Any]:
    """The values without the data of media. One query where a text is long, so that its media are found."""
    long = [
        key for key, value in bodies.items()
        if key and isinstance(value, _Clipped) and value.n <= MEDIA_CHARACTERS and '"type"' in value.start
    ]
    most = min(TEXT_CHARACTERS, PAGE_CHARACTERS // max(len(bodies), 1))
    cleaned = {key: without_data(value) for key, value in bodies.items()}
    for key, _, whole in trajectory_parts.content_starts(long[:MAX_LONG], MEDIA_CHARACTERS) if long else ():
        value = without_data(json.loads(whole))
        if len(json.dumps(value, ensure_ascii=False)) <= most:
            cleaned[key] = value
    return cleaned


def _step_url(step: int | None, first: int, query: str) -> str:
    """The address of a step on the page that shows it; empty where a finding has none."""
    if step is None:
        return ""
    page = "" if first <= step < first + STEPS else f"?step={step // STEPS * STEPS}{query}"
    return f"{page}#step-{step}"


def _drawn(
    chat: ChatPainter, summaries: Sequence[trajectory_parts.StepSummary], steps: Sequence[Mapping[str, Any]]
) -> list[DrawnStep]:
    """At most 20 steps for the template. A further step tells only what the last of them said."""
    read = {step["index"]: _messages(step) for step in steps}
    parents = {summary.index: summary.parent for summary in summaries}
    n_sampled_of = {summary.index: summary.completion_length for summary in summaries}
    # What a reply was, as the first request after it holds it.
    sent_back: dict[int, ChatMessage] = {}
    for step in reversed(steps):
        parent, messages = parents.get(step["index"]), read[step["index"]][0]
        if parent is not None and messages and messages[0].role == "assistant" and not messages[0].is_result:
            sent_back[parent] = messages[0]
    messages_by_key: dict[int, ChatMessage] = {}
    chat_steps = []
    for step in steps[:STEPS]:
        index = step["index"]
        messages, fields = read[index]
        reply, note = _reply(step, sent_back.get(index))
        if reply is not None:
            messages_by_key[index] = reply
        parent = parents.get(index)
        before = messages_by_key.get(parent) if parent is not None else None
        repeats = before is not None and bool(messages) and messages[0].same_as(before)
        numbers = media_numbers([step.get(name) for name in ("messages", "reply", "fields")])
        chat_step = chat.step(index, messages, reply, note, numbers, messages[0] if repeats else None)
        request_fields = {name: step[name] for name in ("tools", "kwargs") if name in step}
        chat_step.others = [*_fields(request_fields), *_fields(fields)]
        if "reply" in step and "text" in step:
            chat_step.others.insert(0, _part("text", step["text"]))
        chat_step.facts = [(name.replace("_", " "), step[name]) for name in STEP_FIELDS if name in step]
        n_sampled = n_sampled_of.get(index, 0)
        if n_sampled:
            chat_step.facts.append(("", f"{n_sampled:,} token{'s' * (n_sampled != 1)} sampled"))
        chat_step.facts += [("", words) for words in time_words(step.get("fields"), n_sampled)]
        chat_steps.append(chat_step)
    return chat_steps


def _messages(step: Mapping[str, Any]) -> tuple[list[ChatMessage], Any]:
    """The new messages of a step, and its fields without those that hold the messages."""
    fields = step.get("fields", {})
    messages = _said(step.get("messages"))
    for name in _SAID:
        if isinstance(fields, dict) and name in fields and not messages:
            messages = _said(fields[name])
            fields = {key: value for key, value in fields.items() if key != name}
    return messages, fields


def _said(value: Any) -> list[ChatMessage]:
    if isinstance(value, _Clipped):
        return [ChatMessage("messages", [value.start], others={CUT: _cut(value)})]
    return messages_in(value)


def _reply(step: Mapping[str, Any], sent_back: ChatMessage | None) -> tuple[ChatMessage | None, str]:
    """What a step said, and where that is known from."""
    reply_body = step.get("reply")
    if isinstance(reply_body, _Clipped):
        return ChatMessage("assistant", [reply_body.start], others={CUT: _cut(reply_body)}), ""
    if (reply := reply_in(reply_body)) is not None:
        return reply, ""
    if "text" in step:
        text = step["text"]
        whole = text.start if isinstance(text, _Clipped) else text if isinstance(text, str) else json.dumps(text)
        others = {CUT: _cut(text)} if isinstance(text, _Clipped) else {}
        return ChatMessage("assistant", [whole], others=others), TEXT_NOTE
    return sent_back, "as the next request holds it" if sent_back else ""


def _cut(value: _Clipped) -> str:
    return f"the first {len(value.start):,} of {value.n:,} characters of JSON"


def _fields(value: Any) -> list[RecordPart]:
    if isinstance(value, dict):
        return [_part(name, item) for name, item in value.items()]
    return [_part("", value)]


def _part(name: str, value: Any) -> RecordPart:
    """A value as text: a string as it is, content parts by their texts, anything else as JSON."""
    note = ""
    if isinstance(value, _Clipped):
        note = _cut(value)
        value = value.start
    elif isinstance(value, list) and value and all(
        isinstance(part, dict) and set(part) == {"type", "text"} for part in value
    ):
        value = "\n".join(str(part["text"]) for part in value)
    elif not isinstance(value, str):
        value = json_text(value)
    return name, html_of(value), note


def _plain(value: Any) -> Any:
    """A value in which each clipped text is a JSON object."""
    if isinstance(value, _Clipped):
        return {"clipped": value.start, "characters": value.n}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


_SECONDS = (
    "e2e_latency", "latency_s", "latency_seconds", "duration_s", "duration_seconds", "elapsed_s", "elapsed_seconds",
    "generation_seconds",
)
"""``e2e_latency`` is the word of SGLang."""
_MILLISECONDS = ("latency_ms", "duration_ms", "elapsed_ms", "generation_ms", "predicted_ms")
"""``predicted_ms`` is the word of llama.cpp."""
_BEGINS = ("started_at", "start_time", "created_at", "timestamp", "created")
_ENDS = ("finished_at", "ended_at", "end_time", "completed_at")
_DEPTH = 3
_UNIX = range(1_000_000_000, 10_000_000_000)
"""Seconds since 1970 from 2001 to 2286; a number outside is of another unit."""


def time_words(fields: Any, n_sampled: int) -> list[str]:
    """How long a step took, its tokens per second and its moment in UTC, as far as its fields say it."""
    values: dict[str, Any] = {}
    for name, value in _named(fields, _DEPTH):
        values.setdefault(name, value)
    begin, end = (next(filter(None, (_moment(values.get(name)) for name in names)), None) for names in (_BEGINS, _ENDS))
    seconds = next((number for name in _SECONDS if (number := _number(values.get(name)))), None) or next(
        (number / 1000 for name in _MILLISECONDS if (number := _number(values.get(name)))), None
    )
    if seconds is None and begin and end and begin < end:
        seconds = (end - begin).total_seconds()
    words = []
    if seconds is not None:
        words.append(f"{seconds:.2g} s" if seconds < 1 else f"{seconds:,.1f} s")
        if n_sampled:
            words.append(f"{n_sampled / seconds:,.1f} tokens per second")
    return [*words, f"{begin:%Y-%m-%d %H:%M:%S} UTC"] if begin else words


def _named(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The fields of a value by name, the outer ones first."""
    if isinstance(value, Mapping) and depth:
        yield from value.items()
        for item in value.values():
            yield from _named(item, depth - 1)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and 0 < value < 1e9 else None


def _moment(value: Any) -> datetime | None:
    if isinstance(value, (int, float)) and math.isfinite(value) and int(value) in _UNIX:
        return datetime.fromtimestamp(value, UTC)
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) and len(value) < 60 else None
        return None if moment is None or moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png", "png"), (b"\xff\xd8\xff", "image/jpeg", "jpg"), (b"GIF87a", "image/gif", "gif"),
    (b"GIF89a", "image/gif", "gif"), (b"ID3", "audio/mpeg", "mp3"), (b"\xff\xfb", "audio/mpeg", "mp3"),
)
_RIFF = {b"WEBP": ("image/webp", "webp"), b"WAVE": ("audio/wav", "wav")}
BODIES = ("messages_new__body", "reply__body", "extra__body")
"""The values of a step in which media parts are counted, in this order."""


def type_of(data: bytes) -> tuple[str, str]:
    """Media type and end of a file name, by the first bytes; any other data is a download without a type."""
    if data[:4] == b"RIFF" and data[8:12] in _RIFF:
        return _RIFF[data[8:12]]
    return next(((kind, end) for start, kind, end in _STARTS if data.startswith(start)), ("", "bin"))


@reads_trajectory
def media(request: HttpRequest, trajectory: StoredTrajectory, step: int, number: int) -> HttpResponse:
    """The data of one media part. 404 for a link, and for data that is no base64."""
    bodies = trajectory_parts.step_bodies(trajectory, step, BODIES) if step < trajectory.n_steps else []
    media_found = [part for body in bodies if body for part in media_parts(json.loads(body))]
    data = media_data(media_found[number]) if number < len(media_found) else None
    if data is None:
        raise Http404("This step holds no such data.")
    kind, end = type_of(data)
    response = HttpResponse(data, content_type=kind or "application/octet-stream")
    how = "inline" if kind else "attachment"
    response["Content-Disposition"] = f'{how}; filename="{trajectory.code}_{step}_{number}.{end}"'
    response["X-Content-Type-Options"] = "nosniff"
    response["Content-Security-Policy"] = "default-src 'none'; sandbox"
    response["Cache-Control"] = "private, no-store"
    return response
