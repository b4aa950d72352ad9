"""Trajectories to store, made from small seeds."""

from typing import Any

import numpy as np

from rollout_inspector.streams.trajectory import Origin, Request, Row, Step, Trajectory
from rollouts.store.token_arrays.items import ALTERNATIVES

TOOLS = ({"type": "function", "function": {"name": "calculator"}},)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def chain(
    external_id: str = "t",
    turns: int = 3,
    seed: int = 0,
    broken_at: int | None = None,
    hostile: str = "\0 \ud800 é",
    **more: Any,
) -> Trajectory:
    """A trajectory whose steps extend each other, except at ``broken_at``, where the last sampled id is another.

    Every second step has two alternatives for each token, the entropy, and the size of the kept set.
    """
    rng = np.random.default_rng(seed)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {seed} {hostile}"}]
    prompt = rng.integers(0, 1000, 7, dtype=np.int32)
    steps = []
    for turn in range(turns):
        completion = rng.integers(0, 1000, 5 + turn, dtype=np.int32)
        logprobs = -rng.random(len(completion), dtype=np.float32)
        steps.append(
            Step(
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=logprobs,
                logprobs_mode="raw",
                **(alternatives(completion, logprobs) if turn % 2 else {}),
                finish_reason="stop",
                stop_reason="7",
                request=Request(tuple(messages), TOOLS, {"enable_thinking": False}),
                reply={"role": "assistant", "content": f"answer {turn}"},
                text=f"answer {turn}\0",
                temperature=0.7,
                top_p=0.9,
                top_k=20,
                engine="scripted 1",
                policy_version="v3",
                chat_template_sha256="ab" * 32,
                extra={"latency": turn},
            )
        )
        messages = [
            *messages,
            {"role": "assistant", "content": f"answer {turn}"},
            {"role": "tool", "content": str(turn)},
        ]
        stream = np.concatenate([prompt, completion])
        if broken_at == turn + 1:
            stream[-1] += 1
        prompt = np.concatenate([stream, rng.integers(0, 1000, 4, dtype=np.int32)])
    return Trajectory(
        external_id, tuple(steps), reward=0.5, reward_parts={"right": 1.0}, stop_reason="answered", group="g",
        tokenizer="tiny", extra={"agent": "a"}, **more,
    )


def alternatives(completion: np.ndarray, logprobs: np.ndarray) -> dict[str, np.ndarray]:
    """Of each token itself and one other; of the last token itself alone."""
    values = np.stack([logprobs, logprobs - 1], axis=1).astype(np.float32)
    values[-1, 1] = -np.inf
    found = np.stack([completion, completion + 1], axis=1).astype(np.int32)
    sizes = np.ceil(-logprobs * 9 + 1)
    return {
        "entropy": -logprobs, "kept_set": sizes, "kept_ids": np.arange(sizes.sum(), dtype=np.int32) + 7,
        "alternative_ids": found.reshape(-1), "alternative_logprobs": values.reshape(-1),
    }


def rows_only(external_id: str = "r") -> Trajectory:
    """A trainer's rows: one whole, one whose arrays disagree in length."""
    whole = Row(
        ids(1, 2, 3, 4), np.array([0, 0, 1, 1], dtype=np.bool_), np.array([0, 0, -1, -2], dtype=np.float32),
        np.array([0, 0, 1, 1], dtype=np.uint8), {"advantages": np.array([0, 0, 0.5, 0.5], dtype=np.float32)}, (),
        {"idx": 3},
    )
    odd = Row(ids(5, 6, 7), np.array([1, 1], dtype=np.bool_), columns={"prev_logprobs": np.zeros(9, dtype=np.float32)})
    return Trajectory(external_id, rows=(whole, odd), reward=None)


def assert_same(left: Trajectory, right: Trajectory, but: tuple[str, ...] = ()) -> None:
    """Every field of two trajectories is equal, arrays with their types."""
    for name in ("external_id", "reward", "reward_parts", "stop_reason", "group", "tokenizer", "extra"):
        assert getattr(left, name) == getattr(right, name), name
    assert len(left.steps) == len(right.steps) and len(left.rows) == len(right.rows)
    for a, b in zip(left.steps, right.steps, strict=True):
        for name in ("prompt_ids", "completion_ids", "logprobs", "delta_origin", "entropy", *ALTERNATIVES):
            if name not in but:
                same(getattr(a, name), getattr(b, name), name)
        for name in (
            "logprobs_mode", "finish_reason", "stop_reason", "reply", "text", "chat_template_sha256", "temperature",
            "top_p", "top_k", "engine", "policy_version", "extra",
        ):
            assert getattr(a, name) == getattr(b, name), name
        assert (a.request is None) == (b.request is None)
        if a.request and b.request:
            assert list(a.request.messages) == list(b.request.messages)
            assert (a.request.tools is None) == (b.request.tools is None)
            assert list(a.request.tools or ()) == list(b.request.tools or ())
            assert dict(a.request.chat_template_kwargs) == dict(b.request.chat_template_kwargs)
    for c, d in zip(left.rows, right.rows, strict=True):
        for name in ("ids", "loss_mask", "logprobs", "origin"):
            same(getattr(c, name), getattr(d, name), name)
        assert c.columns.keys() == d.columns.keys()
        for name in c.columns:
            same(c.columns[name], d.columns[name], name)
        assert (c.step_indices, dict(c.extra)) == (d.step_indices, dict(d.extra))


def same(left: Any, right: Any, name: str) -> None:
    assert (left is None) == (right is None), name
    if left is not None:
        assert left.dtype.kind == right.dtype.kind and np.array_equal(left, right, equal_nan=left.dtype.kind == "f"), (
            name
        )


DELTA = np.array([Origin.TEMPLATE, Origin.OBSERVATION, Origin.OBSERVATION, Origin.TEMPLATE], dtype=np.uint8)
