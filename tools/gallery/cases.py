"""The trajectories of the gallery: for each kind of finding, the smallest episode of the demo policy that shows it."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Trajectory, ids_array
from rollouts.gallery import CLEAN
from tools.gallery.sampling import FaultyTurn, Policy

Case = Callable[[FaultyTurn], Trajectory]
CASES: dict[str, Case] = {}
"""Kind of finding -> what makes a trajectory that has it, from a question of its own. In the order of the gallery."""
GO_ON = {"role": "user", "content": "Please answer."}
SIDE_SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
NATURAL = ("noncanonical_sampling", "row_not_sampled")
"""Kinds that come about without any fault of a harness, where each prompt is encoded from text."""
MAX_SEEDS = 3000
MAX_THOUGHT = 12
MAX_CALLS = 40
"""Calls of one question that are sampled in a batch to look for a special one."""
HOT = 2.0
"""A temperature at which the policy samples odd tokens."""
MAX_HOT = 40
"""A completion of odd tokens that is longer is left alone."""


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def clean(t: FaultyTurn) -> Trajectory:
    return t.on(t.delta)


# -- what was sampled against the next prompt


@case
def empty_think_toggled(t: FaultyTurn) -> Trajectory:
    t = replace(t, template="empty_think")
    return t.then(t.render(t.messages))


@case
def template_not_append_only(t: FaultyTurn) -> Trajectory:
    t = replace(t, template="reminder")
    return t.then(t.render(t.messages))


@case
def tool_call_reserialized(t: FaultyTurn) -> Trajectory:
    """The harness keeps the parsed call and writes it again without spaces, as many JSON libraries do."""
    call = t.reply["tool_calls"][0]["function"]
    compact = json.dumps({"name": call["name"], "arguments": call["arguments"]}, separators=(",", ":"))
    return t.then(t.joined(t.prompt, f"<tool_call>\n{compact}\n</tool_call><|im_end|>" + t.delta))


@case
def special_tokens_dropped(t: FaultyTurn) -> Trajectory:
    return t.then(t.joined(t.prompt, t.made.completion_ids[:-1], t.delta))


@case
def assistant_rewritten(t: FaultyTurn) -> Trajectory:
    """The harness makes the expression pretty before it sends the call back."""
    after = copy.deepcopy(t.messages)
    arguments: Any = after[len(t.task.messages)]["tool_calls"][0]["function"]["arguments"]
    arguments["expression"] = " ".join(arguments["expression"])
    return t.then(t.render(after), after)


@case
def history_rewritten(t: FaultyTurn) -> Trajectory:
    after = copy.deepcopy(t.messages)
    question = dict(after[1])
    after[1] = {**question, "content": "Summary: the user asked for a number."}
    return t.then(t.render(after), after)


@case
def context_truncated(t: FaultyTurn) -> Trajectory:
    return t.then(t.joined(t.first.stream, t.delta)[12:])


@case
def request_changed(t: FaultyTurn) -> Trajectory:
    return t.then(t.render(t.messages, tools=None), tools=None)


@case
def chat_template_changed(t: FaultyTurn) -> Trajectory:
    """The first call went to a server with another chat template."""
    t = replace(t, template="reminder")
    return t.then(t.render(t.messages, template="empty_think"), template="empty_think")


@case
def duplicate_call(t: FaultyTurn) -> Trajectory:
    """The first call was sent again after a time-out, and both answers were recorded."""
    whole = t.on(t.delta)
    others = (t.policy.sample(t.prompt, t.seed + n) for n in range(100, 100 + MAX_SEEDS))
    other = next(
        candidate for candidate in others if not np.array_equal(candidate.completion_ids, t.made.completion_ids)
    )
    reply = t.policy.parse(t.prompt, other.completion_ids, t.task.tools)
    stray = t.policy.step(t.prompt, other, t.task.messages, t.task.tools, reply)
    return replace(whole, steps=(stray, *whole.steps))


@case
def branch(t: FaultyTurn) -> Trajectory:
    """A sub-agent with its own system text answers between the two calls."""
    question = {"role": "user", "content": "What is 2+3?"}
    aside = FaultyTurn(t.policy, replace(t.task, messages=[SIDE_SYSTEM, question], tools=None), t.seed + 2)
    first, last = t.on(t.delta).steps
    return t.ended(first, aside.first, last)


def _hot(t: FaultyTurn, wanted: Callable[[str], bool], n: int = MAX_HOT) -> FaultyTurn:
    """The turn of a completion sampled at a high temperature, the first whose leading ``n`` tokens are as wanted.

    A user goes on after it.
    """
    for start in range(t.seed, t.seed + MAX_SEEDS, MAX_CALLS):
        seeds = range(start, start + MAX_CALLS)
        for seed, head in zip(seeds, t.policy.samples(t.prompt, seeds, n, HOT), strict=True):
            hot = replace(t, seed=seed, temperature=HOT, max_tokens=MAX_HOT, new=(GO_ON,))
            if wanted(t.decode(head.completion_ids)) and hot.made.finish_reason == "stop":
                return hot
    raise LookupError("no such completion was sampled")


@case
def boundary_merge(t: FaultyTurn) -> Trajectory:
    """The completion begins with a line end, which merges with the one that ends the header."""
    hot = _hot(t, lambda text: text.startswith("\n"), n=1)
    text = hot.decode(ids_array(np.concatenate([hot.prompt, hot.made.completion_ids])))
    return hot.then(hot.joined(text, hot.delta))


@case
def invalid_utf8(t: FaultyTurn) -> Trajectory:
    """The completion holds a part of a character. The harness keeps it as text."""
    hot = _hot(t, lambda text: "\ufffd" in text and "<tool_call>" not in text)
    return hot.then(hot.joined(hot.prompt, hot.decode(hot.made.completion_ids), hot.delta))


def _with_words(t: FaultyTurn) -> FaultyTurn:
    """The turn of a call with words before it, which the policy writes now and then."""
    for seed in _wordy(t):
        turn = replace(t, seed=seed, temperature=1.0)
        if turn.reply.get("tool_calls") and turn.reply.get("content"):
            return turn
    raise LookupError("no call with words before it was sampled")


def _wordy(t: FaultyTurn) -> Iterator[int]:
    """Seeds with which the policy does not begin its answer with the call. One token is sampled for each seed."""
    seeds = range(t.seed, t.seed + MAX_CALLS)
    for seed, head in zip(seeds, t.policy.samples(t.prompt, seeds, 1), strict=True):
        if "<" not in t.decode(head.completion_ids):
            yield seed


@case
def whitespace_changed(t: FaultyTurn) -> Trajectory:
    """The harness puts words and call together again, with an empty line between them."""
    t = _with_words(t)
    again = t.decode(t.made.completion_ids).replace("\n<tool_call>", "\n\n<tool_call>")
    return t.then(t.joined(t.prompt, again + t.delta))


@case
def unclassified(t: FaultyTurn) -> Trajectory:
    """A proxy before the server puts its own words before the call, and nobody kept what was asked of the server."""
    t = _with_words(t)
    again = t.decode(t.made.completion_ids).replace(t.reply["content"], "A tool is called.")
    broken = t.then(t.joined(t.prompt, again + t.delta))
    return replace(broken, steps=tuple(replace(step, request=None) for step in broken.steps))


def _thought(t: FaultyTurn) -> FaultyTurn:
    """The turn of a completion that ends a think block, which the generation prompt opened.

    The policy was not taught to end one. So the engine ends it, as engines do when the budget for thinking is used up:
    the ids are forced, so their processed log-probability is 0.
    """
    turn = replace(t, template="thinking")
    end = turn.encode("\n</think>\n\n")
    for seed in _wordy(turn):
        thought = t.policy.sample(turn.prompt, seed, MAX_THOUGHT, 1.0, ".")
        words = t.decode(thought.completion_ids)
        if not words.endswith(".") or "<" in words or "answer" in words:
            continue
        call = t.policy.sample(turn.joined(turn.prompt, thought.completion_ids, end), seed)
        ids = turn.joined(thought.completion_ids, end, call.completion_ids)
        logprobs = np.concatenate([thought.logprobs, np.zeros(len(end), np.float32), call.logprobs])
        turn = replace(turn, seed=seed, given=replace(call, completion_ids=ids, logprobs=logprobs))
        if turn.reply.get("tool_calls"):
            return turn
    raise LookupError("no thought with a call behind it was sampled")


@case
def thinking_stripped(t: FaultyTurn) -> Trajectory:
    t = _thought(t)
    return t.then(t.render(t.messages))


@case
def reasoning_misparsed(t: FaultyTurn) -> Trajectory:
    """The harness looks for an opening tag in the completion. It stands in the prompt, so nothing is reasoning."""
    t = _thought(t)
    words = f"{t.reply['reasoning_content']}\n</think>\n\n"
    t = replace(t, read={**t.reply, "content": words, "reasoning_content": ""})
    return t.then(t.render(t.messages))


@case
def tokenizer_mismatch(t: FaultyTurn) -> Trajectory:
    """The harness has an older version of the tokenizer, which lacks the merges of the question."""
    question = str(t.task.messages[-1]["content"])
    head, tail = t.text(t.task.messages).split(question)
    t = replace(t, asked=t.joined(head, *question, tail))
    return t.on(t.delta)


@case
def token_ids_missing(t: FaultyTurn) -> Trajectory:
    """The gateway passes no ids on; the harness makes one up."""
    whole = t.on(t.delta)
    first = replace(t.first, completion_ids=ids_array([0]), logprobs=None)
    return replace(whole, steps=(first, *whole.steps[1:]))


@case
def engine_ids_inconsistent(t: FaultyTurn) -> Trajectory:
    """The text was streamed, and a part of it is gone."""
    whole = t.on(t.delta)
    text = t.decode(t.made.completion_ids[:-1])
    return replace(whole, steps=(replace(t.first, text=text.replace('"name": ', "")), *whole.steps[1:]))


@case
def reply_text_lost(t: FaultyTurn) -> Trajectory:
    """The parser that the log was written with does not know this form of a call, and drops it."""
    whole = t.on(t.delta)
    first = replace(t.first, reply={"role": "assistant", "content": ""})
    return replace(whole, steps=(first, *whole.steps[1:]))


@case
def stop_string_misaligned(t: FaultyTurn) -> Trajectory:
    """A stop string ends the call. The engine cuts it off the text, and keeps its ids."""
    t = replace(t, stop="\n</tool_call>")
    whole = t.on("<|im_end|>" + t.delta)
    text = t.decode(t.made.completion_ids).removesuffix(t.stop)
    return replace(whole, steps=(replace(t.first, text=text), *whole.steps[1:]))


@case
def truncated_trained(t: FaultyTurn) -> Trajectory:
    """The answer is cut. The trainer's settings say that such answers are masked, and no row does it."""
    return replace(t.on(t.delta, max_tokens=4), extra={"mask_truncated": True})


@case
def mixed_policy_versions(t: FaultyTurn) -> Trajectory:
    """The engine reports another version between the two calls. The bundle has the weights of one version alone."""
    first, last = t.on(t.delta).steps
    return t.ended(first, replace(last, policy_version=f"{last.policy_version}-2"))


@case
def not_decidable(t: FaultyTurn) -> Trajectory:
    """The recorder kept the ids alone, without the messages of the requests."""
    return t.ended(*(replace(step, request=None) for step in t.on(t.delta).steps))


# -- what the chat template writes between two completions


def _two(t: FaultyTurn) -> FaultyTurn:
    """The same turn with a second message of the tool."""
    note = {"role": "tool", "name": "calculator", "content": "1 of 5 calls used"}
    return replace(t, new=(*t.following, note))


@case
def message_dropped(t: FaultyTurn) -> Trajectory:
    two = _two(t)
    return two.on(t.delta)


@case
def tool_messages_split(t: FaultyTurn) -> Trajectory:
    two = _two(t)
    tails = [replace(t, new=(message,)).delta for message in two.new]
    header = "<|im_start|>assistant\n"
    return two.on(tails[0].removesuffix(header) + tails[1].removeprefix("\n"))


@case
def turn_separator_lost(t: FaultyTurn) -> Trajectory:
    return t.on(t.delta.removeprefix("\n"))


@case
def stop_token_doubled(t: FaultyTurn) -> Trajectory:
    return t.on("<|im_end|>" + t.delta)


@case
def system_prompt_injected(t: FaultyTurn) -> Trajectory:
    """The tool's message is rendered alone, and the template puts the tools in front of it."""
    return t.on("\n" + t.text(t.following))


@case
def special_tokens_injected(t: FaultyTurn) -> Trajectory:
    """The tool's answer spells a control token, which ends the turn."""
    injected = t.with_content(f"{t.following[0]['content']}<|im_end|>")
    return injected.on(injected.delta)


@case
def generation_prompt_missing(t: FaultyTurn) -> Trajectory:
    return t.on(t.delta.removesuffix("<|im_start|>assistant\n"))


@case
def delta_differs(t: FaultyTurn) -> Trajectory:
    """The harness adds a word to the tool's answer that the request does not have."""
    content = str(t.following[0]["content"])
    return t.on(t.delta.replace(content, content + " (cached)"))


# -- training rows


def _row(t: FaultyTurn) -> tuple[Trajectory, Row]:
    """A clean episode, and its row as a trainer writes it: with advantages, without origins."""
    whole = t.on(t.delta)
    row = merged_rows(whole.steps)[0]
    advantages = np.where(row.loss_mask, np.float32(0.7), np.float32(0)).astype(np.float32)
    assert row.logprobs is not None
    logprobs = np.nan_to_num(row.logprobs).astype(np.float32)
    return whole, replace(row, logprobs=logprobs, columns={"advantages": advantages})


def _with(t: FaultyTurn, change: Callable[[FaultyTurn, Row], Row | tuple[Row, ...]]) -> Trajectory:
    whole, row = _row(t)
    changed = change(t, row)
    return replace(whole, rows=changed if isinstance(changed, tuple) else (changed,))


def _trained(row: Row, start: int, stop: int, flag: bool = True) -> Row:
    """The row with the mask of ``[start, stop)`` set."""
    mask = row.loss_mask.copy()
    mask[start:stop] = flag
    return replace(row, loss_mask=mask, columns={"advantages": np.where(mask, 0.7, 0).astype(np.float32)})


def _end(t: FaultyTurn) -> int:
    """The offset behind the first completion."""
    return len(t.first.stream)


def row_case(change: Callable[[FaultyTurn, Row], Row | tuple[Row, ...]]) -> None:
    CASES[change.__name__] = partial(_with, change=change)


@row_case
def observation_trained(t: FaultyTurn, row: Row) -> Row:
    head = len(t.encode(t.delta[: t.delta.index("<tool_response>\n") + len("<tool_response>\n")]))
    n = len(t.encode(str(t.following[0]["content"])))
    return _trained(row, _end(t) + head, _end(t) + head + n)


@row_case
def generation_prompt_trained(t: FaultyTurn, row: Row) -> Row:
    return _trained(row, len(t.prompt) - len(t.encode("<|im_start|>assistant\n")), len(t.prompt))


@row_case
def separator_trained(t: FaultyTurn, row: Row) -> Row:
    return _trained(row, _end(t), _end(t) + 1)


@row_case
def appended_eos_trained(t: FaultyTurn, row: Row) -> Row:
    assert row.logprobs is not None
    stop = t.encode("<|im_end|>")
    return replace(
        row, ids=ids_array(np.concatenate([row.ids, stop])), loss_mask=np.append(row.loss_mask, True),
        logprobs=np.append(row.logprobs, np.float32(0)).astype(np.float32), origin=None,
        columns={"advantages": np.append(row.columns["advantages"], np.float32(0.7)).astype(np.float32)},
    )


@row_case
def mask_overrun(t: FaultyTurn, row: Row) -> Row:
    return replace(row, loss_mask=np.ones_like(row.loss_mask), logprobs=None, columns={})


@row_case
def columns_shifted(t: FaultyTurn, row: Row) -> Row:
    assert row.logprobs is not None
    return replace(row, logprobs=np.roll(row.logprobs, -1))


@row_case
def logprob_invalid(t: FaultyTurn, row: Row) -> Row:
    assert row.logprobs is not None
    logprobs = row.logprobs.copy()
    logprobs[len(t.prompt) + 2] = np.nan
    return replace(row, logprobs=logprobs)


@row_case
def length_mismatch(t: FaultyTurn, row: Row) -> Row:
    return replace(row, loss_mask=row.loss_mask[:-2])


@row_case
def advantage_misplaced(t: FaultyTurn, row: Row) -> Row:
    advantages = row.columns["advantages"].copy()
    advantages[len(t.prompt) : _end(t)] = 0
    return replace(row, columns={"advantages": advantages})


@row_case
def reward_misplaced(t: FaultyTurn, row: Row) -> Row:
    """The reward stands at the first sampled token, as where a turn's length counted twice."""
    rewards = np.where(np.arange(len(row.ids)) == len(t.prompt), 1, 0).astype(np.float32)
    return replace(row, columns={**row.columns, "rewards": rewards})


@row_case
def trained_twice(t: FaultyTurn, row: Row) -> tuple[Row, ...]:
    return row, replace(merged_rows((t.first,))[0], step_indices=(0,))


@row_case
def never_trained(t: FaultyTurn, row: Row) -> Row:
    """The trainer takes the first call of an episode alone."""
    return replace(merged_rows((t.first,))[0], step_indices=(0,))


@row_case
def sampled_masked(t: FaultyTurn, row: Row) -> Row:
    """The mask was made from decoded text, and begins at the call's JSON."""
    return _trained(row, len(t.prompt), len(t.prompt) + 2, False)


@row_case
def stop_token_untrained(t: FaultyTurn, row: Row) -> Row:
    return _trained(row, _end(t) - 1, _end(t), False)


@row_case
def prompt_split_wrong(t: FaultyTurn, row: Row) -> Row:
    return replace(row, extra={"prompt_length": int((~row.loss_mask).sum())})


@row_case
def step_order_invalid(t: FaultyTurn, row: Row) -> tuple[Row, ...]:
    flagged = ((merged_rows((step,))[0], n) for n, step in enumerate(t.on(t.delta).steps))
    return tuple(replace(flagged_row, step_indices=(n,), extra={"is_last_step": n == 0}) for flagged_row, n in flagged)


@row_case
def routing_misaligned(t: FaultyTurn, row: Row) -> Row:
    return replace(row, extra={"routed_experts": [[0]] * 3})


@row_case
def logprobs_other_distribution(t: FaultyTurn, row: Row) -> Row:
    assert row.logprobs is not None
    return replace(row, columns={**row.columns, "trainer_logprobs": row.logprobs * np.float32(0.7)})


def natural(policy: Policy, strategy: str, n_tries: int = 60) -> Any:
    """The episodes that the policy has under a strategy, one after the other."""
    for seed in range(n_tries):
        yield policy.rolled(strategy, policy.tasks[seed % len(policy.tasks)], 1000 + 10 * seed)


assert CLEAN in CASES
