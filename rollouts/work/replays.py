"""Replays of strategies over stored trajectories. A page asks for one and a worker makes it."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from django.db import transaction
from django.db.models import Count, QuerySet, Sum

from rollouts import chat_templates, models, selectors, tokenizers
from rollouts.models import Job, Replay, ReplayRows, Run, StoredTrajectory
from rollouts.replies.call_readers import parser_of
from rollouts.selectors.activity import is_active
from rollouts.services.jobs import Beat, JobFailed, JobLost, ask_job, end_job
from rollouts.services.shards import shards_of
from rollouts.services.text import without_paths
from rollouts.services.tokenizers import load_tokenizer
from rollouts.tito.batches import batched
from rollouts.tito.interfaces import RenderFailed
from rollouts.tito.strategies import STRATEGIES, Context, StrategyRefused
from rollouts.tito.strategies.replay import StrategyResult as Made
from rollouts.tito.strategies.replay import lacks_reply, replay_many, with_replies
from rollouts.tito.trajectory import Ids, Origin, Row
from rollouts.tito.trajectory import Trajectory as Value
from rollouts.tokenizers.pieces import PieceEncoder
from rollouts.work import renderers_package
from rollouts.work.ranges import LAST, cut_run, finished_trajectories, range_of

VERSION = 7
"""Raise it when a strategy makes other rows than before: stored replays are then stale."""

MAX_STEPS = 500
MAX_FORWARDED_TOKENS = 8_000_000
"""Prompt and completion tokens over all steps. Some strategies render and encode all of them."""

RUN_BATCH = 20
"""Trajectories of a run that are loaded at once."""

MAX_KEPT_TOKENS = 3_000_000
"""Tokens of one strategy's rows that are stored for the comparison. Of larger rows only the figures are stored."""


class CannotReplay(ValueError):
    """No strategy can be replayed; the message is a sentence that says what is missing."""


def template_text(run: Run) -> str | None:
    """The run's chat template, else its tokenizer's own."""
    if run.chat_template is not None:
        return run.chat_template.text
    own = run.tokenizer.chat_template if run.tokenizer is not None else None
    return own.text if own is not None else None


def missing(trajectory: StoredTrajectory) -> str:
    """Why no strategy can be replayed over a trajectory, as a sentence; empty = at least the step-wise ones can."""
    if trajectory.n_steps:
        return ""
    return (
        "It came as training rows without steps, and a strategy is replayed over steps: prompts, completions and "
        "the messages between them. Import what the rollout side recorded to see this page."
    )


def all_installed() -> bool:
    """Whether no strategy lacks its optional package."""
    return not any(one.missing() for one in STRATEGIES.values())


def key_of(trajectory: StoredTrajectory) -> str:
    """The hash of all that a replay depends on. A stored replay with another key is stale."""
    counted = trajectory.attempt, trajectory.n_steps, trajectory.n_tokens, trajectory.status
    return _key(trajectory.run, *counted)


def _key(run: Run, *counted: Any) -> str:
    parts = (
        VERSION, sorted(STRATEGIES), all_installed(), *counted,
        run.tokenizer.sha256 if run.tokenizer else "", hashlib.sha256((template_text(run) or "").encode()).hexdigest(),
        *filter(None, [run.rows_chat_template_id]),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def ask(trajectory: StoredTrajectory, again: bool = False, user: Any = None) -> tuple[Replay, bool]:
    """The replay of a trajectory, and whether a worker has to be sent for it. ``again`` retries a failed replay."""
    key = key_of(trajectory)
    with transaction.atomic():
        made, created = Replay.objects.get_or_create(trajectory=trajectory, defaults={"key": key})
        if not created and not (
            is_active(made.job) or made.key != key or (again and made.job.status == Job.Status.FAILED)
        ):
            return made, False
        made.job, is_new = ask_job(made, Job.Kind.REPLAY_TRAJECTORY, user=user)
        if is_new:
            made.key, made.report = key, None
            made.save(update_fields=["key", "report"])
    return made, is_new


def current(trajectory: StoredTrajectory) -> Replay | None:
    """The stored replay of a trajectory if it is not stale or a worker is making it now; else None."""
    made = Replay.objects.select_related("job").filter(trajectory=trajectory).first()
    if made is None or not (made.key == key_of(trajectory) or is_active(made.job)):
        return None
    return made


def do_job(job: Job, beat: Beat) -> None:
    """Replay every strategy over a trajectory and store figures and rows."""
    made = Replay.objects.get(job=job)
    record = StoredTrajectory.objects.select_related(
        "run__tokenizer__chat_template", "run__chat_template", "run__rows_chat_template"
    ).get(pk=made.trajectory_id)
    beat()
    made.key = key_of(record)
    made.save(update_fields=["key"])
    try:
        results = _replayed(record)
    except (CannotReplay, RenderFailed, OSError, ValueError) as error:
        raise JobFailed(str(error)) from error
    made.report = {"strategies": [figures(result) for result in results]}
    kept = [_kept(made, result) for result in results if result.rows]
    with transaction.atomic():
        if not end_job(job, Job.Status.DONE):
            raise JobLost
        made.rows.all().delete()
        ReplayRows.objects.bulk_create([rows for rows in kept if rows is not None])
        made.save(update_fields=["report"])


def _replayed(record: StoredTrajectory) -> list[Made]:
    reason = missing(record)
    if reason:
        raise CannotReplay(reason)
    (value,) = selectors.load_trajectories([record])
    forwarded = sum(len(step.prompt_ids) + len(step.completion_ids) for step in value.steps)
    if len(value.steps) > MAX_STEPS or forwarded > MAX_FORWARDED_TOKENS:
        raise CannotReplay(
            f"With {len(value.steps):,} steps that forward {forwarded:,} tokens it is too long for this page, which "
            f"takes {MAX_STEPS:,} steps and {MAX_FORWARDED_TOKENS:,} tokens. On a command line there is no limit: "
            f"manage.py replay {record.code}"
        )
    context, loaded = context_of(record.run)
    (made,) = replay_many([complete_replies(value, loaded, context)], list(STRATEGIES.values()), context)
    return made


# -- a whole run -------------------------------------------------------------------------------------------------------

MAX_REASONS = 3
"""Sentences of a strategy's refusals that are kept, the most frequent ones."""


def run_key(run: Run) -> str:
    """The hash of all that the replay of a run depends on."""
    return _key(run, run.n_trajectories, run.n_finished, run.n_steps, run.n_tokens)


def new_report(run: Run, first: int = 0, last: int = LAST) -> dict[str, Any]:
    """The report of a range of a run before any trajectory was replayed, with the figures of the stored rows."""
    finished = finished_trajectories(run, first, last).order_by()
    rows = models.StoredRow.objects.filter(trajectory__in=finished.values("pk"))
    stored = rows.aggregate(rows=Count("pk"), tokens=Sum("n_tokens"), trained=Sum("n_trained"))
    return {
        "key": run_key(run),
        "recorded": {"rows": stored["rows"], "tokens": stored["tokens"] or 0, "trained": stored["trained"] or 0},
        "strategies": [
            {"strategy": slug, "trajectories": 0, "refused": 0, "why": {}, **dict.fromkeys(_SUMMED, 0), "differing": 0}
            for slug in STRATEGIES
        ],
    }


_SUMMED = {
    "rows": "rows_count", "tokens": "tokens", "trained": "trained_tokens", "sampled": "sampled_tokens",
    "lost": "lost_tokens", "repaid": "prompt_tokens_repaid",
}  # fmt: skip
"""Figure of a run -> the figure of its trajectories that is summed."""


def replay_run(run: Run, report: dict[str, Any], after: int = -1, last: int = LAST) -> Generator[int]:
    """Replay every strategy over the finished trajectories after the index ``after``, and add them to the report.

    Yields the index of each trajectory that was added; ``last`` is the index of the last one. A trajectory that cannot
    be replayed counts as refused.
    """
    context, loaded = context_of(run)
    pending: deque[StoredTrajectory] = deque()

    def values() -> Iterator[Value]:
        for record, value in loaded_trajectories(finished_trajectories(run, after + 1, last)):
            pending.append(record)
            yield complete_replies(value, loaded, context)

    for made in replay_many(values(), list(STRATEGIES.values()), context):
        record = pending.popleft()
        _add(report, made)
        yield record.index


def do_run_job(job: Job, beat: Beat) -> None:
    """Replay every strategy over a run. The report of an earlier worker is continued."""
    do_shard(job, beat)
    join(job, beat)


def cut(job: Job, beat: Beat) -> list[dict[str, int]]:
    """The ranges of trajectories that workers replay side by side; empty = the run is small."""
    return cut_run(_run_of(job), job, beat)


def do_shard(job: Job, beat: Beat) -> dict[str, Any]:
    """Replay every strategy over the trajectories that the options of a job or of a shard name.

    Returns the columns to store at its end: the report, and the number of trajectories.
    """
    run, first, last = _run_of(job), *range_of(job)
    if job.report is None or job.report["key"] != run_key(run):
        job.report, job.reached = new_report(run, first, last), first - 1
    of_job = finished_trajectories(run, first, last)
    n_done = of_job.filter(index__lte=job.reached).count()
    beat(n_done=n_done, n_total=of_job.count(), report=job.report, reached=job.reached)
    with closing(replay_run(run, job.report, job.reached, last)) as made:
        for index in made:
            n_done += 1
            beat.now_and_then(n_done=n_done, report=job.report, reached=index)
    return {"report": job.report, "n_done": n_done}


def join(job: Job, beat: Beat) -> None:
    """End a replay: its report is the sum of the reports of its shards, in their order."""
    run = _run_of(job)
    reports = [one.report or {} for one in shards_of(job) or [job]]
    total = new_report(run, 0, -1)
    if any(report.get("key") != total["key"] for report in reports):
        raise JobFailed("The run changed while it was replayed. Replay it again.")
    for report in reports:
        _merge(total, report)
    for line in total["strategies"]:
        line["why"] = _most_frequent(line["why"])
    end_job(job, Job.Status.DONE, report=total, n_done=total["strategies"][0]["trajectories"])


def _run_of(job: Job) -> Run:
    found = Run.objects.select_related("tokenizer__chat_template", "chat_template")
    run = found.filter(jobs=job.whole_id or job.pk).first()
    if run is None:
        raise JobLost
    return run


def loaded_trajectories(records: QuerySet[StoredTrajectory]) -> Iterator[tuple[StoredTrajectory, Value]]:
    """Yields records with their values. One batch of records is in memory at a time."""
    for batch in batched(records.iterator(RUN_BATCH), RUN_BATCH):
        yield from zip(batch, selectors.load_trajectories(batch), strict=True)


def _add(report: dict[str, Any], made: Sequence[Made]) -> None:
    for line, one in zip(report["strategies"], made, strict=True):
        line["trajectories"] += 1
        if one.refused:
            line["refused"] += 1
            line["why"][one.refused] = line["why"].get(one.refused, 0) + 1
            continue
        of_one = figures(one)
        for name, figure in _SUMMED.items():
            line[name] += of_one[figure]
        line["differing"] += one.differs_at is not None


def _merge(total: dict[str, Any], report: dict[str, Any]) -> None:
    """Add the figures of a report to those of another one."""
    for line, one in zip(total["strategies"], report["strategies"], strict=True):
        line["why"] = dict(Counter(line["why"]) + Counter(one["why"]))
        for name in ("trajectories", "refused", *_SUMMED, "differing"):
            line[name] += one[name]
    for name, n in report["recorded"].items():
        total["recorded"][name] += n


def _most_frequent(why: dict[str, int]) -> dict[str, int]:
    """The sentences that are kept of why trajectories were refused."""
    return dict(sorted(why.items(), key=lambda item: (-item[1], item[0]))[:MAX_REASONS])


def context_of(
    run: Run, chosen: tokenizers.LoadedTokenizer | None = None, chat_template: str | None = None
) -> tuple[Context, tokenizers.LoadedTokenizer | None]:
    """The context of a run's strategies, for one thread. ``chosen`` and ``chat_template`` replace the run's own.

    Where the run lacks what a render needs, the context says so. Raises :class:`CannotReplay` with a sentence where
    ``chosen`` or ``chat_template`` cannot be used.
    """
    try:
        return _rendering(run, chosen, chat_template)
    except CannotReplay as error:
        if chosen or chat_template:
            raise
        return Context.without_renderer(str(error)), None


def _rendering(
    run: Run, chosen: tokenizers.LoadedTokenizer | None, chat_template: str | None
) -> tuple[Context, tokenizers.LoadedTokenizer]:
    is_other = bool(chosen or chat_template)
    if chosen is None and run.tokenizer is None:
        raise CannotReplay(
            "The run has no tokenizer, and this strategy renders and encodes. Choose one under “Diagnose again” on the "
            "page of the run, or name one with --tokenizer."
        )
    try:
        loaded = chosen or load_tokenizer(run.tokenizer.files_sha256 if run.tokenizer else "")
    except (ValueError, OSError) as error:
        raise CannotReplay(without_paths(f"The tokenizer cannot be used: {error}")) from error
    rows = run.rows_chat_template if chat_template is None else None
    text = chat_template or (run.chat_template.text if run.chat_template is not None else loaded.chat_template)
    if text is None:
        raise CannotReplay(
            "Neither the run nor its tokenizer has a chat template, and this strategy renders messages. Import the "
            "files with the template that made them, or name it with --chat-template FILE."
        )
    try:
        pieces = PieceEncoder(loaded)
    except tokenizers.TokenizerUnusable as error:
        raise CannotReplay(f"The tokenizer cannot be used: {error}") from error

    def encode(text: str) -> Ids:
        try:
            return pieces.encode(text)
        except tokenizers.TokenizerUnusable as error:
            raise StrategyRefused(f"A text of this trajectory cannot be encoded. {error}") from error

    renderer = chat_templates.PrefetchingRenderer(loaded, text, encode, prefetch=pieces.prefetch)
    context = Context(
        loaded, renderer, loaded.stop_ids, encode=encode, bridge=renderers_package.bridges_of(loaded, renderer),
        keeps_prompts=not is_other,
    )  # fmt: skip
    if rows is not None:
        of_rows = Context(loaded, chat_templates.renderer(loaded, rows.text), loaded.stop_ids, encode=encode)
        context = replace(context, rows=of_rows)
    return context, loaded


def complete_replies(value: Value, loaded: tokenizers.LoadedTokenizer | None, context: Context) -> Value:
    """The trajectory with a message for every completion. The parser is loaded only if a message is missing."""
    if loaded is None or not lacks_reply(value):
        return value
    return with_replies(value, parser_of(loaded, context.renderer))


def figures(made: Made) -> dict[str, Any]:
    """The figures of what one strategy makes of a trajectory."""
    return {
        "strategy": made.slug,
        "parameters": dict(STRATEGIES[made.slug].parameters),
        "refused": made.refused or None,
        "trained_tokens": made.trained_tokens,
        "sampled_tokens": made.sampled_tokens,
        "trained_share": made.trained_share,
        "frozen_steps": made.frozen_steps,
        "lost_tokens": made.lost_tokens,
        "prompt_tokens_repaid": made.prompt_tokens_repaid,
        "rows_count": len(made.rows),
        "tokens": sum(len(row.ids) for row in made.rows),
        "differs_at": None
        if made.differs_at is None
        else {"step": made.differs_at.step, "offset": made.differs_at.offset},
    }


def _kept(made: Replay, result: Made) -> ReplayRows | None:
    if sum(len(row.ids) for row in result.rows) > MAX_KEPT_TOKENS:
        return None
    return ReplayRows(
        replay=made,
        strategy=result.slug,
        lengths=[len(row.ids) for row in result.rows],
        ids=np.concatenate([row.ids for row in result.rows]),
        loss_mask=np.concatenate([row.loss_mask for row in result.rows]),
        origin=None
        if any(row.origin is None for row in result.rows)
        else np.concatenate([row.origin for row in result.rows if row.origin is not None]),
    )


def row_of(stored: ReplayRows, index: int) -> Row:
    """The row at an index of the rows that a strategy made. Without recorded origins every token has ``prompt``."""
    stops = np.cumsum(stored.lengths)
    part = slice(int(stops[index]) - stored.lengths[index], int(stops[index]))
    origin = stored.origin[part] if stored.origin is not None else np.full(stored.lengths[index], Origin.PROMPT, "u1")
    return Row(stored.ids[part], stored.loss_mask[part], origin=origin)


def stored_rows(made: Replay, strategies: Sequence[str]) -> dict[str, models.ReplayRows]:
    """Strategy -> its stored rows. Strategies whose rows were not stored are left out. One query."""
    return {rows.strategy: rows for rows in made.rows.filter(strategy__in=strategies)}
