"""The rows of what slime, miles and SkyRL pickle, as trajectories."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from rollout_inspector.formats.engine_fields import ARRAYS, KEY, summary_of
from rollout_inspector.formats.policy_versions import of_row
from rollout_inspector.formats.training_step import as_step
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Row, Trajectory, ids_array
from tools.pickles.unpickling import Record, load_tensor

_SAMPLE_FIELDS = (
    "tokens", "response_length", "loss_mask", "rollout_log_probs", "reward", "index", "group_index", "status",
    "remove_sample", "prompt", "response", *ARRAYS,
)


def trajectories(value: Any, stem: str) -> Iterator[Trajectory]:
    """The rows of a dump as trajectories. Raises :class:`Refusal` when it is neither slime's nor SkyRL's."""
    if isinstance(value, Mapping) and isinstance(value.get("samples"), list):
        return _slime(value, stem)
    if isinstance(value, Mapping) and isinstance(value.get("rollout_data"), Mapping):
        return _slime_training(value, stem)
    state = _skyrl_state(value)
    if state is not None:
        return _skyrl(state, stem)
    kind = getattr(value, "origin", "") or type(value).__name__
    raise Refusal(
        f"The file holds a {kind}, which is neither a slime debug dump (rollout_id with samples or rollout_data) nor a "
        "SkyRL training input (sequences, response_mask)."
    )


def _slime(dump: Mapping[str, Any], stem: str) -> Iterator[Trajectory]:
    """Trajectories from slime's ``--save-debug-rollout-data``. Mask and logprobs cover the response alone."""
    rollout = dump.get("rollout_id", stem)
    names_seen: set[str] = set()
    for n, sample in enumerate(dump["samples"]):
        if not isinstance(sample, Mapping):
            raise Refusal(f"samples[{n}] is not an object.")
        where = f"samples[{n}]"
        ids = _ids(sample.get("tokens"), f"{where}.tokens")
        length = int(sample.get("response_length") or 0)
        if not 0 <= length <= len(ids):
            raise Refusal(f"{where}.response_length is {length}, but there are {len(ids)} tokens.")
        at = len(ids) - length
        mask = sample.get("loss_mask")
        response_mask = np.ones(length, np.bool_) if mask is None else _array(mask, f"{where}.loss_mask") != 0
        if sample.get("remove_sample"):
            response_mask = np.zeros(length, np.bool_)
        logprobs = sample.get("rollout_log_probs")
        whole = np.concatenate([np.zeros(at, np.bool_), response_mask])
        row = Row(
            ids=ids,
            loss_mask=whole,
            logprobs=None if logprobs is None else _behind(at, _array(logprobs, f"{where}.rollout_log_probs")),
            extra=_extra(sample) | _routing(sample, len(ids)) | of_row(_plain(sample.get("weight_versions")), whole),
        )
        index = sample.get("index")
        name = f"{rollout}-{n if index is None else index}"
        while name in names_seen:
            name += "+"
        names_seen.add(name)
        reward, parts = _reward(sample.get("reward"))
        group = sample.get("group_index")
        status = sample.get("status", "")
        yield Trajectory(
            name,
            rows=(row,),
            reward=reward,
            reward_parts=parts,
            group="" if group is None else str(group),
            stop_reason=status[:60] if isinstance(status, str) else "",
            training_step=as_step(rollout),
        )


_TRAINED = {
    "log_probs": "trainer_logprobs", "ref_log_probs": "ref_logprobs", "teacher_log_probs": "teacher_logprobs",
    "entropy": "entropy", "ref_entropy": "ref_entropy", "advantages": "advantages", "returns": "returns",
    "values": "values",
}
"""Lists of a training dump with a value for each token of the response, and our names of these columns."""
_OF_BATCH = ("tokens", "loss_masks", "response_lengths", "total_lengths", "rewards", "sample_indices", "raw_reward",
             "rollout_log_probs", "partition", *_TRAINED, *ARRAYS)


def _slime_training(dump: Mapping[str, Any], stem: str) -> Iterator[Trajectory]:
    """Trajectories from ``--save-debug-train-data`` of slime and miles: the share of one rank, a row for each sample.

    The reward is that of the trainer, after normalisation. A list whose length is not that of the response, such as a
    slice of context parallelism, is left out and named in ``left_out``.
    """
    rollout, data = dump.get("rollout_id", stem), dump["rollout_data"]
    tokens = data.get("tokens")
    if not isinstance(tokens, list | tuple):
        raise Refusal("rollout_data.tokens is not a list with the tokens of each sample.")
    n = len(tokens)
    for key in ("response_lengths", "loss_masks", "rollout_log_probs", "rewards", "sample_indices", *_TRAINED, *ARRAYS):
        if data.get(key) is not None and len(data[key]) != n:
            raise Refusal(f"rollout_data.{key} has {len(data[key])} elements for {n} tokens.")
    lengths = data.get("response_lengths")
    if lengths is None:
        raise Refusal("rollout_data.response_lengths is missing, so nobody knows where the responses begin.")
    names_seen: set[str] = set()
    for i in range(n):
        own = {key: item[i] for key, item in data.items() if isinstance(item, list | tuple) and len(item) == n}
        where = f"rollout_data.tokens[{i}]"
        ids = _ids(own["tokens"], where)
        length = int(own["response_lengths"])
        if not 0 <= length <= len(ids):
            raise Refusal(f"rollout_data.response_lengths[{i}] is {length}, but there are {len(ids)} tokens.")
        at, columns, left_out = len(ids) - length, {}, {}
        for key in (*_TRAINED, "rollout_log_probs"):
            values = None if own.get(key) is None else _array(own[key], f"rollout_data.{key}[{i}]").reshape(-1)
            if values is not None and len(values) != length:
                left_out[key] = f"{len(values)} values for {length} tokens of the response"
            elif values is not None:
                columns[_TRAINED.get(key, key)] = _behind(at, values)
        logprobs = columns.pop("rollout_log_probs", None)
        mask = own.get("loss_masks")
        trained = np.ones(length, np.bool_) if mask is None else _array(mask, f"loss_masks[{i}]").reshape(-1) != 0
        whole = np.concatenate([np.zeros(at, np.bool_), trained])
        own["left_out"] = left_out
        further = {str(key): _plain(item) for key, item in own.items() if key not in _OF_BATCH}
        extra = {key: item for key, item in further.items() if item not in (None, {}, [], "")}
        index = own.get("sample_indices")
        name = f"{rollout}-{i if index is None else int(index)}"
        while name in names_seen:
            name += "+"
        names_seen.add(name)
        yield Trajectory(
            name,
            rows=(
                Row(
                    ids=ids,
                    loss_mask=whole,
                    logprobs=logprobs,
                    columns=columns,
                    extra=extra | _routing(own, len(ids)) | of_row(_plain(own.get("weight_versions")), whole),
                ),
            ),
            reward=_reward(own.get("rewards"))[0],
            training_step=as_step(rollout),
        )


def _routing(fields: Mapping[str, Any], n_tokens: int) -> dict[str, Any]:
    """The summary of the expert routing of a sample; empty where it has none."""
    key = next((name for name in ARRAYS if fields.get(name) is not None), None)
    if key is None:
        return {}
    value = fields[key]
    return {KEY: summary_of(_array(value, key) if hasattr(value, "shape") else _plain(value), n_tokens)}


def _skyrl_state(value: Any) -> dict[str, Any] | None:
    """The tensors of a ``TrainingInputBatch`` and its ``metadata``; None when the value is not one."""
    if isinstance(value, Record):
        # A function that was not looked up would rebuild it from its state: the arguments hold the state.
        arguments = value.get("__arguments__", ())
        states = [argument for argument in arguments if isinstance(argument, Mapping)]
        value = {**(states[0] if states else {}), **value}
    if not isinstance(value, Mapping):
        return None
    inner = value.get("batch_dict", value)
    if not isinstance(inner, Mapping) or not {"sequences", "response_mask"} <= inner.keys():
        return None
    fields: dict[str, Any] = {
        key: _tensor(item, str(key)) for key, item in inner.items() if item is not None and _is_tensor(item)
    }
    fields["metadata"] = value.get("metadata") or {}
    return fields


def _is_tensor(item: Any) -> bool:
    return hasattr(item, "shape") or (isinstance(item, Mapping) and "data" in item)


def _tensor(item: Any, name: str) -> np.ndarray[Any, Any]:
    """SkyRL writes a tensor as its bytes with a shape, or as a ``torch.save`` file when numpy lacks the type."""
    if isinstance(item, Mapping):
        if item.get("format") == "torch":
            return _array(load_tensor(item["data"]), name)
        return np.frombuffer(item["data"], dtype=np.dtype(item["dtype"])).reshape(item["shape"])
    return _array(item, name)


def _skyrl(state: dict[str, Any], stem: str) -> Iterator[Trajectory]:
    """Rows of a padded batch: ``[B, T]`` sequences and attention, ``[B, R]`` arrays of the response at its end."""
    sequences, metadata = state["sequences"], state["metadata"]
    n, width = state["response_mask"].shape
    attention = state.get("attention_mask", np.ones_like(sequences)) != 0
    columns = {
        key: item
        for key, item in state.items()
        if key not in ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs", "metadata")
        and item.shape == (n, width)
    }
    uids = list(metadata.get("uids") or [""] * n)
    padding = int(metadata.get("pad_size") or 0)
    lasts = list(metadata.get("is_last_step") or [True] * n)
    keys = []
    episode = 0
    for i in range(n - padding):
        keys.append(episode)
        episode += bool(lasts[i]) if i < len(lasts) else 1
    for number, group in groupby(range(n - padding), key=lambda i: keys[i]):
        members = list(group)
        rows = tuple(_skyrl_row(state, columns, attention, i, width) for i in members)
        token_rewards = [row.columns["rewards"].sum() for row in rows if "rewards" in row.columns]
        uid = uids[members[0]] if members[0] < len(uids) else ""
        yield Trajectory(
            f"{stem}-{number}"[-200:],
            rows=rows,
            reward=float(sum(token_rewards)) if token_rewards else None,
            group=str(uid)[:200],
        )


def _skyrl_row(
    state: dict[str, Any], columns: dict[str, Any], attention: np.ndarray[Any, Any], i: int, width: int
) -> Row:
    is_attended = attention[i]
    total = len(is_attended)
    response = np.zeros(total, np.bool_)
    response[total - width :] = state["response_mask"][i] != 0

    def whole(values: Any, fill: float) -> Any:
        column = np.full(total, fill, dtype=np.float32)
        column[total - width :] = values
        return np.where(response, column, np.float32(fill))[is_attended]

    mask = state.get("loss_mask")
    logprobs = state.get("rollout_logprobs")
    return Row(
        ids=_ids(state["sequences"][i][is_attended], "sequences"),
        loss_mask=whole(state["response_mask"][i] if mask is None else mask[i], 0) != 0,
        logprobs=None if logprobs is None else whole(logprobs[i], np.nan),
        columns={str(key)[:60]: whole(item[i], 0) for key, item in columns.items()},
    )


def _array(value: Any, where: str) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):
        value = value.detach().to("cpu")
        value = value.float().numpy() if value.dtype.is_floating_point else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise Refusal(f"{where} is not a list of numbers.") from error
    if array.dtype.kind not in "biuf":
        raise Refusal(f"{where} is not a list of numbers.")
    return array


def _ids(value: Any, where: str) -> Any:
    array = _array([] if value is None else value, where)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu" or int(array.min()) < 0):
        raise Refusal(f"{where} is not a flat list of token ids.")
    try:
        return ids_array(array.astype(np.int64))
    except OverflowError as error:
        raise Refusal(f"{where}: {error}.") from error


def _behind(n: int, values: Any) -> Any:
    return np.concatenate([np.full(n, np.nan, dtype=np.float32), values.astype(np.float32)])


def _reward(value: Any) -> tuple[float | None, dict[str, float]]:
    """The reward as one number, or as several by name."""
    value = _plain(value)
    if isinstance(value, Mapping):
        parts = {key: float(item) for key, item in value.items() if isinstance(item, int | float)}
        return parts.get("score", next(iter(parts.values()), None)), parts
    return (float(value), {}) if isinstance(value, int | float) else (None, {})


def _extra(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The texts and the other fields, as far as JSON can hold them."""
    skipped = {*_SAMPLE_FIELDS} - {"prompt", "response"}
    extra = {key: _plain(item) for key, item in sample.items() if key not in skipped}
    return {str(key): item for key, item in extra.items() if item not in (None, {}, [], "")}


def _plain(value: Any, depth: int = 0) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if depth < 20 and isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item, depth + 1) for key, item in value.items()}
    if depth < 20 and isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return None
