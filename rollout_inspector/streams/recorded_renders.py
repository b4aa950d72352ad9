"""How a recorded request is rendered again: with the arguments that the template takes, and with the record's date."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

from rollout_inspector.streams.interfaces import Codec, Conversation, Renderer, RenderFailed
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.trajectory import Ids, Message, Request, Step

NOW = "strftime_now"
"""The template kwarg that sets the clock: an ISO date and time, which the sandbox's ``strftime_now`` tells."""
DATE = "date_string"  # The kwarg of Llama's templates that holds the date as text.
_CLOCKS = datetime(2026, 1, 1, 9, 0), datetime(1999, 12, 31, 23, 59, 58)
"""Two times whose texts differ from the first character that a format takes from the clock."""
_DATE_FORMATS = ("%d %b %Y", "%Y-%m-%d", "%d %B %Y", "%B %d, %Y")
_ASKED = re.compile(r"strftime_now\(\s*(?:format\s*=\s*)?(?:\"([^\"]+)\"|'([^']+)')")
_NO_TIME = 100_000_000  # Seconds since 1970 that no call was made at: a server without a clock writes 0 or 1.
MAX_DATE_CHARACTERS = 64
CONTEXT_CHARACTERS = 24  # Text before a date by which it is found in a prompt that begins otherwise than the render.

UNKNOWN_DATE = (
    "The chat template prints the date, and the record does not tell it: the prompt shows none where the template "
    "prints it, and no call has a time. The rows would hold an invented date. Record the time of each call (created), "
    "or choose a strategy that keeps the recorded prompts."
)

Form = Callable[[Sequence[Message]], list[Message]]


# -- arguments ---------------------------------------------------------------------------------------------------------


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """Messages as engines pass them to a template: arguments that are JSON text become values."""
    return _with_arguments(messages, str, parsed)


def with_text(messages: Sequence[Message]) -> list[Message]:
    """Messages as vLLM and SGLang pass them to a template: a content that is null or absent is an empty text. Sources:
    ``_parse_chat_message_content`` in ``vllm/entrypoints/chat_utils.py``, and ``_apply_jinja_template`` in
    ``sglang/srt/entrypoints/openai/serving_chat.py``. ``transformers`` passes null on."""
    return [message if message.get("content") is not None else {**message, "content": ""} for message in messages]


def with_json(messages: Sequence[Message]) -> list[Message]:
    """The same for a template that joins arguments as text: objects become JSON."""
    return _with_arguments(messages, Mapping, lambda value: json.dumps(value, ensure_ascii=False))


def parsed(arguments: Any) -> Any:
    """Arguments that are JSON text as a value; anything else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _with_arguments(messages: Sequence[Message], of: type, change: Callable[[Any], Any]) -> list[Message]:
    result: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or not calls:
            result.append(message)
            continue
        mended = []
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), of):
                call = {**call, "function": {**function, "arguments": change(function["arguments"])}}
            mended.append(call)
        result.append({**message, "tool_calls": mended})
    return result


def first_rendered(renderer: Renderer, conversation: Conversation) -> tuple[Form, Ids] | None:
    """The first form of the arguments that the template takes, and the render; None when it takes none. Where it takes
    none with a content that is null, that content is an empty text (:func:`with_text`)."""
    forms: tuple[Form, ...] = (with_objects, list, with_json)
    if has_null(conversation.messages):
        forms += tuple(partial(_in_both_forms, form) for form in forms)
    for form in forms:
        try:
            return form, renderer.render_ids(conversation._replace(messages=form(conversation.messages)))
        except RenderFailed:
            continue
    return None


def has_null(messages: Sequence[Message]) -> bool:
    """Whether the content of a message is null or absent."""
    return any(message.get("content") is None for message in messages)


def _in_both_forms(form: Form, messages: Sequence[Message]) -> list[Message]:
    return form(with_text(messages))


# -- the date ----------------------------------------------------------------------------------------------------------


def kwargs_of_record(step: Step, request: Request, renderer: Renderer, codec: Codec) -> list[Mapping[str, Any]]:
    """The template kwargs of a request, with the date that the step's prompt shows, else with the time of its call. If
    the date is not known, there are two: only a render that is the same under both holds no invented date."""
    kwargs, template = request.chat_template_kwargs, getattr(renderer, "chat_template", "")
    if DATE in kwargs or NOW in kwargs:
        return [kwargs]
    if NOW in template:
        formats = list(dict.fromkeys(form or other for form, other in _ASKED.findall(template)))
        called = time_of_call(step)
        clocks = [{**kwargs, NOW: clock.isoformat()} for clock in _CLOCKS]
        dated = _shown_date(step, request, renderer, codec, clocks, formats)
        if dated is None:
            return [*clocks] if called is None else [{**kwargs, NOW: called.isoformat()}]
        # The time of the call also tells the hour. But the server may have been in another zone.
        times = [called] if called is not None and called.strftime(dated[1]) == dated[0] else _times_of(*dated)
        return [{**kwargs, NOW: time.isoformat()} for time in times[: len(formats)]]
    if DATE in template:
        dates = [{**kwargs, DATE: clock.strftime(_DATE_FORMATS[0])} for clock in _CLOCKS]
        if dated := _shown_date(step, request, renderer, codec, dates, _DATE_FORMATS):
            return [{**kwargs, DATE: dated[0]}]
    return [kwargs]


def time_of_call(step: Step) -> datetime | None:
    """When a call was made, in UTC: ``created_at`` as ISO text or ``created`` in seconds, if the source kept it."""
    for part in (step.extra, *step.extra.values()):
        if not isinstance(part, Mapping):
            continue
        try:
            if isinstance(part.get("created_at"), str):
                called = datetime.fromisoformat(part["created_at"])
                return (called if called.tzinfo else called.replace(tzinfo=UTC)).astimezone(UTC)
            if isinstance(part.get("created"), int | float) and part["created"] > _NO_TIME:
                return datetime.fromtimestamp(part["created"], UTC)
        except (ValueError, OverflowError, OSError):
            continue
    return None


def _shown_date(
    step: Step, request: Request, renderer: Renderer, codec: Codec, dates: Sequence[Mapping[str, Any]],
    formats: Sequence[str],
) -> tuple[str, str] | None:
    """What the recorded prompt holds in the place of the first date, and its format; None = no date that can be read.
    ``dates``: kwargs with two dates, so that two renders show the place."""
    if not len(step.prompt_ids):
        return None
    recorded = codec.decode(step.prompt_ids)
    # Most templates print the date before the first text, whatever it is. Then a render of few words tells the place.
    few = [{"role": message.get("role"), "content": "Hello."} for message in request.messages[:2]]
    for messages in (few, request.messages):
        try:
            asks = (Conversation(with_objects(with_text(messages)), request.tools, date, True) for date in dates)
            first, other = map(renderer.render_text, asks)
        except RenderFailed:
            continue
        if first != other and (date_found := _date_at(recorded, first, other, formats, NOW in dates[0])):
            return date_found
    return None


def _date_at(recorded: str, one: str, other: str, formats: Sequence[str], asked: bool) -> tuple[str, str] | None:
    """The text and the format of the date in ``recorded``, in the place where two renders differ first. ``asked``: the
    renders print ``_CLOCKS`` in one of the formats; else in the first format of Llama."""
    start = common_length(one, other)
    for form in formats:
        with suppress(ValueError, re.error):  # no format that Python reads
            texts = [clock.strftime(form if asked else _DATE_FORMATS[0]) for clock in _CLOCKS]
            place = start - common_length(*texts)
            if not (one.startswith(texts[0], place) and other.startswith(texts[1], place)):
                continue
            before = one[:place]
            if not recorded.startswith(before):
                before = before[-CONTEXT_CHARACTERS:]
                if not before.strip() or before not in recorded:
                    continue
                place = recorded.find(before) + len(before)
            greatest, least = _lengths(form)
            for stop in range(min(len(recorded), place + greatest), place + least - 1, -1):
                date_text = recorded[place:stop]
                with suppress(ValueError):  # it is no date, or more than a date
                    if _read(date_text, form).strftime(form) == date_text:
                        return date_text, form
    return None


@lru_cache(maxsize=64)
def _lengths(form: str) -> tuple[int, int]:
    """The greatest length of the texts that a format makes, at most ``MAX_DATE_CHARACTERS``, and the least."""
    times = (datetime(2026, month, day, hour, hour, hour)
             for month in range(1, 13) for day in range(1, 29) for hour in (1, 22))
    sizes = {min(len(time.strftime(form)), MAX_DATE_CHARACTERS) for time in times}
    return max(sizes), max(min(sizes), 1)


def _read(shown: str, form: str) -> datetime:
    return datetime.strptime(shown, form.replace("%-", "%"))


def _times_of(shown: str, form: str) -> list[datetime]:
    """Two times that a date may mean: what its format leaves out differs, if it leaves out anything."""
    first = last = _read(shown, form)
    for part in ({"year": 2000}, {"month": 12}, {"day": 28}, {"hour": 23}, {"minute": 59}, {"second": 58}):
        changed = last.replace(**part)  # type: ignore[arg-type]
        if changed.strftime(form) == shown:
            last = changed
    return [first, last]
