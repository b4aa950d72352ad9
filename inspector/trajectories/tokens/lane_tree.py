"""The lanes of a trajectory whose steps form a tree: what the page draws beside the tokens, and the same as JSON."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from django.utils.text import get_text_list

from inspector.trajectories.place import PagePlace
from inspector.trajectories.tokens.findings import DrawnFinding
from inspector.trajectories.tokens.turns import stored_json
from inspector.web.twins import Page, some_fields
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.streams.lanes import (
    REWRITES, Lane, LaneKind, LeavingPlace, Summary, Told, find_lanes, names_break, with_messages
)
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import trajectory_parts
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

MAX_OPEN = 12  # Lanes that the page shows unfolded.
MAX_DRAWN = 200
MAX_LISTED = 1_000  # Lanes in the JSON of the page.
MAX_READ_STEPS = 400
"""A trajectory of at most so many steps is read for summaries whole; of a longer one the ends of its first lanes."""
MAX_READ_CHARACTERS = 200_000  # A longer text of a step is not read.
WIDTH = 200  # Width of the viewBox of a lane: the steps of the trajectory from the first to the last.
MAX_PIECES = 60
MAX_DEPTH = 4
MAX_AGENT = 80  # Characters of a sub-agent's name that a page shows.


LaneItem: Any = some_fields(
    Lane, "LaneItem", "A lane in the JSON.",
    "index kind words=sentence agent cause steps row leaves repeats same_reply read_by summary tokens=n_tokens "
    "sampled=n_sampled trained=n_trained",
)


@dataclass(frozen=True)
class LaneTree(Page):
    """The lanes of a trajectory that has more than one."""

    n_lanes: int
    """All of them."""
    sentence: str
    """What the tree is made of."""
    items: list[LaneItem]
    """The first 1,000 lanes."""


def read_lanes(
    trajectory: StoredTrajectory, rows: Sequence[RowSummary], steps: Sequence[StepSummary],
    findings: Sequence[DrawnFinding],
) -> list[Lane]:
    """The lanes of a trajectory, of the first 1,000 with their words; empty where it has one alone. At most one query,
    none where no message can matter."""
    prompts = {step.index: step.prompt_length for step in steps}
    causes: dict[int, str] = {}
    for item in findings:
        if item.step in prompts and names_break(item.kind, item.axis, item.start, prompts[item.step]):
            causes.setdefault(item.step, item.kind)
    lanes = find_lanes(steps, rows, causes)
    if len(lanes) < 2:
        return []
    is_growing = is_active(trajectory)
    if not is_growing and any(_needs_messages(lane) for lane in lanes):
        lanes = with_messages(lanes, _messages(trajectory, lanes, list(prompts)))
    return [replace(lane, words=words_of(lane, lanes, is_growing)) for lane in lanes[:MAX_LISTED]] + lanes[MAX_LISTED:]


def _messages(trajectory: StoredTrajectory, lanes: Sequence[Lane], steps: Sequence[int]) -> dict[int, Told]:
    """Step -> what its request added and what it replied. One query."""
    if len(steps) <= MAX_READ_STEPS:
        step_indices = set(steps)
    else:
        ends = [lane for lane in lanes if lane.index == 0 or _needs_messages(lane)][: MAX_READ_STEPS // 4]
        step_indices = {
            step for lane in ends for step in (lane.steps[0], lane.steps[-1], lane.repeats) if step is not None
        }
    of_step = {}
    for index, new, reply, extra in trajectory_parts.said_of_steps(trajectory, step_indices, MAX_READ_CHARACTERS):
        messages, answer = stored_json(new), stored_json(reply)
        added = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
        of_step[index] = Told(tuple(added), answer if isinstance(answer, dict) else None, _agent(stored_json(extra)))
    return of_step


def _agent(extra: Any) -> str:
    """The sub-agent that the recorder, or another source of calls, noted with a step."""
    fields = extra if isinstance(extra, dict) else {}
    names = (holder.get("agent") for holder in (fields, fields.get("line")) if isinstance(holder, dict))
    return next((name[:MAX_AGENT] for name in names if isinstance(name, str)), "")


def _needs_messages(lane: Lane) -> bool:
    return lane.kind in (LaneKind.BRANCH, LaneKind.DUPLICATE) or lane.cause in REWRITES


def lane_tree(trajectory: StoredTrajectory, lanes: Sequence[Lane], rows: Sequence[RowSummary]) -> LaneTree | None:
    """The lanes as JSON; None where the trajectory has one alone."""
    if not lanes:
        return None
    items = [LaneItem.of(lane) for lane in lanes[:MAX_LISTED]]
    return LaneTree(len(lanes), sentence_of(trajectory, lanes, rows), items)


def drawn_lanes(
    trajectory: StoredTrajectory, lanes: Sequence[Lane], rows: Sequence[RowSummary], address_of: Callable[[Lane], str],
    current_row: int | None = None,
) -> dict[str, Any]:
    """The list of lanes for the template; empty where the trajectory has one alone. ``address_of``: where a lane is
    read; empty where no row trains it."""
    if not lanes:
        return {}
    n_steps = 1 + max(lane.steps[-1] for lane in lanes)
    entries = [
        {
            "kind": lane.kind.value,
            "name": _name(lane, lanes),
            "label": lane.label,
            "words": lane.words,
            "url": address_of(lane),
            "current": current_row is not None and lane.row == current_row,
            "depth": min(lane.depth, MAX_DEPTH),
            # Paths in a viewBox of 200 x 12: from the step that it leaves to its first step, and over its steps.
            "leaving": _leaving_path(lane, n_steps),
            "line": _line(lane, n_steps),
        }
        for lane in lanes[:MAX_DRAWN]
    ]
    return {
        "n": len(lanes),
        "sentence": sentence_of(trajectory, lanes, rows),
        "open": entries[:MAX_OPEN],
        "folded": entries[MAX_OPEN:],
        "is_unfolded": any(lane["current"] for lane in entries[MAX_OPEN:]),
        "rest": f"and {len(lanes) - MAX_DRAWN:,} more" if len(lanes) > MAX_DRAWN else "",
    }


def lane_address(place: PagePlace, lane: Lane, row: RowSummary) -> str:
    """The query of the place in the lane's row at which it leaves, or of the start of the row."""
    if lane.leaves is None or not row.follows_steps or not row.n_tokens:
        return place.query(row=row.index, mark=None, window=0)
    offset = min(lane.leaves.offset, row.n_tokens - 1)
    return place.query(row=row.index, mark=(offset, offset + 1), window=0)


def _x(step: int, n_steps: int) -> float:
    return WIDTH * step / n_steps


def _leaving_path(lane: Lane, n_steps: int) -> str:
    if lane.leaves is None:
        return ""
    middle, first = _x(lane.leaves.step, n_steps) + WIDTH / n_steps / 2, _x(lane.steps[0], n_steps)
    return f"M{middle:.1f} 0V6H{first:.1f}"


def _line(lane: Lane, n_steps: int) -> str:
    pieces = _stretches(lane.steps)
    if len(pieces) > MAX_PIECES:  # the steps of two lanes in turn: the gaps are too narrow to be seen
        pieces = [(lane.steps[0], lane.steps[-1])]
    width = WIDTH / n_steps
    return "".join(f"M{_x(a, n_steps) + width * 0.1:.1f} 6h{max((b - a + 0.8) * width, 1):.1f}" for a, b in pieces)


def _stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each stretch of steps that follow one another."""
    cuts = [b for a, b in pairwise(steps) if b != a + 1]
    ends = [a for a, b in pairwise(steps) if b != a + 1]
    return list(zip([steps[0], *cuts], [*ends, steps[-1]], strict=True))


def words_of(lane: Lane, lanes: Sequence[Lane], is_growing: bool) -> str:
    """Steps of a lane, why and where it leaves, and its tokens."""
    words = [f"agent “{lane.agent}”"] * bool(lane.agent) + [_steps_text(lane.steps)]
    if lane.kind is LaneKind.CONTINUATION:
        words.append(f"cause: {title_of(lane.cause)}")
    elif lane.kind is LaneKind.UNNAMED:
        words.append("not diagnosed yet" if is_growing else "no finding names why it leaves")
    elif lane.kind is LaneKind.DUPLICATE:
        words.append(_duplicate_text(lane))
    if lane.read_by is not None:
        words.append(f"step {lane.read_by} reads its answer")
    if lane.summary is not None:
        words.append(_summary_text(lane.summary))
    if lane.leaves is not None:
        words.append(_leaving_text(lane.leaves, lanes))
    trained = "" if lane.n_trained is None else f", {lane.n_trained:,} trained"
    words.append(f"{_count(lane.n_tokens, 'token')} of its own, {lane.n_sampled:,} sampled{trained}")
    return "; ".join(words)


def _duplicate_text(lane: Lane) -> str:
    again = "an earlier step" if lane.repeats is None else f"step {lane.repeats}"
    replied = {True: ", with the same reply", False: ", with another reply", None: ""}[lane.same_reply]
    went_on = ", and went on" if len(lane.steps) > 1 else ""
    return f"sends the prompt of {again} again{replied}{went_on}"


def _summary_text(summary: Summary) -> str:
    if summary.outcome == "accepted":
        return f"step {summary.taken_by} begins with the summary that step {summary.step} wrote"
    if summary.outcome == "discarded":
        return f"no later prompt holds the summary that step {summary.step} wrote"
    return f"step {summary.step} wrote a summary; not all later messages could be read for it"


def _leaving_text(leaves: LeavingPlace, lanes: Sequence[Lane]) -> str:
    parent = lanes[leaves.lane]
    if leaves.offset == 0:
        return f"shares no token with {_name(parent, lanes)}"
    where = {"prompt": "in the prompt of", "completion": "in the completion of", "end": "behind the completion of"}
    return f"leaves {_name(parent, lanes)} {where[leaves.part]} step {leaves.step}, at token {leaves.offset:,}"


def _name(lane: Lane, lanes: Sequence[Lane]) -> str:
    """The row of a lane; the lane itself where its row trains several or none does."""
    return f"row {lane.row}" if lane.row == lane.index else f"lane {lane.index}"


def _steps_text(steps: Sequence[int]) -> str:
    pieces = [f"{a:,}" if a == b else f"{a:,}–{b:,}" for a, b in _stretches(steps)]
    more = f" and {len(pieces) - 6} more stretches" if len(pieces) > 6 else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(pieces[:6])}{more}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def sentence_of(trajectory: StoredTrajectory, lanes: Sequence[Lane], rows: Sequence[RowSummary]) -> str:
    """What the tree is made of, in one sentence."""
    n_calls = sum(len(lane.steps) for lane in lanes)
    so_far = " so far" * is_active(trajectory)
    if all(row.follows_steps for row in rows):
        head = f"{_count(n_calls, 'engine call')} made {_count(len(rows), 'row')}{so_far}"
    else:
        lanes_text = _count(len(lanes), "lane")
        head = (
            f"{_count(n_calls, 'engine call')} form {lanes_text}{so_far}; the source holds {_count(len(rows), 'row')}"
        )
    groups: dict[str, list[Lane]] = {}
    for lane in lanes:
        groups.setdefault(lane.label, []).append(lane)
    return f"{head}: {get_text_list([_group_text(lanes_of_group) for lanes_of_group in groups.values()], 'and')}."


def _group_text(group: Sequence[Lane]) -> str:
    lane, n = group[0], len(group)
    calls = sum(len(other.steps) for other in group)
    of_calls = f" of {_count(calls, 'call')}"
    number = "one" if n == 1 else f"{n:,}"
    if lane.kind is LaneKind.FIRST:
        return f"the first lane{of_calls}"
    if lane.read_by is not None:
        return f"{number} sub-agent{'s' * (n > 1)}{of_calls}"
    if lane.kind is LaneKind.BRANCH:
        return f"{number} branch{'es' * (n > 1)}{of_calls} whose answer no later step is known to read"
    if lane.kind is LaneKind.CONTINUATION:
        (cause, most), *others = Counter(other.cause for other in group).most_common()
        why = f" after “{title_of(cause)}”" if not others else f", {most:,} after “{title_of(cause)}”"
        return f"{number} continuation{'s' * (n > 1)}{of_calls}{why}"
    outcome = None if lane.summary is None else lane.summary.outcome
    became = {"accepted": "was accepted", "discarded": "was discarded", None: "could not be followed"}[outcome]
    if lane.kind is LaneKind.COMPACTION:
        return f"{number} compaction{'s' * (n > 1)} whose summary {became}"
    if lane.kind is LaneKind.SUMMARY:
        return f"{number} side call{'s' * (n > 1)} whose summary {became}"
    if lane.kind is LaneKind.DUPLICATE:
        return f"{number} duplicate call{'s' * (n > 1)}"
    return f"{number} lane{'s' * (n > 1)}{of_calls} whose cause is not named"
