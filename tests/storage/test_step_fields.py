"""The table of a step's fields against the columns of the database."""

from dataclasses import fields
from typing import Any

from rollout_inspector.streams.coding import ARRAYS, BODIES, COLUMNS, REQUEST_FIELDS, STEP_FIELDS, CodedStep
from rollout_inspector.streams.trajectory import Link
from rollouts.store.fields import ArrayField
from rollouts.store.models import Content, StepTokens, StoredStep

BODY_KEYS = {one.column for one in (*BODIES, *REQUEST_FIELDS)}
PLACE = {"id", "trajectory_id", "index", "prompt_length", "completion_length", "row_index"}
"""Columns that say where a step lies and how long it is."""
IN_SEGMENT = {"segment_id", "segment_offset", "has_origin"}
"""Columns that say where its arrays are, when a segment has them."""
OF_ARRAYS = {"has_entropy", "n_alternatives", "least_kept"}
"""Columns that tell of an array without reading it."""
CODED = {"parent_id" if one.name == "parent" else one.name for one in fields(Link)} | set(CodedStep._fields) - {"link"}
"""What the codec makes."""
CODED_ARRAYS = {"delta_ids", "delta_origin"}
"""Those of them that are arrays."""


def columns(model: Any) -> dict[str, Any]:
    return {field.attname: field for field in model._meta.concrete_fields}


def test_every_column_of_a_step_is_in_the_table() -> None:
    coded = {"messages_new_id" if name == "messages_new" else name for name in CODED - CODED_ARRAYS}
    assert set(columns(StoredStep)) == PLACE | IN_SEGMENT | OF_ARRAYS | coded | set(COLUMNS) | BODY_KEYS
    assert set(columns(StepTokens)) == {"step_id"} | CODED_ARRAYS | set(ARRAYS)


def test_each_column_holds_what_the_table_says() -> None:
    limits = {one.name: one.limit for one in STEP_FIELDS}
    for name in COLUMNS:
        assert (columns(StoredStep)[name].max_length or 0) == limits[name], name
    for name in BODY_KEYS:
        assert columns(StoredStep)[name].related_model is Content, name
    for name in ARRAYS:
        assert isinstance(columns(StepTokens)[name], ArrayField), name
