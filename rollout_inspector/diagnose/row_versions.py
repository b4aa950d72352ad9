"""The policy versions that a row or a step names in its ``extra``."""

from collections.abc import Mapping
from typing import Any

from rollout_inspector.streams.trajectory import Row, Step

RUN_LENGTHS = "version_rle"  # The key in ``extra`` with pairs (version, tokens) over the row, as AReaL writes them.
OF_TOKENS = "policy_versions"  # The key in ``extra`` with one version for each token, or with such pairs.


def run_lengths(value: Any) -> list[tuple[str, int]] | None:
    """Pairs (version, tokens), also of spans as vLLM and SGLang write them; None = it is something else."""
    if not isinstance(value, list) or not value:
        return None
    pairs: list[tuple[str, int]] = []
    for item in value:
        if isinstance(item, Mapping) and all(type(item.get(bound)) is int for bound in ("start", "end")):
            item = item.get("version", ""), max(item["end"] - item["start"], 0)
        if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[1], int) or item[1] < 0:
            return None
        pairs.append((str(item[0]), item[1]))
    return pairs


def step_versions(step: Step) -> list[str]:
    """The distinct versions that sampled a completion, in order of appearance; empty = not recorded. ``extra`` of the
    step holds runs of (version, tokens) where the weights changed during the call."""
    runs = run_lengths(step.extra.get(OF_TOKENS)) or run_lengths(step.extra.get("weight_versions")) or []
    versions = [version for version, count in runs if version and count]
    return list(dict.fromkeys(versions)) or [step.policy_version] * bool(step.policy_version)


def trained_versions(row: Row) -> list[str]:
    """The distinct versions that sampled the tokens under the loss mask, in order of appearance. What is recorded is as
    long as the row or as its trained tokens; in another length, or without a mask for each token, it tells nothing.
    Empty = not recorded."""
    n, n_trained = len(row.ids), row.n_trained
    if len(row.loss_mask) != n:
        return []
    for key in (RUN_LENGTHS, OF_TOKENS):
        value = row.extra.get(key)
        pairs = run_lengths(value)
        if pairs is None and isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
            pairs = [("" if item is None else str(item), 1) for item in value]
        total = sum(count for _, count in pairs or ())
        if not pairs or total not in (n, n_trained):
            continue
        versions: dict[str, None] = {}
        at = 0
        for version, count in pairs:
            if version and count and (total == n_trained or row.loss_mask[at : at + count].any()):
                versions[version] = None
            at += count
        return list(versions)
    return []
