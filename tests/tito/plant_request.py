"""Faults of requests, and the shapes of trajectories."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np

from rollouts.tito.trajectory import Trajectory
from tests.tito.plant_setup import CannotPlant, Case, World, planter


@planter
def duplicate_call(w: World) -> Case:
    turn = w.turn()
    other = w.codec.encode("I am not sure." + turn.stop)
    stray = w.step(turn.messages, turn.p, other, {"role": "assistant", "content": "I am not sure."})
    last = w.final(turn.after, np.concatenate([turn.p, turn.g, turn.d]))
    steps = [stray, turn.first(), last] if w.rng.random() < 0.5 else [turn.first(), stray, last]
    return Case("duplicate_call", turn.trajectory(*steps), "duplicate_call", 1)


@planter
def branch(w: World) -> Case:
    turn = w.turn()
    side = [{"role": "user", "content": f"Title for: product of {w.a} and {w.b}"}]
    if w.system:
        side.insert(0, {"role": "system", "content": "You write a short title for a conversation."})
    prompt, completion = w.answer(side, {"role": "assistant", "content": "A product"})
    if w.tools:
        prompt = w.text(side, tools=None)
    aside = w.step(
        side,
        w.codec.encode(prompt),
        w.codec.encode(completion),
        {"role": "assistant", "content": "A product"},
        tools=None,
    )
    last = w.final(turn.after, np.concatenate([turn.p, turn.g, turn.d]))
    return Case("branch", turn.trajectory(turn.first(), aside, last), "branch", 1)


@planter
def request_changed(w: World) -> Case:
    turn = w.turn()
    if w.tools:
        prompt = w.render(turn.after, tools=None)
        last = w.step(turn.after, prompt, turn.g, turn.reply, tools=None)
    elif w.system:
        after = copy.deepcopy(turn.after)
        after[0]["content"] += " It is Tuesday."
        last = w.final(after, w.render(after))
    else:
        raise CannotPlant("neither tools nor system")
    same = np.array_equal(last.prompt_ids[: len(turn.p)], turn.p)
    if same:
        raise CannotPlant("the template does not write the tools")
    return Case("request_changed", turn.trajectory(turn.first(), last), "request_changed", 1)


@planter
def bos_doubled(w: World) -> Case:
    turn = w.turn()
    if w.codec.bos_id is None or int(turn.p[0]) != w.codec.bos_id:
        raise CannotPlant("no BOS")
    last = w.final(turn.after, np.concatenate([turn.p[:1], turn.p, turn.g, turn.d]))
    return Case("bos_doubled", turn.trajectory(turn.first(), last), "bos_mismatch", 1)


@planter
def bos_missing(w: World) -> Case:
    turn = w.turn()
    if w.codec.bos_id is None or int(turn.p[0]) != w.codec.bos_id:
        raise CannotPlant("no BOS")
    last = w.final(turn.after, np.concatenate([turn.p[1:], turn.g, turn.d]))
    return Case("bos_missing", turn.trajectory(turn.first(), last), "bos_mismatch", 1)


@planter
def context_truncated(w: World) -> Case:
    turn = w.turn()
    whole = np.concatenate([turn.p, turn.g, turn.d])
    cut = w.rng.randrange(5, len(turn.p) - 2)
    return Case(
        "context_truncated", turn.trajectory(turn.first(), w.final(turn.after, whole[cut:])), "context_truncated", 1
    )


@planter
def history_summary(w: World) -> Case:
    turn = w.turn()
    after = [*turn.messages[:-1], {"role": "user", "content": "Summary so far: a product was asked for. Continue."}]
    return Case(
        "history_summary", turn.trajectory(turn.first(), w.final(after, w.render(after))), "history_rewritten", 1
    )


@planter
def history_edited(w: World) -> Case:
    turn = w.turn()
    after = copy.deepcopy(turn.after)
    after[len(turn.messages) - 1]["content"] = after[len(turn.messages) - 1]["content"].replace("someone", "nobody")
    return Case(
        "history_edited", turn.trajectory(turn.first(), w.final(after, w.render(after))), "history_rewritten", 1
    )


@planter
def assistant_rewritten(w: World) -> Case:
    turn = w.turn()
    after = copy.deepcopy(turn.after)
    sent = after[len(turn.messages)]
    if w.tools:
        sent["tool_calls"] = [w.call(expr=f"{w.a} times {w.b}", exact=False)]
    else:
        sent["content"] = "Just a moment."
    return Case(
        "assistant_rewritten", turn.trajectory(turn.first(), w.final(after, w.render(after))), "assistant_rewritten", 1
    )


@planter
def chat_template_changed(w: World) -> Case:
    reply, new = {"role": "assistant", "content": "So it is."}, [{"role": "user", "content": "And doubled?"}]
    messages = w.opening()
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    prompt = w.text(messages, kwargs=off)
    if prompt == w.text(messages, kwargs=on):
        raise CannotPlant("the template has no such switch")
    g = w.codec.encode("So it is." + w.stop(messages))
    after = [*messages, reply, *new]
    first = w.step(messages, w.codec.encode(prompt), g, reply, kwargs=off)
    second = w.render(after, kwargs=on)
    if np.array_equal(second[: len(first.stream)], first.stream):
        raise CannotPlant("the switch changes nothing in the past")
    last = w.step(after, second, g, reply, kwargs=on)
    return Case("chat_template_changed", Trajectory("planted", (first, last)), "chat_template_changed", 1)


@planter
def chat_template_replaced(w: World) -> Case:
    turn = w.turn()
    last = w.final(turn.after, np.concatenate([w.codec.encode("New rules. "), turn.p, turn.g, turn.d]))
    steps = replace(turn.first(), chat_template_sha256="a" * 64), replace(last, chat_template_sha256="b" * 64)
    return Case("chat_template_replaced", turn.trajectory(*steps), "chat_template_changed", 1)


@planter
def history_window(w: World) -> Case:
    if not w.history:
        raise CannotPlant("no history")
    turn = w.turn()
    after = [m for m in turn.after if m["content"] not in ("Hello there.", "Hello.")]
    return Case(
        "history_window",
        turn.trajectory(turn.first(), w.final(after, w.render(after))),
        "history_rewritten",
        1,
        ("context_truncated",),
    )


@planter
def aside_at_the_end(w: World) -> Case:
    if not w.system:
        raise CannotPlant("no system")
    turn = w.turn()
    side = [{"role": "system", "content": "You judge answers."}, {"role": "user", "content": "Is 3 right?"}]
    prompt, completion = w.answer(side, {"role": "assistant", "content": "Yes"})
    steps = [*turn.tito().steps, w.step(side, w.codec.encode(prompt), w.codec.encode(completion), None)]
    return Case("aside_at_the_end", turn.trajectory(*steps), "branch", 2)


@planter
def aside_with_its_own_system(w: World) -> Case:
    """A judge with a system text, beside a conversation that has none."""
    if w.system or not w.tools:
        raise CannotPlant("the conversation has a system text, or the judge lacks no tools")
    turn = w.turn()
    side = [{"role": "system", "content": "You judge answers."}, {"role": "user", "content": "Is 3 right?"}]
    prompt = w.text(side, tools=None)
    step = w.step(side, w.codec.encode(prompt), w.codec.encode("Yes" + turn.stop), None, tools=None)
    return Case("aside_with_its_own_system", turn.trajectory(*turn.tito().steps, step), "branch", 2)


@planter
def question_over_the_transcript(w: World) -> Case:
    """Something is asked about the conversation so far, and then the user goes on from before it."""
    turn = w.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Is it done?"}])
    asked = w.final(turn.after, np.concatenate([turn.p, turn.g, turn.d]), "No.")
    after = [*turn.messages, turn.reply, {"role": "user", "content": "Please go on."}]
    delta = w.codec.encode(turn.delta.replace("Is it done?", "Please go on."))
    last = w.final(after, np.concatenate([turn.p, turn.g, delta]))
    return Case("question_over_the_transcript", turn.trajectory(turn.first(), asked, last), "branch", 2)


@planter
def parallel_branches(w: World) -> Case:
    if not w.tools:
        raise CannotPlant("no tools")
    turn = w.turn()
    prompt = np.concatenate([turn.p, turn.g, turn.d])
    middle = w.final(turn.after, prompt)
    other = copy.deepcopy(turn.after)
    other[-1]["content"] = "77"
    delta = w.codec.encode(turn.delta.replace(str(turn.new[0]["content"]), "77"))
    third = w.final(other, np.concatenate([turn.p, turn.g, delta]), "It is 77.")
    return Case("parallel_branches", turn.trajectory(turn.first(), middle, third), "branch", 2)


@planter
def system_changed(w: World) -> Case:
    if not w.system:
        raise CannotPlant("no system")
    turn = w.turn()
    after = copy.deepcopy(turn.after)
    after[0]["content"] = after[0]["content"].replace("careful", "careless")
    return Case("system_changed", turn.trajectory(turn.first(), w.final(after, w.render(after))), "request_changed", 1)


@planter
def tools_dropped_once(w: World) -> Case:
    if not w.tools:
        raise CannotPlant("no tools")
    turn = w.turn()
    prompt = w.render(turn.after, tools=None)
    if np.array_equal(prompt[: len(turn.p)], turn.p):
        raise CannotPlant("the template does not write the tools")
    said = f"The answer is {w.a * w.b}."
    second = w.step(
        turn.after, prompt, w.codec.encode(said + turn.stop), {"role": "assistant", "content": said}, tools=None
    )
    after = [*turn.after, {"role": "assistant", "content": said}, {"role": "user", "content": "Again, please."}]
    delta = w.codec.encode(w.delta(after, turn.stop, "Again, please."))
    sampled = w.codec.encode(said + turn.stop)
    third = w.final(after, np.concatenate([turn.p, turn.g, turn.d, sampled, delta]))
    return Case("tools_dropped_once", turn.trajectory(turn.first(), second, third), "request_changed", 1)


@planter
def tool_result_edited(w: World) -> Case:
    if not w.tools:
        raise CannotPlant("no tools")
    turn = w.turn()
    prompt = np.concatenate([turn.p, turn.g, turn.d])
    said = {"role": "assistant", "content": f"The answer is {w.a * w.b}."}
    second = w.final(turn.after, prompt)
    edited = copy.deepcopy([*turn.after, said, {"role": "user", "content": "Again, please."}])
    edited[len(turn.messages) + 1]["content"] = "a long result (shortened)"
    return Case(
        "tool_result_edited", turn.trajectory(turn.first(), second, w.final(edited, w.render(edited))),
        "history_rewritten", 2,
    )  # fmt: skip
