"""What an engine or a source tells beside a sampled token: its likeliest alternatives, entropy, and the kept set. The
arrays are flat, as they are stored: the K entries of token ``i`` are ``[i * K, (i + 1) * K)``. An entry whose
log-probability is minus infinity is none: sampling left fewer tokens over than K."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.align import sampled_in_row
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Row, Step, ids_array

MAX_ALTERNATIVES = 20
"""The most alternatives of a token that a launch asks for, which is also the most that OpenAI's API returns."""
_NEVER = -9999.0  # What vLLM's server writes for minus infinity, which JSON lacks.
MAX_STORED = 1000  # The most alternatives of a token that are kept.
MAX_KEPT = 32  # Ids of kept sets that are stored for a token, on the mean. Of larger sets the sizes alone are.


Alternatives = tuple[Ids, Floats]
"""The likeliest tokens at each place of a completion, likeliest first: ids ``[C, K]`` and log-probabilities ``[C, K]``.
Minus infinity where there is no alternative."""
KeptSets = tuple[NDArray[np.int64], Ids]
"""The ids that tokens could be drawn from: the size of the set of each token ``[T]``, and the ids of all sets."""


def packed(entries: Sequence[Sequence[tuple[int, float]]], k: int | None = None) -> tuple[Ids, Floats] | None:
    """``(id, log-probability)`` of the alternatives of each token, in any order, as the flat arrays of a step. ``k``:
    keep so many, the likeliest; None = all. An entry that no token can be drawn by is left out. None = no token has an
    entry. Raises ``OverflowError`` for an id outside int32."""
    possible = [[pair for pair in entry if pair[1] > _NEVER] for entry in entries]
    most = max(map(len, possible), default=0)
    if not most:
        return None
    most = min(most, k or most)
    ids = np.zeros((len(entries), most), dtype=np.int64)
    logprobs = np.full((len(entries), most), -np.inf, dtype=np.float32)
    for row, pairs in enumerate(possible):
        ordered = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:most]
        ids[row, : len(ordered)] = [token_id for token_id, _ in ordered]
        logprobs[row, : len(ordered)] = [value for _, value in ordered]
    return ids_array(ids.reshape(-1)), logprobs.reshape(-1)


def unpacked(ids: Ids | None, logprobs: Floats | None, n_tokens: int) -> Alternatives | None:
    """The flat arrays of a completion of ``n_tokens``. None = there are none, or their lengths do not fit."""
    if ids is None or logprobs is None or not n_tokens or not len(ids):
        return None
    if len(ids) != len(logprobs) or len(ids) % n_tokens:
        return None
    return ids.reshape(n_tokens, -1), logprobs.reshape(n_tokens, -1)


def problem(step: Step) -> str:
    """Why what was told beside the tokens of a step cannot be kept, as a sentence; empty = it can."""
    n, ids, logprobs = len(step.completion_ids), step.alternative_ids, step.alternative_logprobs
    for name, values in (("entropy", step.entropy), ("kept_set", step.kept_set)):
        if values is not None and len(values) != n:
            return f"{name} has {len(values)} values for {n} completion ids."
    if step.kept_ids is not None and len(step.kept_ids) != n_kept(step.kept_set):
        return f"{len(step.kept_ids)} kept_ids are not as many as kept_set tells."
    if step.kept_ids is not None and len(step.kept_ids) > n * MAX_STORED:
        return f"{n} tokens have {len(step.kept_ids)} kept_ids; at most {MAX_STORED} each are stored."
    if ids is None and logprobs is None:
        return ""
    if ids is None or logprobs is None:
        return "alternative_ids and alternative_logprobs belong together, and one of them is missing."
    if len(ids) != len(logprobs):
        return f"{len(ids)} alternative_ids have {len(logprobs)} alternative_logprobs."
    if len(ids) and (not n or len(ids) % n):
        return f"{len(ids)} alternative_ids do not divide among {n} completion ids."
    if n and len(ids) // n > MAX_STORED:
        return f"Each token has {len(ids) // n} alternatives; at most {MAX_STORED} are kept."
    return ""


def count(step: Step) -> int:
    """K, the alternatives of each sampled token; 0 = none are recorded."""
    entries = unpacked(step.alternative_ids, step.alternative_logprobs, len(step.completion_ids))
    return 0 if entries is None else entries[0].shape[1]


def least_kept(step: Step) -> int | None:
    """The size of the smallest kept set of a step; None = none is recorded."""
    if step.kept_set is None or not np.isfinite(step.kept_set).any():
        return None
    return int(min(float(np.nanmin(step.kept_set)), 2**31 - 1))


def n_kept(kept_set: Floats | None) -> int:
    """How many ids kept sets of these sizes hold together."""
    return 0 if kept_set is None else int(np.nansum(kept_set, dtype=np.float64))


def kept_at(kept_set: Floats | None, kept_ids: Ids | None, place: int) -> Ids:
    """The ids that sampling could draw from at a place of a completion; none where they are not recorded."""
    if kept_set is None or kept_ids is None:
        return NO_IDS
    return kept_ids[n_kept(kept_set[:place]) : n_kept(kept_set[: place + 1])]


def kept_sets(steps: Sequence[Step], row: Row) -> KeptSets:
    """The kept sets of a row's tokens, as far as its steps tell their ids; the others have the size 0."""
    sizes, parts = np.zeros(len(row.ids), np.int64), [NO_IDS]
    for start, step, first, n in sampled_in_row(steps, row):
        kept_set, ids = steps[step].kept_set, steps[step].kept_ids
        if kept_set is not None and ids is not None:
            sizes[start : start + n] = np.nan_to_num(kept_set[first : first + n])
            parts.append(ids[n_kept(kept_set[:first]) : n_kept(kept_set[: first + n])])
    return sizes, np.concatenate(parts)


def behind_likeliest(alternatives: Alternatives, logprobs: Floats) -> Floats:
    """``[C]``, in nats: how far each sampled token stands behind the likeliest one. 0 = it is the likeliest. The
    sampled token need not be among the alternatives. NaN where either is not known."""
    likeliest = alternatives[1][:, 0]
    n = len(likeliest)
    behind: Floats = np.full(n, np.nan, dtype=np.float32)
    n_known = min(n, len(logprobs))
    with np.errstate(invalid="ignore"):
        behind[:n_known] = likeliest[:n_known] - logprobs[:n_known]
    behind[~np.isfinite(behind)] = np.nan
    return np.maximum(behind, 0)


def entropy_at_least(alternatives: Alternatives) -> Floats:
    """``[C]``, in nats: the least entropy that a distribution with these likeliest tokens can have. Every other token
    is at most as likely as the last alternative. So the mass ``r`` that is left adds at least ``-r * log p_K``, with
    ``p_K`` the least of the alternatives. NaN where nothing is known."""
    logprobs = alternatives[1].astype(np.float64)
    is_there = np.isfinite(logprobs)
    p = np.where(is_there, np.exp(np.where(is_there, logprobs, 0.0)), 0.0)
    terms = np.where(is_there, -p * np.where(is_there, logprobs, 0.0), 0.0).sum(axis=1)
    least = np.min(np.where(is_there, logprobs, 0.0), axis=1)
    # Where fewer are there than there is room for, no other token can be drawn.
    remainder = np.where(is_there.all(axis=1), np.clip(1.0 - p.sum(axis=1), 0.0, 1.0), 0.0)
    bound = np.maximum(terms - remainder * least, 0.0)
    return np.where(is_there.any(axis=1), bound, np.nan).astype(np.float32)
