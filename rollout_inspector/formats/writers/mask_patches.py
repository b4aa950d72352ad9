"""Takes tokens out of the loss of a trainer's record, or a trajectory out of it. Every other value stays as it stands.

A trainer's file holds fields that no reader of ours knows, so a record is changed where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

LABEL_IGNORED = -100
"""The label that takes a token out of a supervised loss."""

Places = Sequence[int]
"""Offsets in the row, as the reader of the format makes it."""
MaskPlaces = Callable[[dict[str, Any], int, Places], None]
"""``(record, n, offsets)``: changes the n-th trajectory of the record, which is known to be readable."""


def without(record: dict[str, Any], left_out: Sequence[int], list_key: str) -> dict[str, Any] | None:
    """The record without these trajectories; None = nothing is left. ``list_key``: the list that counts them.

    An empty key: the record is one trajectory. As the readers do, every list of that length counts as one of them.
    """
    if not left_out:
        return record
    n = len(record[list_key]) if list_key else 1
    if n == len(left_out):
        return None
    dropped = set(left_out)
    return {
        key: [one for i, one in enumerate(item) if i not in dropped]
        if isinstance(item, list) and len(item) == n
        else item
        for key, item in record.items()
    }


def _clear(values: Any, places: Places, before: int = 0, to: float | None = None) -> None:
    """Set values to 0 or to ``to``, each in its own type. ``before``: tokens of the row that the list leaves out."""
    if not isinstance(values, list):
        return
    for place in places:
        if 0 <= place - before < len(values) and values[place - before] is not None:
            values[place - before] = type(values[place - before])(0) if to is None else to


def _inner(values: Any) -> Any:
    """A list out of its list of one."""
    return values[0] if isinstance(values, list) and len(values) == 1 and isinstance(values[0], list) else values


def _verl(record: dict[str, Any], n: int, places: Places) -> None:
    _clear(record["response_mask"], places, len(record["prompt_ids"]))


def _of_batch(responses: str, masks: str, prompts: str) -> MaskPlaces:
    """For a batch of lists, which may have no masks: then every response is trained whole."""

    def clear(record: dict[str, Any], n: int, places: Places) -> None:
        if record.get(masks) is None:
            record[masks] = [[1] * len(one) for one in record[responses]]
        before = record.get(prompts)
        _clear(record[masks][n], places, len(before[n]) if before else 0)

    return clear


def _prime_rl(record: dict[str, Any], n: int, places: Places) -> None:
    _clear(record["mask"], places)
    _clear(record.get("advantages"), places)


def _tinker(record: dict[str, Any], n: int, places: Places) -> None:
    """Values stand at the place that predicts their token. A loss that reads no mask reads the advantages."""
    inputs = record.get("loss_fn_inputs", record)

    def values(name: str) -> Any:
        held = inputs.get(name)
        return held.get("data", held.get("_numpy")) if isinstance(held, Mapping) else held

    if inputs.get("mask") is None:
        inputs["mask"] = [1] * len(values("target_tokens"))
    for name in ("mask", "advantages"):
        _clear(values(name), places, 1)


def _nemo_rl(record: dict[str, Any], n: int, places: Places) -> None:
    for name, item in record.items():
        if name == "token_loss_mask" or "advantage" in name:
            _clear(_inner(item), places)


def _message_log(record: dict[str, Any], n: int, places: Places) -> None:
    start = 0
    for message in record["message_log"]:
        length = len(message["token_ids"])
        inside = [place for place in places if start <= place < start + length]
        if inside:
            if message.get("token_loss_mask") is None:
                message["token_loss_mask"] = [int(message.get("role") == "assistant")] * length
            _clear(message["token_loss_mask"], inside, start)
        start += length


def _atropos(record: dict[str, Any], n: int, places: Places) -> None:
    _clear(record["masks"][n], places, to=LABEL_IGNORED)
    if record.get("advantages"):
        _clear(record["advantages"][n], places)


def _sft(record: dict[str, Any], n: int, places: Places) -> None:
    """The reader cuts off what has no attention, so offsets count what is left."""
    attention = record.get("attention_mask")
    kept = [i for i in range(len(record["labels"])) if attention is None or attention[i]]
    _clear(record["labels"], [kept[place] for place in places], to=LABEL_IGNORED)


PATCHED: dict[str, tuple[MaskPlaces, str]] = {
    "verl_agent_loop": (_verl, ""),
    "trl_rollouts": (_of_batch("completion_ids", "env_mask", "prompt_ids"), "prompt_ids"),
    "skyrl": (_of_batch("response_ids", "loss_masks", "prompt_token_ids"), "response_ids"),
    "prime_rl_samples": (_prime_rl, ""),
    "tinker_data": (_tinker, ""),
    "nemo_rl": (_nemo_rl, ""),
    "nemo_message_log": (_message_log, ""),
    "atropos": (_atropos, "tokens"),
    "sft_rows": (_sft, ""),
}
"""Name of a format -> what masks tokens, and the list that counts the trajectories of a record."""


def why_not(record: Mapping[str, Any]) -> str:
    """Why a record cannot be changed where it stands, as a sentence; empty = it can."""
    if record.get("is_last_step") is not None:
        return "It is step-wise: several elements of its lists are one trajectory."
    return ""
