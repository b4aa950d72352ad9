"""What the pages of a trajectory read: findings, turns, tokens. The number of queries is fixed."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from inspector.trajectories.tokens.findings import DrawnFinding
from inspector.trajectories.tokens.turns import Turn, cut_at_headers, header_spans, make_turns, origin_spans, roles_of
from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.streams.roles import role_turns
from rollout_inspector.streams.trajectory import Origin, Tokens, is_teacher
from rollout_inspector.text.tokenizers import ByteTable, TokenizerUnusable
from rollout_inspector.text.tokenizers.byte_table import special_tokens
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import byte_table
from rollouts.store.text import without_paths
from rollouts.store.trajectories import trajectory_parts as parts
from rollouts.store.trajectories.rows import Span, row_spans, row_window
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


def read_turns(
    trajectory: models.StoredTrajectory, row: RowSummary, steps: Sequence[StepSummary],
    findings: Sequence[DrawnFinding], tokens: Tokens, within: tuple[int, int] | None = None,
) -> list[Turn]:
    """The turns of a row, or those that touch the tokens ``within``. ``tokens``: the whole row. At most one query. A
    turn is one message of the stream. All pages number them here, so a message that is read again keeps its number."""
    table, _ = table_of(trajectory.run.tokenizer)
    headers = [] if table is None else role_turns(tokens.ids, special_tokens(table, tokens.ids), table.token_bytes)
    if not row.follows_steps:
        is_sampled = tokens.origin_known and bool((tokens.origin == Origin.SAMPLED).any())
        parts_of_row = cut_at_headers(origin_spans(tokens.origin), headers) if is_sampled else header_spans(headers)
        own = _numbered(parts_of_row or origin_spans(tokens.origin), within)
        return make_turns(own, {}, findings, row.index, None, {}, tokens.loss_mask)
    spans = row_spans(row.handle, steps)
    if spans and any(step.index == spans[0].step_index and step.parent is not None for step in steps):
        spans[0] = replace(spans[0], part="history")  # it holds earlier turns once more
    numbered = _numbered(cut_at_headers(spans, headers), within)
    indices = frozenset(span.step_index for _, span in numbered if span.step_index is not None)
    # The roles of the new messages of a step, after ``history`` when it shares earlier messages.
    bodies = parts.new_messages(trajectory, indices)
    roles = {index: ["history"] * bool(shared) + roles_of(body) for index, shared, body in bodies}
    reasons = {step.index: step.finish_reason for step in steps}
    return make_turns(numbered, roles, findings, row.index, row.steps, reasons)


def _numbered(spans: Iterable[Span], within: tuple[int, int] | None) -> list[tuple[int, Span]]:
    """The spans with their numbers in the row, from 1; of them those that touch the tokens ``within``."""
    numbered = enumerate(spans, start=1)
    if within is None:
        return list(numbered)
    start, stop = within
    return [(number, span) for number, span in numbered if span.start <= stop and span.stop >= start]


MISMATCH = "mismatch"
"""A lens of two columns: the trainer's logprob minus the sampler's, which is the log of the importance ratio."""
REVERSE_KL = "reverse_kl:"
"""What the name of a lens begins with that is the sampler's logprob minus a teacher's; the teacher's column follows."""


def read_columns(trajectory: models.StoredTrajectory) -> dict[int, list[str]]:
    """Row index -> names of its lenses from a trainer's columns. One query, which reads no array."""
    names_of_row = parts.column_names(trajectory)
    for names in names_of_row.values():
        if any(name in names for name in TRAINER_LOGPROBS):
            names.insert(0, MISMATCH)
        names[:0] = [REVERSE_KL + name for name in names if is_teacher(name)]
    return names_of_row


def read_values(trajectory: models.StoredTrajectory, row: RowSummary, name: str) -> NDArray[np.float32]:
    """One whole column ``[n]`` of a row, because the scale of its colours is that of the row."""
    if name == MISMATCH:
        return _less_the_sampler(trajectory, row, TRAINER_LOGPROBS)
    if name.startswith(REVERSE_KL):
        return -_less_the_sampler(trajectory, row, [name.removeprefix(REVERSE_KL)])
    return np.asarray(parts.column_values(trajectory, row.index, [name])[name])


def _less_the_sampler(
    trajectory: models.StoredTrajectory, row: RowSummary, names: Sequence[str]
) -> NDArray[np.float32]:
    """The first of these columns that the row has, minus the sampler's, under the loss mask ``[n]``."""
    columns = parts.column_values(trajectory, row.index, names)
    trainer = next(columns[name] for name in names if name in columns)
    tokens = read_tokens(trajectory, row, 0, len(trainer))
    difference = np.full(len(tokens), np.nan, dtype=np.float32)
    if tokens.logprobs is not None:
        trained = tokens.loss_mask
        difference[trained] = trainer[: len(tokens)][trained] - tokens.logprobs[trained]
    return difference


def read_tokens(
    trajectory: models.StoredTrajectory, row: RowSummary, start: int, stop: int,
    steps: Sequence[StepSummary] | None = None,
) -> Tokens:
    """The tokens ``[start, stop)`` of a row. ``steps``: all of the trajectory, where they are known. A log-probability
    that a file holds for a token which nobody sampled is left out: it is padding."""
    tokens = row_window(trajectory, row.handle, start, stop, steps)
    if tokens.logprobs is None:
        return tokens
    others = tokens.origin != Origin.SAMPLED if tokens.origin_known else tokens.logprobs == 0
    return replace(tokens, logprobs=np.where(others & ~np.asarray(tokens.loss_mask), np.nan, tokens.logprobs))
