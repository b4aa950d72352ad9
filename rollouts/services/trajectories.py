"""Writing trajectories: steps delta-coded, rows merged, contents stored once, totals kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from rollouts import models
from rollouts.formats.containers.json_text import canonical_json
from rollouts.services.bulk import bare, insert_whole, reserve_keys
from rollouts.services.contents import Contents
from rollouts.services.findings import add_findings, worst_severity
from rollouts.tito import segments
from rollouts.tito.diagnose.finding import Finding
from rollouts.tito.prefix import delta_of, links_of, merge_steps
from rollouts.tito.trajectory import Ids, Link, Row, Step, Trajectory


class TokenTable(Protocol):
    """What tells the text of a token: ``rollouts.tokenizers.ByteTable``."""

    vocab_size: int
    special: Any

    def joined(self, ids: Ids) -> tuple[bytes, Any]: ...


@dataclass
class Rows:
    """What one trajectory becomes in the tables."""

    trajectory: models.StoredTrajectory
    steps: list[models.StoredStep]
    step_tokens: list[models.StepTokens]
    rows: list[models.StoredRow]
    row_tokens: list[models.RowTokens]
    columns: list[models.RowColumn]


def save_trajectories(
    run: models.Run,
    trajectories: Sequence[Trajectory],
    findings: Sequence[Sequence[Finding]] | None = None,
    base_index: int | None = None,
    token_table: TokenTable | None = None,
) -> list[models.StoredTrajectory]:
    """Store finished trajectories in one transaction, and bump the run's totals.

    ``findings[i]`` belongs to ``trajectories[i]``. ``base_index`` is the first one's position in the run
    (default: after the last). With a ``token_table`` the origin of the tokens between completions is
    found where no strategy wrote it.
    """
    if not trajectories:
        return []
    links = [links_of(trajectory) for trajectory in trajectories]
    merged = [
        [] if trajectory.rows else merge_steps(trajectory.steps, links[n]) for n, trajectory in enumerate(trajectories)
    ]
    with transaction.atomic():
        if base_index is None:
            last = run.trajectories.aggregate(last=Max("index"))["last"]
            base_index = 0 if last is None else last + 1
        contents = Contents()
        trajectory_keys = reserve_keys(models.StoredTrajectory, len(trajectories))
        step_keys = reserve_keys(models.StoredStep, sum(len(trajectory.steps) for trajectory in trajectories))
        row_keys = reserve_keys(
            models.StoredRow, sum(len(trajectory.rows) or len(merged[n]) for n, trajectory in enumerate(trajectories))
        )
        built = []
        now = timezone.now()
        for n, trajectory in enumerate(trajectories):
            record = bare(
                models.StoredTrajectory,
                id=next(trajectory_keys),
                run_id=run.pk,
                index=base_index + n,
                external_id=trajectory.external_id,
                group=trajectory.group,
                stop_reason=trajectory.stop_reason,
                reward=trajectory.reward,
                reward_parts=dict(trajectory.reward_parts),
                tokenizer_name=trajectory.tokenizer,
                extra_id=contents.add_unless_empty(trajectory.extra),
                created_at=now,
                finished_at=now,
            )
            built.append(_build(record, trajectory, links[n], merged[n], contents, step_keys, row_keys, token_table))
        _set_finding_totals([one.trajectory for one in built], findings)
        contents.save()
        insert_whole([one.trajectory for one in built])
        insert_whole([step for one in built for step in one.steps])
        insert_whole([tokens for one in built for tokens in one.step_tokens])
        insert_rows(built)
        counts: Counter[str] = Counter()
        if findings is not None:
            counts = add_findings(
                run, [(one.trajectory, found) for one, found in zip(built, findings, strict=True) if found]
            )
        records = [one.trajectory for one in built]
        bump_run(
            run,
            counts,
            n_trajectories=len(records),
            n_finished=len(records),
            n_steps=sum(record.n_steps for record in records),
            n_rows=sum(record.n_rows for record in records),
            n_tokens=sum(record.n_tokens for record in records),
            n_sampled=sum(record.n_sampled for record in records),
            **reward_totals(record.reward for record in records),
        )
    return records


def insert_rows(built: Iterable[Rows]) -> None:
    built = list(built)
    insert_whole([row for one in built for row in one.rows])
    insert_whole([tokens for one in built for tokens in one.row_tokens])
    models.RowColumn.objects.bulk_create([column for one in built for column in one.columns])


def _set_finding_totals(
    records: Sequence[models.StoredTrajectory], findings: Sequence[Sequence[Finding]] | None
) -> None:
    if findings is None:
        return
    for record, found in zip(records, findings, strict=True):
        record.n_findings = len(found)
        record.worst_severity = worst_severity(finding.severity for finding in found)


def reward_totals(rewards: Iterable[float | None]) -> dict[str, float]:
    """What scored trajectories add to the totals of their run."""
    known = [reward for reward in rewards if reward is not None]
    return {"n_rewards": len(known), "reward_sum": sum(known)}


def bump_run(run: models.Run, counts: Mapping[str, int], **added: float) -> None:
    """Add to the run's totals. The row is locked, because the counts of findings are read and written back."""
    held = models.Run.objects.select_for_update().get(pk=run.pk)
    kinds = Counter(held.finding_counts)
    kinds.update(counts)
    values: dict[str, Any] = {name: getattr(held, name) + value for name, value in added.items()}
    values["finding_counts"] = {kind: n for kind, n in kinds.items() if n > 0}
    models.Run.objects.filter(pk=run.pk).update(**values)
    for name, value in values.items():
        setattr(run, name, value)


# -- one trajectory as table rows


def _build(
    record: models.StoredTrajectory,
    trajectory: Trajectory,
    links: Sequence[Link],
    merged: Sequence[tuple[int, ...]],
    contents: Contents,
    step_keys: Any,
    row_keys: Any,
    token_table: TokenTable | None,
) -> Rows:
    built = Rows(record, [], [], [], [], [])
    row_of_step = _row_of_step([row.step_indices for row in trajectory.rows] or merged)
    messages: list[list[str]] = []
    later: list[tuple[models.StepTokens, Step, int]] = []
    for index, (step, link) in enumerate(zip(trajectory.steps, links, strict=True)):
        parent = built.steps[link.parent] if link.parent is not None else None
        texts = message_texts(step)
        shared = leading_equal(messages[link.parent], texts) if link.parent is not None else 0
        messages.append(texts)
        stored = make_step(
            record.pk, index, step, link, parent.pk if parent else None, texts, shared, contents, next(step_keys)
        )
        stored.row_index = row_of_step.get(index, 0)
        built.steps.append(stored)
        built.step_tokens.append(make_step_tokens(stored, step, link))
        if link.parent is not None:
            later.append((built.step_tokens[-1], step, shared))
    if token_table is not None:
        derive_origins(later, token_table)
    if trajectory.rows:
        for index, row in enumerate(trajectory.rows):
            _add_stored_row(built, index, row, contents, next(row_keys))
    else:
        for index, chain in enumerate(merged):
            built.rows.append(_merged_row(built.steps, record, index, chain, next(row_keys)))
    set_totals(record, built.steps, built.rows)
    return built


def set_totals(
    record: models.StoredTrajectory, steps: Sequence[models.StoredStep], rows: Sequence[models.StoredRow]
) -> None:
    """Counts of a trajectory, from the columns of its steps and rows. Rows alone count their own tokens."""
    record.n_steps, record.n_rows = len(steps), len(rows)
    record.n_trained = sum(row.n_trained for row in rows)
    if steps:
        record.n_sampled = sum(step.completion_length for step in steps)
        record.n_tokens = record.n_sampled + sum(step.prompt_length - step.shared_length for step in steps)
    else:
        record.n_sampled = record.n_trained
        record.n_tokens = sum(row.n_tokens for row in rows)


def _row_of_step(chains: Iterable[tuple[int, ...]]) -> dict[int, int]:
    return {step: index for index, chain in enumerate(chains) for step in chain}


def message_texts(step: Step) -> list[str]:
    """Each message of the request as JSON text; empty when the request is not known."""
    return [canonical_json(message) for message in step.request.messages] if step.request else []


def leading_equal(left: Sequence[str], right: Sequence[str]) -> int:
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n


def make_step(
    trajectory_key: int,
    index: int,
    step: Step,
    link: Link,
    parent_key: int | None,
    texts: Sequence[str],
    messages_shared: int,
    contents: Contents,
    key: int,
) -> models.StoredStep:
    """The columns of a step."""
    request = step.request
    return bare(
        models.StoredStep,
        id=key,
        trajectory_id=trajectory_key,
        index=index,
        parent_id=parent_key,
        shared_length=link.shared_length,
        parent_length=link.parent_length,
        prompt_length=len(step.prompt_ids),
        completion_length=len(step.completion_ids),
        finish_reason=step.finish_reason,
        stop_reason=step.stop_reason,
        logprobs_mode=step.logprobs_mode,
        temperature=step.temperature,
        top_p=step.top_p,
        top_k=step.top_k,
        engine=step.engine,
        policy_version=step.policy_version,
        chat_template_sha256=step.chat_template_sha256,
        messages_shared=messages_shared,
        messages_new_id=contents.add_text(f"[{','.join(texts[messages_shared:])}]") if request else None,
        tools_id=contents.add(request.tools) if request and request.tools is not None else None,
        template_kwargs_id=contents.add_unless_empty(request.chat_template_kwargs) if request else None,
        reply_id=contents.add(step.reply) if step.reply is not None else None,
        text_id=contents.add(step.text) if step.text is not None else None,
        extra_id=contents.add_unless_empty(step.extra),
    )


def make_step_tokens(stored: models.StoredStep, step: Step, link: Link) -> models.StepTokens:
    """The arrays of a step: what it adds to its parent's stream, with the origin that a strategy wrote, if one did."""
    delta, origin = delta_of(step, link), step.delta_origin
    return bare(
        models.StepTokens,
        step_id=stored.pk,
        delta_ids=delta,
        delta_origin=origin if origin is not None and len(origin) == len(delta) else None,
        completion_ids=step.completion_ids,
        logprobs=step.logprobs,
    )


def derive_origins(
    steps: Iterable[tuple[models.StepTokens, Step, int]], token_table: TokenTable
) -> list[models.StepTokens]:
    """Find who wrote each token between completions where no strategy told: template scaffold or observation.

    For steps that have a parent, each with how many of its messages the parent had; gives those that gained their
    origins. The bytes of all deltas are gathered at once.
    """
    asked = [
        (tokens, step.request.messages[shared:] if step.request else ())
        for tokens, step, shared in steps
        if step.delta_origin is None and len(tokens.delta_ids)
    ]
    if not asked:
        return []
    ids = np.concatenate([tokens.delta_ids for tokens, _ in asked])
    whole, ends = token_table.joined(ids)
    offsets = np.concatenate([[0], ends])
    special = np.asarray(token_table.special).take(ids, mode="clip") & (ids >= 0) & (ids < token_table.vocab_size)
    stops = np.cumsum([len(tokens.delta_ids) for tokens, _ in asked]).tolist()
    origins = segments.origins_of_texts(whole, offsets, special, stops, [messages for _, messages in asked])
    for (tokens, _), start, stop in zip(asked, [0, *stops[:-1]], stops, strict=True):
        tokens.delta_origin = origins[start:stop]
    return [tokens for tokens, _ in asked]


def _merged_row(
    steps: Sequence[models.StoredStep],
    record: models.StoredTrajectory,
    index: int,
    step_indices: tuple[int, ...],
    key: int,
) -> models.StoredRow:
    last = steps[step_indices[-1]]
    return bare(
        models.StoredRow,
        id=key,
        trajectory_id=record.pk,
        index=index,
        last_step_id=last.pk,
        n_tokens=last.prompt_length + last.completion_length,
        n_trained=sum(steps[i].completion_length for i in step_indices),
        step_indices=list(step_indices),
    )


def _add_stored_row(built: Rows, index: int, row: Row, contents: Contents, key: int) -> None:
    stored = bare(
        models.StoredRow,
        id=key,
        trajectory_id=built.trajectory.pk,
        index=index,
        n_tokens=len(row.ids),
        n_trained=int(np.count_nonzero(row.loss_mask)),
        step_indices=list(row.step_indices),
        extra_id=contents.add_unless_empty(row.extra),
    )
    built.rows.append(stored)
    built.row_tokens.append(
        bare(
            models.RowTokens,
            row_id=stored.pk,
            ids=row.ids,
            loss_mask=row.loss_mask,
            logprobs=row.logprobs,
            origin=row.origin,
        )
    )
    built.columns.extend(
        models.RowColumn(row_id=stored.pk, name=name, values=values) for name, values in row.columns.items()
    )


def build_rows(
    record: models.StoredTrajectory,
    steps: Sequence[models.StoredStep],
    values: Sequence[Step],
    rows: Sequence[Row] | None,
    links: Sequence[Link],
    contents: Contents,
    keys: Iterator[int] | None = None,
    merged: Sequence[tuple[int, ...]] | None = None,
) -> Rows:
    """The rows of a trajectory whose steps are stored already.

    ``keys``: reserved ones, when rows of several trajectories go in together. ``merged``: the merged steps, if known.
    """
    built = Rows(record, list(steps), [], [], [], [])
    if rows is not None:
        keys = keys or reserve_keys(models.StoredRow, len(rows))
        for index, row in enumerate(rows):
            _add_stored_row(built, index, row, contents, next(keys))
        row_of_step = _row_of_step(row.step_indices for row in rows)
    else:
        merged = merge_steps(values, links) if merged is None else merged
        keys = keys or reserve_keys(models.StoredRow, len(merged))
        for index, chain in enumerate(merged):
            built.rows.append(_merged_row(steps, record, index, chain, next(keys)))
        row_of_step = _row_of_step(merged)
    for step in steps:
        step.row_index = row_of_step.get(step.index, 0)
    return built


def fill_origins(
    trajectories: Sequence[models.StoredTrajectory], values: Sequence[Trajectory], token_table: TokenTable
) -> int:
    """Find the origin of tokens between completions where it is not known yet; gives how many steps gained it.

    For trajectories that were stored before a tokenizer was chosen. ``values[i]`` is ``trajectories[i]`` as loaded.
    """
    filled: list[models.StepTokens] = []
    for trajectory, value in zip(trajectories, values, strict=True):
        if not any(step.delta_origin is None for step in value.steps[1:]):
            continue
        stored = trajectory.steps.select_related("tokens").filter(parent__isnull=False).order_by("index")
        filled += derive_origins(
            [(one.tokens, value.steps[one.index], one.messages_shared) for one in stored], token_table
        )
    with transaction.atomic():
        for tokens in filled:
            tokens.save(update_fields=["delta_origin"])
    return len(filled)
