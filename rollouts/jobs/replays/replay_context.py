"""What a replay needs of a run: its tokenizer, its chat templates and its trajectories, each reply with its message."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

from django.db.models import QuerySet

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.strategies import STRATEGIES, Context, StrategyRefused
from rollout_inspector.streams.strategies.replay import StrategyResult, lacks_reply, replay_many, with_replies
from rollout_inspector.streams.trajectory import Ids, Trajectory
from rollout_inspector.text import chat_templates, tokenizers
from rollout_inspector.text.replies.parsing import parser_of
from rollout_inspector.text.tokenizers.pieces import PieceEncoder
from rollouts.jobs.replays import renderers_package
from rollouts.store.chat_templates.chat_templates import faults_in
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.text import without_paths
from rollouts.store.trajectories.trajectories import load_trajectories, trajectory_batches

BATCH = 20  # Trajectories that are loaded at once.

Key = TypeVar("Key")


def template_text(run: Run) -> str | None:
    """The run's chat template, else its tokenizer's own."""
    if run.chat_template is not None:
        return run.chat_template.text
    own = run.tokenizer.chat_template if run.tokenizer is not None else None
    return own.text if own is not None else None


def context_of(
    run: Run, chosen: tokenizers.LoadedTokenizer | None = None, chat_template: str | None = None
) -> tuple[Context, tokenizers.LoadedTokenizer | None]:
    """The context of a run's strategies, for one thread. ``chosen`` and ``chat_template`` replace the run's own. Where
    the run lacks what a render needs, the context says so. Raises :class:`Refusal` with a sentence where ``chosen`` or
    ``chat_template`` cannot be used."""
    try:
        return _rendering(run, chosen, chat_template)
    except Refusal as error:
        if chosen or chat_template:
            raise
        return Context.without_renderer(str(error)), None


def _rendering(
    run: Run, chosen: tokenizers.LoadedTokenizer | None, chat_template: str | None
) -> tuple[Context, tokenizers.LoadedTokenizer]:
    is_other = bool(chosen or chat_template)
    if chosen is None and run.tokenizer is None:
        raise Refusal(
            "The run has no tokenizer, and this strategy renders and encodes. Diagnose the run again with a tokenizer, "
            "or name one for the replay."
        )
    try:
        loaded = chosen or load_tokenizer(run.tokenizer.files_sha256 if run.tokenizer else "")
    except (ValueError, OSError) as error:
        raise Refusal(without_paths(f"The tokenizer cannot be used: {error}")) from error
    rows = run.rows_chat_template if chat_template is None else None
    text = chat_template or (run.chat_template.text if run.chat_template is not None else loaded.chat_template)
    if text is None:
        raise Refusal(
            "Neither the run nor its tokenizer has a chat template, and this strategy renders messages. Import the "
            "files with the template that made them, or name it for the replay."
        )
    try:
        pieces = PieceEncoder(loaded)
    except tokenizers.TokenizerUnusable as error:
        raise Refusal(f"The tokenizer cannot be used: {error}") from error

    def encode(text: str) -> Ids:
        try:
            return pieces.encode(text)
        except tokenizers.TokenizerUnusable as error:
            raise StrategyRefused(f"A text of this trajectory cannot be encoded. {error}") from error

    faults = faults_in(run.pk, text)
    renderer = chat_templates.renderer(loaded, text, faults=faults)
    if not chat_templates.is_renderer(text):
        renderer = chat_templates.PrefetchingRenderer(loaded, text, encode, prefetch=pieces.prefetch, faults=faults)
    context = Context(
        loaded, renderer, loaded.stop_ids, fast_encode=encode, bridge=renderers_package.bridges_of(loaded, renderer),
        keeps_prompts=not is_other,
    )
    if rows is not None:
        row_renderer = chat_templates.renderer(loaded, rows.text, faults=faults_in(run.pk, rows.text))
        of_rows = Context(loaded, row_renderer, loaded.stop_ids, fast_encode=encode)
        context = replace(context, rows=of_rows)
    return context, loaded


def complete_replies(value: Trajectory, loaded: tokenizers.LoadedTokenizer | None, context: Context) -> Trajectory:
    """The trajectory with a message for every completion. The parser is loaded only if a message is missing."""
    if loaded is None or not lacks_reply(value):
        return value
    return with_replies(value, parser_of(loaded, context.renderer))


def replayed(
    items: Iterable[tuple[Key, Trajectory]], slugs: Iterable[str], context: Context,
    loaded: tokenizers.LoadedTokenizer | None,
) -> Generator[tuple[Key, list[StrategyResult]]]:
    """What strategies make of trajectories, each with what stands before it in ``items``."""
    pending: deque[Key] = deque()

    def values() -> Iterator[Trajectory]:
        for key, value in items:
            pending.append(key)
            yield complete_replies(value, loaded, context)

    with closing(replay_many(values(), [STRATEGIES[slug] for slug in slugs], context)) as results:
        for result in results:
            yield pending.popleft(), result


def loaded_trajectories(records: QuerySet[StoredTrajectory]) -> Iterator[tuple[StoredTrajectory, Trajectory]]:
    """Yields records with their values. One batch of records is in memory at a time."""
    for batch in trajectory_batches(records, BATCH):
        yield from zip(batch, load_trajectories(batch), strict=True)
