"""As recorded: what the source holds beside the tokens: messages, replies and texts of the steps, and other fields.

A page shows a few steps. The texts of a page have at most two million characters, and each text gets an equal share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString, mark_safe

from inspector.html.text import text_html
from inspector.trajectories.frame import TrajectoryHead, head_of
from inspector.web.twins import whole_number
from rollouts import models
from rollouts.formats import lacks_of
from rollouts.selectors import parts

STEPS = 20
ROWS = 60
PAGE_CHARACTERS = 2_000_000
TEXT_CHARACTERS = 200_000
STEP_FIELDS = (
    "finish_reason",
    "stop_reason",
    "temperature",
    "top_p",
    "top_k",
    "engine",
    "policy_version",
    "logprobs_mode",
)
_BODIES = ("messages_new_id", "tools_id", "template_kwargs_id", "reply_id", "text_id", "extra_id")
_SAID = ("messages", "prompt", "new_messages", "items_before")
"""Fields of a step that hold the messages before the completion, in formats that keep no whole request."""


@dataclass(frozen=True)
class _Clipped:
    """The start of a stored JSON text that is longer than a page shows."""

    start: str
    n: int


@dataclass(frozen=True)
class RecordPart:
    """A field of the source as text."""

    name: str
    html: SafeString
    note: str
    """How much of the field is shown; empty when all of it is shown."""


@dataclass(frozen=True)
class RecordStep:
    """A step for the template: its messages in their order, then its other fields."""

    index: int
    said: list[tuple[str, list[RecordPart]]]
    """Role and parts of each message."""
    others: list[RecordPart]
    facts: list[tuple[str, Any]]
    """Name and value of each field that is no text."""


@dataclass(frozen=True)
class RecordRow:
    """A row for which the source holds other fields."""

    index: int
    fields: Any
    """In the JSON the value of the source; for the template a list of :class:`RecordPart`."""


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
    rows: list[RecordRow]
    """The rows that have other fields; only on the first page."""
    steps: list[dict[str, Any]]
    """At most 20 steps; each has its index, and the fields that the source filled."""


def record_page(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[RecordPage, dict[str, Any]]:
    """The page: a few steps, from the step that the address names."""
    params = request.GET
    first = whole_number(params.get("step")) or 0
    notices = []
    if first and first >= trajectory.n_steps:
        there = f"steps run from 0 to {trajectory.n_steps - 1:,}" if trajectory.n_steps else "it came without steps"
        notices, first = [f"There is no step {first:,} here: {there}."], 0
    steps = parts.step_values(trajectory, ("index", *_BODIES, *STEP_FIELDS), first, STEPS)
    rows = [] if first else parts.row_extras(trajectory, ROWS)
    keys = [trajectory.extra_id, *(key for _, key in rows), *(step[key] for step in steps for key in _BODIES)]
    bodies = _read(keys)
    fields = bodies.get(trajectory.extra_id, {})
    held = [(index, bodies[key]) for index, key in rows]
    said = [_step(step, bodies) for step in steps]
    page = RecordPage(
        **head_of(trajectory),
        lacks=lacks_of(trajectory.run.format),
        first_step=first,
        n_steps=trajectory.n_steps,
        notices=notices,
        fields=_plain(fields),
        rows=[RecordRow(index, _plain(value)) for index, value in held],
        steps=_plain(said),
    )
    here = reverse("trajectory-record", args=[trajectory.code])
    return page, {
        "fields": _fields(fields),
        "rows": [RecordRow(index, _fields(value)) for index, value in held],
        "steps": [_drawn(step) for step in said],
        "previous_url": f"{here}?step={max(first - STEPS, 0)}" if first else "",
        "rest_url": f"{here}?step={first + STEPS}" if first + len(steps) < trajectory.n_steps else "",
        "rest": first + STEPS,
    }


def recorded_step(trajectory: models.StoredTrajectory, index: int) -> dict[str, Any]:
    """What the source recorded of a step beside its tokens, without what is empty. Two queries.

    A text that is too long is ``{"clipped": START, "characters": N}``.
    """
    (step,) = parts.step_values(trajectory, ("index", *_BODIES, *STEP_FIELDS), index, 1)
    said = _step(step, _read(step[key] for key in _BODIES))
    found: dict[str, Any] = _plain({name: value for name, value in said.items() if name not in ("index", *STEP_FIELDS)})
    return found


def _read(keys: Iterable[str | None]) -> dict[str | None, Any]:
    """Stored values by key. One query reads the part of each text that the page shows."""
    wanted = sorted({key for key in keys if key})
    most = min(TEXT_CHARACTERS, PAGE_CHARACTERS // max(len(wanted), 1))
    found = parts.content_starts(wanted, most)
    return {key: json.loads(start) if n <= most else _Clipped(start, n) for key, n, start in found}


def _step(step: Mapping[str, Any], bodies: Mapping[str | None, Any]) -> dict[str, Any]:
    found = {"index": step["index"], **{name: step[name] for name in STEP_FIELDS if step[name] not in ("", None)}}
    for name, key in (("messages", "messages_new_id"), ("tools", "tools_id"), ("kwargs", "template_kwargs_id"),
                      ("reply", "reply_id"), ("text", "text_id"), ("fields", "extra_id")):  # fmt: skip
        if step[key] and bodies[step[key]] not in ({}, []):
            found[name] = bodies[step[key]]
    return found


def _drawn(step: Mapping[str, Any]) -> RecordStep:
    fields = step.get("fields", {})
    said = _messages(step.get("messages"))
    for name in _SAID:
        if isinstance(fields, dict) and name in fields and not said:
            said = _messages(fields[name])
            fields = {key: value for key, value in fields.items() if key != name}
    if "reply" in step:
        said += _messages([step["reply"]], "assistant")
    elif "text" in step:
        said.append(("completion", [_part("", step["text"])]))
    others = [*_fields({name: step[name] for name in ("tools", "kwargs") if name in step}), *_fields(fields)]
    if "reply" in step and "text" in step:
        others.insert(0, _part("text", step["text"]))
    facts = [(name.replace("_", " "), step[name]) for name in STEP_FIELDS if name in step]
    return RecordStep(step["index"], said, others, facts)


def _messages(value: Any, role: str = "prompt") -> list[tuple[str, list[RecordPart]]]:
    """Role and parts of each message; ``role`` for a value that names none."""
    if value is None:
        return []
    return [_message(item, role) for item in value] if isinstance(value, list) else [(role, [_part("", value)])]


def _message(value: Any, role: str) -> tuple[str, list[RecordPart]]:
    if not isinstance(value, dict):
        return role, [_part("", value)]
    parts = [_part("" if key == "content" else key, item) for key, item in value.items()
             if key != "role" and item not in (None, "", [], {})]  # fmt: skip
    return str(value.get("role") or value.get("type") or role), parts


def _fields(value: Any) -> list[RecordPart]:
    if isinstance(value, dict):
        return [_part(name, item) for name, item in value.items()]
    return [_part("", value)]


def _part(name: str, value: Any) -> RecordPart:
    """A value as text: a string as it is, content parts by their texts, anything else as JSON."""
    note = ""
    if isinstance(value, _Clipped):
        note = f"the first {len(value.start):,} of {value.n:,} characters of JSON"
        value = value.start
    elif isinstance(value, list) and value and all(_is_text_part(one) for one in value):
        value = "\n".join(str(one["text"]) for one in value)
    elif not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, indent=None if len(str(value)) < 200 else 1)
    # A page cannot hold a lone surrogate.
    text = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return RecordPart(name, mark_safe(text_html(text)), note)


def _is_text_part(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"type", "text"}


def _plain(value: Any) -> Any:
    """A value in which each clipped text is a JSON object."""
    if isinstance(value, _Clipped):
        return {"clipped": value.start, "characters": value.n}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
