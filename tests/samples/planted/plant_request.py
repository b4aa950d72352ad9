"""Faults of requests, and the shapes of trajectories."""

import copy
from dataclasses import replace

import numpy as np

from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.planted.plant_setup import CannotPlant, Case, ModelSetup, planter


@planter
def duplicate_call(s: ModelSetup) -> Case:
    turn = s.turn()
    other = s.codec.encode("I am not sure." + turn.stop)
    stray = s.step(turn.messages, turn.p, other, {"role": "assistant", "content": "I am not sure."})
    last = s.final(turn.after, np.concatenate([turn.p, turn.g, turn.d]))
    steps = [stray, turn.first(), last] if s.rng.random() < 0.5 else [turn.first(), stray, last]
    return Case("duplicate_call", turn.trajectory(*steps), "duplicate_call", 1)


@planter
def branch(s: ModelSetup) -> Case:
    turn = s.turn()
    side = [{"role": "user", "content": f"Title for: product of {s.a} and {s.b}"}]
    if s.system:
        side.insert(0, {"role": "system", "content": "You write a short title for a conversation."})
    prompt, completion = s.answer(side, {"role": "assistant", "content": "A product"})
    if s.tools:
        prompt = s.text(side, tools=None)
    aside = s.step(
        side,
        s.codec.encode(prompt),
        s.codec.encode(completion),
        {"role": "assistant", "content": "A product"},
        tools=None,
    )
    last = s.final(turn.after, np.concatenate([turn.p, turn.g, turn.d]))
    return Case("branch", turn.trajectory(turn.first(), aside, last), "branch", 1)


@planter
def request_changed(s: ModelSetup) -> Case:
    turn = s.turn()
    if s.tools:
        prompt = s.render(turn.after, tools=None)
        last = s.step(turn.after, prompt, turn.g, turn.reply, tools=None)
    elif s.system:
        after = copy.deepcopy(turn.after)
        after[0]["content"] += " It is Tuesday."
        last = s.final(after, s.render(after))
    else:
        raise CannotPlant("neither tools nor system")
    same = np.array_equal(last.prompt_ids[: len(turn.p)], turn.p)
    if same:
        raise CannotPlant("the template does not write the tools")
    return Case("request_changed", turn.trajectory(turn.first(), last), "request_changed", 1)


@planter
def bos_doubled(s: ModelSetup) -> Case:
    turn = s.turn()
    if s.codec.bos_id is None or int(turn.p[0]) != s.codec.bos_id:
        raise CannotPlant("no BOS")
    last = s.final(turn.after, np.concatenate([turn.p[:1], turn.p, turn.g, turn.d]))
    return Case("bos_doubled", turn.trajectory(turn.first(), last), "bos_mismatch", 1)


@planter
def bos_missing(s: ModelSetup) -> Case:
    turn = s.turn()
    if s.codec.bos_id is None or int(turn.p[0]) != s.codec.bos_id:
        raise CannotPlant("no BOS")
    last = s.final(turn.after, np.concatenate([turn.p[1:], turn.g, turn.d]))
    return Case("bos_missing", turn.trajectory(turn.first(), last), "bos_mismatch", 1)


@planter
def context_truncated(s: ModelSetup) -> Case:
    turn = s.turn()
    whole = np.concatenate([turn.p, turn.g, turn.d])
    cut = s.rng.randrange(5, len(turn.p) - 2)
    return Case(
        "context_truncated", turn.trajectory(turn.first(), s.final(turn.after, whole[cut:])), "context_truncated", 1
    )


@planter
def history_summary(s: ModelSetup) -> Case:
    turn = s.turn()
    after = [*turn.messages[:-1], {"role": "user", "content": "Summary so far: a product was asked for. Continue."}]
    return Case(
        "history_summary", turn.trajectory(turn.first(), s.final(after, s.render(after))), "history_rewritten", 1
    )


@planter
def history_edited(s: ModelSetup) -> Case:
    turn = s.turn()
    after = copy.deepcopy(turn.after)
    after[len(turn.messages) - 1]["content"] = after[len(turn.messages) - 1]["content"].replace("someone", "nobody")
    return Case(
        "history_edited", turn.trajectory(turn.first(), s.final(after, s.render(after))), "history_rewritten", 1
    )


@planter
def assistant_rewritten(s: ModelSetup) -> Case:
    turn = s.turn()
    after = copy.deepcopy(turn.after)
    sent = after[len(turn.messages)]
    if s.tools:
        sent["tool_calls"] = [s.call(expr=f"{s.a} times {s.b}", exact=False)]
    else:
        sent["content"] = "Just a moment."
    return Case(
        "assistant_rewritten", turn.trajectory(turn.first(), s.final(after, s.render(after))), "assistant_rewritten", 1
    )


@planter
def chat_template_changed(s: ModelSetup) -> Case:
    reply, new = {"role": "assistant", "content": "So it is."}, [{"role": "user", "content": "And doubled?"}]
    messages = s.opening()
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    prompt = s.text(messages, kwargs=off)
    if prompt == s.text(messages, kwargs=on):
        raise CannotPlant("the template has no such switch")
    g = s.codec.encode("So it is." + s.stop(messages))
    after = [*messages, reply, *new]
    first = s.step(messages, s.codec.encode(prompt), g, reply, kwargs=off)
    second = s.render(after, kwargs=on)
    if np.array_equal(second[: len(first.stream)], first.stream):
        raise CannotPlant("the switch changes nothing in the past")
    last = s.step(after, second, g, reply, kwargs=on)
    return Case("chat_template_changed", Trajectory("planted", (first, last)), "chat_template_changed", 1)


@planter
def chat_template_replaced(s: ModelSetup) -> Case:
    turn = s.turn()
    last = s.final(turn.after, np.concatenate([s.codec.encode("New rules. "), turn.p, turn.g, turn.d]))
    steps = replace(turn.first(), chat_template_sha256="a" * 64), replace(last, chat_template_sha256="b" * 64)
    return Case("chat_template_replaced", turn.trajectory(*steps), "chat_template_changed", 1)


@planter
def history_window(s: ModelSetup) -> Case:
    if not s.history:
        raise CannotPlant("no history")
    turn = s.turn()
    after = [m for m in turn.after if m["content"] not in ("Hello there.", "Hello.")]
    return Case(
        "history_window",
        turn.trajectory(turn.first(), s.final(after, s.render(after))),
        "history_rewritten",
        1,
        ("context_truncated",),
    )


@planter
def aside_at_the_end(s: ModelSetup) -> Case:
    if not s.system:
        raise CannotPlant("no system")
    turn = s.turn()
    side = [{"role": "system", "content": "You judge answers."}, {"role": "user", "content": "Is 3 right?"}]
    prompt, completion = s.answer(side, {"role": "assistant", "content": "Yes"})
    steps = [*turn.tito().steps, s.step(side, s.codec.encode(prompt), s.codec.encode(completion), None)]
    return Case("aside_at_the_end", turn.trajectory(*steps), "branch", 2)


@planter
def aside_with_its_own_system(s: ModelSetup) -> Case:
    """A judge with a system text, beside a conversation that has none."""
    if s.system or not s.tools:
        raise CannotPlant("the conversation has a system text, or the judge lacks no tools")
    turn = s.turn()
    side = [{"role": "system", "content": "You judge answers."}, {"role": "user", "content": "Is 3 right?"}]
    prompt = s.text(side, tools=None)
    step = s.step(side, s.codec.encode(prompt), s.codec.encode("Yes" + turn.stop), None, tools=None)
    return Case("aside_with_its_own_system", turn.trajectory(*turn.tito().steps, step), "branch", 2)


@planter
def question_over_the_transcript(s: ModelSetup) -> Case:
    """Something is asked about the conversation so far, and then the user goes on from before it."""
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Is it done?"}])
    asked = s.final(turn.after, np.concatenate([turn.p, turn.g, turn.d]), "No.")
    after = [*turn.messages, turn.reply, {"role": "user", "content": "Please go on."}]
    delta = s.codec.encode(turn.delta.replace("Is it done?", "Please go on."))
    last = s.final(after, np.concatenate([turn.p, turn.g, delta]))
    return Case("question_over_the_transcript", turn.trajectory(turn.first(), asked, last), "branch", 2)


@planter
def parallel_branches(s: ModelSetup) -> Case:
    if not s.tools:
        raise CannotPlant("no tools")
    turn = s.turn()
    prompt = np.concatenate([turn.p, turn.g, turn.d])
    middle = s.final(turn.after, prompt)
    other = copy.deepcopy(turn.after)
    other[-1]["content"] = "77"
    delta = s.codec.encode(turn.delta.replace(str(turn.new[0]["content"]), "77"))
    third = s.final(other, np.concatenate([turn.p, turn.g, delta]), "It is 77.")
    return Case("parallel_branches", turn.trajectory(turn.first(), middle, third), "branch", 2)


@planter
def system_changed(s: ModelSetup) -> Case:
    if not s.system:
        raise CannotPlant("no system")
    turn = s.turn()
    after = copy.deepcopy(turn.after)
    after[0]["content"] = after[0]["content"].replace("careful", "careless")
    return Case("system_changed", turn.trajectory(turn.first(), s.final(after, s.render(after))), "request_changed", 1)


@planter
def tools_dropped_once(s: ModelSetup) -> Case:
    if not s.tools:
        raise CannotPlant("no tools")
    turn = s.turn()
    prompt = s.render(turn.after, tools=None)
    if np.array_equal(prompt[: len(turn.p)], turn.p):
        raise CannotPlant("the template does not write the tools")
    said = f"The answer is {s.a * s.b}."
    second = s.step(
        turn.after, prompt, s.codec.encode(said + turn.stop), {"role": "assistant", "content": said}, tools=None
    )
    after = [*turn.after, {"role": "assistant", "content": said}, {"role": "user", "content": "Again, please."}]
    delta = s.codec.encode(s.delta(after, turn.stop, "Again, please."))
    sampled = s.codec.encode(said + turn.stop)
    third = s.final(after, np.concatenate([turn.p, turn.g, turn.d, sampled, delta]))
    return Case("tools_dropped_once", turn.trajectory(turn.first(), second, third), "request_changed", 1)


@planter
def system_flipped_once(s: ModelSetup) -> Case:
    """Another date in the system text of one call, whose answer is kept."""
    if not s.system:
        raise CannotPlant("no system")
    turn = s.turn()
    other = copy.deepcopy(turn.after)
    other[0]["content"] += " It is Tuesday."
    second = s.final(other, s.render(other))
    said = {"role": "assistant", "content": f"The answer is {s.a * s.b}."}
    after = [*turn.after, said, {"role": "user", "content": "Again, please."}]
    delta = s.codec.encode(s.delta(after, turn.stop, "Again, please."))
    third = s.final(after, np.concatenate([turn.p, turn.g, turn.d, second.completion_ids, delta]))
    return Case("system_flipped_once", turn.trajectory(turn.first(), second, third), "request_changed", 1)


@planter
def subagent_interleaved(s: ModelSetup) -> Case:
    """A conversation of two calls with a system text of its own, between those of the main one."""
    if not s.system:
        raise CannotPlant("no system")
    turn = s.turn()
    asked = [{"role": "system", "content": "You read maps."}, {"role": "user", "content": "Where is the ferry?"}]
    told = {"role": "assistant", "content": "At the pier."}
    prompt, completion = s.answer(asked, told)
    side = s.step(asked, s.codec.encode(prompt), s.codec.encode(completion), told)
    main = s.final(turn.after, np.concatenate([turn.p, turn.g, turn.d]))
    more = [*asked, told, {"role": "user", "content": "Which pier?"}]
    behind = s.codec.encode(s.delta(more, turn.stop, "Which pier?"))
    again = s.final(more, np.concatenate([side.stream, behind]), "The third.")
    said = {"role": "assistant", "content": f"The answer is {s.a * s.b}."}
    after = [*turn.after, said, {"role": "user", "content": "Again, please."}]
    delta = s.codec.encode(s.delta(after, turn.stop, "Again, please."))
    last = s.final(after, np.concatenate([main.stream, delta]))
    return Case("subagent_interleaved", turn.trajectory(turn.first(), side, main, again, last), "branch", 1)


@planter
def tool_result_edited(s: ModelSetup) -> Case:
    if not s.tools:
        raise CannotPlant("no tools")
    turn = s.turn()
    prompt = np.concatenate([turn.p, turn.g, turn.d])
    said = {"role": "assistant", "content": f"The answer is {s.a * s.b}."}
    second = s.final(turn.after, prompt)
    edited = copy.deepcopy([*turn.after, said, {"role": "user", "content": "Again, please."}])
    edited[len(turn.messages) + 1]["content"] = "a long result (shortened)"
    return Case(
        "tool_result_edited", turn.trajectory(turn.first(), second, s.final(edited, s.render(edited))),
        "history_rewritten", 2,
    )
