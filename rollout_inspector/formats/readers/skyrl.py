"""SkyRL ``GeneratorOutput`` as JSON: parallel lists; with step-wise training each element is one step. Whole-trajectory
elements are rows: the response holds observation tokens too, masked by ``loss_masks``. A step's response may end in an
observation too. The mask says where its completion ends."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rollout_inspector.formats import shapes
from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.formats.registry import NO_REQUESTS, Format, each_batch, having
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import Floats, Mask, Row, Step, Trajectory

_AS_TEXT = re.compile(r"(.+)_\d+", re.DOTALL)
_ROUTING = "rollout_expert_indices"
_LISTS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs",
          "trajectory_ids", "is_last_step", _ROUTING)


def _batch(value: Any, number: int) -> list[Trajectory]:
    """A batch is read whole or rejected whole: its lists mean nothing apart."""
    value = shapes.mapping(value, "The batch")
    n = len(shapes.sequence(value.get("response_ids"), "response_ids"))
    lists = {}
    for name in _LISTS:
        item = value.get(name)
        if item is not None and len(shapes.sequence(item, name)) != n:
            raise BadLine(f"{name} has {len(item)} elements for {n} response_ids.")
        lists[name] = item
    if lists["is_last_step"] is not None:
        return _step_wise(lists, n, number, value)
    further = shapes.elements(value, _LISTS, n)
    elements = [_Element(lists, i) for i in range(n)]
    names = _names(lists["trajectory_ids"], n, number)
    return [
        Trajectory(
            names[i], rows=(element.row(),), reward=element.reward, stop_reason=element.stop_reason,
            group=_group(lists["trajectory_ids"], i), extra=further(i) | element.extra,
        )
        for i, element in enumerate(elements)
    ]


class _Element:
    """One element of every list."""

    def __init__(self, lists: dict[str, Any], i: int) -> None:
        self.prompt = shapes.ids((lists["prompt_token_ids"] or [[]] * (i + 1))[i], f"prompt_token_ids[{i}]")
        self.response = shapes.ids(lists["response_ids"][i], f"response_ids[{i}]")
        masks, logprobs, stops, rewards = (
            lists[name] for name in ("loss_masks", "rollout_logprobs", "stop_reasons", "rewards")
        )
        self.mask = (
            np.ones(len(self.response), dtype=np.bool_) if masks is None else shapes.mask(masks[i], f"loss_masks[{i}]")
        )
        self.logprobs = None if logprobs is None else shapes.optional_floats(logprobs[i], f"rollout_logprobs[{i}]")
        self.stop_reason = "" if stops is None else shapes.text(stops[i], f"stop_reasons[{i}]", 60)
        routing = None if lists[_ROUTING] is None else lists[_ROUTING][i]
        self.extra = {} if routing is None else {_ROUTING: routing}
        self.token_rewards: Floats | None = None
        self.reward: float | None = None
        if rewards is not None and isinstance(rewards[i], list):
            self.token_rewards = shapes.floats(rewards[i], f"rewards[{i}]")
            self.reward = shapes.number(sum(item or 0.0 for item in rewards[i]), f"rewards[{i}]")
        elif rewards is not None:
            self.reward = shapes.number(rewards[i], f"rewards[{i}]")

    def sampled(self) -> tuple[int, int] | None:
        """Where the completion stands in the response. None = at several places, so more than one call is in it. A
        masked token that has a log-probability was sampled: SkyRL writes 0.0 on observations. Without
        log-probabilities, one or two masked tokens between trained ones are no observation, which has a header too."""
        if len(self.mask) != len(self.response):
            return 0, len(self.response)
        sampled, gap = self.mask, 2
        if self.logprobs is not None and len(self.logprobs) == len(sampled):
            sampled, gap = sampled | (np.nan_to_num(self.logprobs) != 0), 0
        runs = mask_runs(sampled)
        if not runs:
            return 0, len(self.response)
        if any(start - stop > gap for (_, stop), (start, _) in pairwise(runs)):
            return None
        return runs[0][0], runs[-1][1]

    def rewards_end(self, last: _Element) -> bool:
        """Whether its rewards are as long as the response, and 0 but for the last token of the ``last`` step. One
        number for each step may also be that of the last step, written to all."""
        rewards, is_last = self.token_rewards, self is last
        if rewards is None and self.reward not in (None, 0, last.reward):
            self.token_rewards = np.zeros(len(self.response), np.float32)
            self.token_rewards[-1:] = self.reward
            return False
        return rewards is None or (len(rewards) == len(self.response) and not rewards[: -1 if is_last else None].any())

    def step(self, start: int, stop: int) -> Step:
        logprobs = self.logprobs
        if logprobs is not None and len(logprobs) == len(self.response):
            logprobs = logprobs[start:stop]
        return Step(
            np.concatenate([self.prompt, self.response[:start]]), self.response[start:stop], logprobs,
            finish_reason=self.stop_reason[:30],
        )

    def row(self, step_indices: tuple[int, ...] = ()) -> Row:
        n = len(self.prompt)
        columns = {}
        if self.token_rewards is not None:
            columns["rewards"] = np.concatenate([np.zeros(n, dtype=np.float32), self.token_rewards])
        return Row(
            ids=np.concatenate([self.prompt, self.response]),
            loss_mask=np.concatenate([np.zeros(n, dtype=np.bool_), self.mask]), logprobs=shapes.after(n, self.logprobs),
            columns=columns, step_indices=step_indices, extra={"prompt_length": n},
        )


def _step_wise(lists: dict[str, Any], n: int, number: int, value: dict[str, Any]) -> list[Trajectory]:
    """Steps of one id are one trajectory. Rows follow from them, unless a mask, order or flag says otherwise."""
    last = shapes.mask(lists["is_last_step"], "is_last_step")
    ids = lists["trajectory_ids"]
    if ids is None:
        raise BadLine("is_last_step is there and trajectory_ids is not; step-wise output needs both.")
    further = shapes.elements(value, _LISTS, n)
    trajectories: list[Trajectory] = []
    for places in _places(ids, last):
        elements = [_Element(lists, k) for k in places]
        sampled = [element.sampled() for element in elements]
        in_order = places == list(range(places[0], places[-1] + 1)) and last[places[-1]] and not last[places[:-1]].any()
        follow = in_order and all(
            element.mask.all() and len(element.mask) == len(element.response) and element.rewards_end(elements[-1])
            for element in elements
        )
        steps: tuple[Step, ...] = ()
        if None not in sampled:
            steps = tuple(
                element.step(*place) for element, place in zip(elements, sampled, strict=True) if place is not None
            )
        rows: tuple[Row, ...] = ()
        if follow:
            steps = tuple(replace(step, extra=element.extra) for step, element in zip(steps, elements, strict=True))
        else:
            # The trainer trains on these rows. Where order, mask or rewards are wrong, the diagnosis makes a finding.
            flags = [{"is_last_step": bool(last[k]), "batch_index": k} for k in places]
            rows = tuple(
                replace(element.row((k,) if steps else ()), extra=element.extra | flags[k])
                for k, element in enumerate(elements)
            )
        trajectories.append(Trajectory(
            _name(ids[places[0]], len(trajectories), number), steps, rows, reward=elements[-1].reward,
            stop_reason=elements[-1].stop_reason, group=_group(ids, places[0]), extra=further(places[-1]),
        ))
    names = [element.external_id for element in trajectories]
    if len(set(names)) != len(names):
        raise BadLine("trajectory_ids gives one name to two trajectories.")
    return trajectories


def _places(ids: list[Any], last: Mask) -> list[list[int]]:
    """The elements of each trajectory, as indices. A trajectory without an id ends where ``is_last_step`` says."""
    places: dict[str, list[int]] = {}
    for i, external_id in enumerate(ids):
        key = f"until {int(last[:i].sum())}" if external_id is None else canonical_json(external_id)
        places.setdefault(key, []).append(i)
    return list(places.values())


def _names(ids: Any, n: int, number: int) -> list[str]:
    names = [_name(ids[i] if ids is not None else None, i, number) for i in range(n)]
    if len(set(names)) != len(names):
        raise BadLine("trajectory_ids names a trajectory twice; step-wise output needs is_last_step too.")
    return names


def _name(value: Any, i: int, number: int) -> str:
    """A trajectory id is a text, or an instance and a repetition of it."""
    if isinstance(value, dict):
        parts = [shapes.text(value.get(key), f"trajectory_ids.{key}", 90) for key in ("instance_id", "repetition_id")]
        return "-".join(part for part in parts if part) or f"line-{number}-{i}"
    return shapes.text(value, "trajectory_ids", 200) or f"line-{number}-{i}"


def _group(ids: Any, i: int) -> str:
    """The instance; SkyRL's own text of an id is ``INSTANCE_REPETITION``."""
    value = ids[i] if ids is not None else None
    if isinstance(value, str) and (parts := _AS_TEXT.fullmatch(value)):
        return parts[1]
    return shapes.text(value.get("instance_id"), "instance_id", 200) if isinstance(value, dict) else ""


FORMAT = Format(
    "skyrl", "SkyRL GeneratorOutput", having("prompt_token_ids", response_ids=list),
    partial(each_batch, read_batch=_batch), NO_REQUESTS,
)
