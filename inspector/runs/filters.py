"""The filter and order of a run's trajectories, read from an address."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.http import QueryDict

from inspector.web.twins import whole_number
from rollouts import selectors
from rollouts.models import StoredTrajectory
from rollouts.tito.diagnose.finding import Severity

SORTS = {
    "index": "run order",
    "-reward": "reward, best first",
    "reward": "reward, worst first",
    "-n_tokens": "longest first",
    "n_tokens": "shortest first",
    "-n_findings": "most findings first",
}
"""The orders that the list offers; `selectors.SORTS` knows more."""
STATUSES = tuple(StoredTrajectory.Status.values)
NUMBERS = {"at": "step", "from": "first", "to": "last", "tokens_min": "tokens_min", "tokens_max": "tokens_max"}
"""Parameters that take a whole number, and the field that holds it."""
SEVERITIES = tuple(severity.value for severity in Severity)


@dataclass(frozen=True)
class TrajectoryFilter:
    """The filter and order of a run's trajectories, read from a URL. ``notices`` names each value that was left out."""

    finding: str = ""
    severity: str = ""
    status: str = ""
    stop: str = ""
    group: str = ""
    text: str = ""
    min: float | None = None
    max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    step: int | None = None
    """The parameter is ``at``: on the pages of a trajectory ``step`` means something else."""
    first: int | None = None
    last: int | None = None
    flawed: str = ""
    sort: str = "index"
    after: str = ""
    notices: tuple[str, ...] = ()

    @classmethod
    def read(cls, params: QueryDict) -> TrajectoryFilter:
        """From query parameters; never raises."""
        notices: list[str] = []
        values: dict[str, Any] = {}
        for name, longest in (("finding", 40), ("stop", 60), ("group", 200), ("text", 200), ("after", 200)):
            values[name] = params.get(name, "").replace("\0", "")[:longest]
        for name, known in (("severity", SEVERITIES), ("status", STATUSES), ("sort", selectors.SORTS)):
            text = params.get(name, "")
            if text and text not in known:
                notices.append(f"There is no {name} “{text[:40]}”; it was left out. Known: {', '.join(known)}.")
            elif text:
                values[name] = text
        for name in ("min", "max"):
            text = params.get(name, "").strip()
            if not text:
                continue
            try:
                amount = float(text)
            except ValueError:
                amount = math.nan
            if math.isfinite(amount):
                values[name] = amount
            else:
                notices.append(f"“{text[:40]}” is not a number, so rewards were not limited by it.")
        for name, key in NUMBERS.items():
            text = params.get(name, "").strip()
            values[key] = whole_number(text)
            if text and values[key] is None:
                notices.append(f"“{text[:40]}” is not a whole number, so “{name}” was left out.")
        values["flawed"] = "1" if params.get("flawed") else ""
        return cls(**values, notices=tuple(notices))

    def filters(self, hide_queued: bool = False) -> selectors.TrajectoryFilters:
        """The filter for the selector. ``hide_queued`` has no effect beside a filter by status."""
        return selectors.TrajectoryFilters(
            kind=self.finding,
            severity=self.severity,
            reward_min=self.min,
            reward_max=self.max,
            tokens_min=self.tokens_min,
            tokens_max=self.tokens_max,
            stop_reason=self.stop,
            group=self.group,
            status=self.status,
            text=self.text,
            step=self.step,
            first=self.first,
            last=self.last,
            flawed=bool(self.flawed),
            hide_queued=hide_queued and not self.status,
        )

    def pairs(self) -> list[tuple[str, str]]:
        """The parameters of this filter and order, without ``after`` and without defaults."""
        named = {name: name for name in ("finding", "severity", "status", "stop", "group", "text", "min", "max")}
        pairs = [
            (name, f"{value:.9g}" if isinstance(value, float) else str(value))
            for name, attribute in {**named, **NUMBERS, "flawed": "flawed"}.items()
            if (value := getattr(self, attribute)) not in ("", None)
        ]
        return pairs if self.sort == "index" else [*pairs, ("sort", self.sort)]

    def query(self, **changes: str) -> str:
        """`?...` with some parameters changed (empty = dropped); empty when nothing is filtered."""
        named = {**dict(self.pairs()), **changes}
        kept = {name: value for name, value in named.items() if value}
        return f"?{urlencode(kept)}" if kept else ""

    @property
    def is_set(self) -> bool:
        """Something is filtered out."""
        return any(name != "sort" for name, _ in self.pairs())
