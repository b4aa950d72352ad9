"""Faults that texts, templates and tokenizers make."""

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.streams.trajectory import Ids, Trajectory, ids_array
from tests.samples.planted.plant_setup import CannotPlant, Case, ModelSetup, eos_text, planter, split_token


@planter
def thinking_stripped(s: ModelSetup) -> Case:
    reply = {
        "role": "assistant",
        "content": f"It is {s.rng.randrange(999)}.",
        "reasoning_content": "I should multiply.",
    }
    new = [{"role": "user", "content": "And doubled?"}]
    messages = s.opening()
    prompt = s.text(messages)
    try:
        _, completion = s.answer(messages, reply)
    except CannotPlant:
        completion = ""
    if "I should multiply." not in completion:
        for opened in ("<think>\n", "<think>"):
            if prompt.endswith(opened):
                completion = f"I should multiply.\n</think>\n\n{reply['content']}{eos_text(s)}"
                break
        else:
            completion = f"<think>\nI should multiply.\n</think>\n\n{reply['content']}{eos_text(s)}"
    after = [*messages, reply, *new]
    whole = s.text(after)
    if "I should multiply." in whole:
        raise CannotPlant("the template keeps reasoning")
    first = s.step(messages, s.codec.encode(prompt), s.codec.encode(completion), reply)
    try:
        last = s.final(after, s.codec.encode(whole))
    except CannotPlant:
        last = s.step(
            after, s.codec.encode(whole), s.codec.encode("ok" + eos_text(s)), {"role": "assistant", "content": "ok"}
        )
    return Case("thinking_stripped", Trajectory("planted", (first, last)), "thinking_stripped", 1)


@planter
def empty_think_toggled(s: ModelSetup) -> Case:
    messages = s.opening()
    for reply, new in (
        (s.calling(), s.result()),
        ({"role": "assistant", "content": "So it is."}, {"role": "user", "content": "And doubled?"}),
    ):
        if "tool_calls" in reply and not s.tools:
            continue
        try:
            prompt, completion = s.answer(messages, reply)
        except CannotPlant:
            continue
        after = [*messages, reply, new]
        whole = s.text(after)
        if "<think>\n\n</think>" in completion and not whole.startswith(prompt + completion):
            first = s.step(messages, s.codec.encode(prompt), s.codec.encode(completion), reply)
            last = s.final(after, s.codec.encode(whole))
            return Case("empty_think_toggled", Trajectory("planted", (first, last)), "empty_think_toggled", 1)
    raise CannotPlant("the template toggles no empty block")


@planter
def reasoning_misparsed(s: ModelSetup) -> Case:
    messages = s.opening()
    prompt = s.text(messages)
    if not prompt.rstrip().endswith("<think>"):
        raise CannotPlant("the generation prompt opens no think block")
    completion = f"I should multiply.\n</think>\n\nIt is so.{eos_text(s)}"
    reply = {"role": "assistant", "content": "I should multiply.\n</think>\n\nIt is so."}
    after = [*messages, reply, {"role": "user", "content": "And doubled?"}]
    head = prompt[: prompt.rindex("<think>")]
    again = f"{head}<think>\n\n</think>\n\nI should multiply.\n</think>\n\nIt is so.{eos_text(s)}"
    first = s.step(messages, s.codec.encode(prompt), s.codec.encode(completion), reply)
    last = s.step(after, s.codec.encode(again + "\nAnd doubled?"), s.codec.encode("ok" + eos_text(s)), None)
    return Case("reasoning_misparsed", Trajectory("planted", (first, last)), "reasoning_misparsed", 1)


@planter
def template_not_append_only(s: ModelSetup) -> Case:
    messages = s.opening()
    reply = {"role": "assistant", "content": "One moment."}
    after = [*messages, reply, {"role": "user", "content": "Please go on."}]
    p, g = s.render(messages), s.codec.encode("One moment." + eos_text(s))
    q = s.render(after)
    if np.array_equal(q[: len(p)], p) or re.search(r"<think>\s*</think>", s.decode(p)):
        raise CannotPlant("the template only appends")
    first = s.step(messages, p, g, reply)
    last = s.step(after, q, s.codec.encode("ok" + eos_text(s)), {"role": "assistant", "content": "ok"})
    return Case("template_not_append_only", Trajectory("planted", (first, last)), "template_not_append_only", 1)


@planter
def tokenizer_mismatch(s: ModelSetup) -> Case:
    turn = s.turn()
    other = (s.render(turn.after) * 7 + 3) % min(s.codec.vocab_size, 90_000)
    return Case(
        "tokenizer_mismatch", turn.trajectory(turn.first(), s.final(turn.after, other)), "tokenizer_mismatch", 1
    )


def _of_another_request(s: ModelSetup, messages: list[dict[str, Any]]) -> Ids:
    """The prompt of a request with the same roles and other texts, of which the template writes some."""
    other = "Quilts, please! How many of them are blue, and who has sewn them?"
    prompt = s.text([{**m, "content": other} if m["role"] in ("user", "tool") else m for m in messages])
    asked = next(str(m["content"]) for m in messages if m["role"] == "user")
    if other not in prompt or asked not in s.text(messages):
        raise CannotPlant("the template writes no text of a user as it is")
    return s.codec.encode(prompt)


@planter
def prompt_of_another_request(s: ModelSetup) -> Case:
    turn = s.turn()
    last = s.final(turn.after, _of_another_request(s, turn.after))
    return Case("prompt_of_another_request", turn.trajectory(turn.first(), last), "engine_ids_inconsistent", 1)


@planter
def first_prompt_of_another_request(s: ModelSetup) -> Case:
    turn = s.turn()
    p = _of_another_request(s, turn.messages)
    last = s.final(turn.after, np.concatenate([p, turn.g, turn.d]))
    steps = s.step(turn.messages, p, turn.g, turn.reply), last
    return Case("first_prompt_of_another_request", turn.trajectory(*steps), "engine_ids_inconsistent", 0)


@planter
def first_prompt_of_other_merges(s: ModelSetup) -> Case:
    """The first prompt has the text that the template writes, in other tokens."""
    turn = s.turn()
    p, start = split_token(s, turn.p)
    last = s.final(turn.after, np.concatenate([p, turn.g, turn.d]))
    steps = s.step(turn.messages, p, turn.g, turn.reply), last
    return Case("first_prompt_of_other_merges", turn.trajectory(*steps), "tokenizer_mismatch", 0, start=start)


@planter
def special_tokens_dropped(s: ModelSetup) -> Case:
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    marks = [i for i in sorted(s.codec.special_ids) if s.decode(ids_array([i])).strip() and i != int(turn.g[-1])]
    mark = next(
        (i for i in marks if "tool" in s.decode(ids_array([i])) or "ipython" in s.decode(ids_array([i]))), marks[-1]
    )
    inside = s.codec.encode("Here")
    sampled = np.concatenate([inside, [mark], s.codec.encode(" it comes" + turn.stop)]).astype(np.int32)
    prompt = s.codec.encode(turn.prompt + "Here it comes" + turn.stop + turn.delta)
    reply = {"role": "assistant", "content": "Here it comes"}
    after = [*turn.messages, reply, *turn.new]
    first = s.step(turn.messages, turn.p, sampled, reply)
    return Case("special_tokens_dropped", turn.trajectory(first, s.final(after, prompt)), "special_tokens_dropped", 1)


@planter
def invalid_utf8(s: ModelSetup) -> Case:
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    for character in ("🧪", "𓀀", "🪐", "藝", "é"):
        ids = s.codec.encode(character)
        if len(ids) > 1:
            break
    else:
        raise CannotPlant("no character is cut")
    half = np.concatenate([s.codec.encode("The sign is "), ids[:1], s.codec.encode(" and more." + turn.stop)])
    text = s.decode(half)
    if "�" not in text:
        raise CannotPlant("no half character")
    reply = {"role": "assistant", "content": text[: -len(turn.stop)]}
    after = [*turn.messages, reply, *turn.new]
    prompt = s.codec.encode(turn.prompt + text + turn.delta)
    first = s.step(turn.messages, turn.p, half.astype(np.int32), reply)
    return Case("invalid_utf8", turn.trajectory(first, s.final(after, prompt)), "invalid_utf8", 1)


@planter
def tool_call_reserialized(s: ModelSetup) -> Case:
    if not s.tools:
        raise CannotPlant("no tools")
    turn = s.turn()
    sampled = _respelled(turn.completion, s.rng)
    if sampled == turn.completion:
        raise CannotPlant("the call has no JSON")
    g = s.codec.encode(sampled)
    prompt = np.concatenate([s.codec.encode(turn.prompt + turn.completion), turn.d])
    return Case("tool_call_reserialized", turn.trajectory(turn.first(g), s.final(turn.after, prompt)),
                "tool_call_reserialized", 1)


@planter
def tool_call_reserialized_parallel(s: ModelSetup) -> Case:
    """One of two calls is respelled. An argument of one is called as the fields of a call are."""
    if not s.tools:
        raise CannotPlant("no tools")
    awkward: dict[str, object] = {"name": "Łódź", "arguments": "none", "id": 7}
    calls = [s.call("lookup", "callaaaa1", **awkward), s.call("lookup", "callbbbb2", query="tides", exact=True)]
    s.rng.shuffle(calls)
    results = [s.result("found it", "lookup", str(call["id"])) for call in calls]
    turn = s.turn(s.calling(*calls), results)
    place = turn.completion.rfind("lookup")
    halves = turn.completion[:place], turn.completion[place:]
    which = s.rng.randrange(2)
    respelled = _respelled(halves[which], s.rng)
    if respelled == halves[which]:
        raise CannotPlant("the call has no JSON")
    g = s.codec.encode(respelled + halves[1] if which == 0 else halves[0] + respelled)
    prompt = np.concatenate([s.codec.encode(turn.prompt + turn.completion), turn.d])
    return Case("tool_call_reserialized_parallel", turn.trajectory(turn.first(g), s.final(turn.after, prompt)),
                "tool_call_reserialized", 1)


def _respelled(text: str, rng: random.Random) -> str:
    ways = [
        text.replace('": ', '":').replace(", ", ","),
        text.replace("false", "False"),
        text.replace('": ', '" : '),
    ]
    ways = [way for way in ways if way != text]
    return rng.choice(ways) if ways else text


@planter
def whitespace_changed(s: ModelSetup) -> Case:
    reply = s.calling(content="I will compute that.") if s.tools else {"role": "assistant", "content": "It is so."}
    turn = s.turn(reply)
    content = reply["content"]
    place = turn.completion.find(content) + len(content)
    if place < len(content):
        raise CannotPlant("the template drops the content of a call")
    sampled = turn.completion[:place] + "\n\n\n" + turn.completion[place:].lstrip()
    g = s.codec.encode(sampled)
    prompt = np.concatenate([s.codec.encode(turn.prompt + turn.completion), turn.d])
    if s.bytes(np.concatenate([turn.p, g])) == s.bytes(prompt[: len(prompt) - len(turn.d)]):
        raise CannotPlant("nothing changed")
    return Case(
        "whitespace_changed", turn.trajectory(turn.first(g), s.final(turn.after, prompt)), "whitespace_changed", 1
    )


@planter
def boundary_merge(s: ModelSetup) -> Case:
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    for begin in ("\nLet me think", "\n\nLet me", " Let me", "ly put", "s it"):
        g = s.codec.encode(begin + " about it." + turn.stop)
        whole = s.codec.encode(turn.prompt + begin + " about it." + turn.stop)
        if not np.array_equal(whole, np.concatenate([turn.p, g])):
            break
    else:
        raise CannotPlant("nothing merges with the generation prompt")
    reply = {"role": "assistant", "content": begin + " about it."}
    after = [*turn.messages, reply, *turn.new]
    first = s.step(turn.messages, turn.p, g, reply)
    prompt = np.concatenate([whole, turn.d])
    return Case("boundary_merge", turn.trajectory(first, s.final(after, prompt)), "boundary_merge", 1)


@planter
def noncanonical_sampling(s: ModelSetup) -> Case:
    turn = s.turn()
    g, _ = split_token(s, turn.g)
    prompt = np.concatenate([s.codec.encode(turn.prompt + turn.completion), turn.d])
    merges = not np.array_equal(prompt[: len(turn.p)], turn.p)
    return Case("noncanonical_sampling", turn.trajectory(turn.first(g), s.final(turn.after, prompt)),
                "boundary_merge" if merges else "noncanonical_sampling", 1)


@planter
def token_ids_missing(s: ModelSetup) -> Case:
    turn = s.turn()
    g = s.rng.choice([ids_array([]), ids_array([0]), ids_array([s.codec.vocab_size + 7, 3]), ids_array([0] * 9)])
    return Case("token_ids_missing", turn.trajectory(turn.first(g), s.final(turn.after, s.render(turn.after))),
                "token_ids_missing", 0)


@planter
def ids_outside_the_vocabulary(s: ModelSetup) -> Case:
    """A later prompt repeats them."""
    turn = s.turn()
    g = turn.g.copy()
    g[len(g) // 2] = s.codec.vocab_size + 7
    second = s.final(turn.after, np.concatenate([turn.p, g, turn.d]))
    after = [*turn.after, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Again, please."}]
    third = s.final(after, np.concatenate([second.stream, turn.d]))
    return Case("ids_outside_the_vocabulary", turn.trajectory(turn.first(g), second, third), "token_ids_missing", 0)


@planter
def stop_token_in_place_of_a_call(s: ModelSetup) -> Case:
    turn = s.turn()
    steps = turn.first(turn.g[-1:]), s.final(turn.after, s.render(turn.after))
    return Case("stop_token_in_place_of_a_call", turn.trajectory(*steps), "token_ids_missing", 0)


@planter
def engine_ids_inconsistent(s: ModelSetup) -> Case:
    turn = s.turn()
    trajectory = turn.tito()
    first = trajectory.steps[0]
    assert first.logprobs is not None
    if s.rng.random() < 0.5:
        first = replace(first, logprobs=np.append(first.logprobs, np.float32(-0.5)))
    else:
        first = replace(first, text="Something else entirely was said here.")
    return Case("engine_ids_inconsistent", turn.trajectory(first, *trajectory.steps[1:]), "engine_ids_inconsistent", 0)


@planter
def reply_text_lost(s: ModelSetup) -> Case:
    turn = s.turn()
    first, *others = turn.tito().steps
    reply = {**(first.reply or {}), "content": "", "reasoning_content": "", "tool_calls": []}
    return Case("reply_text_lost", turn.trajectory(replace(first, reply=reply), *others), "reply_text_lost", 0)


@planter
def thinking_dropped_by_harness(s: ModelSetup) -> Case:
    messages = s.opening()
    content = f"It is {s.rng.randrange(999)}."
    reply = {"role": "assistant", "content": content, "reasoning_content": "I should multiply."}
    completion = f"<think>\nI should multiply.\n</think>\n\n{content}{eos_text(s)}"
    after = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "And doubled?"}]
    first = s.step(messages, s.render(messages), s.codec.encode(completion), reply)
    last = s.step(after, s.render(after), s.codec.encode("ok" + eos_text(s)), {"role": "assistant", "content": "ok"})
    return Case("thinking_dropped_by_harness", Trajectory("planted", (first, last)), "assistant_rewritten", 1)
