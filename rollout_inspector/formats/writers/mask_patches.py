"""Changes which tokens of a trainer's record are trained, or takes a trajectory out of it. All else stays as it stands.
A trainer's file holds fields that no reader of ours knows, so a record is changed where it stands."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_inspector.streams.trajectory import Row

LABEL_IGNORED = -100  # The label that takes a token out of a supervised loss.

Places = Sequence[int]  # Offsets in the row, as the reader of the format makes it.
MaskPlaces = Callable[[dict[str, Any], int, Places, Row], None]
"""``(record, n, places, row)``: at these places the n-th trajectory of the record, which is known to be readable, gets
the mask and the advantages of the row."""


def without(record: dict[str, Any], left_out: Sequence[int], list_key: str) -> dict[str, Any] | None:
    """The record without these trajectories; None = nothing is left. ``list_key``: the list that counts them. An empty
    key, or a list of plain values: the record is one trajectory. As the readers do, every list of that length counts as
    one of them."""
    if not left_out:
        return record
    n = len(record[list_key]) if _is_batch(record, list_key) else 1
    if n == len(left_out):
        return None
    dropped = set(left_out)
    return {
        key: [element for i, element in enumerate(item) if i not in dropped]
        if isinstance(item, list) and len(item) == n
        else item
        for key, item in record.items()
    }


def _is_batch(record: Mapping[str, Any], list_key: str) -> bool:
    items = record.get(list_key)
    return isinstance(items, list) and bool(items) and isinstance(items[0], list | dict)


def _write(values: Any, places: Places, row: Row, before: int = 0, labels: bool = False) -> None:
    """Write the row's mask, or its labels. ``before``: tokens of the row that the list leaves out."""
    for place in places:
        if isinstance(values, list) and 0 <= place - before < len(values):
            is_trained, old = bool(row.loss_mask[place]), values[place - before]
            label = int(row.ids[place]) if is_trained else LABEL_IGNORED
            values[place - before] = label if labels else is_trained if old is None else type(old)(is_trained)


def _advantages(values: Any, places: Places, row: Row, before: int = 0) -> None:
    """Masked tokens lose their advantage, because a loss may read no mask; others get that of the row."""
    column = row.columns.get("advantages")
    for place in places:
        if isinstance(values, list) and 0 <= place - before < len(values) and values[place - before] is not None:
            advantage = float(column[place]) if column is not None and row.loss_mask[place] else 0
            values[place - before] = type(values[place - before])(advantage)


def _inner(values: Any) -> Any:
    """A list out of its list of one."""
    return values[0] if isinstance(values, list) and len(values) == 1 and isinstance(values[0], list) else values


def _verl(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    _write(record["response_mask"], places, row, len(record["prompt_ids"]))


def _trl(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    """A batch, or one row. All masks together say what is trained; without one the response is trained whole."""
    is_batch = _is_batch(record, "completion_ids")
    if record.get("env_mask") is None and record.get("completion_mask") is None:
        responses = record["completion_ids"]
        record["env_mask"] = [[1] * len(ids) for ids in responses] if is_batch else [1] * len(responses)
    values = {
        name: record[name][n] if is_batch else record[name]
        for name in ("prompt_ids", "prompt_mask", "env_mask", "completion_mask") if record.get(name) is not None
    }
    attention = values.get("prompt_mask") or ()
    padded = len(attention) == len(values["prompt_ids"]) and any(attention)
    for name in ("env_mask", "completion_mask"):
        _write(values.get(name), places, row, sum(map(bool, attention)) if padded else len(values["prompt_ids"]))


def _skyrl(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    if record.get("loss_masks") is None:
        record["loss_masks"] = [[1] * len(response) for response in record["response_ids"]]
    before = record.get("prompt_token_ids")
    _write(record["loss_masks"][n], places, row, len(before[n]) if before else 0)


def _prime_rl(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    _write(record["mask"], places, row)
    _advantages(record.get("advantages"), places, row)


def _tinker(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    """Values stand at the place that predicts their token."""
    inputs = record.get("loss_fn_inputs", record)

    def values(name: str) -> Any:
        field = inputs.get(name)
        return field.get("data", field.get("_numpy")) if isinstance(field, Mapping) else field

    if inputs.get("mask") is None:
        inputs["mask"] = [1] * len(values("target_tokens"))
    _write(values("mask"), places, row, 1)
    _advantages(values("advantages"), places, row, 1)


def _nemo_rl(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    for name, item in record.items():
        if name == "token_loss_mask":
            _write(_inner(item), places, row)
        elif "advantage" in name:
            _advantages(_inner(item), places, row)


def _message_log(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    start = 0
    for message in record["message_log"]:
        length = len(message["token_ids"])
        inside = [place for place in places if start <= place < start + length]
        if inside:
            if message.get("token_loss_mask") is None:
                message["token_loss_mask"] = [int(message.get("role") == "assistant")] * length
            _write(message["token_loss_mask"], inside, row, start)
        start += length


def _atropos(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    _write(record["masks"][n], places, row, labels=True)
    if record.get("advantages"):
        _advantages(record["advantages"][n], places, row)


def _attended(attention: Any, length: int) -> list[int]:
    """The places in a record of the tokens that the reader keeps."""
    return [place for place in range(length) if attention is None or attention[place]]


def _sft(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    """A batch, or one row. Labels and all masks together say what is trained."""
    is_batch = _is_batch(record, "input_ids")
    masks = ("labels", "completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
    names = [name for name in ("input_ids", "attention_mask", *masks) if record.get(name) is not None]
    values = {name: record[name][n] if is_batch else record[name] for name in names}
    attended = _attended(values.get("attention_mask"), len(values["input_ids"]))
    for name in masks:
        for place in places:
            _write(values.get(name), [place], row, place - attended[place], labels=name == "labels")


def _slime(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    sample = record["samples"][n] if "samples" in record else record
    if sample.get("loss_mask") is None:
        sample["loss_mask"] = [1] * sample["response_length"]
    _write(sample["loss_mask"], places, row, len(sample["tokens"]) - sample["response_length"])


def _openrlhf(record: dict[str, Any], n: int, places: Places, row: Row) -> None:
    """The values of actions stand at the end of a sequence, whose padding the reader cuts off."""
    is_batch = _is_batch(record, "sequences")
    names = ("sequences", "attention_mask", "action_mask", "advantages")
    values = {name: record[name][n] if is_batch else record[name] for name in names if record.get(name) is not None}
    attended = _attended(values.get("attention_mask"), len(values["sequences"]))
    first = len(values["sequences"]) - len(values["action_mask"])
    for place in places:
        _write(values["action_mask"], [place], row, place - attended[place] + first)
        _advantages(values.get("advantages"), [place], row, place - attended[place] + first)


PATCHED: dict[str, tuple[MaskPlaces, str]] = {
    "verl_agent_loop": (_verl, ""),
    "trl_rollouts": (_trl, "prompt_ids"),
    "skyrl": (_skyrl, "response_ids"),
    "prime_rl_samples": (_prime_rl, ""),
    "tinker_data": (_tinker, ""),
    "nemo_rl": (_nemo_rl, ""),
    "nemo_message_log": (_message_log, ""),
    "atropos": (_atropos, "tokens"),
    "sft_rows": (_sft, "input_ids"),
    "slime_samples": (_slime, "samples"),
    "openrlhf_experience": (_openrlhf, "sequences"),
}
"""Name of a format -> what changes its masks, and the list that counts the trajectories of a record."""


def why_not(record: Mapping[str, Any]) -> str:
    """Why a record cannot be changed where it stands, as a sentence; empty = it can."""
    if record.get("is_last_step") is not None:
        return "It is step-wise: several elements of its lists are one trajectory."
    return ""
