"""Faults of training rows, planted in rows whose every token's writer is known."""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.measures.call_faults import play
from benchmarks.measures.models import Model
from benchmarks.measures.sessions import Label, NotHere, Session, split_somewhere
from rollout_inspector.formats.readers.inspector_jsonl import encode
from rollout_inspector.streams.trajectory import Row, ids_array


@dataclass
class RowDraft:
    """A row while it is written. All lists have an element per token."""

    session: Session
    ids: list[int]
    mask: list[int]
    logprobs: list[float] | None
    advantages: list[float]
    trainer: list[float] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    more: list[Row] = field(default_factory=list)
    """Further rows of the trajectory."""
    steps: list[int] = field(default_factory=list)

    def row(self) -> Row:
        columns = {"advantages": self.advantages} | ({"trainer_logprobs": self.trainer} if self.trainer else {})
        return Row(
            ids_array(self.ids), np.array(self.mask, dtype=np.bool_), _floats(self.logprobs),
            columns={name: np.array(one, dtype=np.float32) for name, one in columns.items()},
            step_indices=tuple(self.steps), extra=self.fields.get("row_extra", {}),
        )


def _floats(values: list[float] | None) -> Any:
    return None if values is None else np.array(values, dtype=np.float32)


Change = Callable[[RowDraft], int | None]
Writer = Callable[[RowDraft], bytes]


@dataclass(frozen=True)
class RowFault:
    """One way of one kind to go wrong in a row."""

    kind: str
    change: Change
    """Changes the draft; returns the offset of the first wrong token, if there is one."""
    variant: str = ""
    forms: tuple[str, ...] = ("nemo_rl", "steps")
    cut: bool = False
    """Whether the last completion was cut by its length."""


def draft(model: Model, rng: random.Random, name: str, *, cut: bool = False, n: int = 3) -> RowDraft:
    """A clean row of a clean session. Raises :class:`NotHere`."""
    session = play(model, rng, name, n=n, cut=cut)
    size = len(session.stream)
    mask, logprobs = [0] * size, [0.0] * size
    for call, (start, stop) in zip(session.calls, session.spans, strict=True):
        mask[start:stop] = [1] * (stop - start)
        logprobs[start:stop] = call["logprobs"] or [0.0] * (stop - start)
    known = session.with_logprobs
    advantages = [0.75 * one for one in mask]
    trainer = [one + rng.gauss(0, 0.01) * on for one, on in zip(logprobs, mask, strict=True)]
    trainer = [min(0.0, one) for one in trainer]
    return RowDraft(
        session, list(session.stream), mask, logprobs if known else None, advantages,
        trainer if known and rng.random() < 0.5 else None, steps=list(range(len(session.calls))),
    )


def nemo_rl(row: RowDraft) -> bytes:
    value = {"idx": row.session.name, "rewards": [1.0], "input_lengths": [len(row.ids)], "token_ids": [row.ids],
             "token_loss_mask": [row.mask], "sample_loss_mask": [1], "advantages": [row.advantages]}
    value |= {"generation_logprobs": [row.logprobs]} if row.logprobs is not None else {}
    value |= {"prev_logprobs": [row.trainer]} if row.trainer is not None else {}
    return json.dumps(value | row.fields).encode()


def steps(row: RowDraft) -> bytes:
    return encode(row.session.trajectory([row.row(), *row.more], **row.fields))


def skyrl(row: RowDraft) -> bytes:
    n = row.session.spans[0][0]
    value = {"prompt_token_ids": [row.ids[:n]], "response_ids": [row.ids[n:]], "rewards": [1.0],
             "loss_masks": [row.mask[n:]], "stop_reasons": ["stop"], "trajectory_ids": [row.session.name],
             "rollout_logprobs": None if row.logprobs is None else [row.logprobs[n:]]}
    return json.dumps(value | row.fields).encode()


def skyrl_step_wise(row: RowDraft) -> bytes:
    """Two trajectories of the same steps."""
    calls = row.session.calls
    value = {
        "prompt_token_ids": [call["prompt"] for call in calls] * 2,
        "response_ids": [call["ids"] for call in calls] * 2,
        "rewards": [[0.0] * len(call["ids"]) for call in calls] * 2,
        "loss_masks": [[1] * len(call["ids"]) for call in calls] * 2,
        "stop_reasons": [call["finish"] for call in calls] * 2,
        "rollout_logprobs": [call["logprobs"] or [-0.5] * len(call["ids"]) for call in calls] * 2,
        "trajectory_ids": [f"a_{n}" for n in (0, 1) for _ in calls],
        "is_last_step": [n == len(calls) - 1 for _ in (0, 1) for n in range(len(calls))],
    }
    order = row.fields.pop("order", range(2 * len(calls)))
    value = {key: [items[n] for n in order] for key, items in value.items()}
    return json.dumps(value | row.fields).encode()


def verl(row: RowDraft) -> bytes:
    n = row.fields.pop("split", row.session.spans[0][0])
    value = {"prompt_ids": row.ids[:n], "response_ids": row.ids[n:], "response_mask": row.mask[n:],
             "response_logprobs": row.logprobs[n:] if row.logprobs else None, "num_turns": 2, "reward_score": 1.0,
             "extra_fields": {"external_id": row.session.name}}
    return json.dumps(value).encode()


def sft(row: RowDraft) -> bytes:
    """A row of a data set: no calls, no log-probabilities."""
    masked = [token if on else -100 for token, on in zip(row.ids, row.mask, strict=True)]
    return json.dumps({"input_ids": row.ids, "labels": masked, "id": row.session.name}).encode()


def preference(row: RowDraft) -> bytes:
    """The answer that is preferred is the last one; the other is a short one, and ends by itself."""
    at = row.session.spans[-1][0]
    other = [*row.session.model.encode("No"), row.session.model.stop_ids[-1]]
    return json.dumps(
        {"prompt_input_ids": row.ids[:at], "chosen_input_ids": row.ids[at:], "rejected_input_ids": other}
    ).encode()


def message_log(row: RowDraft) -> bytes:
    """One message for each stretch of the mask."""
    cuts = [0, *(n for n in range(1, len(row.ids)) if row.mask[n] != row.mask[n - 1]), len(row.ids)]
    messages = []
    for start, stop in pairwise(cuts):
        message = {"role": "assistant" if row.mask[start] else "user", "token_ids": row.ids[start:stop],
                   "token_loss_mask": row.mask[start:stop]}
        has_logprobs = row.logprobs is not None and row.mask[start]
        messages.append(message | ({"generation_logprobs": row.logprobs[start:stop]} if has_logprobs else {}))
    return json.dumps({"message_log": messages, "reward": 1.0}).encode()


def areal(row: RowDraft) -> bytes:
    n = row.fields.get("split", row.session.spans[0][0])
    value = {"task_id": row.session.name, "sample_idx": 0, "seqlen": len(row.ids), "prompt_len": n, "head_version": 1,
             "tail_version": 1, "reward": 1.0, "prompt": row.session.model.decode(row.ids[:n]),
             "completion": row.session.model.decode(row.ids[n:])}
    return json.dumps(value).encode()


WRITERS: Mapping[str, Writer] = {
    "nemo_rl": nemo_rl, "steps": steps, "skyrl": skyrl, "skyrl_step_wise": skyrl_step_wise, "verl": verl,
    "areal": areal, "sft": sft, "preference": preference, "message_log": message_log,
}


# -- the faults


def _between(row: RowDraft) -> tuple[int, int]:
    """The inside of what stands between two completions, without headers and generation prompt."""
    spans = row.session.spans
    n = row.session.rng.randrange(len(spans) - 1)
    tail = len(row.session.model.encode(row.session.model.generation_prompt))
    return spans[n][1] + 8, spans[n + 1][0] - tail - 6


def _train(row: RowDraft, start: int, stop: int) -> int:
    if stop <= start:
        raise NotHere("nothing to train")
    row.mask[start:stop] = [1] * (stop - start)
    return start


def _part_of_observation(row: RowDraft) -> int:
    start, stop = _between(row)
    at = row.session.rng.randrange(start, max(start + 1, stop - 5))
    return _train(row, at, at + 5)


def _observation(row: RowDraft) -> int:
    return _train(row, *_between(row))


def _generation_prompt(row: RowDraft) -> int:
    model, start = row.session.model, row.session.rng.choice(row.session.spans)[0]
    header = model.encode(model.generation_prompt)
    if not header or row.ids[start - len(header) : start] != header:
        raise NotHere("no generation prompt here")
    return _train(row, start - len(header), start)


def _stop_masked(row: RowDraft) -> int:
    stops = [stop for _, stop in row.session.spans if row.ids[stop - 1] in row.session.model.stop_ids]
    at = row.session.rng.choice(stops) - 1
    row.mask[at] = 0
    return at


def _separator(row: RowDraft) -> int:
    places = [stop for _, stop in row.session.spans[:-1] if row.session.model.decode(row.ids[stop : stop + 1]) == "\n"]
    if not places or row.session.model.pair.added:
        raise NotHere("no separator")  # the stop token of GLM is a header, with a line break of its own
    for at in places:
        row.mask[at] = 1
    return places[0]


def _appended_stop(row: RowDraft) -> int:
    """The last completion was cut, and a stop token was put behind it."""
    if row.ids[-1] in row.session.model.stop_ids:
        raise NotHere("it ended by itself")
    if row.logprobs is None or row.session.zeros:
        raise NotHere("its log-probability of 0 is all that tells it in a row without steps")
    at = len(row.ids)
    row.ids.append(row.session.model.stop_ids[-1])
    row.mask.append(1)
    row.advantages.append(0.75)
    for column in (row.logprobs, row.trainer):
        if column is not None:
            column.append(0.0)
    return at


def _shift(by: int, *names: str) -> Change:
    def change(row: RowDraft) -> None:
        row.advantages = [0.75 * one for one in row.mask]
        for name in names:
            column = getattr(row, name)
            if column is None:
                raise NotHere("no such column")
            setattr(row, name, [*column[1:], 0] if by < 0 else [0, *column[:-1]])

    return change


def _trained_place(row: RowDraft) -> int:
    if row.logprobs is None:
        raise NotHere("no log-probabilities")
    return row.session.rng.choice([n for n, on in enumerate(row.mask) if on])


def _logprob(value: float) -> Change:
    def change(row: RowDraft) -> int:
        at = _trained_place(row)
        assert row.logprobs is not None
        row.logprobs[at] = value
        return at

    return change


def _all_zero(row: RowDraft) -> None:
    _trained_place(row)
    row.logprobs = [0.0] * len(row.ids)


def _other_distribution(factor: float, more: float) -> Change:
    def change(row: RowDraft) -> None:
        _trained_place(row)
        assert row.logprobs is not None
        row.trainer = [(one * factor - more) * on for one, on in zip(row.logprobs, row.mask, strict=True)]

    return change


def _length(name: str, by: int) -> Change:
    def change(row: RowDraft) -> None:
        column = getattr(row, name)
        if column is None:
            raise NotHere("no such column")
        setattr(row, name, column[:by] if by < 0 else [*column, *[column[-1]] * by])

    return change


def _mask(which: str) -> Change:
    def change(row: RowDraft) -> int | None:
        start = row.session.spans[0][0]
        size = len(row.ids)
        row.mask = {"all": [1] * size, "none": [0] * size, "to the end": [0] * start + [1] * (size - start)}[which]
        return None

    return change


def _advantage_on_masked(row: RowDraft) -> int:
    row.advantages = [0.75 * one for one in row.mask]
    start, stop = _between(row)
    if stop <= start:
        raise NotHere("nothing in between")
    row.advantages[start:stop] = [0.75] * (stop - start)
    return start


def _advantage_missing(row: RowDraft) -> int:
    row.advantages = [0.75 * one for one in row.mask]
    start, stop = row.session.rng.choice(row.session.spans)
    row.advantages[start:stop] = [0.0] * (stop - start)
    return start


def _turn_masked(row: RowDraft) -> int:
    start, stop = row.session.rng.choice(row.session.spans)
    row.mask[start:stop] = [0] * (stop - start)
    return start


def _part_masked(row: RowDraft) -> int:
    start, stop = row.session.rng.choice(row.session.spans)
    if stop - start < 8:
        raise NotHere("too short")
    at = row.session.rng.randrange(start + 1, stop - 5)
    row.mask[at : at + 3] = [0] * 3
    return at


def _retokenized_row(row: RowDraft) -> int:
    """The row holds an encoding of the last completion's text that nobody sampled."""
    start, stop = row.session.spans[-1]
    ids = split_somewhere(row.session, row.ids[start:stop])
    row.ids = row.ids[:start] + ids
    row.mask = row.mask[:start] + [1] * len(ids)
    row.advantages = [0.75 * one for one in row.mask]
    row.logprobs = None if row.logprobs is None else row.logprobs[:start] + [-0.5] * len(ids)
    row.trainer = None
    old = row.session.stream
    return next(n for n, (a, b) in enumerate(zip(old, row.ids, strict=False)) if a != b)


def _trained_twice(row: RowDraft) -> None:
    start, stop = row.session.spans[0]
    row.more = [
        Row(ids_array(row.ids[:stop]), np.arange(stop) >= start, _floats(row.logprobs and row.logprobs[:stop]),
            columns={"advantages": np.array([0.75] * stop, dtype=np.float32)}, step_indices=(0,))
    ]


def _never_trained(row: RowDraft) -> None:
    stop = row.session.spans[-2][1]
    row.ids, row.mask, row.advantages = row.ids[:stop], row.mask[:stop], row.advantages[:stop]
    row.logprobs = row.logprobs and row.logprobs[:stop]
    row.trainer = row.trainer and row.trainer[:stop]
    row.steps.pop()


def _versions(row: RowDraft) -> None:
    n = len(row.steps)
    row.fields = {"steps": {step: {"policy_version": "12" if step < n - 1 else "13"} for step in range(n)}}


def _experts(by: int) -> Change:
    def change(row: RowDraft) -> None:
        row.fields = {"rollout_expert_indices": [[[[1, 2]]] * (len(row.ids) + by)]}

    return change


def _flags(row: RowDraft) -> None:
    n = len(row.session.calls)
    row.fields = {"is_last_step": [True] + [False] * (n - 2) + [True] + [False] * (n - 1) + [True]}


def _interleaved(row: RowDraft) -> None:
    n = len(row.session.calls)
    row.fields = {"order": [0, n, *range(1, n), *range(n + 1, 2 * n)]}


def _counted_split(row: RowDraft) -> None:
    """The prompt is as long as the row without its trained tokens, as if these stood together at the end."""
    n = len(row.ids) - sum(row.mask)
    row.fields = {"split": n}
    row.mask = [0] * n + row.mask[n:]


def _counted_length(row: RowDraft) -> None:
    """The mask is right, and the length of the prompt that is written beside it is not."""
    row.fields = {"row_extra": {"prompt_length": len(row.ids) - sum(row.mask)}}


def _first_masked(row: RowDraft) -> int:
    """The first token of an answer is left out: the header was thought to be longer."""
    _without_rewards(row)
    start, stop = row.session.rng.choice(row.session.spans)
    if stop - start < 4:
        raise NotHere("too short")
    row.mask[start] = 0
    return start


def _without_rewards(row: RowDraft) -> None:
    """A data set holds ids and masks alone, and each of its answers ends by itself."""
    row.logprobs, row.trainer = None, None
    if row.ids[-1] not in row.session.model.stop_ids:
        raise NotHere("the answer was cut")


def _bos_twice(row: RowDraft) -> int:
    bos = row.session.model.tokenizer.bos_token_id
    if bos is None or row.ids[0] != bos:
        raise NotHere("no bos")
    for column, value in ((row.ids, bos), (row.mask, 0), (row.logprobs, 0.0), (row.trainer, 0.0), (row.advantages, 0)):
        if column is not None:
            column.insert(0, value)
    return 1


def _stop_left_out(row: RowDraft) -> int:
    """The row ends without its stop token, and without padding."""
    _without_rewards(row)
    row.ids.pop()
    row.mask.pop()
    return len(row.ids) - 1


def _other_stop(row: RowDraft) -> int:
    """The base model's end of text in place of the end of the turn."""
    model = row.session.model
    _without_rewards(row)
    if "<|im_end|>" not in model.pair.stops:
        raise NotHere("one stop token alone")
    [row.ids[-1]] = model.encode("<|endoftext|>")
    return len(row.ids) - 1


def _truncated(row: RowDraft) -> int:
    if row.ids[-1] in row.session.model.stop_ids:
        raise NotHere("it ended by itself")
    row.fields = {"stop_reasons": ["length"]}
    return row.session.spans[-1][0]


_STEPS, _DATA = ("steps",), ("sft", "preference")
ROW_FAULTS = (
    RowFault("observation_trained", _part_of_observation, "part"),
    RowFault("observation_trained", _observation, "all"),
    RowFault("generation_prompt_trained", _generation_prompt),
    RowFault("stop_token_untrained", _stop_masked),
    RowFault("separator_trained", _separator),
    RowFault("appended_eos_trained", _appended_stop, cut=True),
    *(RowFault("columns_shifted", _shift(by, name), f"{name} {by}")
      for name in ("mask", "logprobs", "advantages") for by in (-1, 1)),
    RowFault("columns_shifted", _shift(1, "mask", "logprobs", "advantages"), "all late"),
    RowFault("columns_shifted", _shift(-1, "mask", "logprobs", "advantages"), "all early"),
    RowFault("logprob_invalid", _logprob(0.3), "positive"),
    RowFault("logprob_invalid", _logprob(math.nan), "NaN"),
    RowFault("logprob_invalid", _logprob(-math.inf), "infinite", _STEPS),
    RowFault("logprob_invalid", _all_zero, "all 0"),
    RowFault("logprobs_other_distribution", _other_distribution(1.6, 0.0), "temperature"),
    RowFault("logprobs_other_distribution", _other_distribution(1.0, 0.4), "constant"),
    RowFault("length_mismatch", _length("mask", -1), "mask"),
    RowFault("length_mismatch", _length("logprobs", 1), "logprobs"),
    RowFault("mask_overrun", _mask("all"), "all"),
    RowFault("mask_overrun", _mask("none"), "none"),
    RowFault("observation_trained", _mask("to the end"), "to the end"),
    RowFault("advantage_misplaced", _advantage_on_masked, "on masked"),
    RowFault("advantage_misplaced", _advantage_missing, "missing"),
    RowFault("sampled_masked", _turn_masked, "a turn", _STEPS),
    RowFault("sampled_masked", _part_masked, "a part", _STEPS),
    RowFault("row_not_sampled", _retokenized_row, "", _STEPS),
    RowFault("trained_twice", _trained_twice, "", _STEPS),
    RowFault("never_trained", _never_trained, "", _STEPS),
    RowFault("mixed_policy_versions", _versions, "", _STEPS),
    RowFault("routing_misaligned", _experts(-3), "shorter", ("skyrl",)),
    RowFault("routing_misaligned", _experts(2), "longer", ("skyrl",)),
    RowFault("step_order_invalid", _flags, "flags", ("skyrl_step_wise",)),
    RowFault("step_order_invalid", _interleaved, "not adjacent", ("skyrl_step_wise",)),
    RowFault("prompt_split_wrong", _counted_split, "", ("verl",)),
    RowFault("sampled_masked", _first_masked, "the first token", ("sft",)),
    RowFault("bos_mismatch", _bos_twice, "doubled in a row", ("sft", "verl", "nemo_rl", "message_log")),
    RowFault("stop_token_untrained", _stop_left_out, "left out", _DATA),
    RowFault("stop_token_untrained", _other_stop, "of the base model", _DATA),
    RowFault("truncated_trained", _truncated, "", ("skyrl",), cut=True),
    RowFault("prompt_split_wrong", _counted_length, "", _STEPS),
)


def plant(model: Model, rng: random.Random, name: str, fault: RowFault, form: str) -> tuple[bytes, list[Label]]:
    """A file with one faulty row."""
    row = draft(model, rng, name, cut=fault.cut, n=rng.randrange(2, 6))
    offset = fault.change(row)
    return WRITERS[form](row), [Label(fault.kind, None, offset, row=0)]


def clean(model: Model, rng: random.Random, name: str, form: str) -> bytes:
    """A file with one row without a fault."""
    row = draft(model, rng, name, cut=rng.random() < 0.1, n=rng.randrange(2, 6))
    if form == "skyrl" and rng.random() < 0.5:
        _experts(rng.choice((0, -1)))(row)
    if form == "nemo_rl":  # which writes the advantage of the sequence to all its tokens
        row.advantages = [0.75] * len(row.ids)
    return WRITERS[form](row)
