"""The gradient of the rows as they are against that of what was sampled: the terms of both, by finding. A policy
gradient is a sum of terms ``weight * gradient of log p(token | tokens before it)``. Decision 0058 says what counts as
sampled. A term that both sides have cancels; each other one belongs to the finding that explains it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout_inspector.diagnose.finding import Finding, Severity
from rollout_inspector.diagnose.gap.figures import trainer_column
from rollout_inspector.diagnose.loss_weights.figures import rows_of, stretches
from rollout_inspector.diagnose.loss_weights.row_weights import (
    ADVANTAGES, advantage_column, loss_inputs, row_weights, with_columns_of
)
from rollout_inspector.diagnose.loss_weights.rules import RULES, Values
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.align import sampled_in_row
from rollout_inspector.streams.prefix import common_prefix, merge_steps, row_of
from rollout_inspector.streams.trajectory import Floats, Ids, Origin, Row, Step, Trajectory

_UNKNOWN = ("token_ids_missing", "tokenizer_mismatch")  # Kinds that say that nobody knows what was sampled.
_OTHER = "logprobs_other_distribution"  # The kind of wrong values of the trainer's own column.
_VALUES = ("columns_shifted", "logprob_invalid", _OTHER, "advantage_misplaced")
"""Kinds of wrong values on right tokens."""
_FLIPPED = (
    "observation_trained", "generation_prompt_trained", "appended_eos_trained", "separator_trained", "sampled_masked",
    "stop_token_untrained",
)
"""Kinds at whose places the mask is the opposite of what it should be."""
_TRAINER = "trainer_logprobs"


@dataclass(frozen=True, eq=False)
class DamageCase:
    """A trajectory whose damage can be measured."""

    sequences: tuple[Ids, ...]  # What the model reads, each once.
    rows: tuple[tuple[Row, int, int, int], ...]
    """Each row as it is; the sequence that it is, one of what was sampled, and how many leading tokens both share."""
    sampled: tuple[tuple[Row, int], ...]  # The rows of what was sampled, and the sequence that each is.
    causes: tuple[Ids, ...]
    """For each sequence ``[T]`` the number of the finding that explains a difference there, from 1; 0 = none."""
    rule: str
    temperature: float  # Of the sampling. The gradient is that of the distribution at this temperature.

    def weights(self, scores: Sequence[Floats]) -> tuple[list[Values], dict[int, list[Values]], list[Values]]:
        """For each sequence ``[T]`` the weights of what was sampled; by finding those of the rows minus these; of rows.
        ``scores``: the model's log-probabilities of each sequence. They stand for what the trainer's columns lack."""
        sampled, difference = ([np.zeros(len(ids)) for ids in self.sequences] for _ in range(2))
        for row, n in self.sampled:
            sampled[n] += (weights := _weights(row, self.rule, scores[n]))
            difference[n] -= weights
        of_rows = []
        for row, n, other, shared in self.rows:
            of_rows.append(weights := _weights(row, self.rule, scores[n]))
            difference[other][:shared] += weights[:shared]  # the same terms stand in what was sampled
            difference[n][shared:] += weights[shared:]
        differing = [cause[part != 0] for cause, part in zip(self.causes, difference, strict=True)]
        by_finding = {
            number: [np.where(cause == number, part, 0.0) for cause, part in zip(self.causes, difference, strict=True)]
            for number, _ in Counter(np.concatenate(differing).tolist()).most_common()
        }
        return sampled, by_finding, of_rows


def damage_case(value: Trajectory, findings: Sequence[Finding], advantage: float | None, rule: str = "") -> DamageCase:
    """What is to be measured of a trajectory. ``findings`` in reading order; ``advantage`` of its group, if any.
    ``rule``: a slug of ``RULES``; empty = GRPO where the trainer's log-probabilities are known, else no correction.
    Raises :class:`Refusal` with a sentence where nobody knows what was sampled."""
    chains = merge_steps(value.steps)
    rows = value.rows or tuple(row_of(value.steps, chain) for chain in chains)
    if any(finding.kind in _UNKNOWN for finding in findings):
        raise Refusal("It is not known what was sampled: the recorded ids are not those of the engine.")
    if any(len(row.loss_mask) != len(row.ids) for row in rows):
        raise Refusal("A loss mask has another length than its ids, so it is not known which tokens are trained.")
    rule = rule or ("grpo" if any(map(trainer_column, rows)) else "uncorrected")
    columns = [row.columns[name][row.loss_mask] for row in rows if (name := advantage_column(row))]
    advantages = np.concatenate([np.zeros(0), *columns])
    advantages = advantages[np.isfinite(advantages) & (advantages != 0)]
    # Where it is 0 or not known, 1 serves: it scales both gradients alike.
    level = float(np.median(advantages)) if len(advantages) else advantage or 1.0
    rows = tuple(_completed(row, level) for row in rows)
    has_steps = bool(chains) and all(row.step_indices and max(row.step_indices) < len(value.steps) for row in rows)
    if has_steps:
        for repeated in [finding.step for finding in findings if finding.kind == "duplicate_call" and finding.step]:
            prompt = value.steps[repeated].prompt_ids
            same = [chain for chain in chains if np.array_equal(value.steps[chain[0]].prompt_ids, prompt)]
            chains = [chain for chain in chains if chain not in same or chain == max(same, key=len)]
        sampled = [_as_sampled(row_of(value.steps, chain), rows, value.steps, findings, level) for chain in chains]
    else:
        sampled, chains = _without_steps(rows, findings, level), []
    number_of: dict[bytes, int] = {}
    numbers = [number_of.setdefault(row.ids.tobytes(), len(number_of)) for row in (*sampled, *rows)]
    sequences = tuple(np.frombuffer(key, dtype=np.int32) for key in number_of)
    shared = []
    for row in rows:
        lengths = [(common_prefix(row.ids, other.ids), -n) for n, other in enumerate(sampled)]
        length, index = max(lengths, default=(0, 0))
        shared.append((numbers[-index], length))
    temperatures = {step.temperature for step in value.steps}
    as_is = tuple((row, n, *pair) for row, n, pair in zip(rows, numbers[len(sampled) :], shared, strict=True))
    chain_of = {step: n for n, chain in zip(numbers, chains, strict=False) for step in chain}
    causes = _causes(value, as_is, chain_of, sequences, findings)
    return DamageCase(
        sequences, as_is, tuple(zip(sampled, numbers, strict=False)), causes, rule,
        (temperatures.pop() if len(temperatures) == 1 else None) or 1.0,
    )


def _completed(row: Row, level: float) -> Row:
    """The row with advantages, log-probabilities and a trainer's column; NaN = the model is to be asked."""
    n, column, trainer = len(row.ids), advantage_column(row), trainer_column(row)
    advantages = row.columns[column] if column else np.zeros(n, np.float32)
    unknown = np.full(n, np.nan, np.float32)
    logprobs = row.logprobs if row.logprobs is not None and len(row.logprobs) == n else unknown
    return replace(row, logprobs=logprobs, columns={
        ADVANTAGES: advantages if advantages[row.loss_mask].any() else np.full(n, level, np.float32),
        _TRAINER: row.columns[trainer] if trainer and len(row.columns[trainer]) == n else unknown,
    })


def _has_right_values(
    findings: Sequence[Finding], rows: Sequence[Row], index: int, kinds: Sequence[str] = _VALUES
) -> bool:
    return not any(finding.kind in kinds and index in rows_of(finding, rows) for finding in findings)


def _as_sampled(row: Row, rows: Sequence[Row], steps: Sequence[Step], findings: Sequence[Finding], level: float) -> Row:
    """A row that follows from steps, with the values that the stored rows have for the same tokens."""
    forwarded = [stored for n, stored in enumerate(rows) if _has_right_values(findings, rows, n, [_OTHER])]
    row = _completed(with_columns_of(row, forwarded, with_advantages=False), level)
    for stored in (stored for n, stored in enumerate(rows) if _has_right_values(findings, rows, n)):
        for start, step, offset, n in sampled_in_row(steps, stored):
            if step in row.step_indices:
                at = len(steps[step].prompt_ids) + offset
                row.columns[ADVANTAGES][at : at + n] = stored.columns[ADVANTAGES][start : start + n]
    is_invalid = any(finding.kind == "logprob_invalid" and finding.step in row.step_indices for finding in findings)
    return replace(row, logprobs=None) if is_invalid else row


def _without_steps(rows: Sequence[Row], findings: Sequence[Finding], level: float) -> list[Row]:
    """Rows with the mask and the values that they should have. Raises :class:`Refusal` where nobody can tell."""
    sampled = []
    for index, row in enumerate(rows):
        own = [finding for finding in findings if finding.step is None and finding.row == index]
        kinds, mask = {finding.kind for finding in own}, row.loss_mask.copy()
        if row.origin is not None and len(row.origin) == len(row.ids) and (row.origin == Origin.SAMPLED).any():
            mask = row.origin == Origin.SAMPLED
        elif kinds & {"mask_overrun", "row_not_sampled"}:
            raise Refusal("It is not known what was sampled: the rows came without steps, and no origin says it.")
        else:
            for start, stop in (place for finding in own if finding.kind in _FLIPPED for place in finding.stretches):
                mask[start:stop] ^= True
        is_wrong = not _has_right_values(findings, rows, index)
        advantages = np.where(is_wrong | (mask & ~row.loss_mask), np.float32(level), row.columns[ADVANTAGES])
        mended = replace(row, loss_mask=mask, columns={**row.columns, ADVANTAGES: advantages})
        sampled += [] if "trained_twice" in kinds else [replace(mended, logprobs=None) if is_wrong else mended]
    return sampled


def _weights(row: Row, rule: str, scores: Floats) -> Values:
    """The weight of each token ``[T]``, 0 outside the mask. A ratio that is not known is 1."""
    trainer = np.where(np.isfinite(row.columns[_TRAINER]), row.columns[_TRAINER], scores)
    sampler = trainer if row.logprobs is None else np.where(np.isfinite(row.logprobs), row.logprobs, trainer)
    columns = {ADVANTAGES: np.nan_to_num(row.columns[ADVANTAGES]), _TRAINER: trainer}
    mask = row.loss_mask & (np.arange(len(row.ids)) > 0)  # nothing stands before the first token
    inputs, weights = loss_inputs(replace(row, loss_mask=mask, logprobs=sampler, columns=columns)), np.zeros(len(mask))
    assert inputs is not None
    weights[inputs.offsets] = np.nan_to_num(row_weights(inputs, RULES[rule]).values)
    return weights


def _causes(
    value: Trajectory, rows: Sequence[tuple[Row, int, int, int]], chain_of: dict[int, int], sequences: Sequence[Ids],
    findings: Sequence[Finding],
) -> tuple[Ids, ...]:
    """The finding that marks a token, of several the one of fewest tokens; else the nearest before it; else the first.
    Notes explain nothing."""
    marks: list[tuple[int, Ids, int]] = []
    for number, finding in enumerate(findings, start=1):
        if finding.severity == Severity.INFO:
            continue
        if finding.step in chain_of:
            marks.append((chain_of[finding.step], _offsets(finding.stretches), number))
        for index in rows_of(finding, [row for row, *_ in rows]):
            row, own, other, shared = rows[index]
            offsets = _offsets(stretches(finding, value, [row for row, *_ in rows], index) or [(0, 1)])
            marks += [(own, offsets, number), (other, np.minimum(offsets, shared), number)]
    causes = tuple(np.zeros(len(ids), np.int32) for ids in sequences)
    for is_cause in (False, True):  # what a row trains instead is the consequence of a break, where one is found
        chosen = [mark for mark in marks if (findings[mark[2] - 1].kind != "row_not_sampled") == is_cause]
        for n, offsets, number in sorted(chosen, key=lambda mark: int(mark[1].min())):
            causes[n][int(offsets.min()) if causes[n].any() else 0 :] = number
        for n, offsets, number in sorted(chosen, key=lambda mark: -len(mark[1])):
            causes[n][offsets[offsets < len(causes[n])]] = number
    for row, own, other, shared in rows:  # a token that stands behind other tokens: one finding explains both terms
        for start, step, offset, n in sampled_in_row(value.steps, row) if chain_of else []:
            at = len(value.steps[step].prompt_ids) + offset - start
            for first, last, place in ((start, min(start + n, shared), other), (max(start, shared), start + n, own)):
                if step in chain_of and first < last and (place, 0) != (chain_of[step], at):
                    here, there = causes[place][first:last], causes[chain_of[step]][first + at : last + at]
                    here[:] = there[:] = np.where(here, here, there)
    repeated = next((n for n, finding in enumerate(findings, start=1) if finding.kind == "duplicate_call"), 0)
    return tuple(cause if cause.any() else np.full_like(cause, repeated) for cause in causes)


def _offsets(places: Sequence[tuple[int, int]]) -> Ids:
    return np.concatenate([np.arange(start, max(stop, start + 1), dtype=np.int32) for start, stop in places])
