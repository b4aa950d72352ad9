"""The filter and order of a run's trajectories: read from an address, written to one, and drawn as a form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

from django.http import QueryDict
from pydantic import ValidationError

from rollouts.store.parameters import MAX_TEXT, SortName, Text
from rollouts.store.trajectory_filters import INPUTS, PARAMETERS, TrajectoryFilters

ORDERS = {
    "index": "run order",
    "-reward": "reward, best first",
    "reward": "reward, worst first",
    "-n_tokens": "longest first",
    "n_tokens": "shortest first",
    "-n_findings": "most findings first",
    "-n_rows": "most rows first",
    "-index": "run order, last first",
}
"""The orders that the list offers; the store has more."""
PERSONAL = tuple(field for field, asked in INPUTS.items() if asked.is_personal)
"""What a visitor does not filter by."""


@dataclass(frozen=True)
class SortHead:
    """The link in the head of a column by which a list can be sorted."""

    url: str
    order: str
    """The order now: ``ascending``, ``descending``, or empty = it is sorted by another column."""
    words: str
    """The order that the link leads to."""


_HEADS = {
    "index": ("index", "-index"), "findings": ("-n_findings", "index"), "reward": ("-reward", "reward"),
    "tokens": ("-n_tokens", "n_tokens"), "rows": ("-n_rows", "index"),
}
"""Column -> the orders that pressing its head leads to, in turn."""


class ListQuery(TrajectoryFilters):
    """The filter and order of a run's list. ``notices`` names each value of its address that was left out."""

    sort: SortName = "index"
    after: Text = ""
    notices: tuple[str, ...] = ()

    @classmethod
    def read(cls, params: QueryDict, reader: int | None) -> Self:
        """From query parameters; never raises.

        ``reader``: the key of the user who asks; None = a visitor, who learns nothing of comments.
        """
        notices: list[str] = []
        values: dict[str, Any] = {}
        for name, parameter in (*PARAMETERS.items(), ("sort", "sort"), ("after", "after")):
            text = params.get(parameter, "").replace("\0", "")[:MAX_TEXT]
            if not text.strip() or (parameter, text) == ("muted", "show"):
                continue
            if name in PERSONAL and reader is None:
                notices.append(f"Only who has a role in the project filters by {parameter}; it was left out.")
                continue
            values[parameter] = True if name == "flawed" else text
        try:
            cls.model_validate(values)
        except ValidationError as error:
            for fault in error.errors():
                parameter = str(fault["loc"][0])
                notices.append(_notice(parameter, values.pop(parameter), fault["type"], fault.get("ctx", {})))
        return cls.model_validate({**values, "reader": reader if values.get("seen") else None, "notices": notices})

    def pairs(self) -> list[tuple[str, str]]:
        """The parameters of this filter and order, without ``after`` and without defaults."""
        chosen = self.model_dump(include={*PARAMETERS, "sort"}, by_alias=True, exclude_defaults=True)
        return [(name, "1" if value is True else f"{value:.9g}" if isinstance(value, float) else str(value))
                for name, value in chosen.items()]

    def query(self, **changes: str) -> str:
        """`?...` with some parameters changed (empty = dropped); empty when nothing is filtered."""
        pairs = {name: value for name, value in {**dict(self.pairs()), **changes}.items() if value}
        return f"?{urlencode(pairs)}" if pairs else ""

    def heads(self) -> dict[str, SortHead]:
        """Column -> the link in its head."""
        heads = {}
        for column, (first, second) in _HEADS.items():
            chosen = self.sort.removeprefix("-") == first.removeprefix("-")
            to = second if self.sort == first else first
            order = ("descending" if self.sort.startswith("-") else "ascending") if chosen else ""
            heads[column] = SortHead(self.query(sort="" if to == "index" else to) or "?", order, ORDERS[to])
        return heads

    @property
    def is_set(self) -> bool:
        """Something is filtered out."""
        return any(name != "sort" for name, _ in self.pairs())


def _notice(parameter: str, text: str, fault: str, context: Mapping[str, Any]) -> str:
    """What the page says about a value that it left out."""
    if fault == "unknown_name":
        return f"There is no {parameter} “{text[:40]}”; it was left out. Known: {context['names']}."
    if fault in ("float_parsing", "finite_number"):
        return f"“{text[:40]}” is not a number, so rewards were not limited by it."
    return f"“{text[:40]}” is not a whole number, so “{parameter}” was left out."


class FilterControl(NamedTuple):
    """An input of the form above the list."""

    name: str
    """The parameter."""
    label: str
    """Empty: it is hidden."""
    value: str
    width: str = ""
    mode: str = ""
    """The keyboard of a number: ``numeric`` or ``decimal``; empty = it takes a text."""
    options: list[tuple[str, str]] | None = None
    """(value, words) of a choice; None = it takes a number or a text."""


def filter_form(
    query: ListQuery, options: Mapping[str, list[tuple[str, str]]], absent: Collection[str]
) -> list[list[FilterControl]]:
    """The inputs of the form, a lower bound with its upper one, the hidden ones last.

    ``options``: (value, words) of the choices that the run decides, by field. ``absent``: fields without an input as
    long as the address has no value for them.
    """
    values = dict(query.pairs())
    groups: list[list[FilterControl]] = []
    for field, (label, _, none, fixed, width, mode, is_upper, _) in INPUTS.items():
        parameter = PARAMETERS[field]
        value = values.get(parameter, "")
        if not label and not value:
            continue
        choices = [("", none), *(options.get(field) or fixed.items())] if none else None
        mode = mode or ("numeric" if TrajectoryFilters.model_fields[field].default is None else "")
        control = FilterControl(parameter, label, value, width, mode, choices)
        if is_upper:
            groups[-1].append(control)
        else:
            groups.append([control])
    names = {PARAMETERS[field] for field in absent}
    groups = [group for group in groups if any(one.value or one.name not in names for one in group)]
    groups.append([FilterControl("sort", "Order", query.sort, options=list(ORDERS.items()))])
    return sorted(groups, key=lambda group: not group[0].label)
