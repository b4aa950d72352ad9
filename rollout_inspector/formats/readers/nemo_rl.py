"""NeMo RL ``train_data_step{N}.jsonl``: training rows, right-padded. Every value but ``idx`` is a list of one."""

from typing import Any

from rollout_inspector.formats import shapes
from rollout_inspector.formats.registry import ROWS_ALONE, having, line_format
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Row, Trajectory

_KNOWN = ("token_ids", "token_loss_mask", "generation_logprobs", "rewards", "input_lengths", "idx")


def _one(value: Any) -> Any:
    """A value out of its list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _array(value: Any) -> Any:
    """A list out of its list of one; a list of one number is a list already."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def _trajectory(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    ids = shapes.ids(_array(value.get("token_ids")), "token_ids")
    length = shapes.whole(_one(value.get("input_lengths")), "input_lengths", least=0)
    if length is None:
        length = len(ids)
    if length > len(ids):
        raise BadLine(f"input_lengths is {length}, but there are {len(ids)} token_ids.")
    # The same padding is cut from every array, so that one whose length disagrees still does.
    padding = len(ids) - length

    def cut(array: Any) -> Any:
        return array[: max(len(array) - padding, 0)]

    logprobs = shapes.optional_floats(_array(value.get("generation_logprobs")), "generation_logprobs")
    columns = {}
    extra: dict[str, Any] = {}
    for name, item in shapes.rest(value, _KNOWN).items():
        array = _array(item)
        is_column = isinstance(array, list) and len(array) == len(ids) > 1
        if is_column and None not in map(shapes.float_of, array):
            columns[shapes.text(name, "a column's name", 60)] = cut(shapes.floats(array, name[:60]))
        else:
            extra[name] = item
    row = Row(
        ids=cut(ids), loss_mask=cut(shapes.mask(_array(value.get("token_loss_mask")), "token_loss_mask")),
        logprobs=None if logprobs is None else cut(logprobs), columns=columns, extra=extra,
    )
    external_id = shapes.text(_one(value.get("idx")), "idx", 200) or f"line-{number}"
    return Trajectory(external_id, rows=(row,), reward=shapes.number(_one(value.get("rewards")), "rewards"))


FORMAT = line_format(
    "nemo_rl", "NeMo RL training rows (train_data_step)", having("token_ids", "token_loss_mask"), _trajectory,
    ROWS_ALONE,
)
