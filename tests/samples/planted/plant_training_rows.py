"""Faults of training rows, planted in the row of a clean conversation."""

from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Trajectory
from tests.samples.planted.plant_setup import PLANTERS, CannotPlant, Case, ModelSetup, planter


def clean_row(s: ModelSetup) -> tuple[Trajectory, Row]:
    """A conversation, and its row as a trainer writes it: with advantages, without origins."""
    trajectory = PLANTERS["clean"](s).trajectory
    rows = merged_rows(trajectory.steps)
    if len(rows) != 1:
        raise CannotPlant("several rows")
    logprobs = np.nan_to_num(rows[0].logprobs)
    advantages = np.where(rows[0].loss_mask, 0.7, 0).astype(np.float32)
    return trajectory, replace(rows[0], logprobs=logprobs, columns={"advantages": advantages}, origin=None)


def moved(values: Any, by: int) -> Any:
    """A column that stands some places late, or early; 0 moves in."""
    there = np.roll(values, by)
    there[: max(by, 0)] = 0
    there[len(there) + min(by, 0) :] = 0
    return there


def all_moved(row: Row, by: int) -> Row:
    columns = {name: moved(values, by) for name, values in row.columns.items()}
    return replace(row, loss_mask=moved(row.loss_mask, by), logprobs=moved(row.logprobs, by), columns=columns)


def to_the_end(row: Row) -> Row:
    mask = np.arange(len(row.ids)) >= row.loss_mask.argmax()
    return replace(row, loss_mask=mask, logprobs=None, columns={})


def alone(row: Row) -> Trajectory:
    return Trajectory("planted", rows=(replace(row, step_indices=()),))


@planter
def clean_row_alone(s: ModelSetup) -> Case:
    return Case("clean_row_alone", alone(clean_row(s)[1]), None, None)


@planter
def advantages_of_all_tokens(s: ModelSetup) -> Case:
    """One advantage for every token: a masked loss ignores the masked ones."""
    row = clean_row(s)[1]
    same = {"advantages": np.full(len(row.ids), 0.7, dtype=np.float32)}
    return Case("advantages_of_all_tokens", alone(replace(row, columns=same)), None, None)


@planter
def all_columns_shifted(s: ModelSetup) -> Case:
    row = all_moved(clean_row(s)[1], s.rng.choice((1, -1, 2)))
    return Case("all_columns_shifted", alone(row), "columns_shifted", None)


@planter
def all_columns_shifted_beside_steps(s: ModelSetup) -> Case:
    trajectory, row = clean_row(s)
    rows = (all_moved(row, s.rng.choice((1, -1, 2))),)
    return Case("all_columns_shifted_beside_steps", replace(trajectory, rows=rows), "columns_shifted", None)


@planter
def mask_to_the_end(s: ModelSetup) -> Case:
    return Case("mask_to_the_end", alone(to_the_end(clean_row(s)[1])), "observation_trained", None)


@planter
def mask_to_the_end_beside_steps(s: ModelSetup) -> Case:
    trajectory, row = clean_row(s)
    trained_whole = replace(trajectory, rows=(to_the_end(row),))
    return Case("mask_to_the_end_beside_steps", trained_whole, "observation_trained", None)
