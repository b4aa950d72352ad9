"""Clean trajectories, and faults of what stands between two completions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.tito.plant_world import CannotPlant, Case, World, eos_text, planter, split_token, two_tools


@planter
def clean(w: World) -> Case:
    return Case("clean", w.turn().tito(), None, None)


@planter
def clean_noncanonical(w: World) -> Case:
    turn = w.turn()
    g, _ = split_token(w, turn.g)
    return Case("clean_noncanonical", turn.tito(g), None, None)


@planter
def clean_user_turns(w: World) -> Case:
    turn = w.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    return Case("clean_user_turns", turn.tito(), None, None)


@planter
def clean_truncated(w: World) -> Case:
    turn = w.turn()
    step = turn.first(turn.g[:-2], finish_reason="length")
    return Case("clean_truncated", turn.trajectory(replace(step, reply=None)), None, None)


@planter
def clean_two_tools(w: World) -> Case:
    return Case("clean_two_tools", two_tools(w).tito(), None, None)


@planter
def message_dropped(w: World) -> Case:
    turn = two_tools(w)
    alone = w.delta([*turn.messages, turn.reply, turn.new[0]], turn.stop, turn.new[0]["content"])
    return Case("message_dropped", turn.tito(d=w.codec.encode(alone)), "message_dropped", 1)


@planter
def tool_messages_split(w: World) -> Case:
    turn = two_tools(w)
    first, second = turn.new
    single = [*turn.messages, turn.reply, first]
    together = w.text(turn.after, gen=False)
    one = w.text(single, gen=False)
    if together.startswith(one):
        raise CannotPlant("the template itself renders tool messages one by one")
    a = w.delta(single, turn.stop, first["content"])
    with_gen, without = w.text(single), w.text(single, gen=False)
    a = a[: len(a) - (len(with_gen) - len(without))]
    b = w.delta([*turn.messages, turn.reply, second], turn.stop, second["content"])
    seam = len(b) - len(b.lstrip())
    d = w.codec.encode(a + b[seam:])
    if np.array_equal(d, turn.d):
        raise CannotPlant("the template itself renders tool messages one by one")
    return Case("tool_messages_split", turn.tito(d=d), "tool_messages_split", 1)


@planter
def turn_separator_lost(w: World) -> Case:
    turn = w.turn()
    if turn.delta[:1] != "\n":
        raise CannotPlant("the template writes no separator")
    lost = turn.delta.lstrip()
    if not w.special(w.codec.encode(lost)[:1])[0]:
        raise CannotPlant("the separator is no token of its own")
    return Case("turn_separator_lost", turn.tito(d=w.codec.encode(lost)), "turn_separator_lost", 1)


@planter
def stop_token_doubled(w: World) -> Case:
    turn = w.turn()
    d = np.concatenate([w.codec.encode(turn.stop), turn.d])
    return Case("stop_token_doubled", turn.tito(d=d), "stop_token_doubled", 1)


@planter
def system_prompt_injected(w: World) -> Case:
    turn = w.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    alone = w.text(turn.new, tools=None)
    seam = turn.delta[: len(turn.delta) - len(turn.delta.lstrip())]
    if seam + alone == turn.delta:
        raise CannotPlant("a message alone renders like a message behind others")
    return Case("system_prompt_injected", turn.tito(d=w.codec.encode(seam + alone)), "system_prompt_injected", 1)


@planter
def special_tokens_injected(w: World) -> Case:
    content = f"result {w.rng.randrange(9999)} {eos_text(w)} trailing"
    if w.tools:
        w_turn = w.turn(new=None)
        turn = w.turn(new=[w_turn.world.result(content)])
    else:
        turn = w.turn(new=[{"role": "user", "content": content}])
    return Case("special_tokens_injected", turn.tito(), "special_tokens_injected", 1)


@planter
def generation_prompt_missing(w: World) -> Case:
    turn = w.turn()
    with_gen, without = w.text(turn.after), w.text(turn.after, gen=False)
    n = len(with_gen) - len(without)
    if n <= 0 or not with_gen.startswith(without):
        raise CannotPlant("the template has no generation prompt")
    return Case(
        "generation_prompt_missing", turn.tito(d=w.codec.encode(turn.delta[:-n])), "generation_prompt_missing", 1
    )


@planter
def delta_differs(w: World) -> Case:
    turn = w.turn()
    content = str(turn.new[0]["content"])
    changed = turn.delta.replace(content, content + " (seen)")
    return Case("delta_differs", turn.tito(d=w.codec.encode(changed)), "delta_differs", 1)
