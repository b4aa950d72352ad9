"""What the pages of a trajectory read: findings, turns, tokens. The number of queries is fixed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from inspector.trajectories.tokens.turns import FindingItem, Turn, header_spans, make_turns, origin_spans, roles_of
from rollout_inspector.diagnose.finding import Severity, cost_sentence
from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.streams.roles import RoleTurn, role_turns
from rollout_inspector.streams.row_places import place_in_row
from rollout_inspector.streams.trajectory import Origin
from rollout_inspector.text.tokenizers import ByteTable, TokenizerUnusable
from rollout_inspector.text.tokenizers.byte_table import special_tokens
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import byte_table
from rollouts.store.runs.muted import muted_in
from rollouts.store.text import without_paths
from rollouts.store.trajectories import trajectory_parts as parts
from rollouts.store.trajectories.rows import Span, Tokens, row_spans, row_window
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

logger = logging.getLogger(__name__)


def table_of(tokenizer: models.Tokenizer | None) -> tuple[ByteTable | None, str]:
    """The bytes of a tokenizer's tokens, or why no text can be shown."""
    if tokenizer is None:
        return None, "this run was imported without a tokenizer."
    try:
        return byte_table(tokenizer.files_sha256), ""
    except (TokenizerUnusable, OSError) as error:
        logger.warning("the byte table of tokenizer %s cannot be opened: %s", tokenizer.name, error)
        return None, f"the tokenizer “{tokenizer.name}” cannot be read: {without_paths(str(error))}"


def read_roles(trajectory: models.StoredTrajectory, steps: frozenset[int]) -> dict[int, list[str]]:
    """Step -> roles of its new messages, after ``history`` when it shares earlier messages. One query."""
    bodies = parts.new_messages(trajectory, steps)
    return {index: ["history"] * bool(shared) + roles_of(body) for index, shared, body in bodies}


def read_findings(
    trajectory: models.StoredTrajectory, steps: Sequence[StepSummary], rows: Sequence[RowSummary]
) -> list[FindingItem]:
    """Findings in reading order, errors first within a step, each with the row that holds its place."""
    if not trajectory.n_findings:
        return []
    row_of_step = {step.index: step.row for step in steps}
    follows = {row.index for row in rows if row.follows_steps}
    items, muted = [], muted_in(trajectory.run)
    for number, finding in enumerate(parts.findings_in_order(trajectory), start=1):
        row = finding.row_index
        if finding.step_index is not None:
            follower = row_of_step.get(finding.step_index)
            row = follower if follower in follows else row
        remedy = finding.remedy
        if finding.kind == "not_decidable" and finding.missing == "tokenizer":
            remedy = "Choose a tokenizer for the run, under “Diagnose again” on its page."
        items.append(
            FindingItem(
                number, finding.kind, title_of(finding.kind),
                finding.severity, finding.axis, finding.step_index, row,
                finding.start, finding.stop, finding.evidence, remedy,
                # An info finding costs nothing.
                "" if finding.severity == Severity.INFO else cost_sentence(
                    finding.trained_tokens_lost, finding.trained_tokens_wrong, finding.rows,
                    finding.prompt_tokens_repaid, finding.lost_in_one_row),
                finding.expected_text, finding.actual_text, finding.missing,
                tuple((start, max(stop, start + 1)) for start, stop in parts.places_of(finding)),
                trained_tokens=(finding.trained_tokens_lost or 0) + (finding.trained_tokens_wrong or 0),
                muted=finding.kind in muted,
            )
        )
    return _placed(trajectory, items, steps, rows)


def _placed(
    trajectory: models.StoredTrajectory,
    items: list[FindingItem],
    steps: Sequence[StepSummary],
    rows: Sequence[RowSummary],
) -> list[FindingItem]:
    """The findings; one that no row holds gets the place of what a row trains instead. Reads the arrays for these."""
    trained_in = {step: row for row in rows if not row.follows_steps for step in row.steps}
    loose = [item for item in items if item.row is None and item.step in trained_in]
    if not loose or trajectory.n_tokens > MAX_PLACED_TOKENS:
        return items
    (value,) = load_trajectories([trajectory])
    own = dict(zip([row.index for row in rows if not row.follows_steps], value.rows, strict=True))
    placed = {}
    for item in loose:
        assert item.step is not None
        row = trained_in[item.step]
        place = place_in_row(value.steps, own[row.index], item.step, item.start, item.stop)
        if place is not None:
            places = ((place[0], max(place[1], place[0] + 1)),)
            placed[item.number] = replace(item, row=row.index, places=places, is_held=False)
    return [placed.get(item.number, item) for item in items]


def read_turns(
    trajectory: models.StoredTrajectory,
    row: RowSummary,
    steps: Sequence[StepSummary],
    findings: Sequence[FindingItem],
    within: tuple[int, int] | None = None,
) -> list[Turn]:
    """The turns of a row, or those that touch the tokens ``within``. One query where the row follows its steps."""
    if not row.follows_steps:
        tokens = read_tokens(trajectory, row, 0, row.n_tokens)
        table, _ = table_of(trajectory.run.tokenizer)
        headers: list[RoleTurn] = []
        if table is not None and not (tokens.origin_known and (tokens.origin == Origin.SAMPLED).any()):
            headers = role_turns(tokens.ids, special_tokens(table, tokens.ids), table.token_bytes)
        own = header_spans(headers) if headers else origin_spans(tokens.origin)
        return make_turns(_numbered(own, within), {}, findings, row.index, None, {}, tokens.loss_mask)
    spans = _numbered(row_spans(row.handle, steps), within)
    roles = read_roles(trajectory, frozenset(span.step_index for _, span in spans if span.step_index is not None))
    reasons = {step.index: step.finish_reason for step in steps}
    return make_turns(spans, roles, findings, row.index, row.steps, reasons)


def _numbered(spans: Iterable[Span], within: tuple[int, int] | None) -> list[tuple[int, Span]]:
    """The spans with their numbers in the row, from 1; of them those that touch the tokens ``within``."""
    numbered = enumerate(spans, start=1)
    if within is None:
        return list(numbered)
    start, stop = within
    return [(number, span) for number, span in numbered if span.start <= stop and span.stop >= start]


MAX_PLACED_TOKENS = 300_000
"""The most tokens of a trajectory that are aligned with its rows for a page."""

MISMATCH = "mismatch"
"""A lens of two columns: the trainer's logprob minus the sampler's, which is the log of the importance ratio."""


def read_columns(trajectory: models.StoredTrajectory) -> dict[int, list[str]]:
    """Row index -> names of its lenses from a trainer's columns. One query, which reads no array."""
    names_of_row = parts.column_names(trajectory)
    for names in names_of_row.values():
        if any(name in names for name in TRAINER_LOGPROBS):
            names.insert(0, MISMATCH)
    return names_of_row


def read_values(trajectory: models.StoredTrajectory, row: RowSummary, name: str) -> NDArray[np.float32]:
    """One whole column ``[n]`` of a row, because the scale of its colours is that of the row."""
    if name == MISMATCH:
        return _mismatch(trajectory, row)
    return np.asarray(parts.column_values(trajectory, row.index, [name])[name])


def _mismatch(trajectory: models.StoredTrajectory, row: RowSummary) -> NDArray[np.float32]:
    trainer_logprobs = parts.column_values(trajectory, row.index, TRAINER_LOGPROBS)
    trainer = next(trainer_logprobs[name] for name in TRAINER_LOGPROBS if name in trainer_logprobs)
    tokens = read_tokens(trajectory, row, 0, len(trainer))
    difference = np.full(len(tokens), np.nan, dtype=np.float32)
    if tokens.logprobs is not None:
        trained = tokens.loss_mask
        difference[trained] = trainer[: len(tokens)][trained] - tokens.logprobs[trained]
    return difference


def read_tokens(
    trajectory: models.StoredTrajectory,
    row: RowSummary,
    start: int,
    stop: int,
    steps: Sequence[StepSummary] | None = None,
) -> Tokens:
    """The tokens ``[start, stop)`` of a row. ``steps``: all of the trajectory, where they are known."""
    return row_window(trajectory, row.handle, start, stop, steps)
