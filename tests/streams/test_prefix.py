from dataclasses import replace

import numpy as np
from hypothesis import given, strategies as st

from rollout_inspector.streams.prefix import (
    common_prefix, link_step, link_steps, links_of, merge_steps, merged_rows, row_of
)
from rollout_inspector.streams.trajectory import Origin, Step, Trajectory, ids_array

tokens = st.lists(st.integers(0, 3), max_size=12)


def step(prompt: list[int], completion: list[int]) -> Step:
    return Step(ids_array(prompt), ids_array(completion))


def chains(*steps: Step) -> list[tuple[int, ...]]:
    return merge_steps(steps)


def test_an_extension_merges_and_a_break_opens_a_row() -> None:
    o1, a1, o2, a2, o3, a3 = ([n, n] for n in range(6))
    steps = [step(o1, a1), step(o1 + a1 + o2, a2), step(o3, a3)]
    rows = merged_rows(steps)
    assert [row.ids.tolist() for row in rows] == [o1 + a1 + o2 + a2, o3 + a3]
    assert rows[0].loss_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert rows[1].loss_mask.tolist() == [False, False, True, True]


def test_a_trajectory_remembers_how_its_steps_hang_together() -> None:
    trajectory = Trajectory("t", (step([1], [2]), step([1, 2, 3], [4]), step([5], [6])))
    assert links_of(trajectory) == link_steps(trajectory.steps)
    assert links_of(trajectory) is links_of(trajectory)
    assert links_of(replace(trajectory, steps=trajectory.steps[:1])) == link_steps(trajectory.steps[:1])


def test_the_prompt_alone_is_no_reason_to_merge() -> None:
    assert chains(step([1, 2], [3]), step([1, 2, 9], [4])) == [(0,), (1,)]


def test_sub_agents_find_their_own_chain() -> None:
    main, side = [1, 1], [2]
    steps = [
        step(main, [3]),
        step(side, [4]),
        step([*main, 3, 5], [6]),
        step([*side, 4, 7], [8]),
        step([*main, 3, 5, 6], [9]),
    ]
    assert chains(*steps) == [(0, 2, 4), (1, 3)]


def test_the_longest_open_chain_wins() -> None:
    # The first chain's stream is a prefix of the second's, and the step starts with both.
    steps = [step([1], [2]), step([1, 2, 3, 3], [4]), step([9], [9]), step([1, 2, 3, 3, 4, 5], [6])]
    assert chains(*steps) == [(0, 1, 3), (2,)]
    steps = [step([1], [2]), step([1, 2, 7], [4]), step([1, 2, 3], [6]), step([1, 2, 3, 6], [7])]
    assert chains(*steps) == [(0, 1), (2, 3)]


def test_a_link_is_the_longest_prefix_and_the_latest_of_several() -> None:
    steps = [step([1, 2], [3]), step([1, 2], [3]), step([1, 2, 3, 4], [5]), step([1, 9], [])]
    links = link_steps(steps)
    assert [link.parent for link in links] == [None, 0, 1, 2]
    assert (links[2].shared_length, links[2].parent_length, links[2].extends) == (3, 3, True)
    assert (links[3].shared_length, links[3].extends) == (1, False)
    assert [link_step(steps[:n], one) for n, one in enumerate(steps)] == links


def test_a_prompt_that_shares_nothing_is_a_break_of_the_step_before() -> None:
    links = link_steps([step([1], [2]), step([3], [4])])
    assert (links[1].parent, links[1].shared_length, links[1].extends) == (0, 0, False)


def test_origins_of_a_merged_row() -> None:
    steps = [step([1], [2]), Step(ids_array([1, 2, 3, 4]), ids_array([5]), delta_origin=np.array([2, 3], np.uint8))]
    row = row_of(steps, merge_steps(steps)[0])
    assert row.origin is not None
    assert row.origin.tolist() == [Origin.PROMPT, Origin.SAMPLED, Origin.TEMPLATE, Origin.OBSERVATION, Origin.SAMPLED]


@given(tokens, tokens)
def test_common_prefix_is_what_a_loop_finds(a: list[int], b: list[int]) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(ids_array(a), ids_array(b)) == n


def test_a_difference_behind_many_blocks_is_found() -> None:
    a = np.arange(50_000, dtype=np.int32)
    for place in (0, 1023, 1024, 5119, 49_999):
        b = a.copy()
        b[place] = -1
        assert common_prefix(a, b) == place


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=7))
def test_links_and_rows_of_any_steps(values: list[tuple[list[int], list[int]]]) -> None:
    steps = [step(prompt, completion) for prompt, completion in values]
    links = link_steps(steps)
    for index, link in enumerate(links[1:], start=1):
        shares = [common_prefix(steps[index].prompt_ids, other.stream) for other in steps[:index]]
        assert link.shared_length == max(shares)
        assert link.parent == max(i for i, share in enumerate(shares) if share == max(shares))
    merged = merge_steps(steps, links)
    assert sorted(i for one in merged for i in one) == list(range(len(steps)))
    for one in merged:
        row = row_of(steps, one)
        assert int(row.loss_mask.sum()) == sum(len(steps[i].completion_ids) for i in one)
        for index in one:
            start = len(steps[index].prompt_ids)
            assert row.ids[start : start + len(steps[index].completion_ids)].tolist() == values[index][1]
            assert row.ids[:start].tolist() == values[index][0]
