"""NeMo RL: streams the training data that its logger writes. Tested with the shapes of NeMo RL 0.5.0.

    logger = stream_logger(logger)      # after `setup(...)` in examples/run_grpo.py

``grpo_train`` hands the rows of each step to ``Logger.log_batched_dict_as_jsonl``, as ``train_data_step{N}.jsonl``.
"""

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from rollout_inspector.client.adapters.records import plain
from rollout_inspector.client.adapters.stream import RolloutStream

_NAME = re.compile(r"train_data_step(\d{1,9})\.jsonl")


def stream_logger(logger: Any, stream: RolloutStream | None = None, **options: Any) -> Any:
    """Returns the logger, which streams training data from now on. Without a ``stream``, ``options`` go to a new
    :class:`RolloutStream`. Raises ``TypeError`` for another object."""
    if not callable(getattr(logger, "log_batched_dict_as_jsonl", None)):
        raise TypeError(
            f"{type(logger).__name__} has no log_batched_dict_as_jsonl(). stream_logger knows NeMo RL's Logger."
        )
    into = stream or RolloutStream(**options)
    start = secrets.token_hex(2)
    write = logger.log_batched_dict_as_jsonl

    def log(to_log: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        match = _NAME.fullmatch(str(filename))
        if match is not None:
            step = int(match[1])
            into.send_made(lambda: list(rows(to_log)), f"step-{step}/{start}-", step)
        return write(to_log, filename, *args, **kwargs)

    logger.log_batched_dict_as_jsonl = log
    return logger


def rows(to_log: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a batch as the format ``nemo_rl`` reads them, without padding."""
    if "token_ids" not in to_log or "token_loss_mask" not in to_log:
        raise ValueError(f"the log data has no token_ids; its keys are {', '.join(map(str, to_log))}")
    columns = {str(name): plain(values) or [] for name, values in to_log.items()}
    lengths = columns.get("input_lengths") or [len(ids) for ids in columns["token_ids"]]
    for i, ids in enumerate(columns["token_ids"]):
        length = lengths[i][0] if isinstance(lengths[i], list) else lengths[i]
        record: dict[str, Any] = {"idx": i}
        for name, values in columns.items():
            value = values[i]
            is_padded = isinstance(value, list) and len(value) == len(ids) > 1
            record[name] = value[:length] if is_padded else value
        yield record
