"""Faults that texts, templates and tokenizers make."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np

from rollouts.tito.trajectory import Trajectory, ids_array
from tests.tito.plant_setup import CannotPlant, Case, World, eos_text, planter, split_token


@planter
def thinking_stripped(w: World) -> Case:
    reply = {
        "role": "assistant",
        "content": f"It is {w.rng.randrange(999)}.",
        "reasoning_content": "I should multiply.",
    }
    new = [{"role": "user", "content": "And doubled?"}]
    messages = w.opening()
    prompt = w.text(messages)
    try:
        _, completion = w.answer(messages, reply)
    except CannotPlant:
        completion = ""
    if "I should multiply." not in completion:
        for opened in ("<think>\n", "<think>"):
            if prompt.endswith(opened):
                completion = f"I should multiply.\n</think>\n\n{reply['content']}{eos_text(w)}"
                break
        else:
            completion = f"<think>\nI should multiply.\n</think>\n\n{reply['content']}{eos_text(w)}"
    after = [*messages, reply, *new]
    whole = w.text(after)
    if "I should multiply." in whole:
        raise CannotPlant("the template keeps reasoning")
    first = w.step(messages, w.codec.encode(prompt), w.codec.encode(completion), reply)
    try:
        last = w.final(after, w.codec.encode(whole))
    except CannotPlant:
        last = w.step(
            after, w.codec.encode(whole), w.codec.encode("ok" + eos_text(w)), {"role": "assistant", "content": "ok"}
        )
    return Case("thinking_stripped", Trajectory("planted", (first, last)), "thinking_stripped", 1)


@planter
def empty_think_toggled(w: World) -> Case:
    messages = w.opening()
    for reply, new in (
        (w.calling(), w.result()),
        ({"role": "assistant", "content": "So it is."}, {"role": "user", "content": "And doubled?"}),
    ):
        if "tool_calls" in reply and not w.tools:
            continue
        try:
            prompt, completion = w.answer(messages, reply)
        except CannotPlant:
            continue
        after = [*messages, reply, new]
        whole = w.text(after)
        if "<think>\n\n</think>" in completion and not whole.startswith(prompt + completion):
            first = w.step(messages, w.codec.encode(prompt), w.codec.encode(completion), reply)
            last = w.final(after, w.codec.encode(whole))
            return Case("empty_think_toggled", Trajectory("planted", (first, last)), "empty_think_toggled", 1)
    raise CannotPlant("the template toggles no empty block")


@planter
def reasoning_misparsed(w: World) -> Case:
    messages = w.opening()
    prompt = w.text(messages)
    if not prompt.rstrip().endswith("<think>"):
        raise CannotPlant("the generation prompt opens no think block")
    completion = f"I should multiply.\n</think>\n\nIt is so.{eos_text(w)}"
    reply = {"role": "assistant", "content": "I should multiply.\n</think>\n\nIt is so."}
    after = [*messages, reply, {"role": "user", "content": "And doubled?"}]
    head = prompt[: prompt.rindex("<think>")]
    again = f"{head}<think>\n\n</think>\n\nI should multiply.\n</think>\n\nIt is so.{eos_text(w)}"
    first = w.step(messages, w.codec.encode(prompt), w.codec.encode(completion), reply)
    last = w.step(after, w.codec.encode(again + "\nAnd doubled?"), w.codec.encode("ok" + eos_text(w)), None)
    return Case("reasoning_misparsed", Trajectory("planted", (first, last)), "reasoning_misparsed", 1)


@planter
def template_not_append_only(w: World) -> Case:
    messages = w.opening()
    reply = {"role": "assistant", "content": "One moment."}
    after = [*messages, reply, {"role": "user", "content": "Please go on."}]
    p, g = w.render(messages), w.codec.encode("One moment." + eos_text(w))
    q = w.render(after)
    if np.array_equal(q[: len(p)], p) or re.search(r"<think>\s*</think>", w.decode(p)):
        raise CannotPlant("the template only appends")
    first = w.step(messages, p, g, reply)
    last = w.step(after, q, w.codec.encode("ok" + eos_text(w)), {"role": "assistant", "content": "ok"})
    return Case("template_not_append_only", Trajectory("planted", (first, last)), "template_not_append_only", 1)


@planter
def tokenizer_mismatch(w: World) -> Case:
    turn = w.turn()
    other = (w.render(turn.after) * 7 + 3) % min(w.codec.vocab_size, 90_000)
    return Case(
        "tokenizer_mismatch", turn.trajectory(turn.first(), w.final(turn.after, other)), "tokenizer_mismatch", 1
    )


@planter
def special_tokens_dropped(w: World) -> Case:
    turn = w.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    marks = [i for i in sorted(w.codec.special_ids) if w.decode(ids_array([i])).strip() and i != int(turn.g[-1])]
    mark = next(
        (i for i in marks if "tool" in w.decode(ids_array([i])) or "ipython" in w.decode(ids_array([i]))), marks[-1]
    )
    inside = w.codec.encode("Here")
    sampled = np.concatenate([inside, [mark], w.codec.encode(" it comes" + turn.stop)]).astype(np.int32)
    prompt = w.codec.encode(turn.prompt + "Here it comes" + turn.stop + turn.delta)
    reply = {"role": "assistant", "content": "Here it comes"}
    after = [*turn.messages, reply, *turn.new]
    first = w.step(turn.messages, turn.p, sampled, reply)
    return Case("special_tokens_dropped", turn.trajectory(first, w.final(after, prompt)), "special_tokens_dropped", 1)


@planter
def invalid_utf8(w: World) -> Case:
    turn = w.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    for character in ("🧪", "𓀀", "🪐", "藝", "é"):
        ids = w.codec.encode(character)
        if len(ids) > 1:
            break
    else:
        raise CannotPlant("no character is cut")
    half = np.concatenate([w.codec.encode("The sign is "), ids[:1], w.codec.encode(" and more." + turn.stop)])
    text = w.decode(half)
    if "�" not in text:
        raise CannotPlant("no half character")
    reply = {"role": "assistant", "content": text[: -len(turn.stop)]}
    after = [*turn.messages, reply, *turn.new]
    prompt = w.codec.encode(turn.prompt + text + turn.delta)
    first = w.step(turn.messages, turn.p, half.astype(np.int32), reply)
    return Case("invalid_utf8", turn.trajectory(first, w.final(after, prompt)), "invalid_utf8", 1)


@planter
def tool_call_reserialized(w: World) -> Case:
    if not w.tools:
        raise CannotPlant("no tools")
    turn = w.turn()
    sampled = _respelled(turn.completion, w.rng)
    if sampled == turn.completion:
        raise CannotPlant("the call has no JSON")
    g = w.codec.encode(sampled)
    prompt = np.concatenate([w.codec.encode(turn.prompt + turn.completion), turn.d])
    return Case("tool_call_reserialized", turn.trajectory(turn.first(g), w.final(turn.after, prompt)),
                "tool_call_reserialized", 1)  # fmt: skip


def _respelled(text: str, rng: random.Random) -> str:
    ways = [
        text.replace('": ', '":').replace(", ", ","),
        text.replace("false", "False"),
        text.replace('": ', '" : '),
    ]
    ways = [way for way in ways if way != text]
    return rng.choice(ways) if ways else text


@planter
def whitespace_changed(w: World) -> Case:
    reply = w.calling(content="I will compute that.") if w.tools else {"role": "assistant", "content": "It is so."}
    turn = w.turn(reply)
    content = reply["content"]
    place = turn.completion.find(content) + len(content)
    if place < len(content):
        raise CannotPlant("the template drops the content of a call")
    sampled = turn.completion[:place] + "\n\n\n" + turn.completion[place:].lstrip()
    g = w.codec.encode(sampled)
    prompt = np.concatenate([w.codec.encode(turn.prompt + turn.completion), turn.d])
    if w.bytes(np.concatenate([turn.p, g])) == w.bytes(prompt[: len(prompt) - len(turn.d)]):
        raise CannotPlant("nothing changed")
    return Case(
        "whitespace_changed", turn.trajectory(turn.first(g), w.final(turn.after, prompt)), "whitespace_changed", 1
    )


@planter
def boundary_merge(w: World) -> Case:
    turn = w.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    for begin in ("\nLet me think", "\n\nLet me", " Let me", "ly put", "s it"):
        g = w.codec.encode(begin + " about it." + turn.stop)
        whole = w.codec.encode(turn.prompt + begin + " about it." + turn.stop)
        if not np.array_equal(whole, np.concatenate([turn.p, g])):
            break
    else:
        raise CannotPlant("nothing merges with the generation prompt")
    reply = {"role": "assistant", "content": begin + " about it."}
    after = [*turn.messages, reply, *turn.new]
    first = w.step(turn.messages, turn.p, g, reply)
    prompt = np.concatenate([whole, turn.d])
    return Case("boundary_merge", turn.trajectory(first, w.final(after, prompt)), "boundary_merge", 1)


@planter
def noncanonical_sampling(w: World) -> Case:
    turn = w.turn()
    g, _ = split_token(w, turn.g)
    prompt = np.concatenate([w.codec.encode(turn.prompt + turn.completion), turn.d])
    merges = not np.array_equal(prompt[: len(turn.p)], turn.p)
    return Case("noncanonical_sampling", turn.trajectory(turn.first(g), w.final(turn.after, prompt)),
                "boundary_merge" if merges else "noncanonical_sampling", 1)  # fmt: skip


@planter
def token_ids_missing(w: World) -> Case:
    turn = w.turn()
    g = w.rng.choice([ids_array([]), ids_array([0]), ids_array([w.codec.vocab_size + 7, 3]), ids_array([0] * 9)])
    return Case("token_ids_missing", turn.trajectory(turn.first(g), w.final(turn.after, w.render(turn.after))),
                "token_ids_missing", 0)  # fmt: skip


@planter
def engine_ids_inconsistent(w: World) -> Case:
    turn = w.turn()
    trajectory = turn.tito()
    first = trajectory.steps[0]
    assert first.logprobs is not None
    if w.rng.random() < 0.5:
        first = replace(first, logprobs=np.append(first.logprobs, np.float32(-0.5)))
    else:
        first = replace(first, text="Something else entirely was said here.")
    return Case("engine_ids_inconsistent", turn.trajectory(first, *trajectory.steps[1:]), "engine_ids_inconsistent", 0)


@planter
def thinking_dropped_by_harness(w: World) -> Case:
    messages = w.opening()
    content = f"It is {w.rng.randrange(999)}."
    reply = {"role": "assistant", "content": content, "reasoning_content": "I should multiply."}
    completion = f"<think>\nI should multiply.\n</think>\n\n{content}{eos_text(w)}"
    after = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "And doubled?"}]
    first = w.step(messages, w.render(messages), w.codec.encode(completion), reply)
    last = w.step(after, w.render(after), w.codec.encode("ok" + eos_text(w)), {"role": "assistant", "content": "ok"})
    return Case("thinking_dropped_by_harness", Trajectory("planted", (first, last)), "assistant_rewritten", 1)
