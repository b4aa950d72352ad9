"""Findings as cards: equal ones share a card, the worst card first, each with its Markdown and its place in the run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from inspector.runs.cached_figures import summary_of
from inspector.trajectories.tokens.findings import SEVERITIES
from rollout_inspector.diagnose.finding import Severity
from rollouts.store.models import StoredTrajectory
from rollouts.store.runs.figures import is_large
from rollouts.store.runs.imports import OPENED
from rollouts.store.trajectories.findings import KindPlace, places_of_kinds

Entry = Mapping[str, Any]  # A finding with its addresses, as :attr:`Reader.findings` makes it.

MAX_MARKDOWN_IDS = 24  # The most ids of one side that a finding copied as Markdown names.


@dataclass(frozen=True)
class InRun:
    """How many trajectories of the run have a kind of finding, and where they are."""

    n: int
    n_all: int  # The trajectories of the run.
    list_url: str  # The list of those that have it.
    next_url: str  # The next one that has it, behind the last one the first; empty where there is no other.


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one kind and severity: one card."""

    entries: Sequence[Entry]
    in_run: InRun | None = None  # None where the reader may not see the run.

    @property
    def first(self) -> Entry:
        """The entry whose difference the card shows: the one that the address marks, else the first."""
        return next((entry for entry in self.entries if entry["current"]), self.entries[0])


def group_findings(entries: Sequence[Entry], in_run: Mapping[str, InRun]) -> list[FindingGroup]:
    """The cards of findings: by severity, then in the order in which their kinds come first."""
    weights = [severity.value for severity in SEVERITIES]
    kinds = list(dict.fromkeys(entry["item"].kind for entry in entries))

    def place(entry: Entry) -> tuple[int, int]:
        return weights.index(entry["item"].weight), kinds.index(entry["item"].kind)

    return [
        FindingGroup(list(group), in_run.get(kinds[kind]))
        for (_, kind), group in groupby(sorted(entries, key=place), key=place)
    ]


def kinds_in_run(trajectory: StoredTrajectory, kinds: Sequence[str]) -> dict[str, InRun]:
    """Kind -> how many trajectories of the run have it, and the next of them. Two queries. For a large run one, of its
    stored figures; the next one is then met by the filter of the list. Nothing where files are open in place: they are
    read as one looks."""
    run = trajectory.run
    if not kinds or OPENED in run.settings:
        return {}
    if is_large(run):
        counts = summary_of(run).finding_trajectories
        places = {kind: KindPlace(counts.get(kind, 1), None) for kind in kinds}
    else:
        places = places_of_kinds(trajectory, kinds)
    list_url, own = reverse("run", args=[run.code]), reverse("trajectory", args=[trajectory.code])
    in_run = {}
    for kind, place in places.items():
        asks = "?" + urlencode({"finding": kind})
        following = reverse("trajectory", args=[place.next_code]) if place.next_code else ""
        next_url = following or (own if is_large(run) else "")
        own_list = f"{list_url}{asks}#trajectories"
        in_run[kind] = InRun(place.n, run.n_trajectories, own_list, next_url and next_url + asks)
    return in_run


def markdown_of(entry: Entry, trajectory: StoredTrajectory) -> str:
    """A finding for a chat or an issue: sentence, ids, link and remedy. The link begins with ``/``, because only the
    browser knows the name of the server. Model output makes no markup."""
    item = entry["item"]
    where = f"{entry['place']} of {_plain(trajectory.external_id)} in run {trajectory.run.code}"
    lines = [f"**{item.title}** ({item.severity}, `{item.kind}`): {where}", "", _plain(item.evidence)]
    for name, ids in entry["ids"]:
        more = f" and {len(ids) - MAX_MARKDOWN_IDS} more" if len(ids) > MAX_MARKDOWN_IDS else ""
        lines += ["", f"{name}: `{ids[:MAX_MARKDOWN_IDS].tolist()}`{more}"]
    lines += ["", f"Cost: {item.cost_text}"] * bool(item.cost_text and item.severity != Severity.INFO)
    lines += ["", f"Remedy: {entry['remedy']}"] * bool(entry["remedy"])
    return "\n".join([*lines, "", f"[Open it]({entry['url']})", ""])


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#|~])", r"\\\1", text)
