"""The diagnosis of trajectories, with the tokenizer and the chat templates of their run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from rollouts import chat_templates, models, selectors, services, tokenizers
from rollouts.tito.codec import Codec, Renderer
from rollouts.tito.diagnose.finding import Axis, Finding, Severity
from rollouts.tito.trajectory import Trajectory

log = logging.getLogger(__name__)

BATCH = 20
"""Trajectories that are held at once while a run is judged."""


def codec_of(run: models.Run) -> Codec | None:
    """The run's tokenizer in memory; None without one, or when its folder is gone."""
    if run.tokenizer is None:
        return None
    try:
        return tokenizers.load(run.tokenizer.path)
    except ValueError as error:
        log.warning("tokenizer of run %s cannot be loaded: %s", run.code, error)
        return None


@lru_cache(maxsize=64)
def _renderer(tokenizer_path: str, sha256: str) -> Renderer | None:
    template = models.ChatTemplate.objects.filter(pk=sha256).first()
    return None if template is None else chat_templates.renderer(tokenizers.load(tokenizer_path), template.text)


def renderer_for(run: models.Run) -> Callable[[str], Renderer | None]:
    """The renderer of a step's chat template by its sha256; empty = the run's own template."""

    def find(sha256: str) -> Renderer | None:
        sha256 = sha256 or run.chat_template_id or ""
        if not sha256 or run.tokenizer is None:
            return None
        try:
            return _renderer(run.tokenizer.path, sha256)
        except ValueError:
            return None

    return find


def findings_for(trajectory: Trajectory, run: models.Run) -> list[Finding]:
    """What is wrong with a trajectory. A fault of the diagnosis itself becomes a finding, never an exception."""
    try:
        from rollouts.tito.diagnose import diagnose

        return list(diagnose(trajectory, codec_of(run), renderer_for(run)))
    except Exception as error:
        log.exception("diagnosis failed run=%s trajectory=%s", run.code, trajectory.external_id)
        return [
            Finding(
                Axis.STREAM,
                "not_decidable",
                Severity.WARNING,
                evidence=f"The diagnosis itself failed on this trajectory ({type(error).__name__}: {error}).",
                remedy="Nothing can be said about it. Please report it together with the file.",
                missing="a diagnosis that works",
            )
        ]


def _byte_table(run: models.Run) -> tokenizers.ByteTable | None:
    if run.tokenizer is not None:
        with contextlib.suppress(OSError, ValueError):
            return tokenizers.byte_table(run.tokenizer.path, services.byte_tables_folder())
    return None


def diagnose_and_save(run: models.Run, trajectories: Iterable[models.Trajectory] | None = None) -> int:
    """Judge finished trajectories anew (default: all of the run), in place of the old findings; gives how many."""
    if trajectories is None:
        trajectories = run.trajectories.filter(status=models.Trajectory.Status.DONE).order_by("index").iterator(BATCH)
    n = 0
    pile: list[models.Trajectory] = []
    for trajectory in trajectories:
        pile.append(trajectory)
        if len(pile) == BATCH:
            n += _judge(run, pile)
            pile = []
    return n + _judge(run, pile)


def _judge(run: models.Run, pile: Sequence[models.Trajectory]) -> int:
    if not pile:
        return 0
    values = list(selectors.load_trajectories(pile))
    if (table := _byte_table(run)) is not None:
        services.fill_origins(pile, values, table)
    found = [findings_for(value, run) for value in values]
    services.replace_findings(run, list(zip(pile, found, strict=True)))
    return len(pile)
