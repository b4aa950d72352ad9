"""As recorded: what the source says beside the tokens. Messages, replies and texts of the steps, and every other field.

A page shows a few steps, and of each stored text no more than its share of two million characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.urls import reverse
from django.utils.safestring import mark_safe

from inspector.html.text import text_html
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
"""Fields of a step in which formats keep what was said before the completion, when they hold no whole request."""


@dataclass(frozen=True)
class _Clipped:
    """The start of a stored JSON text that is longer than a page shows."""

    start: str
    n: int


def recorded_page(
    params: Mapping[str, str], trajectory: models.StoredTrajectory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record as JSON, and what the template needs beside it."""
    first = whole_number(params.get("step")) or 0
    notices = []
    if first and first >= trajectory.n_steps:
        there = f"steps run from 0 to {trajectory.n_steps - 1:,}" if trajectory.n_steps else "it came without steps"
        notices, first = [f"There is no step {first:,} here: {there}."], 0
    steps = parts.step_values(trajectory, ("index", *_BODIES, *STEP_FIELDS), first, STEPS)
    rows = [] if first else parts.row_extras(trajectory, ROWS)
    keys = [trajectory.extra_id, *(key for _, key in rows), *(step[key] for step in steps for key in _BODIES)]
    bodies = _read(keys)
    report: dict[str, Any] = {
        "lacks": lacks_of(trajectory.run.format),
        "first_step": first,
        "n_steps": trajectory.n_steps,
        "notices": notices,
        "fields": bodies.get(trajectory.extra_id, {}),
        "rows": [{"index": index, "fields": bodies[key]} for index, key in rows],
        "steps": [_step(step, bodies) for step in steps],
    }
    drawn = {
        "here": "as recorded",
        "notices": notices,
        "lacks": report["lacks"],
        "fields": _fields(report["fields"]),
        "rows": [{"index": row["index"], "fields": _fields(row["fields"])} for row in report["rows"]],
        "steps": [_drawn(step) for step in report["steps"]],
        "rest_url": _url(trajectory, first + STEPS) if first + len(steps) < trajectory.n_steps else "",
        "rest": first + STEPS,
        "previous_url": _url(trajectory, max(first - STEPS, 0)) if first else "",
    }
    return _plain(report), drawn


def _url(trajectory: models.StoredTrajectory, step: int) -> str:
    return f"{reverse('trajectory-record', args=[trajectory.code])}?step={step}"


def _read(keys: Iterable[str | None]) -> dict[str | None, Any]:
    """Stored values by key: one query, which brings of each text what the page shows."""
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


def _drawn(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step as messages in the order in which they were said, then its other fields."""
    fields = step.get("fields", {})
    said = _messages(step.get("messages"))
    for name in _SAID:
        if isinstance(fields, dict) and name in fields and not said:
            said = _messages(fields[name])
            fields = {key: value for key, value in fields.items() if key != name}
    if "reply" in step:
        said += _messages([step["reply"]], "assistant")
    elif "text" in step:
        said.append({"role": "completion", "parts": [_part("", step["text"])]})
    others = [*_fields({name: step[name] for name in ("tools", "kwargs") if name in step}), *_fields(fields)]
    if "reply" in step and "text" in step:
        others.insert(0, {"name": "text", **_part("", step["text"])})
    facts = [{"name": name.replace("_", " "), "value": step[name]} for name in STEP_FIELDS if name in step]
    return {"index": step["index"], "said": said, "others": others, "facts": facts}


def _messages(value: Any, role: str = "prompt") -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        return [{"role": role, "parts": [_part("", value)]}]
    return [_message(item, role) for item in value]


def _message(value: Any, role: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {"role": role, "parts": [_part("", value)]}
    parts = [_part("" if key == "content" else key, item) for key, item in value.items()
             if key != "role" and item not in (None, "", [], {})]  # fmt: skip
    return {"role": str(value.get("role") or value.get("type") or role), "parts": parts}


def _fields(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [{"name": name, **_part(name, item)} for name, item in value.items()]
    return [{"name": "", **_part("", value)}]


def _part(label: str, value: Any) -> dict[str, Any]:
    """A value as text: a string as it is, content parts by their texts, anything else as JSON."""
    note = ""
    if isinstance(value, _Clipped):
        note = f"the first {len(value.start):,} of {value.n:,} characters of JSON"
        value = value.start
    elif isinstance(value, list) and value and all(_is_text_part(one) for one in value):
        value = "\n".join(str(one["text"]) for one in value)
    elif not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, indent=None if len(str(value)) < 200 else 1)
    # A lone surrogate is no text that a page can hold.
    text = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return {"label": label, "html": mark_safe(text_html(text)), "note": note}


def _is_text_part(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"type", "text"}


def _plain(value: Any) -> Any:
    """What is clipped, as JSON."""
    if isinstance(value, _Clipped):
        return {"clipped": value.start, "characters": value.n}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
