"""The types of what a caller sends: a page, the API and an export read a value by the same rule."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.store.models import WorkStatus

MAX_TEXT = 200  # Characters of a text of an address.


def storable(text: str) -> str:
    """The text. Raises ``ValueError`` where it holds U+0000, which no database stores."""
    if "\0" in text:
        raise ValueError("This holds the character U+0000, which cannot be stored. Remove it.")
    return text


def among(names: Sequence[str]) -> AfterValidator:
    """Accepts the empty text and these names."""

    def check(text: str) -> str:
        if text and text not in names:
            context = {"text": repr(text[:40]), "names": ", ".join(names)}
            raise PydanticCustomError("unknown_name", "There is no {text} here. Known: {names}.", context)
        return text

    return AfterValidator(check)


def listed(names: Sequence[str]) -> WithJsonSchema:
    """What the schema says of ``among``."""
    return WithJsonSchema({"type": "string", "enum": ["", *names]})


Text = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(storable)]  # A text of a parameter, without U+0000.
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
SEVERITIES = tuple(severity.value for severity in Severity)
STATUSES = tuple(WorkStatus.values)
YES_NO = ("yes", "no")
COMMENTS = ("open", "any")
SORTED_COLUMNS = (
    "index", "reward", "n_tokens", "n_findings", "n_rows", "n_steps", "n_sampled", "n_trained", "n_lost",
    "training_step", "group", "stop_reason", "damage",
)
"""The columns by which a list of trajectories can be sorted."""
SORTS = tuple(sign + column for column in SORTED_COLUMNS for sign in ("", "-"))
"""The orders of a list of trajectories; a minus sign means descending."""
KindName = Annotated[str, among(tuple(KINDS)), listed(tuple(KINDS))]
StatusName = Annotated[str, among(STATUSES), listed(STATUSES)]
SeverityName = Annotated[str, among(SEVERITIES), listed(SEVERITIES)]
YesNo = Annotated[str, among(YES_NO), listed(YES_NO)]
CommentsName = Annotated[str, among(COMMENTS), listed(COMMENTS)]
MutedName = Annotated[str, among(("hide",)), listed(("hide",))]
SortName = Annotated[str, among(SORTS), listed(SORTS)]
