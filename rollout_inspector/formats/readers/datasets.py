"""Rows of supervised and preference training, tokenised: what TRL, axolotl and data sets of Hugging Face hold. Facts:
TRL ``trl/trainer/sft_trainer.py`` and ``dpo_trainer.py`` (the columns of their data sets)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.formats import shapes
from rollout_inspector.formats.readers.trainer_rows import labelled
from rollout_inspector.formats.registry import ROWS_ALONE, batch_format, has_keys
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import Ids, Mask, Row, Trajectory

_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
_SFT = ("input_ids", "labels", "attention_mask", *_MASKS)


def _batch(value: Any, number: int) -> list[Trajectory]:
    """The row of a line, or the rows of a collated batch."""
    rows = shapes.rows_of_batch(value, number, "input_ids", _SFT)
    return [Trajectory(name, rows=(_row(fields),), extra=extra) for name, fields, extra in rows]


def _row(value: Mapping[str, Any]) -> Row:
    """Padding, which has no attention, is cut off. A token is trained where labels and all masks say so."""
    ids = shapes.ids(value.get("input_ids"), "input_ids")
    masks = [] if value.get("labels") is None else [labelled(value["labels"], ids, "labels")]
    masks += [shapes.mask(value[name], name) for name in _MASKS if value.get(name) is not None]
    if not masks:
        raise BadLine("The row has neither labels nor a mask, so nothing says which tokens are trained.")
    attention = value.get("attention_mask")
    is_token = attended(attention, ids, "attention_mask", "input_ids")
    for mask in masks:
        if len(mask) != len(ids):
            raise BadLine(f"A mask has {len(mask)} elements for {len(ids)} input_ids.")
    return Row(ids=ids[is_token], loss_mask=np.logical_and.reduce(masks)[is_token])


def attended(value: Any, ids: Ids, where: str, of: str) -> Mask:
    """Which ids ``[T]`` an attention mask says are no padding; all where there is none. Raises :class:`BadLine`."""
    mask = np.ones(len(ids), dtype=np.bool_) if value is None else shapes.mask(value, where)
    if len(mask) != len(ids):
        raise BadLine(f"{where} has {len(mask)} elements for {len(ids)} {of}.")
    return mask


def _detect_rows(values: Sequence[Any]) -> bool:
    return has_keys(values[0], "input_ids") and not {"labels", *_MASKS}.isdisjoint(values[0])


# -- preferences

SIDES = ("chosen", "rejected", "completion")
_IDS = ("{}_input_ids", "{}_ids")
_MAX_MERGED = 4  # Last tokens of a prompt that may be others where it was encoded with the answer.


def _pair(value: Any, number: int) -> list[Trajectory]:
    """A trajectory for each answer to one prompt, in one group. Each says which it is under ``preference``."""
    value = shapes.mapping(value, "The line")
    prompt_key = _key(value, "prompt")
    prompt = shapes.ids(value[prompt_key], prompt_key) if prompt_key else None
    sides = [side for side in SIDES if _key(value, side)]
    field_names = [form.format(name) for name in ("prompt", *SIDES)
                   for form in (*_IDS, "{}_labels", "{}_attention_mask", "{}_mask")]
    further = shapes.filled(shapes.rest(value, field_names))
    return [
        Trajectory(
            f"line-{number}-{n}", rows=(_answer(value, side, prompt),), group=f"line-{number}",
            extra={**further, "preference": side},
        )
        for n, side in enumerate(sides)
    ]


def _answer(value: Mapping[str, Any], side: str, prompt: Ids | None) -> Row:
    """The row of one answer. Its ids may hold the prompt too, as in TRL before 0.12."""
    key = _key(value, side)
    ids = shapes.ids(value[key], key)
    labels = value.get(f"{side}_labels")
    is_token = attended(value.get(f"{side}_attention_mask"), ids, f"{side}_attention_mask", key)
    is_labelled = labels is not None and len(shapes.sequence(labels, f"{side}_labels")) == len(ids)
    mask = labelled(labels, ids, f"{side}_labels")[is_token] if is_labelled else None
    ids = ids[is_token]
    if prompt is None or not len(prompt):
        if mask is None and prompt is None:
            raise BadLine(f"The line has {key}, but neither the prompt's ids nor labels say where the answer begins.")
        return Row(ids=ids, loss_mask=np.ones(len(ids), dtype=np.bool_) if mask is None else mask)
    shared = common_prefix(prompt, ids)
    # Encoded with the answer, the last tokens of the prompt may have become others.
    has_prompt = len(ids) > shared > len(prompt) // 2 and shared >= len(prompt) - _MAX_MERGED
    before = shared if has_prompt else len(prompt)
    if not has_prompt:
        ids = np.concatenate([prompt, ids])
        mask = None if mask is None else np.concatenate([np.zeros(before, dtype=np.bool_), mask])
    tail = prompt[before:].tolist()
    return Row(
        ids=ids, loss_mask=np.arange(len(ids)) >= before if mask is None else mask,
        extra={"prompt_length": before} | ({"prompt_tail": tail} if tail else {}),
    )


def _key(value: Mapping[str, Any], name: str) -> str:
    """The key of the ids of a prompt or an answer; empty = there are none."""
    return next((key for form in _IDS if isinstance(value.get(key := form.format(name)), list)), "")


def _detect_pairs(values: Sequence[Any]) -> bool:
    record = values[0]
    if not isinstance(record, dict):
        return False
    is_unpaired = "label" in record and bool(_key(record, "completion"))
    return bool(_key(record, "chosen") and _key(record, "rejected")) or is_unpaired


FORMATS = (
    batch_format("sft_rows", "Rows for supervised training", _detect_rows, _batch, ROWS_ALONE),
    batch_format("preference_rows", "Preference pairs with token ids", _detect_pairs, _pair, ROWS_ALONE),
)
