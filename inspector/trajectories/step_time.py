"""When a step was, and how long it took, where its source recorded that. A number without a known unit says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

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
