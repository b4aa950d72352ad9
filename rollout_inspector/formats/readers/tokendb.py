"""Segments of Tinker cookbook's tokendb, Parquet or lines: a row is a turn, its observation mostly what it adds. Facts:
the table in ``tinker_cookbook/tokendb/README.md`` of thinking-machines-lab/tinker-cookbook, schema version 2."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollout_inspector.formats import shapes
from rollout_inspector.formats.call_fields import rows_with_columns
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.readers.sessions import Session, read_sessions, session_parts
from rollout_inspector.formats.registry import NO_REQUESTS, Format, Rejected, having
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Floats, Step, Trajectory

_PLACE = ("split", "iteration", "group_idx", "traj_idx")
_OF_EPISODE = (
    "split", "iteration", "run_id", "run_attempt", "env_row_id", "source", "filtered_reason", "tags", "attrs"
)
_TURN = ("ob_tokens", "ob_is_delta", "ac_tokens", "ac_logprobs", "sampling_client_step", "stop_reason", "total_reward",
         "ac_text", "step_idx", "group_idx", "traj_idx", "token_metrics", *_OF_EPISODE)
_METRICS = "token_metrics"


def read(source: Source) -> Iterator[Trajectory | Rejected]:
    for item in read_sessions(source, _name, _add_turn):
        yield _with_columns(item) if isinstance(item, Trajectory) else item


def _name(value: Mapping[str, Any], number: int) -> str:
    """Of a resumed run each attempt is a trajectory of its own."""
    attempt = value.get("run_attempt")
    parts = [shapes.text(value.get(name), name, 60) for name in _PLACE]
    return "/".join([*parts, f"attempt-{attempt}"] if type(attempt) is int and attempt else parts)


def _add_turn(session: Session, value: dict[str, Any]) -> None:
    prompt = shapes.ids(value.get("ob_tokens"), "ob_tokens")
    if value.get("ob_is_delta"):
        if session.last is None or value.get("step_idx") != len(session.steps):
            raise BadLine("ob_tokens is what the turn before lacks, and that turn is not on the lines before.")
        prompt = np.concatenate([session.last.stream, prompt])
    session.group = "/".join(session.external_id.split("/")[:3])
    session.reward = shapes.number(value.get("total_reward"), "total_reward")
    session.stop_reason = shapes.text(value.get("filtered_reason"), "filtered_reason", 60)
    session.extra |= shapes.filled({name: value.get(name) for name in _OF_EPISODE})
    session.append(Step(
        prompt_ids=prompt, completion_ids=shapes.ids(value.get("ac_tokens"), "ac_tokens"),
        logprobs=shapes.optional_floats(value.get("ac_logprobs"), "ac_logprobs"),
        policy_version=shapes.text(value.get("sampling_client_step"), "sampling_client_step", 100),
        finish_reason=shapes.text(value.get("stop_reason"), "stop_reason", 30),
        text=shapes.optional_string(value.get("ac_text"), "ac_text"),
        extra=shapes.filled({**shapes.rest(value, _TURN), _METRICS: value.get(_METRICS)}),
    ))


def _with_columns(trajectory: Trajectory) -> Trajectory:
    """Values for each sampled token, such as a teacher's log-probabilities, as columns of the rows."""
    columns: list[dict[str, Floats]] = []
    for step in trajectory.steps:
        metrics = step.extra.get(_METRICS)
        pairs = list(metrics.items() if isinstance(metrics, dict) else metrics if isinstance(metrics, list) else ())
        pairs = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]  # a map of Parquet
        values = {str(name)[:60]: shapes.spare(shapes.floats, items, _METRICS) for name, items in pairs}
        n = len(step.completion_ids)
        columns.append({name: item for name, item in values.items() if item is not None and len(item) == n})
    steps = tuple(replace(step, extra=shapes.rest(step.extra, (_METRICS,))) for step in trajectory.steps)
    names = dict.fromkeys(name for step_columns in columns for name in step_columns)
    return replace(trajectory, steps=steps, rows=rows_with_columns(steps, columns, names))


FORMAT = Format(
    "tokendb", "Tinker cookbook tokendb segments", having("ob_tokens", "ac_tokens", "traj_idx"), read, NO_REQUESTS,
    cut=partial(session_parts, session_id=_name), by_line=False,
)
