"""`/runs/<code>/groups/<key>`: the trajectories of one prompt beside each other, by reward."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import NoReverseMatch, reverse

from inspector.runs.run_values import OfRun, RunValues
from inspector.runs.trajectory_values import TrajectoryValues
from inspector.web.access import reads_run
from inspector.web.twins import page, wants_json
from rollout_inspector.streams.prefix import common_prefix
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.muted import muted_in
from rollouts.store.trajectories.findings import finding_kinds
from rollouts.store.trajectories.groups import (
    GroupStats, group_advantages, group_stats, sampled_tokens, trajectories_of_group
)

MAX_SIBLINGS = 512  # The most trajectories of a group that a page shows.
BAR_WIDTH = 120  # Width of the viewBox of a bar.


@dataclass(frozen=True)
class GroupPage(OfRun):
    """The trajectories of one prompt."""

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
    siblings: list[TrajectoryValues]
    """The best reward first, those without a reward last."""
    muted: list[str]
    """The kinds of findings that are muted in the run."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""


def is_flat(group: GroupStats, live: bool) -> bool:
    """The group teaches nothing: all rewards are equal, and none is still to come."""
    return group.has_no_signal and not (live and group.n_rewards < group.n)


def group_url(run: str, group: str) -> str:
    """The address of a group; of a name that no address can hold, the list of its trajectories."""
    if not group.endswith(".json") and not any(part in ("", ".", "..") for part in group.split("/")):
        with suppress(NoReverseMatch):  # a line break
            return reverse("run-group", args=[run, group])
    return f"{reverse('run', args=[run])}?{urlencode({'group': group})}"


@reads_run
def group(request: HttpRequest, run: Run, key: str) -> HttpResponse:
    """The group ``key``. `?to=CODE` names the reference; `?left=CODE&right=CODE` leads to the two side by side."""
    trajectories = trajectories_of_group(run, key, MAX_SIBLINGS) if "\0" not in key else []
    if not trajectories:
        raise Http404(f"This run has no group “{key[:80]}”.")
    by_code = {trajectory.code: trajectory for trajectory in trajectories}
    left_code, right_code = request.GET.get("left", ""), request.GET.get("right", "")
    notices = []
    if left_code or right_code:
        if left_code in by_code and right_code in by_code and left_code != right_code and not wants_json(request):
            return redirect(f"{reverse('trajectory-compare', args=[left_code])}?{urlencode({'with': right_code})}")
        notices.append("Choose two different trajectories of this group, one on each side.")
    reference = request.GET.get("to", "")
    if reference and reference not in by_code:
        notices.append(f"“{reference[:40]}” is no trajectory of this group; the best one is the reference.")
    best = next((trajectory for trajectory in trajectories if _can_compare(trajectory)), trajectories[0])
    data, more = _page(run, key, trajectories, by_code.get(reference, best), notices)
    return page(request, "runs/group.html", data, **more)


def _can_compare(one: StoredTrajectory) -> bool:
    return one.status == StoredTrajectory.Status.DONE and one.n_rows > 0


def _page(
    run: Run, key: str, found: list[StoredTrajectory], reference: StoredTrajectory, notices: list[str]
) -> tuple[GroupPage, dict[str, Any]]:
    """Seven queries."""
    stats = group_stats(run, [key]).get(key) or GroupStats(len(found), 0, None, None, None)
    kinds = finding_kinds(found)
    streams, stored, whole = sampled_tokens(found)
    keys = [trajectory.pk for trajectory in found]
    computed = dict(zip(keys, group_advantages([trajectory.reward for trajectory in found]), strict=True))
    advantages, source = (stored, "stored") if stored else (computed, "computed")
    if not any(value is not None for value in advantages.values()):
        source = ""
    best = streams.get(reference.pk)
    shared = {} if best is None else {pk: common_prefix(best, stream) for pk, stream in streams.items()}
    siblings = [
        TrajectoryValues.of(
            trajectory, run, f"?{urlencode({'group': key})}", advantage=advantages.get(trajectory.pk),
            kinds=kinds.get(trajectory.pk, {}), shared=shared.get(trajectory.pk),
            compare_url=_compare(reference, trajectory),
        )
        for trajectory in found
    ]
    most = max((len(stream) for stream in streams.values()), default=0) or 1
    bars = {
        pk: {
            "sampled": f"{BAR_WIDTH * len(stream) / most:.1f}",
            "shared": f"{BAR_WIDTH * shared.get(pk, 0) / most:.1f}",
            "n": len(stream),
        }
        for pk, stream in streams.items()
    }
    data = GroupPage(
        run=RunValues.of(run), group=key,
        prompt_line=next((trajectory.prompt_line for trajectory in found if trajectory.prompt_line), ""),
        trajectories=stats.n, scored=stats.n_rewards, reward_mean=stats.mean, reward_min=stats.low,
        reward_max=stats.high, zero_variance=is_flat(stats, is_active(run)), advantages=source,
        reference=reference.code, whole=whole, siblings=siblings, muted=sorted(muted_in(run)), notices=notices,
    )
    lines = [
        (sibling, bars.get(trajectory.pk), _can_compare(trajectory))
        for sibling, trajectory in zip(siblings, found, strict=True)
    ]
    others = [trajectory.code for trajectory in found if _can_compare(trajectory) and trajectory.pk != reference.pk]
    return data, {
        "lines": lines,
        "reference_line": next(trajectory for trajectory in siblings if trajectory.code == reference.code),
        "bar_width": BAR_WIDTH,
        "list_url": f"{reverse('run', args=[run.code])}?{urlencode({'group': key})}",
        "muted_kinds": muted_in(run),
        "comparable": sum(_can_compare(trajectory) for trajectory in found) > 1,
        "last": others[-1] if others else "",
    }


def _compare(reference: StoredTrajectory, one: StoredTrajectory) -> str:
    if one.pk == reference.pk or not (_can_compare(one) and _can_compare(reference)):
        return ""
    return f"{reverse('trajectory-compare', args=[reference.code])}?{urlencode({'with': one.code})}"
