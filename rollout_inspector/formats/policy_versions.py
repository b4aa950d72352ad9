"""Which policy sampled which tokens, from what slime, miles and SGLang record of a row, or a trainer of a record."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.streams.trajectory import Mask, Trajectory

RUN_LENGTHS = "version_rle"
"""The name in ``extra`` of a row for runs of ``[version, tokens]``, which together are as long as the row."""
VERSION = "policy_version"  # The name in ``extra`` of a row for the one version that sampled all of it.

OF_RECORD = (VERSION, "weight_version")  # Fields of a record that name the one version of all its engine calls.
MAX_VERSION = 100  # Characters of a version that a step holds.


def with_policy_version(trajectory: Trajectory) -> Trajectory:
    """The trajectory, whose engine calls that tell no policy version have that of their record."""
    if not trajectory.steps or not (version := of_record(trajectory.extra)):
        return trajectory
    steps = (step if step.policy_version else replace(step, policy_version=version) for step in trajectory.steps)
    return replace(trajectory, steps=tuple(steps))


def of_record(fields: Mapping[str, Any]) -> str:
    """The policy version that the fields of a record tell; empty = none."""
    for name in OF_RECORD:
        value = fields.get(name)
        if type(value) is int or (isinstance(value, str) and value):
            return str(value)[:MAX_VERSION]
    return ""


def of_row(value: Any, loss_mask: Mask) -> dict[str, Any]:
    """Fields for the ``extra`` of a row: its one version, or its runs; empty where nobody can tell. ``value``: for each
    call of the engine a version, or spans of the row with ``version``, ``abs_start``, ``abs_end``. Versions without
    spans belong to the trained stretches of ``loss_mask`` ``[T]``, if there are as many."""
    if not isinstance(value, list) or not value:
        return {}
    if all(isinstance(version, str | int) and not isinstance(version, bool) for version in value):
        versions = [str(version) for version in value]
        if len(set(versions)) == 1:
            return {VERSION: versions[0]} if versions[0] else {}
        trained = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])) == -1)
        return _runs(versions, trained.tolist(), len(loss_mask)) if len(trained) == len(versions) else {}
    spans = [span for call in value for span in _spans(call)]
    stops = [stop for span in spans if type(stop := span.get("abs_end")) is int]
    if len(stops) != len(spans) or sorted(stops) != stops:
        return {}
    return _runs([str(span.get("version", "")) for span in spans], stops, len(loss_mask))


def _spans(call: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(call, Mapping):
        call = call.get("spans")
    return [span for span in call if isinstance(span, Mapping)] if isinstance(call, list) else []


def _runs(versions: Sequence[str], stops: Sequence[int], length: int) -> dict[str, Any]:
    """Runs up to each stop. Tokens that nobody sampled count with the run behind them, the last ones with the last."""
    if not all(versions) or not stops or stops[-1] > length or stops[0] < 0:
        return {}
    if len(set(versions)) == 1:
        return {VERSION: versions[0]}
    bounds = [0, *stops[:-1], length]
    runs: list[list[Any]] = []
    for version, start, stop in zip(versions, bounds[:-1], bounds[1:], strict=True):
        if runs and runs[-1][0] == version:
            runs[-1][1] += stop - start
        elif stop > start:
            runs.append([version, stop - start])
    return {RUN_LENGTHS: runs}
