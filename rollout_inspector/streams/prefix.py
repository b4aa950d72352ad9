"""Prefixes: how much two streams share, which step continues which, what a step adds, and which rows follow. A step
*extends* its parent when its prompt starts with the parent's whole stream. That is the prefix check."""

from collections.abc import Sequence
from typing import AnyStr
from weakref import WeakKeyDictionary

import numpy as np

from rollout_inspector.streams.trajectory import (
    NO_PARENT, Floats, Ids, Link, Mask, Origin, Origins, Row, Step, Trajectory
)

_BLOCK = 1024
_SMALL = 1 << 16
_links: WeakKeyDictionary[Trajectory, list[Link]] = WeakKeyDictionary()


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids two streams share. Stops soon after the first difference."""
    if a is b:
        return len(a)
    n = min(len(a), len(b))
    if n <= _SMALL and a[:n].tobytes() == b[:n].tobytes():
        return n  # the most frequent case by far, and the cheapest comparison
    start, block = 0, _BLOCK
    while start < n:
        stop = min(n, start + block)
        differs = a[start:stop] != b[start:stop]
        if differs.any():
            return start + int(differs.argmax())
        start, block = stop, block * 4
    return n


def common_length(a: AnyStr, b: AnyStr) -> int:
    """How many characters or bytes two texts share at their start."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while high - low > 1:  # invariant: a[:low] == b[:low]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def shared_with_stream(prompt_ids: Ids, step: Step) -> int:
    """How many leading ids a prompt shares with a step's stream. The stream itself is not built."""
    n = len(step.prompt_ids)
    shared = common_prefix(prompt_ids, step.prompt_ids)
    if shared < n:
        return shared
    return n + common_prefix(prompt_ids[n:], step.completion_ids)


def stream_length(step: Step) -> int:
    """How many ids the stream of a step holds."""
    return len(step.prompt_ids) + len(step.completion_ids)


def link_steps(steps: Sequence[Step]) -> list[Link]:
    """The link of each step. A chain of steps that extend each other costs one comparison a step."""
    links: list[Link] = []
    longest = 0
    for index, step in enumerate(steps):
        links.append(_link(steps, index, step.prompt_ids, longest))
        longest = max(longest, stream_length(step))
    return links


def links_of(trajectory: Trajectory) -> list[Link]:
    """The parent of each step of a trajectory. Computed once, because the diagnosis and the storage both ask for it."""
    links = _links.get(trajectory)
    if links is None:
        links = _links[trajectory] = link_steps(trajectory.steps)
    return links


def n_new_tokens(trajectory: Trajectory) -> int:
    """Tokens that the steps add: what a prompt does not share, and the completion. Rows alone count theirs."""
    if not trajectory.steps:
        return sum(len(row.ids) for row in trajectory.rows)
    return sum(
        stream_length(step) - link.shared_length
        for step, link in zip(trajectory.steps, links_of(trajectory), strict=True)
    )


def link_step(earlier: Sequence[Step], step: Step) -> Link:
    """The parent of a step among those before it."""
    return _link(earlier, len(earlier), step.prompt_ids, max(map(stream_length, earlier), default=0))


def _link(steps: Sequence[Step], index: int, prompt_ids: Ids, longest: int) -> Link:
    if index == 0:
        return NO_PARENT
    best, parent = -1, index - 1
    for candidate in range(index - 1, -1, -1):
        step = steps[candidate]
        if best >= 0 and not _may_share_more(prompt_ids, step, best):
            continue
        shared = shared_with_stream(prompt_ids, step)
        if shared > best:
            best, parent = shared, candidate
        if best == len(prompt_ids) or best >= longest:
            break  # no other step shares more
    return Link(parent=parent, shared_length=best, parent_length=stream_length(steps[parent]))


def _may_share_more(prompt_ids: Ids, step: Step, than: int) -> bool:
    """Compare one id, the one after the best prefix so far. It makes most full comparisons unnecessary."""
    if than >= len(prompt_ids) or than >= stream_length(step):
        return False
    n = len(step.prompt_ids)
    other = step.prompt_ids[than] if than < n else step.completion_ids[than - n]
    return bool(prompt_ids[than] == other)


def merge_steps(steps: Sequence[Step], links: Sequence[Link] | None = None) -> list[tuple[int, ...]]:
    """The rows that follow from steps: for each row the indices of its steps, in order.

    Each step of a row extends the step before it, so the row is the stream of its last step. A step joins the open
    chain whose whole stream starts its prompt; of several the longest. Else it opens a row with a masked prompt. Known
    ``links`` save comparisons. Source: step-wise merging of SkyRL and tinker-cookbook. Here every open chain is
    matched, so the steps of sub-agents may interleave.
    """
    links = link_steps(steps) if links is None else links
    chains: list[list[int]] = []
    chain_of: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        chain = _chain_to_join(steps, step, links[index], chains, chain_of)
        if chain is None:
            chain = []
            chains.append(chain)
        else:
            del chain_of[chain[-1]]
        chain.append(index)
        chain_of[index] = chain
    return [tuple(chain) for chain in chains]


def _chain_to_join(
    steps: Sequence[Step], step: Step, link: Link, chains: Sequence[list[int]], chain_of: dict[int, list[int]]
) -> list[int] | None:
    if link.parent is None:
        return None
    if link.extends and link.parent in chain_of and link.parent_length:
        return chain_of[link.parent]  # no other step shares more than the parent
    best: list[int] | None = None
    length = 0
    for chain in reversed(chains):
        n = stream_length(steps[chain[-1]])
        # A chain that the step extends shares its whole stream, so it is no longer than what the parent shares.
        if length < n <= link.shared_length and shared_with_stream(step.prompt_ids, steps[chain[-1]]) == n:
            best, length = chain, n
    return best


def row_of(steps: Sequence[Step], step_indices: tuple[int, ...]) -> Row:
    """The row of a chain of steps: mask 1 on completions; logprobs NaN elsewhere, None when no step has any. Deltas
    without stored origins count as template. :func:`origins_of_text` finds more."""
    last = steps[step_indices[-1]]
    ids = last.stream
    n = len(ids)
    loss_mask: Mask = np.zeros(n, dtype=np.bool_)
    logprobs: Floats = np.full(n, np.nan, dtype=np.float32)
    origin: Origins = np.full(n, Origin.PROMPT, dtype=np.uint8)
    has_logprobs = False
    done = 0
    for position, index in enumerate(step_indices):
        step = steps[index]
        start, stop = len(step.prompt_ids), stream_length(step)
        if position:
            written = step.delta_origin
            origin[done:start] = written if written is not None and len(written) == start - done else Origin.TEMPLATE
        loss_mask[start:stop] = True
        origin[start:stop] = Origin.SAMPLED
        if step.logprobs is not None and len(step.logprobs) == stop - start:
            logprobs[start:stop] = step.logprobs
            has_logprobs = True
        done = stop
    return Row(
        ids=ids, loss_mask=loss_mask, logprobs=logprobs if has_logprobs else None, origin=origin,
        step_indices=step_indices,
    )


def merged_rows(steps: Sequence[Step]) -> list[Row]:
    """The rows that follow from steps, with their arrays."""
    return [row_of(steps, chain) for chain in merge_steps(steps)]
