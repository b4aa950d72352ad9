"""``meta_info`` of SGLang: what was sampled stands there as ``[log-probability, id, text]`` for each token."""

from collections.abc import Mapping
from typing import Any

from rollout_inspector.formats import shapes
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.formats.top_logprobs import alternatives_of
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids

VERSIONS = ("weight_version", "weight_versions")
META = ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "input_top_logprobs",
        "finish_reason", *VERSIONS)
"""Fields that are read, or that repeat what is read."""


def entries(value: Any, where: str) -> tuple[Ids, Floats]:
    """Ids and log-probabilities ``[n]`` of a list of ``[log-probability, id, text]``. Raises :class:`BadLine`."""
    ids, values = [], []
    for n, item in enumerate(shapes.sequence(value, where)):
        pair = shapes.sequence(item, f"{where}[{n}]")
        if len(pair) < 2:
            raise BadLine(f"{where}[{n}] must hold a log-probability and a token id.")
        values.append(pair[0])
        ids.append(pair[1])
    return shapes.ids(ids, f"{where}: ids"), shapes.floats(values, f"{where}: log-probabilities")


def sampled(meta: Mapping[str, Any], where: str) -> tuple[Ids, Floats | None, dict[str, Any]]:
    """Ids ``[C]``, log-probabilities ``[C]`` and alternatives of a completion; empty where none are recorded."""
    if meta.get("output_token_logprobs") is None:
        return NO_IDS, None, {}
    ids, logprobs = entries(meta["output_token_logprobs"], f"{where}.output_token_logprobs")
    top = meta.get("output_top_logprobs")
    if not isinstance(top, list):
        return ids, logprobs, {}
    name = f"{where}.output_top_logprobs"
    listed = []
    for n, top_entry in enumerate(top):
        token_entries = None if top_entry is None else entries(top_entry, f"{name}[{n}]")
        pairs = () if token_entries is None else zip(token_entries[0].tolist(), token_entries[1].tolist(), strict=True)
        listed.append([{"token_id": id_, "logprob": value if value == value else None} for id_, value in pairs])
    return ids, logprobs, alternatives_of(listed, ids, name)


def token_texts(meta: Mapping[str, Any]) -> list[Any]:
    """The text of each token of a completion, where the server returned texts; else None or nothing."""
    value = meta.get("output_token_logprobs")
    items = value if isinstance(value, list) else []
    return [item[2] if isinstance(item, list) and len(item) > 2 else None for item in items]


def prompt(meta: Mapping[str, Any], where: str) -> Ids | None:
    """The ids ``[P]`` of the prompt; None unless ``input_token_logprobs`` holds all of them."""
    if meta.get("input_token_logprobs") is None:
        return None
    ids, _ = entries(meta["input_token_logprobs"], f"{where}.input_token_logprobs")
    return ids if len(ids) == shapes.whole(meta.get("prompt_tokens"), f"{where}.prompt_tokens") else None


def versions(meta: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The policy version of a call, and ``policy_versions`` where weights changed meanwhile: runs of [version, tokens].
    The last version is that of the call. Raises :class:`BadLine`."""
    name = f"{where}.weight_versions"
    runs: list[tuple[str, int]] = []
    for n, item in enumerate(shapes.sequence(meta.get("weight_versions") or [], name)):
        span = shapes.mapping(item, f"{name}[{n}]")
        start, stop = (shapes.whole(span.get(key), f"{name}[{n}].{key}", least=0) or 0 for key in ("start", "end"))
        runs.append((shapes.text(span.get("version"), f"{name}[{n}].version", 100), max(stop - start, 0)))
    last = shapes.text(meta.get("weight_version"), f"{where}.weight_version", 100)
    several = {"policy_versions": [list(run) for run in runs]} if len(runs) > 1 else {}
    return last or (runs[-1][0] if runs else ""), several


def finish(meta: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Why the completion ended, and the token or string that ended it."""
    reason = meta.get("finish_reason")
    if not isinstance(reason, Mapping):
        return shapes.text(reason, f"{where}.finish_reason", 30), ""
    matched = reason.get("matched")
    stop = matched if isinstance(matched, str | int) and not isinstance(matched, bool) else None
    kind = shapes.text(reason.get("type"), f"{where}.finish_reason.type", 30)
    return kind, shapes.text(stop, f"{where}.finish_reason.matched", 100)
