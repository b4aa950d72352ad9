"""`/runs/<code>/groups/<key>`: the trajectories of one prompt beside each other, by reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import NoReverseMatch, reverse

from inspector.runs.pages import RunValues
from inspector.runs.values import is_flat
from inspector.web.access import reads_run
from inspector.web.twins import Page, from_columns, page, wants_json
from rollouts.store.jobs.activity import is_active
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.muted import muted_in
from rollouts.store.trajectories.findings import finding_kinds
from rollouts.store.trajectories.groups import (
    GroupStats,
    group_advantages,
    group_stats,
    sampled_tokens,
    shared_length,
    trajectories_of_group,
)

MAX_SIBLINGS = 512
"""The most trajectories of a group that a page shows."""
BAR_WIDTH = 120
"""Width of the viewBox of a bar."""


@dataclass(frozen=True)
class Sibling:
    """One trajectory of the group."""

    code: str
    url: str
    """Address of its page."""
    index: int
    external_id: str
    status: str
    stop_reason: str
    answer_line: str | None
    """First line of its last answer; null = not known."""
    reward: float | None
    advantage: float | None
    """As the trainer stored it, the mean over its trained tokens, or computed; ``advantages`` says which."""
    kinds: dict[str, str]
    """Kind of its findings -> the worst severity of that kind."""
    steps: int
    rows: int
    tokens: int
    sampled: int
    trained: int
    shared: int | None
    """Leading sampled tokens that are those of the reference; null = it was not read."""
    compare_url: str
    """Side by side with the reference; empty for the reference, and for one that cannot be compared."""


@dataclass(frozen=True)
class GroupPage(Page):
    """The trajectories of one prompt."""

    run: RunValues
    """The run."""
    group: str
    """What the trajectories share."""
    prompt_line: str
    """First line of the task; empty = not known."""
    trajectories: int
    """How many the group has."""
    scored: int
    """How many of them have a reward."""
    reward_mean: float | None
    """Over those that have a reward."""
    reward_min: float | None
    """The lowest reward."""
    reward_max: float | None
    """The highest reward."""
    zero_variance: bool
    """All rewards are equal, and none is still to come: the group teaches nothing."""
    advantages: str
    """``stored`` by the trainer, ``computed`` as GRPO does it from the rewards, or empty = there are none."""
    reference: str
    """Code of the trajectory that the others are compared with: ``to`` of the address, or the best one."""
    whole: bool
    """False: the group is so large that only first completions were compared."""
    siblings: list[Sibling]
    """The best reward first, those without a reward last."""
    muted: list[str]
    """The kinds of findings that are muted in the run."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""


def group_url(run: str, group: str) -> str:
    """The address of a group; of a name that no address can hold, the list of its trajectories."""
    odd = group.endswith(".json") or any(part in ("", ".", "..") for part in group.split("/"))
    try:
        return f"{reverse('run', args=[run])}?{urlencode({'group': group})}" if odd else _address(run, group)
    except NoReverseMatch:  # a line break
        return f"{reverse('run', args=[run])}?{urlencode({'group': group})}"


def _address(run: str, group: str) -> str:
    return reverse("run-group", args=[run, group])


@reads_run
def group(request: HttpRequest, run: Run, key: str) -> HttpResponse:
    """The group ``key``. `?to=CODE` names the reference; `?left=CODE&right=CODE` leads to the two side by side."""
    found = trajectories_of_group(run, key, MAX_SIBLINGS) if "\0" not in key else []
    if not found:
        raise Http404(f"This run has no group “{key[:80]}”.")
    by_code = {one.code: one for one in found}
    left, right = request.GET.get("left", ""), request.GET.get("right", "")
    notices = []
    if left or right:
        if left in by_code and right in by_code and left != right and not wants_json(request):
            return redirect(f"{reverse('trajectory-compare', args=[left])}?{urlencode({'with': right})}")
        notices.append("Choose two different trajectories of this group, one on each side.")
    asked = request.GET.get("to", "")
    if asked and asked not in by_code:
        notices.append(f"“{asked[:40]}” is no trajectory of this group; the best one is the reference.")
    shown, more = _page(run, key, found, by_code.get(asked) or _best(found), notices)
    return page(request, "runs/group.html", shown, **more)


def _best(found: list[StoredTrajectory]) -> StoredTrajectory:
    return next((one for one in found if _can_compare(one)), found[0])


def _can_compare(one: StoredTrajectory) -> bool:
    return one.status == StoredTrajectory.Status.DONE and one.n_rows > 0


def _page(
    run: Run, key: str, found: list[StoredTrajectory], reference: StoredTrajectory, notices: list[str]
) -> tuple[GroupPage, dict[str, Any]]:
    """Seven queries."""
    stats = group_stats(run, [key]).get(key) or GroupStats(len(found), 0, None, None, None)
    kinds = finding_kinds(found)
    streams, stored, whole = sampled_tokens(found)
    computed = dict(zip([one.pk for one in found], group_advantages([one.reward for one in found]), strict=True))
    advantages, source = (stored, "stored") if stored else (computed, "computed")
    if not any(value is not None for value in advantages.values()):
        source = ""
    best = streams.get(reference.pk)
    siblings = [
        from_columns(
            Sibling,
            one,
            url=reverse("trajectory", args=[one.code]) + f"?{urlencode({'group': key})}",
            advantage=advantages.get(one.pk),
            kinds=kinds.get(one.pk, {}),
            shared=None if best is None or one.pk not in streams else shared_length(best, streams[one.pk]),
            compare_url=_compare(reference, one),
        )
        for one in found
    ]
    most = max((len(stream) for stream in streams.values()), default=0) or 1
    bars = {
        one.code: {
            "sampled": f"{BAR_WIDTH * len(streams[one.pk]) / most:.1f}",
            "shared": f"{BAR_WIDTH * (shared_length(best, streams[one.pk]) if best is not None else 0) / most:.1f}",
            "n": len(streams[one.pk]),
        }
        for one in found
        if one.pk in streams
    }
    shown = GroupPage(
        run=RunValues.of(run),
        group=key,
        prompt_line=next((one.prompt_line for one in found if one.prompt_line), ""),
        trajectories=stats.n,
        scored=stats.n_rewards,
        reward_mean=stats.mean,
        reward_min=stats.low,
        reward_max=stats.high,
        zero_variance=is_flat(stats, is_active(run)),
        advantages=source,
        reference=reference.code,
        whole=whole,
        siblings=siblings,
        muted=sorted(muted_in(run)),
        notices=notices,
    )
    lines = [(one, bars.get(one.code), _can_compare(record)) for one, record in zip(siblings, found, strict=True)]
    others = [one.code for one in found if _can_compare(one) and one.pk != reference.pk]
    return shown, {
        "lines": lines,
        "reference_line": next(one for one in siblings if one.code == reference.code),
        "bar_width": BAR_WIDTH,
        "list_url": f"{reverse('run', args=[run.code])}?{urlencode({'group': key})}",
        "muted_kinds": muted_in(run),
        "comparable": sum(_can_compare(one) for one in found) > 1,
        "last": others[-1] if others else "",
    }


def _compare(reference: StoredTrajectory, one: StoredTrajectory) -> str:
    if one.pk == reference.pk or not (_can_compare(one) and _can_compare(reference)):
        return ""
    return f"{reverse('trajectory-compare', args=[reference.code])}?{urlencode({'with': one.code})}"
