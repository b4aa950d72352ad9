"""Replay strategies over a trajectory or all of a run, and print the rows that result."""

import json
from argparse import ArgumentParser
from typing import Any

import numpy as np
from django.core.management.base import CommandError

from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.strategies.replay import StrategyResult
from rollout_inspector.streams.trajectory import Origin, Row
from rollout_inspector.text import tokenizers
from rollout_inspector.text.tokenizers import LoadedTokenizer
from rollouts.jobs.replays import replay_context, trajectory_replays
from rollouts.management import TerminalCommand
from rollouts.management.arguments import read_chat_template, run_and_trajectories_named
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import load_tokenizer, tokenizer_named


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("target", metavar="RUN_OR_TRAJECTORY", help="a code")
        parser.add_argument("--strategy", default="all", help=f"all, or one of: {', '.join(STRATEGIES)}")
        parser.add_argument("--tokenizer", default="", help="a registered name or a folder (default: the run's)")
        parser.add_argument("--chat-template", default="", metavar="FILE", help="or renderer:NAME (default: the run's)")
        parser.add_argument("--no-rows", action="store_true", help="leave the rows' arrays out of the JSON")
        parser.add_argument("--json", action="store_true", help="print one JSON list")

    def handle(self, *_: Any, **options: Any) -> None:
        slugs = list(STRATEGIES) if options["strategy"] == "all" else [options["strategy"]]
        if slugs[0] not in STRATEGIES:
            raise CommandError(
                f"There is no strategy named {slugs[0]!r}; choose all or one of {', '.join(STRATEGIES)}."
            )
        run, trajectories = run_and_trajectories_named(options["target"])
        records = replay_context.loaded_trajectories(trajectories)
        values = []
        text = read_chat_template(options["chat_template"]) if options["chat_template"] else None
        of_run = replay_context.context_of(run, _chosen(run, options["tokenizer"]), text)
        for record, results in replay_context.replayed(records, slugs, *of_run):
            for result in results:
                if options["json"]:
                    values.append(_json(record, result, not options["no_rows"]))
                else:
                    self.stdout.write(_line(record, result))
        if options["json"]:
            self.stdout.write(json.dumps(values))


def _chosen(run: models.Run, named: str) -> LoadedTokenizer | None:
    """The registered tokenizer of a name, or the tokenizer of a folder; None = the run's own."""
    if not named:
        return None
    registered = tokenizer_named(run.project_id, named)
    try:
        return tokenizers.load(named) if registered is None else load_tokenizer(registered.files_sha256)
    except (ValueError, OSError) as error:
        raise CommandError(f"The tokenizer {named} cannot be used: {error}") from error


def _json(record: models.StoredTrajectory, result: StrategyResult, with_rows: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "trajectory": record.code, "external_id": record.external_id, **trajectory_replays.figures(result),
    }
    if with_rows:
        values["rows"] = [_row(row) for row in result.rows]
    return values


def _row(row: Row) -> dict[str, Any]:
    logprobs = None
    if row.logprobs is not None:
        logprobs = [float(value) if np.isfinite(value) else None for value in row.logprobs]
    return {
        "ids": row.ids.tolist(),
        "loss_mask": row.loss_mask.astype(int).tolist(),
        "logprobs": logprobs,
        "origin": None if row.origin is None else [Origin(value).slug for value in row.origin.tolist()],
    }


def _line(record: models.StoredTrajectory, result: StrategyResult) -> str:
    if result.refused:
        return f"{record.code}  {result.slug:<17} refused: {result.refused}"
    where = result.differs_at
    place = "as recorded" if where is None else f"differs at step {where[0]}, token {where[1]}"
    frozen = f" (frozen up to step {result.frozen_steps}, where history was rewritten)" if result.frozen_steps else ""
    return (
        f"{record.code}  {result.slug:<17} {len(result.rows)} rows, {result.trained_tokens} trained, "
        f"{result.lost_tokens} lost of {result.sampled_tokens} sampled{frozen}, "
        f"{result.prompt_tokens_repaid} repaid, {place}"
    )
