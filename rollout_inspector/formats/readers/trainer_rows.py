"""Rows in the shapes that trainers take them in, read back: what our exports write, and what users dump themselves."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollout_inspector.formats import shapes
from rollout_inspector.formats.registry import ROWS_ALONE, Format, each_batch, has_keys, having, line_format
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.formats.teacher_columns import FIELDS, teacher_columns
from rollout_inspector.streams.trajectory import REWARD_COLUMNS, Floats, Ids, Mask, Row, Trajectory

IGNORED = -100


def _split_row(prompt: Ids, response: Ids, mask: Mask, logprobs: Floats | None) -> Row:
    return Row(
        ids=np.concatenate([prompt, response]),
        loss_mask=np.concatenate([np.zeros(len(prompt), dtype=np.bool_), mask]),
        logprobs=shapes.after(len(prompt), logprobs), extra={"prompt_length": len(prompt)},
    )


def _rest(value: Mapping[str, Any], known: tuple[str, ...], name: str = "") -> dict[str, Any]:
    """What else the source says, as one field where it has a name; nothing where it says nothing."""
    fields = {key: item for key, item in shapes.rest(value, known).items() if item not in (None, {}, [])}
    return {name: fields} if name and fields else fields


# -- verl

_VERL = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "extra_fields")


def _verl(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    row = _split_row(
        shapes.ids(value.get("prompt_ids"), "prompt_ids"),
        shapes.ids(value.get("response_ids"), "response_ids"),
        shapes.mask(value.get("response_mask"), "response_mask"),
        shapes.optional_floats(value.get("response_logprobs"), "response_logprobs"),
    )
    scores = {name: shapes.floats(value[name], name) for name in REWARD_COLUMNS if isinstance(value.get(name), list)}
    n_prompt = len(row.ids) - len(value["response_ids"])
    columns = {name: np.concatenate([np.zeros(n_prompt, np.float32), score]) for name, score in scores.items()}
    more = shapes.spare(shapes.optional_mapping, value.get("extra_fields"), "extra_fields") or {}
    columns |= teacher_columns({**more, **value}, row.ids)
    name = shapes.text(more.get("external_id"), "extra_fields.external_id", 180) or f"line-{number}"
    place = shapes.whole(more.get("row"), "extra_fields.row", least=0)
    return Trajectory(
        f"{name}-row-{place}" if place else name,
        rows=(replace(row, columns=columns),),
        reward=shapes.number(value.get("reward_score"), "reward_score"),
        extra=_rest(value, (*_VERL, *columns, *FIELDS)) | _rest(more, ("external_id", "row", *FIELDS), "extra_fields"),
    )


# -- TRL


_TRL = ("completion_ids", "logprobs", "env_mask", "reward", "external_id", "prompt_mask", "completion_mask",
        "completion_logprobs")


def _trl(value: Any, number: int, seen: set[str]) -> list[Trajectory]:
    """A batch is read whole or rejected whole: its lists mean nothing apart. A line may also be one row."""
    value = shapes.mapping(value, "The batch")
    prompts = shapes.sequence(value.get("prompt_ids"), "prompt_ids")
    ids = value.get("completion_ids")
    if not any(isinstance(item, list) for item in (*prompts[:1], *(ids[:1] if isinstance(ids, list) else ()))):
        value = {key: item if item is None else [item] for key, item in value.items()}
        prompts = [prompts]
    columns: dict[str, list[Any] | None] = {}
    for name in _TRL:
        column = value.get(name)
        if column is not None and len(shapes.sequence(column, name)) != len(prompts):
            raise BadLine(f"{name} has {len(column)} elements for {len(prompts)} prompt_ids.")
        columns[name] = column

    def element(name: str, i: int) -> Any:
        column = columns[name]
        return None if column is None else column[i]

    further = shapes.elements(value, ("prompt_ids", *_TRL), len(prompts))
    trajectories = []
    for i in range(len(prompts)):
        row = _generation({name: element(name, i) for name in _TRL} | {"prompt_ids": prompts[i]}, f"[{i}]")
        name = shapes.text(element("external_id", i), f"external_id[{i}]", 180) or f"line-{number}-{i}"
        # Rows of one trajectory carry its id.
        unique, n = name, 0
        while unique in seen:
            n += 1
            unique = f"{name}-row-{n}"
        seen.add(unique)
        trajectories.append(Trajectory(
            unique, rows=(row,), reward=shapes.number(element("reward", i), f"reward[{i}]"),
            extra=further(i),
        ))
    return trajectories


def _generation(value: Mapping[str, Any], at: str) -> Row:
    """One row. ``prompt_mask`` with a 1 is attention, so the batch is padded: prompts left, completions right."""
    prompt = shapes.ids(value["prompt_ids"], f"prompt_ids{at}")
    ids = shapes.ids(value["completion_ids"], f"completion_ids{at}")
    logprobs, logprobs_name = value["logprobs"], f"logprobs{at}"
    if logprobs is None:
        logprobs, logprobs_name = value["completion_logprobs"], f"completion_logprobs{at}"
    values = shapes.optional_floats(logprobs, logprobs_name)
    mask = np.ones(len(ids), dtype=np.bool_)
    for name in ("completion_mask", "env_mask"):
        if value[name] is not None:
            own = shapes.mask(value[name], f"{name}{at}")
            mask = mask & own if len(own) == len(mask) else own
    attention = None if value["prompt_mask"] is None else shapes.mask(value["prompt_mask"], f"prompt_mask{at}")
    if attention is not None and attention.any() and len(attention) == len(prompt):
        prompt = prompt[attention]
        attended = value["completion_mask"] or []
        length = len(attended) - next((n for n, bit in enumerate(reversed(attended)) if bit), len(attended))
        if (ids[length:] == ids[-1:]).all():
            ids, mask, values = ids[:length], mask[:length], None if values is None else values[:length]
    return _split_row(prompt, ids, mask, values)


# -- prime-rl, Tinker, NeMo RL, supervised rows

_PRIME_RL_COLUMNS = ("advantages", "temperatures", "ref_logprobs")


def _prime_rl(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    row = Row(
        ids=shapes.ids(value.get("token_ids"), "token_ids"),
        loss_mask=shapes.mask(value.get("mask"), "mask"),
        logprobs=shapes.optional_floats(value.get("logprobs"), "logprobs"),
        columns={name: shapes.floats(value[name], name) for name in _PRIME_RL_COLUMNS if value.get(name) is not None},
    )
    return Trajectory(
        f"line-{number}", rows=(row,), reward=shapes.number(value.get("reward"), "reward"),
        extra=shapes.rest(value, ("token_ids", "mask", "logprobs", "reward", *_PRIME_RL_COLUMNS)),
    )


def _plain_datum(value: dict[str, Any]) -> dict[str, Any]:
    """A ``Datum`` with its lists out of their chunks and tensors, as pydantic writes it or ``dataclasses.asdict``."""
    if "loss_fn_inputs" not in value:
        return value
    inputs = {}
    for name, item in shapes.mapping(value["loss_fn_inputs"], "loss_fn_inputs").items():
        where = f"loss_fn_inputs.{name[:60]}"
        tensor = shapes.mapping(item, where)
        if tensor.get("sparse_crow_indices") is not None:
            raise BadLine(f"{where} is a sparse tensor. Write it as a plain list (tolist).")
        inputs[name] = tensor.get("data", tensor.get("_numpy"))
    tokens: list[Any] = []
    model_input = shapes.mapping(value.get("model_input"), "model_input")
    for n, chunk in enumerate(shapes.sequence(model_input.get("chunks"), "model_input.chunks")):
        where = f"model_input.chunks[{n}]"
        tokens += shapes.sequence(shapes.mapping(chunk, where).get("tokens"), f"{where}.tokens")
    return {**shapes.rest(value, ("loss_fn_inputs",)), **inputs, "model_input": tokens}


_TINKER_COLUMNS = ("logprobs", "advantages", "mask")


def _tinker(value: Any, number: int) -> Trajectory:
    """Columns stand at the place that predicts their token: the row's first token has none."""
    value = _plain_datum(shapes.mapping(value, "The line"))
    model_input = shapes.ids(value.get("model_input"), "model_input")
    targets = shapes.ids(value.get("target_tokens"), "target_tokens")
    if not len(targets) or len(model_input) != len(targets) or not np.array_equal(model_input[1:], targets[:-1]):
        raise BadLine("target_tokens must be the tokens of model_input, each one place earlier, and one more.")
    mask = value.get("mask")
    trained = np.ones(len(targets), dtype=np.bool_) if mask is None else shapes.mask(mask, "mask")
    advantages = shapes.after(1, shapes.optional_floats(value.get("advantages"), "advantages"))
    row = Row(
        ids=np.concatenate([model_input[:1], targets]),
        loss_mask=np.concatenate([np.zeros(1, dtype=np.bool_), trained]),
        logprobs=shapes.after(1, shapes.optional_floats(value.get("logprobs"), "logprobs")),
        columns={} if advantages is None else {"advantages": np.nan_to_num(advantages)},
    )
    return Trajectory(
        f"line-{number}", rows=(row,), extra=_rest(value, ("model_input", "target_tokens", *_TINKER_COLUMNS))
    )


_MESSAGE_ARRAYS = ("token_ids", "token_loss_mask", "generation_logprobs")


def _nemo(value: Any, number: int) -> Trajectory:
    """Messages one after the other; only the assistant's have log-probabilities."""
    value = shapes.mapping(value, "The line")
    ids: list[Ids] = []
    masks: list[Mask] = []
    logprobs: list[Floats] = []
    messages: list[dict[str, Any]] = []
    has_logprobs = False
    for n, item in enumerate(shapes.sequence(value.get("message_log"), "message_log")):
        where = f"message_log[{n}]"
        message = shapes.mapping(item, where)
        own = shapes.ids(message.get("token_ids"), f"{where}.token_ids")
        mask = message.get("token_loss_mask")
        is_assistant = message.get("role") == "assistant"
        turn_logprobs = shapes.optional_floats(message.get("generation_logprobs"), f"{where}.generation_logprobs")
        has_logprobs = has_logprobs or turn_logprobs is not None
        ids.append(own)
        messages.append({**shapes.rest(message, _MESSAGE_ARRAYS), "n_tokens": len(own)})
        masks.append(
            np.full(len(own), is_assistant, dtype=np.bool_)
            if mask is None
            else shapes.mask(mask, f"{where}.token_loss_mask")
        )
        logprobs.append(np.full(len(own), np.nan, dtype=np.float32) if turn_logprobs is None else turn_logprobs)
    if not ids:
        raise BadLine("message_log is empty.")
    row = Row(
        ids=np.concatenate(ids), loss_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs) if has_logprobs else None, extra={"messages": messages},
    )
    return Trajectory(
        f"line-{number}", rows=(row,), reward=shapes.number(value.get("reward"), "reward"),
        extra=_rest(value, ("message_log", "reward")),
    )


def labelled(labels: Any, ids: Ids, where: str) -> Mask:
    """The mask that labels say: -100 where nothing is trained, else the token's own id."""
    items = shapes.sequence(labels, where)
    if len(items) != len(ids):
        raise BadLine(f"{where} has {len(items)} elements for {len(ids)} ids.")
    for n, label in enumerate(items):
        if type(label) not in (int, float) or label not in (IGNORED, int(ids[n])):
            raise BadLine(f"{where} must be -100 or the token's own id; element {n} is neither.")
    return np.array([label != IGNORED for label in items], dtype=np.bool_)


# -- atropos


_ATROPOS = ("tokens", "masks", "scores", "inference_logprobs", "advantages", "ref_logprobs")


def _atropos(value: Any, number: int) -> list[Trajectory]:
    """A scored group: one row for each of its sequences. The group is read whole or rejected whole."""
    value = shapes.mapping(value, "The group")
    lists = {name: shapes.sequence(value[name], name) for name in _ATROPOS if value.get(name) is not None}
    n = len(lists.get("tokens", ()))
    if not n:
        raise BadLine("tokens is empty: the group has no sequence.")
    for name, items in lists.items():
        if len(items) != n:
            raise BadLine(f"{name} has {len(items)} elements for {n} tokens.")
    further = shapes.elements(value, _ATROPOS, n)
    trajectories = []
    for i in range(n):
        ids = shapes.ids(lists["tokens"][i], f"tokens[{i}]")
        mask = labelled(lists.get("masks", [None] * n)[i], ids, f"masks[{i}]")
        columns = {
            name: shapes.floats(lists[name][i], f"{name}[{i}]")
            for name in _ATROPOS[3:] if name in lists and lists[name][i] is not None
        }
        logprobs = columns.pop("inference_logprobs", None)
        if logprobs is not None and len(logprobs) == len(mask):
            # atropos writes 1.0 on tokens that were not sampled.
            logprobs = np.where(~mask & (logprobs == 1.0), np.float32(np.nan), logprobs)
        trajectories.append(Trajectory(
            f"line-{number}-{i}", rows=(Row(ids=ids, loss_mask=mask, logprobs=logprobs, columns=columns),),
            reward=shapes.number(lists["scores"][i], f"scores[{i}]") if "scores" in lists else None,
            group=f"line-{number}", extra=further(i),
        ))
    return trajectories


FORMATS = (
    line_format(
        "verl_agent_loop", "verl AgentLoopOutput", having("prompt_ids", "response_ids", "response_mask"), _verl,
        ROWS_ALONE,
    ),
    Format(
        "trl_rollouts", "TRL rollouts (prompt_ids, completion_ids)", having("prompt_ids", "completion_ids"),
        lambda source: each_batch(source, partial(_trl, seen=set())),
        ROWS_ALONE,
    ),
    line_format(
        "prime_rl_samples", "prime-rl TrainingSample", having("token_ids", "mask", "temperatures"), _prime_rl,
        ROWS_ALONE,
    ),
    line_format(
        "tinker_data", "Tinker Datum",
        lambda found: has_keys(found[0], "model_input") and bool({"target_tokens", "loss_fn_inputs"} & set(found[0])),
        _tinker, ROWS_ALONE,
    ),
    line_format("nemo_message_log", "NeMo RL message log", having("message_log"), _nemo, ROWS_ALONE),
    Format(
        "atropos", "atropos scored groups", having("tokens", "masks", "scores"),
        partial(each_batch, read_batch=_atropos), ROWS_ALONE,
    ),
)
