"""Lanes of planted and recorded trajectories: why each leaves, where, and what became of a summary."""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rollout_inspector.diagnose import diagnose
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.lanes import Lane, LaneKind, Told, find_lanes, names_break, with_messages
from rollout_inspector.streams.prefix import link_steps, merge_steps, shared_with_stream
from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from tests.counting import growth
from tests.samples.lanes import compacted
from tests.samples.model_setups import model_setup
from tests.samples.planted.plant import PLANTERS, ModelSetup


@dataclass(frozen=True)
class S:
    """A step as the lanes read it."""

    index: int
    parent: int | None = None
    shared_length: int = 0
    parent_length: int = 0
    prompt_length: int = 10
    completion_length: int = 5


@dataclass(frozen=True)
class R:
    index: int
    n_trained: int
    follows_steps: bool
    steps: frozenset[int]


def of_steps(trajectory: Trajectory) -> tuple[list[S], list[R]]:
    links = link_steps(trajectory.steps)
    steps = [
        S(n, link.parent, link.shared_length, link.parent_length, len(one.prompt_ids), len(one.completion_ids))
        for n, (one, link) in enumerate(zip(trajectory.steps, links, strict=True))
    ]
    chains = merge_steps(trajectory.steps, links)
    trained = [sum(len(trajectory.steps[i].completion_ids) for i in chain) for chain in chains]
    return steps, [R(n, trained[n], True, frozenset(chain)) for n, chain in enumerate(chains)]


def told_of(trajectory: Trajectory) -> dict[int, Told]:
    """The new messages of each step against its parent's, found by plain comparison."""
    told = {}
    for n, (step, link) in enumerate(zip(trajectory.steps, link_steps(trajectory.steps), strict=True)):
        assert step.request is not None
        before = [] if link.parent is None else list(trajectory.steps[link.parent].request.messages)  # type: ignore[union-attr]
        shared = 0
        while shared < min(len(before), len(step.request.messages)) and before[shared] == step.request.messages[shared]:
            shared += 1
        told[n] = Told(step.request.messages[shared:], step.reply)
    return told


def lanes_of(trajectory: Trajectory, s: ModelSetup, told: Mapping[int, Told] | None = None) -> list[Lane]:
    findings = diagnose(trajectory, s.codec, lambda sha: s.renderer)
    causes: dict[int, str] = {}
    for one in findings:
        if one.step is not None and names_break(
            one.kind, one.axis, one.start, len(trajectory.steps[one.step].prompt_ids)
        ):
            causes.setdefault(one.step, one.kind)
    return with_messages(find_lanes(*of_steps(trajectory), causes), told_of(trajectory) if told is None else told)


@pytest.fixture(params=["stable", "composed"])
def s(request: pytest.FixtureRequest) -> ModelSetup:
    return model_setup(request.param)


def test_one_chain_is_one_lane(s: ModelSetup) -> None:
    trajectory = s.turn().tito()
    (lane,) = lanes_of(trajectory, s)
    n = sum(len(step.completion_ids) for step in trajectory.steps)
    assert (lane.kind, lane.steps, lane.row, lane.leaves) == (LaneKind.FIRST, (0, 1), 0, None)
    assert (lane.n_sampled, lane.n_trained) == (n, n)
    assert lane.n_tokens == len(trajectory.steps[1].stream)


def test_a_sub_agent_is_a_branch_beside_the_main_lane(s: ModelSetup) -> None:
    case = PLANTERS["subagent_interleaved"](s)
    first, side = lanes_of(case.trajectory, s)
    assert (first.steps, side.steps, side.kind, side.row, side.depth) == ((0, 2, 4), (1, 3), LaneKind.BRANCH, 1, 1)
    assert side.leaves is not None and (side.leaves.step, side.leaves.part) == (0, "prompt")
    steps = case.trajectory.steps
    assert side.leaves.offset == shared_with_stream(steps[1].prompt_ids, steps[0])
    assert side.n_tokens == len(steps[3].stream) - side.leaves.offset


def test_a_duplicate_names_the_call_that_it_repeats(s: ModelSetup) -> None:
    case = PLANTERS["duplicate_call"](s)
    lane = next(one for one in lanes_of(case.trajectory, s) if one.kind is LaneKind.DUPLICATE)
    assert lane.repeats == 0 and lane.steps[0] == 1
    first, again = case.trajectory.steps[:2]
    assert first.prompt_ids.tolist() == again.prompt_ids.tolist()
    # The structure alone tells it, where nothing was diagnosed and no message is known.
    (one,) = [one for one in find_lanes(*of_steps(case.trajectory)) if one.repeats is not None]
    assert (one.kind, one.repeats, one.same_reply) == (LaneKind.DUPLICATE, 0, None)
    same = replace(case.trajectory, steps=(first, replace(again, reply=first.reply), *case.trajectory.steps[2:]))
    assert [one.same_reply for one in lanes_of(same, s) if one.kind is LaneKind.DUPLICATE] == [True]


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("aside", [False, True])
def test_an_accepted_summary_begins_a_lane(s: ModelSetup, aside: bool, role: str) -> None:
    lanes = lanes_of(compacted(s, aside=aside, role=role), s)
    last = lanes[-1]
    assert (last.kind, last.steps, last.depth) == (LaneKind.COMPACTION, (3,), 0)
    assert last.summary is not None
    assert (last.summary.step, last.summary.outcome, last.summary.taken_by) == (2, "accepted", 3)
    assert [one.kind for one in lanes[1:-1]] == [LaneKind.SUMMARY] * aside


@pytest.mark.parametrize("aside", [False, True])
def test_a_summary_that_no_later_prompt_holds_is_discarded(s: ModelSetup, aside: bool) -> None:
    trajectory = compacted(s, taken=False, aside=aside)
    lane = next(one for one in lanes_of(trajectory, s) if one.summary)
    assert lane.summary is not None
    assert (lane.kind, lane.steps) == ((LaneKind.SUMMARY, (2,)) if aside else (LaneKind.COMPACTION, (3,)))
    assert (lane.summary.step, lane.summary.outcome, lane.summary.taken_by) == (2, "discarded", None)


def test_a_summary_is_not_called_discarded_where_a_later_step_is_not_told(s: ModelSetup) -> None:
    trajectory = compacted(s, taken=False, aside=True)
    more = replace(trajectory, steps=(*trajectory.steps, trajectory.steps[-1]))
    told = {n: one for n, one in told_of(more).items() if n < 4}
    lane = next(one for one in lanes_of(more, s, told) if one.kind is LaneKind.SUMMARY)
    assert lane.summary is not None and lane.summary.outcome is None


def test_what_is_no_summary_is_none(s: ModelSetup) -> None:
    """An edited history without a summary call, an answer that was not asked to be one, a sub-agent that was."""
    for name in ("history_summary", "history_edited", "parallel_branches", "question_over_the_transcript"):
        for lane in lanes_of(PLANTERS[name](s).trajectory, s):
            assert lane.summary is None, name
    case = PLANTERS["subagent_interleaved"](s)
    told = told_of(case.trajectory)
    told[1] = Told((*told[1].new[:-1], {"role": "user", "content": "Summarise the map."}), told[1].reply)
    answer = "The ferry leaves from the third pier."
    told[3] = Told(told[3].new, {"role": "assistant", "content": f"<think>Third?</think>\n{answer}"})
    told[4] = Told((*told[4].new, {"role": "tool", "content": f"The agent said: {answer}"}), told[4].reply)
    lanes = lanes_of(case.trajectory, s, told)
    assert [(one.kind, one.read_by) for one in lanes] == [(LaneKind.FIRST, None), (LaneKind.BRANCH, 4)]
    told[4] = Told((*told[4].new[:-1], {"role": "assistant", "content": answer}), told[4].reply)
    assert [one.read_by for one in lanes_of(case.trajectory, s, told)] == [None, None]


def test_a_break_is_a_continuation_with_its_cause_and_unnamed_without(s: ModelSetup) -> None:
    case = PLANTERS["history_edited"](s)
    assert [(one.kind, one.cause) for one in lanes_of(case.trajectory, s)][1:] == [("continuation", case.kind)]
    assert find_lanes(*of_steps(case.trajectory))[1].kind is LaneKind.UNNAMED


def test_sub_agents_that_share_a_first_prompt_stand_side_by_side_and_nested_ones_deeper() -> None:
    steps = [
        S(0),
        S(1, 0, 2, 15, 8),  # leaves the system text of the main lane
        S(2, 1, 6, 13, 8),  # the same sub-agent, asked something else
        S(3, 1, 11, 13, 20),  # leaves what the first sub-agent had sampled
    ]
    lanes = find_lanes(steps, [], {1: "branch", 2: "branch", 3: "branch"})
    assert [one.depth for one in lanes] == [0, 1, 1, 2]
    assert [(one.leaves.lane, one.leaves.part) for one in lanes if one.leaves] == [
        (0, "prompt"), (1, "prompt"), (1, "completion"),
    ]


def test_rows_of_the_source_are_told_apart_from_lanes() -> None:
    steps = [S(0), S(1, 0, 12, 15, 30), S(2, 1, 35, 35, 40)]
    joined = find_lanes(steps, [R(0, 15, False, frozenset({0, 1, 2}))])
    assert [(one.steps, one.row, one.n_trained) for one in joined] == [((0,), 0, None), ((1, 2), 0, None)]
    left_out = find_lanes(steps, [R(0, 9, False, frozenset({1, 2}))])
    assert [(one.row, one.n_trained) for one in left_out] == [(None, 0), (0, 9)]


def test_steps_in_any_order_without_ids_and_without_parents() -> None:
    steps = [S(2, 1, 20, 20, 25), S(0), S(1, 0, 15, 15, 15)]
    assert [one.steps for one in find_lanes(steps, [])] == [(0, 1, 2)]
    assert find_lanes([S(n, prompt_length=0, completion_length=0) for n in range(3)], []) == []
    assert find_lanes([], []) == []
    assert [one.leaves for one in find_lanes([S(0), S(1, 7, 3, 9)], [])] == [None, None]  # a parent that is not there
    circle = [S(0, 1, 9, 15), S(1, 0, 9, 15), S(2, 2, 9, 15)]  # no parent is later than its step
    assert [one.leaves and one.leaves.lane for one in find_lanes(circle, [])] == [None, 0, None]


@pytest.mark.parametrize("forked", [False, True])
def test_finding_lanes_is_linear_work(forked: bool) -> None:
    """Thousands of lanes, or one long chain of causes."""

    def found(n_steps: int) -> Callable[[], list[Lane]]:
        steps = [
            S(0),
            *(S(n, n - 1, 12 + n % 3 if forked else 10 * n + 5, 10 * n + 5, 10 * n + 10) for n in range(1, n_steps)),
        ]
        return lambda: find_lanes(steps, [], dict.fromkeys(range(n_steps), "thinking_stripped"))

    lanes = found(5000)()
    assert sum(len(one.steps) for one in lanes) == 5000 and (len(lanes) > 3000) == forked
    assert growth(found, 400) < 1.1


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3-fixed", "llama3.1"])
def test_lanes_of_the_corpus(corpus: Path, name: str) -> None:
    """Each labelled trajectory: every step in one lane, a lane for each row, and the kind that the label asks for."""
    tokenizer, template = {"qwen3-fixed": ("qwen3", "qwen3--seed-one-line-fix")}.get(name, (name, name))
    codec = load(corpus / "tokenizers" / tokenizer)
    text = (corpus / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    s = ModelSetup(name, codec, renderer(codec, text), random.Random(0))
    expected = json.loads((corpus / "labelled" / f"{name}.expect.json").read_text())
    kinds: Counter[str] = Counter()
    for trajectory in read(Source.of_path(corpus / "labelled" / f"{name}.calls.jsonl"))[1]:
        assert isinstance(trajectory, Trajectory)
        label = expected[trajectory.external_id]
        lanes = lanes_of(trajectory, s)
        rows = merge_steps(trajectory.steps)
        assert [one.steps for one in lanes] == rows, trajectory.external_id
        assert all(one.kind is not LaneKind.UNNAMED for one in lanes) or label["kind"] in NAMELESS, (
            trajectory.external_id
        )
        kinds.update(one.kind for one in lanes)
        wanted = {"duplicate_call": LaneKind.DUPLICATE, "branch": LaneKind.BRANCH}.get(label["kind"])
        assert wanted is None or wanted in [one.kind for one in lanes], trajectory.external_id
    assert kinds[LaneKind.FIRST] == len(expected) and kinds[LaneKind.CONTINUATION]


NAMELESS = {"token_ids_missing", "engine_ids_inconsistent"}
"""After these the break itself is not named again."""


def test_a_step_that_shares_all_with_a_continued_one_is_a_branch() -> None:
    steps = [S(0), S(1, 0, 15, 15, 20), S(2, 0, 15, 15, 22)]
    assert [(one.kind, one.steps) for one in find_lanes(steps, [])] == [("first", (0, 1)), ("branch", (2,))]


def test_the_links_tell_the_same_prompt_through_longer_ones() -> None:
    """P A, P A O B, and P again: the longest prefix is that of the second, the prompt that of the first."""
    steps = [
        Step(ids_array([1, 2]), ids_array([3])), Step(ids_array([1, 2, 3, 4]), ids_array([5])),
        Step(ids_array([1, 2]), ids_array([7])),
    ]
    lane = find_lanes(*of_steps(Trajectory("t", tuple(steps))))[1]
    assert (lane.kind, lane.repeats) == (LaneKind.DUPLICATE, 0)
