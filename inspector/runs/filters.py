"""The filter and order of a run's trajectories, read from an address."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlencode

from django.http import QueryDict

from inspector.web.twins import whole_number
from rollouts import selectors
from rollouts.models import StoredTrajectory
from rollouts.selectors import TrajectoryFilters
from rollouts.tito.diagnose.finding import Severity

SORTS = {
    "index": "run order",
    "-reward": "reward, best first",
    "reward": "reward, worst first",
    "-n_tokens": "longest first",
    "n_tokens": "shortest first",
    "-n_findings": "most findings first",
    "-n_rows": "most rows first",
    "-index": "run order, last first",
}
"""The orders that the list offers; `selectors.SORTS` knows more."""
STATUSES = tuple(StoredTrajectory.Status.values)
SEVERITIES = tuple(severity.value for severity in Severity)
PARAMETERS = {
    "finding": "kind", "severity": "severity", "status": "status", "stop": "stop_reason", "group": "group",
    "text": "text", "min": "reward_min", "max": "reward_max", "at": "step", "from": "first", "to": "last",
    "tokens_min": "tokens_min", "tokens_max": "tokens_max", "flawed": "flawed", "training_min": "training_min",
    "training_max": "training_max", "policy": "policy_version", "comments": "comments", "muted": "muted",
    "seen": "seen",
}
"""Parameter of an address -> field of the filter. ``step`` means something else on the pages of a trajectory."""

KNOWN = {
    "severity": SEVERITIES, "status": STATUSES, "sort": selectors.SORTS, "comments": ("open", "any"),
    "seen": ("yes", "no"), "muted": ("hide", "show"),
}
"""Parameter -> the values that it takes."""
PERSONAL = ("comments", "seen")
"""Parameters about what members say and do, which a visitor does not see."""


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


@dataclass(frozen=True)
class TrajectoryFilter(TrajectoryFilters):
    """The filter and order of a run's trajectories, read from a URL. ``notices`` names each value that was left out."""

    sort: str = "index"
    after: str = ""
    notices: tuple[str, ...] = ()

    @classmethod
    def read(cls, params: QueryDict, reader: int | None) -> TrajectoryFilter:
        """From query parameters; never raises.

        ``reader``: the key of the user who asks; None = a visitor, who learns nothing of comments.
        """
        notices: list[str] = []
        values: dict[str, Any] = {"flawed": bool(params.get("flawed"))}
        for name, longest in (
            ("finding", 40),
            ("stop", 60),
            ("group", 200),
            ("text", 200),
            ("policy", 100),
            ("after", 200),
        ):
            values[PARAMETERS.get(name, name)] = params.get(name, "").replace("\0", "")[:longest]
        for name, known in KNOWN.items():
            text = params.get(name, "")
            if text and text not in known:
                notices.append(f"There is no {name} “{text[:40]}”; it was left out. Known: {', '.join(known)}.")
            elif text:
                values[name] = text
        if values.get("muted") == "show":
            del values["muted"]
        refused = [name for name in PERSONAL if reader is None and values.pop(name, "")]
        notices += [f"Only who has a role in the project filters by {name}; it was left out." for name in refused]
        if values.get("seen"):
            values["reader"] = reader
        for name in ("min", "max"):
            text = params.get(name, "").strip()
            if not text:
                continue
            try:
                amount = float(text)
            except ValueError:
                amount = math.nan
            if math.isfinite(amount):
                values[PARAMETERS[name]] = amount
            else:
                notices.append(f"“{text[:40]}” is not a number, so rewards were not limited by it.")
        for name in ("at", "from", "to", "tokens_min", "tokens_max", "training_min", "training_max"):
            text = params.get(name, "").strip()
            values[PARAMETERS[name]] = number = whole_number(text)
            if text and number is None:
                notices.append(f"“{text[:40]}” is not a whole number, so “{name}” was left out.")
        return cls(**values, notices=tuple(notices))

    def chosen(self) -> dict[str, Any]:
        """The fields of ``TrajectoryFilters`` that filter, by name: an export keeps them as its ``only``."""
        held = {one.name: (getattr(self, one.name), one.default) for one in fields(TrajectoryFilters)}
        return {name: value for name, (value, default) in held.items() if value != default}

    def pairs(self) -> list[tuple[str, str]]:
        """The parameters of this filter and order, without ``after`` and without defaults."""
        held = {name: getattr(self, field) for name, field in PARAMETERS.items()}
        held["flawed"] = "1" if self.flawed else ""
        pairs = [
            (name, f"{value:.9g}" if isinstance(value, float) else str(value))
            for name, value in held.items()
            if value not in ("", None)
        ]
        return pairs if self.sort == "index" else [*pairs, ("sort", self.sort)]

    def query(self, **changes: str) -> str:
        """`?...` with some parameters changed (empty = dropped); empty when nothing is filtered."""
        named = {**dict(self.pairs()), **changes}
        kept = {name: value for name, value in named.items() if value}
        return f"?{urlencode(kept)}" if kept else ""

    def heads(self) -> dict[str, SortHead]:
        """Column -> the link in its head."""
        found = {}
        for column, (first, second) in _HEADS.items():
            chosen = self.sort.removeprefix("-") == first.removeprefix("-")
            to = second if self.sort == first else first
            order = ("descending" if self.sort.startswith("-") else "ascending") if chosen else ""
            found[column] = SortHead(self.query(sort="" if to == "index" else to) or "?", order, SORTS[to])
        return found

    @property
    def is_set(self) -> bool:
        """Something is filtered out."""
        return any(name != "sort" for name, _ in self.pairs())
