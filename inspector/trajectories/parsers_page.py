"""Parsers: how one reply was read. What its message lost of the sampled ids, and what every other parser reads of them.
A worker reads (``rollouts.jobs.parser_comparison``). This page draws what it stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse

from inspector.trajectories.conversation import html_of
from inspector.trajectories.frame import TrajectoryHead, asking, base_url, head_of, work_state
from inspector.trajectories.place import PagePlace, View
from inspector.web.twins import whole_number
from rollouts.jobs import parser_comparison
from rollouts.store import models
from rollouts.store.trajectories import trajectory_parts as parts
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

KIND = "reply_text_lost"  # The finding of a reply that lost text.
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
        **head_of(trajectory), step=step, n_steps=trajectory.n_steps, lossy_steps=lossy,
        reply_check=(trajectory.checks or {}).get("reply"), state=state, why=words or None,
        audit=audit.report if audit is not None and state == "done" else None,
    )
    here = reverse("trajectory-parsers", args=[trajectory.code])
    html: dict[str, Any] = {
        "words": words,
        "notices": notices,
        **asking(request, trajectory, state),
        "progress": audit.job.progress if audit is not None and state == "running" else "",
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
    return work_state(
        trajectory, parser_comparison.missing, lambda: parser_comparison.current(trajectory, step),
        live="A reply is read when the trajectory has ended.",
        unasked="This reply has not been read by every parser yet. Log in to read it.",
    )


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


def _reading(reading: Mapping[str, Any], link: _Linker) -> dict[str, Any]:
    """What some parsers read alike, as the worker stored it, with its texts as HTML and the addresses of its tokens."""
    n_calls = sum(piece["kind"] == "call" for piece in reading["pieces"])
    differs = reading.get("differs")
    return {
        **reading,
        "parts": [_part(piece, link, piece["tokens"]) for piece in reading["pieces"]],
        "more_calls": reading["n_calls"] - n_calls,
        "lost": [_part(lost, link, [lost["tokens"]]) for lost in reading["lost"]],
        "added": [html_of(text) for text in reading["added"]],
        # None = there is no message.
        "differs": None if differs is None else [PART_WORDS[word] for word in differs],
    }


def _part(piece: Mapping[str, Any], link: _Linker, places: Sequence[Sequence[int]]) -> dict[str, Any]:
    more = piece["characters"] - len(piece["text"])
    return {
        "kind": piece.get("kind", ""),
        "text": html_of(piece["text"]),
        "more": f"and {more:,} more characters" if more > 0 else "",
        "places": [link(place) for place in places],
        "arguments": html_of(piece["arguments"]) if "arguments" in piece else None,
    }
