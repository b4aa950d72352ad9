"""The arrays of one step or row, as every store keeps them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rollouts.store.fields import ArrayField, IdsField
from rollouts.store.models import RowTokens, StepTokens

Arrays = Mapping[str, NDArray[Any] | None]
"""Name -> values ``[n]``. The names are those of the columns of ``StepTokens`` or ``RowTokens``."""


def _fields(model: Any) -> dict[str, ArrayField]:
    return {field.attname: field for field in model._meta.concrete_fields if isinstance(field, ArrayField)}


STEP_ARRAYS = _fields(StepTokens)  # The arrays of a step, each with its type.
ROW_ARRAYS = _fields(RowTokens)  # The arrays of a row, each with its type.
ALTERNATIVES = ("alternative_ids", "alternative_logprobs", "kept_ids")
"""The arrays of a step that are several times as long as its completion. A page reads them for few tokens."""
_IDS = tuple(
    name
    for name, field in {**STEP_ARRAYS, **ROW_ARRAYS}.items()
    if isinstance(field, IdsField) and name not in ALTERNATIVES
)
COLUMNS = "columns"  # The name of the trainer's columns of a row among the columns of a segment.


class TokenItem(NamedTuple):
    """The arrays of one step, or of one row that has its own."""

    trajectory: str  # The code of its trajectory.
    step: int | None  # The index of the step; None for a row.
    row: int | None  # The index of the row; None for a step.
    arrays: Arrays
    """The names of ``STEP_ARRAYS`` or ``ROW_ARRAYS``. None = not recorded, which is not the same as empty."""
    columns: Mapping[str, NDArray[Any]] | None = None  # The trainer's columns of a row; None for a step.

    @property
    def n_tokens(self) -> int:
        """How many ids it holds."""
        return sum(len(values) for name in _IDS if (values := self.arrays.get(name)) is not None)


def step_item(trajectory: str, index: int, tokens: StepTokens) -> TokenItem:
    """The item of a step."""
    return TokenItem(trajectory, index, None, {name: getattr(tokens, name) for name in STEP_ARRAYS})


def row_item(trajectory: str, index: int, row: Any, columns: Mapping[str, NDArray[Any]]) -> TokenItem:
    """The item of a row that has its own arrays, from a ``Row`` or ``RowTokens``."""
    return TokenItem(trajectory, None, index, {name: getattr(row, name) for name in ROW_ARRAYS}, columns)
