"""What can be done to a run that has ended, as a card of its page."""

from typing import Any

from rollout_inspector.diagnose import VERSION
from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs.exports.exports import WRITERS, is_rows, title_of
from rollouts.jobs.launch import served_models
from rollouts.sampling.engines import scoring_engines
from rollouts.store.chat_templates.tokenizers import tokenizer_names
from rollouts.store.models import Run

MAX_TOKENIZERS = 500


def work_card(run: Run, writer: bool) -> dict[str, Any]:
    """The choices of the export form and, for a writer, of the form that diagnoses the run again. One query."""
    can_replay = writer and run.n_steps and run.tokenizer_id is not None
    return {
        "writers": {
            "whole trajectories": [(name, title_of(name)) for name in WRITERS if not is_rows(name)],
            "training rows": [(name, title_of(name)) for name in WRITERS if is_rows(name)],
        },
        "strategies": {slug: spec.about for slug, spec in STRATEGIES.items()} if can_replay else {},
        "version": VERSION,
        "outdated": run.diagnosis_version is not None and run.diagnosis_version < VERSION,
        "models": {name: spec.engine for name, spec in served_models().items()} if writer else {},
        "engines": scoring_engines() if writer else [],
        "tokenizers": tokenizer_names(run.project_id, MAX_TOKENIZERS) if writer else [],
    }
