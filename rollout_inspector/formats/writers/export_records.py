"""How a row is written for each trainer: one function for each target, from a row to a JSON object. Values of a token
keep its place. 0 stands where nothing was sampled, as the trainers write it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rollout_inspector.streams.trajectory import Ids, Row, Trajectory

IGNORED = -100  # The label that takes a token out of a supervised loss.

Decode = Callable[[Ids], str]
Recorder = Callable[[Trajectory, Sequence[Row]], Iterator[dict[str, Any]]]
"""Yields the records of a trajectory's rows, one for each row, in order."""
Start = Callable[[Decode | None], Recorder]  # A recorder for one file. Without a tokenizer nothing can be decoded.


def per_row(record: Callable[[Row, Trajectory], dict[str, Any]]) -> Start:
    """For a target whose records depend on their row and trajectory alone."""
    return lambda _: lambda trajectory, rows: (record(row, trajectory) for row in rows)


def split_of(row: Row) -> int:
    """Where the response begins: at the first trained token."""
    trained = np.flatnonzero(row.loss_mask[: len(row.ids)])
    return int(trained[0]) if len(trained) else len(row.ids)


def _logprobs(row: Row) -> list[float] | None:
    if row.logprobs is None:
        return None
    logprobs: list[float] = np.nan_to_num(row.logprobs.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0).tolist()
    return logprobs


def _mask(row: Row) -> list[int]:
    mask_bits: list[int] = row.loss_mask.astype(np.int8).tolist()
    return mask_bits


def _advantages(row: Row) -> list[float] | None:
    """The column ``advantages``, 0 where nothing is trained: not every target's loss reads the mask."""
    column = row.columns.get("advantages")
    if column is None:
        return None
    advantages = np.nan_to_num(column.astype(np.float64))
    return (
        np.where(row.loss_mask, advantages, 0.0).tolist()
        if len(advantages) == len(row.loss_mask)
        else advantages.tolist()
    )


def _from(values: list[Any] | None, start: int) -> list[Any] | None:
    return None if values is None else values[start:]


def verl(trajectory: Trajectory, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """``AgentLoopOutput``: ``metrics`` is required there, and all of its fields have defaults. ``num_turns`` counts
    user, assistant and tool turns: verl counts one before each call. It is left out when no call is known."""
    n_turns = trajectory.extra.get("num_turns")
    for n, row in enumerate(rows):
        at = split_of(row)
        turns = 2 * len(row.step_indices) or (n_turns if type(n_turns) is int else 0)
        yield {
            "prompt_ids": row.ids[:at].tolist(), "response_ids": row.ids[at:].tolist(),
            "response_mask": _mask(row)[at:], "response_logprobs": _from(_logprobs(row), at),
            "reward_score": trajectory.reward, "metrics": {},
            "extra_fields": {"external_id": trajectory.external_id, "row": n},
            **({"num_turns": turns} if turns else {}),
        }


def trl(row: Row, trajectory: Trajectory) -> dict[str, Any]:
    """What ``rollout_func`` returns. TRL hands names that it does not know to the reward functions."""
    at = split_of(row)
    return {
        "prompt_ids": row.ids[:at].tolist(), "completion_ids": row.ids[at:].tolist(),
        "logprobs": _from(_logprobs(row), at), "env_mask": _mask(row)[at:], "reward": trajectory.reward,
        "external_id": trajectory.external_id,
    }


def prime_rl(row: Row, trajectory: Trajectory) -> dict[str, Any]:
    temperature = next((step.temperature for step in trajectory.steps if step.temperature is not None), 1.0)
    recorded = row.columns.get("temperatures")
    return {
        "token_ids": row.ids.tolist(), "mask": row.loss_mask.tolist(), "logprobs": _logprobs(row),
        "advantages": _advantages(row),
        "temperatures": [temperature] * len(row.ids) if recorded is None else recorded.astype(np.float64).tolist(),
        "env_name": str(trajectory.extra.get("env_name") or row.extra.get("env_name") or ""),
        "reward": trajectory.reward,
    }


def tinker(row: Row, trajectory: Trajectory) -> dict[str, Any]:
    """Inputs are shifted against targets: the values of a token stand at the place that predicts the token."""
    return {
        "model_input": row.ids[:-1].tolist(), "target_tokens": row.ids[1:].tolist(),
        "logprobs": _from(_logprobs(row), 1), "advantages": _from(_advantages(row), 1), "mask": _mask(row)[1:],
    }


def nemo(decode: Decode | None) -> Recorder:
    """Cuts messages where the mask changes. Trained tokens are the assistant's. ``num_turns`` counts the calls of the
    row. ``full_rollout`` holds what else is known, without arrays. Source: https://docs.nvidia.com/nemo/gym/latest/
    (multi-turn rollouts)."""

    def record(row: Row, trajectory: Trajectory) -> dict[str, Any]:
        log = _message_log(row, decode)
        whole = {name: getattr(trajectory, name) for name in ("external_id", "group", "stop_reason", "training_step")}
        return {
            "message_log": log, "reward": trajectory.reward,
            "num_turns": len(row.step_indices) or sum(message["trainable"] for message in log),
            "full_rollout": {**trajectory.extra, **whole, "reward_parts": dict(trajectory.reward_parts)},
        }

    return per_row(record)(decode)


def _message_log(row: Row, decode: Decode | None) -> list[dict[str, Any]]:
    mask, n = row.loss_mask, len(row.loss_mask)
    cuts = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), n] if n else [0]
    log = []
    logprobs = _logprobs(row)
    for start, stop in pairwise(cuts):
        ids = row.ids[start:stop]
        message: dict[str, Any] = {
            "role": "assistant" if mask[start] else "user" if start == 0 else "environment",
            "content": "" if decode is None else decode(ids), "trainable": bool(mask[start]),
            "token_ids": ids.tolist(), "token_loss_mask": _mask(row)[start:stop],
        }
        if mask[start] and logprobs is not None:
            message["generation_logprobs"] = logprobs[start:stop]
        log.append(message)
    return log


def sft(row: Row, trajectory: Trajectory) -> dict[str, Any]:
    n = min(len(row.ids), len(row.loss_mask))
    labels = np.full(len(row.ids), IGNORED, dtype=np.int64)
    labels[:n] = np.where(row.loss_mask[:n], row.ids[:n], IGNORED)
    return {"input_ids": row.ids.tolist(), "attention_mask": [1] * len(row.ids), "labels": labels.tolist()}


def padded_sft(length: int, pad_id: int) -> Start:
    """Rows of ``length`` tokens. The padding has no attention and no label; a longer row is cut."""

    def record(row: Row, trajectory: Trajectory) -> dict[str, Any]:
        filled = {"input_ids": pad_id, "attention_mask": 0, "labels": IGNORED}
        return {
            key: values[:length] + [filled[key]] * (length - len(values))
            for key, values in sft(row, trajectory).items()
        }

    return per_row(record)


class Skyrl:
    """Elements of a ``GeneratorOutput``: one for each trajectory, or, step-wise, one for each step."""

    def __init__(self, step_wise: bool) -> None:
        self.step_wise = step_wise
        self._repetitions: dict[str, set[int]] = {}
        self._by_token: bool | None = True if step_wise else None

    def __call__(self, trajectory: Trajectory, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        name = self._name(trajectory)
        if self._by_token is None and rows:
            self._by_token = "rewards" in rows[0].columns  # one kind for the whole batch, as the first row has it
        for n, row in enumerate(rows):
            at, is_last = split_of(row), n == len(rows) - 1
            element = {
                "prompt_token_ids": row.ids[:at].tolist(), "response_ids": row.ids[at:].tolist(),
                "rewards": self._reward(trajectory, row, at, is_last), "loss_masks": _mask(row)[at:],
                "stop_reasons": self._stop_reason(trajectory, row, is_last),
                "rollout_logprobs": _from(_logprobs(row), at), "trajectory_ids": name,
            }
            if self.step_wise:
                element["is_last_step"] = is_last
            yield element

    def _name(self, trajectory: Trajectory) -> dict[str, Any]:
        """Trajectories of one prompt share ``instance_id``. An id that ends in its number keeps that number."""
        instance = trajectory.group or trajectory.external_id
        used = self._repetitions.setdefault(instance, set())
        tail = trajectory.external_id.removeprefix(f"{instance}-")
        number = int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 10 else len(used)
        while number in used:
            number += 1
        used.add(number)
        return {"instance_id": instance, "repetition_id": number}

    def _reward(self, trajectory: Trajectory, row: Row, at: int, is_last: bool) -> Any:
        """The reward, or one reward for each token. Without a column the last token of the last step has the reward."""
        if not self._by_token:
            return trajectory.reward
        column = row.columns.get("rewards")
        if column is not None and len(column) == len(row.ids):
            return np.nan_to_num(column[at:].astype(np.float64)).tolist()
        rewards = [0.0] * (len(row.ids) - at)
        if is_last and rewards:
            rewards[-1] = trajectory.reward or 0.0
        return rewards

    def _stop_reason(self, trajectory: Trajectory, row: Row, is_last: bool) -> str:
        own = [trajectory.steps[n].finish_reason for n in row.step_indices[-1:] if n < len(trajectory.steps)]
        of_step = own[0] if own else ""
        if self.step_wise and not is_last:
            return of_step
        return of_step or trajectory.stop_reason if self.step_wise else trajectory.stop_reason or of_step
