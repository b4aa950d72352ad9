"""Rows with a fault each, and the pair that is right."""

from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Step, ids_array
from tests.samples.model_setups import model_setup
from tests.samples.planted.plant_training_rows import all_moved

S = model_setup("stable")


def ids(text: str) -> list[int]:
    return S.codec.encode(text).tolist()


HEAD = ids("<|open|>user\nWhat is 2+2?<|shut|>\n")

OPEN = ids("<|open|>assistant\n")

ONE = ids("I call the tool.")

SHUT = ids("<|shut|>")

LINE = ids("\n")

TOOL = ids("<|open|>tools\n<result>\nfour\n</result><|shut|>\n")

TWO = ids("It is four.")

PARTS = [(HEAD, 0), (OPEN, 0), (ONE, 1), (SHUT, 1), (LINE, 0), (TOOL, 0), (OPEN, 0), (TWO, 1), (SHUT, 1)]


N_HEAD, N_ONE = len(HEAD + OPEN), len(ONE + SHUT)


def row(parts: list[tuple[list[int], int]] | None = None, **changes: Any) -> Row:
    parts = PARTS if parts is None else parts
    tokens = np.array([token for stretch, _ in parts for token in stretch], dtype=np.int32)
    mask = np.array([bool(flag) for stretch, flag in parts for _ in stretch])
    rng = np.random.default_rng(3)
    logprobs = np.where(mask, -rng.uniform(0.01, 2, len(mask)), 0).astype(np.float32)
    advantages = np.where(mask, 0.7, 0).astype(np.float32)
    made = Row(tokens, mask, logprobs, columns={"advantages": advantages})
    return replace(made, **changes)


def trained(index: int, flag: int) -> Row:
    parts = list(PARTS)
    parts[index] = (parts[index][0], flag)
    return row(parts)


def shifted(by: int) -> Row:
    good = row()
    assert good.logprobs is not None
    return replace(good, logprobs=np.roll(good.logprobs, by))


def with_logprob(value: float) -> Row:
    good = row()
    assert good.logprobs is not None
    logprobs = good.logprobs.copy()
    logprobs[N_HEAD + 1] = value
    return replace(good, logprobs=logprobs)


def observation_trained() -> Row:
    parts = list(PARTS)
    parts[5] = (TOOL[:1], 0)
    parts[6:6] = [(TOOL[1:-1], 1), (TOOL[-1:], 0)]
    return row(parts)


def stop_masked() -> Row:
    good = row()
    mask = good.loss_mask.copy()
    mask[N_HEAD + N_ONE - 1] = False
    return replace(good, loss_mask=mask, columns={"advantages": np.where(mask, 0.7, 0).astype(np.float32)})


def advantage_on(masked: bool) -> Row:
    good = row()
    values = good.columns["advantages"].copy()
    values[0 if masked else N_HEAD] = 0.7 if masked else 0
    return replace(good, columns={"advantages": values})


def all_of_it(flag: bool) -> Row:
    good = row()
    return replace(good, loss_mask=np.full(len(good.ids), flag), columns={})


def hotter(factor: float) -> Row:
    good = row([(HEAD, 0), (OPEN, 0), (ONE * 4, 1), (SHUT, 1)])
    assert good.logprobs is not None
    return replace(good, columns={**good.columns, "trainer_logprobs": good.logprobs * np.float32(factor)})


def mask_later(n: int) -> Row:
    """The first tokens of an answer have logprobs as the others have, and are masked."""
    good = row([(HEAD + OPEN, 0), (ONE * 4 + SHUT, 1)])
    mask = good.loss_mask.copy()
    mask[N_HEAD : N_HEAD + n] = False
    return replace(good, loss_mask=mask)


WITNESSES = {
    "length_mismatch": [row(loss_mask=row().loss_mask[:-2]), row(extra={"advantages": [0.7, 0.7, 0.0]})],
    "observation_trained": [
        observation_trained(),
        row([(HEAD + OPEN, 0), (ONE + SHUT + LINE + TOOL, 1), (OPEN, 0), (TWO + SHUT, 1)]),
        *(row([(HEAD + OPEN, 0), (ONE + SHUT + LINE + TOOL + OPEN + TWO + SHUT, 1), (LINE, 0)][:n]) for n in (2, 3)),
    ],
    "generation_prompt_trained": [trained(1, 1), trained(6, 1)],
    "separator_trained": [
        trained(4, 1),
        *(row([(HEAD + OPEN, 0), (ONE + SHUT + more, 1), (LINE + TOOL, 0)]) for more in (SHUT, SHUT + LINE)),
        row([(HEAD + OPEN, 0), (ONE + SHUT + TWO[:1] * 5, 1)]),
        row([(HEAD + OPEN, 0), (ONE + SHUT + TWO, 1)], logprobs=None, columns={}),
    ],
    "stop_token_untrained": [stop_masked()],
    "mask_overrun": [all_of_it(True), all_of_it(False)],
    "columns_shifted": [shifted(1), shifted(-1), shifted(2), *(all_moved(row(), by) for by in (1, -1, 2))],
    "sampled_masked": [
        row([(HEAD + OPEN + ONE[:1], 0), (ONE[1:] + SHUT, 1)], logprobs=None, columns={}),
        row([(HEAD + OPEN, 0), (ONE[:2], 1), (ONE[2:3], 0), (ONE[3:] + SHUT, 1)], logprobs=None, columns={}),
        row([(HEAD + OPEN, 0), (ONE, 1), (LINE + TWO[:4] + SHUT, 0)], logprobs=None, columns={}),
        row([(HEAD + OPEN, 0), (ONE + SHUT, 1), (LINE + TOOL + OPEN + TWO, 0)], logprobs=None, columns={}),
        replace(mask_later(9), columns={}),
        row([(HEAD + OPEN, 0), (ONE + SHUT, 1), (LINE + OPEN + TWO * 3, 0), (SHUT, 1)], logprobs=None, columns={}),
    ],
    "logprob_invalid": [
        with_logprob(-9999.0),
        with_logprob(-1e30),
        with_logprob(0.8),
        with_logprob(np.nan),
        with_logprob(-np.inf),
        row(logprobs=np.zeros(len(row().ids), np.float32)),
    ],
    "advantage_misplaced": [advantage_on(True), advantage_on(False)],
    "logprobs_other_distribution": [hotter(0.7), hotter(1.4)],
    "prompt_split_wrong": [row(extra={"prompt_length": int((~row().loss_mask).sum())})],
    "routing_misaligned": [
        row(extra={"routed_experts": [[0]] * 3}),
        row(extra={"routed_experts": "nrlre1:u1:3x2x8:AAAA"}),
    ],
}


def steps() -> tuple[Step, ...]:
    lp = lambda n: np.full(n, -0.5, np.float32)  # noqa: E731
    first = Step(ids_array(HEAD + OPEN), ids_array(ONE + SHUT), lp(N_ONE), finish_reason="stop")
    prompt = HEAD + OPEN + ONE + SHUT + LINE + TOOL + OPEN
    return first, Step(ids_array(prompt), ids_array(TWO + SHUT), lp(len(TWO) + 1), finish_reason="stop")


def merged() -> Row:
    return merged_rows(steps())[0]
