"""Parsers: how one reply was read. What its message lost of the sampled ids, and what every other parser reads of them.

A worker reads (``rollouts.jobs.parser_comparison``). This page draws what it stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from inspector.trajectories.conversation import html_of
from inspector.trajectories.frame import TrajectoryHead, base_url, head_of, waiting_words
from inspector.trajectories.place import PagePlace, View
from inspector.web.access import may_write
from inspector.web.remedies import WORDS
from inspector.web.twins import whole_number
from rollout_inspector.refusal import worded
from rollouts.jobs import parser_comparison
from rollouts.store import models
from rollouts.store.jobs.activity import is_active
from rollouts.store.trajectories import trajectory_parts as parts
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

KIND = "reply_text_lost"
"""The finding of a reply that lost text."""
PART_WORDS = {"calls": "other calls", "content": "other content", "reasoning": "other reasoning"}


@dataclass(frozen=True)
class ParsersPage(TrajectoryHead):
    """How a reply was read."""

    step: int
    """The step whose reply it is."""
    n_steps: int
    """Steps of the trajectory."""
    lossy_steps: list[int]
    """The steps whose replies lost text, by the findings. ``reply_check`` says whether that was checked."""
    reply_check: str | list[str] | None
    """The outcome of the check ``reply``: ``passed``, ``noted``, ``failed``, or the fields that it lacks."""
    state: str
    """The state of the audit: ``live``, ``missing``, ``unasked``, ``queued``, ``running``, ``failed``, ``cancelled`` or
    ``done``."""
    why: str | None
    """A sentence about the state; None when there is nothing to say."""
    audit: dict[str, Any] | None
    """What each parser read, as the worker stored it; places are ``[start, stop)`` in the stream of the step."""


@dataclass(frozen=True)
class DrawnPlace:
    """A text with the tokens in which it stands."""

    text: SafeString
    more: str
    """How much of the text is left out; empty when nothing is."""
    places: list[tuple[str, str]]
    """Words and address of each stretch; the address is empty where no row holds it."""
    kind: str = ""
    arguments: SafeString | None = None


@dataclass(frozen=True)
class DrawnReading:
    """What some parsers read alike."""

    parsers: list[str]
    parts: list[DrawnPlace]
    left_out: int
    """Calls that are not shown."""
    lost: list[DrawnPlace]
    n_lost: int
    added: list[SafeString]
    differs: list[str] | None
    """In words, what differs from the message; None = there is no message."""


def parsers_page(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[ParsersPage, dict[str, Any]]:
    """The audit of the reply that the address names, else of the first that lost text. At most six queries."""
    lossy = parts.steps_with_finding(trajectory, KIND)
    step_text, notices = request.GET.get("step"), list[str]()
    step = (whole_number(step_text) if step_text else None) or 0
    if not step_text and lossy:
        step = lossy[0]
    if step and step >= trajectory.n_steps:
        there = f"steps run from 0 to {trajectory.n_steps - 1:,}" if trajectory.n_steps else "it came without steps"
        notices, step = [f"There is no step {step:,} here: {there}."], 0
    state, audit, words = audit_state(trajectory, step)
    page = ParsersPage(
        **head_of(trajectory),
        step=step,
        n_steps=trajectory.n_steps,
        lossy_steps=lossy,
        reply_check=(trajectory.checks or {}).get("reply"),
        state=state,
        why=words or None,
        audit=audit.report if audit is not None and state == "done" else None,
    )
    here = reverse("trajectory-parsers", args=[trajectory.code])
    html: dict[str, Any] = {
        "words": words,
        "notices": notices,
        "is_pending": state in ("queued", "running"),
        "progress": audit.job.progress if audit is not None and state == "running" else "",
        "can_ask": state in ("unasked", "failed", "cancelled") and may_write(request),
        "may_write": may_write(request),
        "ask_url": f"{reverse('trajectory-audit', args=[trajectory.code])}?step={step}",
        "conversation_url": f"{reverse('trajectory-record', args=[trajectory.code])}?step={step}#step-{step}",
        "lossy": [(lossy_step, f"{here}?step={lossy_step}", lossy_step == step) for lossy_step in lossy[:50]],
        "n_more": max(len(lossy) - 50, 0),
        "previous_url": f"{here}?step={step - 1}" if step else "",
        "next_url": f"{here}?step={step + 1}" if step + 1 < trajectory.n_steps else "",
        "lacks": page.reply_check if isinstance(page.reply_check, list) else [],
    }
    if page.audit is not None:
        html |= _drawn(trajectory, step, page.audit)
    return page, html


def audit_state(trajectory: models.StoredTrajectory, step: int) -> tuple[str, models.ParserAudit | None, str]:
    """How far the audit is, the audit, and a sentence."""
    if is_active(trajectory):
        return "live", None, "A reply is read when the trajectory has ended."
    if refusal := parser_comparison.missing(trajectory):
        return "missing", None, worded(str(refusal), refusal.remedy, WORDS)
    audit = parser_comparison.current(trajectory, step)
    if audit is None:
        return "unasked", None, "Nobody has had this reply read by every parser yet; it takes a login."
    job = audit.job
    failed = job.status == models.Job.Status.FAILED
    return job.status, audit, worded(job.error, job.remedy, WORDS) if failed else waiting_words(job)


def _drawn(trajectory: models.StoredTrajectory, step: int, audit: Mapping[str, Any]) -> dict[str, Any]:
    rows, steps = parts.rows_and_steps(trajectory)
    link = _Linker(trajectory, rows, next((reading for reading in steps if reading.index == step), None))
    message = audit["message"]
    readings = [(reading["kind"], _reading(reading, link)) for reading in audit["readings"]]
    return {
        "message": _reading(message, link) if message is not None else None,
        "message_of": audit["message_of"],
        "run_reads": audit["run_reads"],
        "calls": [call for kind, call in readings if kind != "reasoning"],
        "reasoning": [call for kind, call in readings if kind == "reasoning"],
        "unusable": [(reading["kind"], reading["parser"], html_of(reading["reason"])) for reading in audit["unusable"]],
        "told": [html_of(reading) for reading in audit["notes"]],
        "version": audit["vllm_version"],
        "reply_place": link(audit["tokens"]),
    }


class _Linker:
    """Words and address of tokens of a step."""

    def __init__(
        self, trajectory: models.StoredTrajectory, rows: Sequence[RowSummary], step: StepSummary | None
    ) -> None:
        self._base, self._row = base_url(trajectory), None if step is None else step.row
        row_of_step = next((row for row in rows if row.index == self._row), None)
        self._is_held = row_of_step is not None and row_of_step.follows_steps

    def __call__(self, place: Sequence[int]) -> tuple[str, str]:
        start, stop = place
        words = f"token {start:,}" if stop - start == 1 else f"tokens {start:,} to {stop - 1:,}"
        if not self._is_held or self._row is None:
            return words, ""
        return words, self._base + PagePlace(row=self._row, view=View.TOKENS).marked(start, stop)


def _reading(one: Mapping[str, Any], link: _Linker) -> DrawnReading:
    n_calls = sum(piece["kind"] == "call" for piece in one["pieces"])
    differs = one.get("differs")
    return DrawnReading(
        one.get("parsers", []),
        [_part(piece, link, piece["tokens"]) for piece in one["pieces"]],
        one["n_calls"] - n_calls,
        [_part(lost, link, [lost["tokens"]]) for lost in one["lost"]],
        one["n_lost"],
        [html_of(text) for text in one["added"]],
        None if differs is None else [PART_WORDS[word] for word in differs],
    )


def _part(one: Mapping[str, Any], link: _Linker, places: Sequence[Sequence[int]]) -> DrawnPlace:
    more = one["characters"] - len(one["text"])
    return DrawnPlace(
        html_of(one["text"]),
        f"and {more:,} more characters" if more > 0 else "",
        [link(place) for place in places],
        one.get("kind", ""),
        html_of(one["arguments"]) if "arguments" in one else None,
    )
