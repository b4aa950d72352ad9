"""The table of a step's fields against the columns of the database."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rollouts.fields import ArrayField
from rollouts.models import Content, StepTokens, StoredStep
from rollouts.tito.coding import REQUEST_FIELDS, STEP_FIELDS, CodedStep, Kept
from rollouts.tito.trajectory import Link

TABLE = (*STEP_FIELDS, *REQUEST_FIELDS)
PLACE = {"id", "trajectory_id", "index", "prompt_length", "completion_length", "row_index"}
"""Columns that say where a step lies and how long it is."""
CODED = {"parent_id" if one.name == "parent" else one.name for one in fields(Link)} | set(CodedStep._fields) - {"link"}
"""What the codec makes."""
ARRAYS = {"delta_ids", "delta_origin"}
"""Those of them that are arrays."""


def columns(model: Any) -> dict[str, Any]:
    return {field.attname: field for field in model._meta.concrete_fields}


def test_every_column_of_a_step_is_in_the_table() -> None:
    kept = {one.attribute for one in TABLE if one.kept in (Kept.INLINE, Kept.CONTENT)}
    coded = {"messages_new_id" if name == "messages_new" else name for name in CODED - ARRAYS}
    assert set(columns(StoredStep)) == PLACE | coded | kept
    assert set(columns(StepTokens)) == {"step_id"} | ARRAYS | {one.attribute for one in TABLE if one.kept is Kept.ARRAY}


def test_each_column_holds_what_the_table_says() -> None:
    for one in TABLE:
        if one.kept is Kept.INLINE:
            assert (columns(StoredStep)[one.attribute].max_length or 0) == one.limit, one.name
        elif one.kept is Kept.CONTENT:
            assert columns(StoredStep)[one.attribute].related_model is Content, one.name
        elif one.kept is Kept.ARRAY:
            assert isinstance(columns(StepTokens)[one.attribute], ArrayField), one.name
