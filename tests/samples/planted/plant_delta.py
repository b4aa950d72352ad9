"""Clean trajectories, and faults of what stands between two completions."""

from dataclasses import replace

import numpy as np

from tests.samples.planted.plant_setup import (
    CITIES, CannotPlant, Case, ModelSetup, Turn, eos_text, first_wrong, planter, split_token, two_tools
)
from tests.tokenizers.oracles import encode_plain

DECOMPOSED = "Ce\u0301leste a trouve\u0301", "Ra\u0301pido, a\u0300 l'e\u0301t\u00e9"
"""Accents of their own behind their letters."""
OBSERVATIONS = [
    "48213", "ok", "found it", "The ferry leaves at nine, and it takes two hours to cross the strait.",
    "札幌は晴れ、気温は二十一度です。", "الطقس في القاهرة حار وجاف اليوم", "В Москве сегодня снег и минус пять",
    "👩‍🔬🧪 done",
]


@planter
def clean(s: ModelSetup) -> Case:
    return Case("clean", s.turn().tito(), None, None)


@planter
def clean_noncanonical(s: ModelSetup) -> Case:
    turn = s.turn()
    g, _ = split_token(s, turn.g)
    return Case("clean_noncanonical", turn.tito(g), None, None)


@planter
def clean_user_turns(s: ModelSetup) -> Case:
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    return Case("clean_user_turns", turn.tito(), None, None)


@planter
def clean_truncated(s: ModelSetup) -> Case:
    turn = s.turn()
    step = turn.first(turn.g[:-2], finish_reason="length")
    return Case("clean_truncated", turn.trajectory(replace(step, reply=None)), None, None)


@planter
def clean_two_tools(s: ModelSetup) -> Case:
    return Case("clean_two_tools", two_tools(s).tito(), None, None)


@planter
def clean_control_text(s: ModelSetup) -> Case:
    """Content that spells a control token, encoded with control tokens split."""
    stop, before = eos_text(s), s.turn()
    new = [{**before.new[0], "content": f"note {stop} end"}]
    delta = s.delta([*before.messages, before.reply, *new], before.stop, str(new[0]["content"]))
    head, found, tail = delta.partition(f" {stop} end")
    if not found:
        raise CannotPlant("the template rewrites content")
    d = np.concatenate([s.codec.encode(head), encode_plain(s.codec, found), s.codec.encode(tail)])
    if s.bytes(d) != delta.encode():
        raise CannotPlant("the encoder adds a space to each piece")
    last = s.final([*before.messages, before.reply, *new], np.concatenate([before.p, before.g, d]))
    return Case("clean_control_text", before.trajectory(before.first(), last), None, None)


@planter
def clean_skipped_text(s: ModelSetup) -> Case:
    """The returned text lacks the tokens that skip_special_tokens drops, and holds other added tokens."""
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    marks = sorted(s.codec.skipped_ids - {int(turn.g[-1])})
    g = np.concatenate([s.codec.encode("<call>"), marks[:1], turn.g]).astype(np.int32)
    text = "<call>" + turn.completion[: -len(turn.stop)]
    first = turn.first(g, text=text)
    return Case("clean_skipped_text", turn.trajectory(replace(first, reply=None)), None, None)


@planter
def clean_decomposed(s: ModelSetup) -> Case:
    """Accents that stand behind their letter, which some tokenizers join with it."""
    return Case("clean_decomposed", two_tools(s, *DECOMPOSED).tito(), None, None)


@planter
def clean_stopped_at_once(s: ModelSetup) -> Case:
    """A completion of the stop token alone, with an empty reply."""
    reply = {"role": "assistant", "content": ""}
    turn = s.turn(reply, [{"role": "user", "content": "Please go on."}])
    if len(reply) > 2:
        raise CannotPlant("the prompt has opened a think block")
    return Case("clean_stopped_at_once", turn.tito(turn.g[-1:]), None, None)


def _dropped(s: ModelSetup, turn: Turn, position: int, name: str) -> Case:
    """One of two results is left out."""
    kept = turn.new[1 - position]
    alone = s.codec.encode(s.delta([*turn.messages, turn.reply, kept], turn.stop, str(kept["content"])))
    return Case(name, turn.tito(d=alone), "message_dropped", 1, start=first_wrong(turn, alone))


@planter
def message_dropped_alike(s: ModelSetup) -> Case:
    """Two results in nearly the same words, and only the first is there."""
    turn = two_tools(s, "Found in the harbour log: 17 boats.", "Found in the harbour log: 23 boats.")
    return _dropped(s, turn, 1, "message_dropped_alike")


@planter
def message_dropped(s: ModelSetup) -> Case:
    return _dropped(s, two_tools(s), 1, "message_dropped")


@planter
def message_dropped_first(s: ModelSetup) -> Case:
    return _dropped(s, two_tools(s), 0, "message_dropped_first")


@planter
def message_dropped_behind_a_space(s: ModelSetup) -> Case:
    """Both results end with a space, which is no trace of either."""
    return _dropped(s, two_tools(s, "Found: 17 boats. ", "Lost at sea: 23 more. "), 1, "message_dropped_behind_a_space")


@planter
def message_dropped_decomposed(s: ModelSetup) -> Case:
    return _dropped(s, two_tools(s, *DECOMPOSED), 1, "message_dropped_decomposed")


@planter
def observation_cut(s: ModelSetup) -> Case:
    """Only the start of a result is in the prompt, however short it is and in whatever script."""
    if not s.tools:
        raise CannotPlant("no tools")
    content = s.rng.choice(OBSERVATIONS)
    return _cut(s, content, content[: s.rng.randrange(1, len(content))].rstrip(), "observation_cut")


@planter
def observation_cut_with_mark(s: ModelSetup) -> Case:
    if not s.tools:
        raise CannotPlant("no tools")
    content = "\n".join(f"{i} {city} {7919 * i}" for i, city in enumerate(CITIES))
    return _cut(s, content, content[:40] + " [cut]", "observation_cut_with_mark")


def _cut(s: ModelSetup, content: str, kept: str, name: str) -> Case:
    turn = s.turn()
    new = [{**turn.new[0], "content": content}]
    turn = replace(turn, new=new, delta=s.delta([*turn.messages, turn.reply, *new], turn.stop, content))
    if turn.delta.count(content) != 1:
        raise CannotPlant("the template rewrites content")
    d = s.codec.encode(turn.delta.replace(content, kept))
    return Case(name, turn.tito(d=d), "delta_differs", 1, start=first_wrong(turn, d))


def _split(s: ModelSetup, turn: Turn, name: str) -> Case:
    """Each of two results is rendered by itself."""
    first, second = turn.new
    single = [*turn.messages, turn.reply, first]
    together = s.text(turn.after, gen=False)
    one = s.text(single, gen=False)
    if together.startswith(one):
        raise CannotPlant("the template itself renders tool messages one by one")
    a = s.delta(single, turn.stop, first["content"])
    with_gen, without = s.text(single), s.text(single, gen=False)
    a = a[: len(a) - (len(with_gen) - len(without))]
    b = s.delta([*turn.messages, turn.reply, second], turn.stop, second["content"])
    seam = len(b) - len(b.lstrip())
    d = s.codec.encode(a + b[seam:])
    if np.array_equal(d, turn.d):
        raise CannotPlant("the template itself renders tool messages one by one")
    return Case(name, turn.tito(d=d), "tool_messages_split", 1)


@planter
def message_repeated(s: ModelSetup) -> Case:
    """The first of two results is rendered, and then both are."""
    turn = two_tools(s)
    alone = s.delta([*turn.messages, turn.reply, turn.new[0]], turn.stop, str(turn.new[0]["content"]))
    return Case("message_repeated", turn.tito(d=s.codec.encode(alone + turn.delta)), "delta_differs", 1)


@planter
def message_repeated_later(s: ModelSetup) -> Case:
    """A message that an earlier prompt holds is added once more."""
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    earlier = [message for message in turn.messages if message["role"] == "user"][-1:]
    again = s.delta([*turn.messages, turn.reply, *earlier, *turn.new], turn.stop, str(earlier[0]["content"]))
    return Case("message_repeated_later", turn.tito(d=s.codec.encode(again)), "delta_differs", 1)


@planter
def tool_messages_split(s: ModelSetup) -> Case:
    return _split(s, two_tools(s), "tool_messages_split")


@planter
def tool_messages_split_decomposed(s: ModelSetup) -> Case:
    return _split(s, two_tools(s, *DECOMPOSED), "tool_messages_split_decomposed")


@planter
def turn_separator_lost(s: ModelSetup) -> Case:
    turn = s.turn()
    if turn.delta[:1] != "\n":
        raise CannotPlant("the template writes no separator")
    lost = turn.delta.lstrip()
    if not s.special(s.codec.encode(lost)[:1])[0]:
        raise CannotPlant("the separator is no token of its own")
    return Case("turn_separator_lost", turn.tito(d=s.codec.encode(lost)), "turn_separator_lost", 1)


@planter
def stop_token_doubled(s: ModelSetup) -> Case:
    turn = s.turn()
    d = np.concatenate([s.codec.encode(turn.stop), turn.d])
    return Case("stop_token_doubled", turn.tito(d=d), "stop_token_doubled", 1)


@planter
def system_prompt_injected(s: ModelSetup) -> Case:
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": "Please go on."}])
    alone = s.text(turn.new, tools=None)
    seam = turn.delta[: len(turn.delta) - len(turn.delta.lstrip())]
    if seam + alone == turn.delta:
        raise CannotPlant("a message alone renders like a message behind others")
    d = s.codec.encode(seam + alone)
    return Case("system_prompt_injected", turn.tito(d=d), "system_prompt_injected", 1, start=first_wrong(turn, d))


@planter
def special_tokens_injected(s: ModelSetup) -> Case:
    return _injected(s, f"result {s.rng.randrange(9999)} {eos_text(s)} trailing", "special_tokens_injected")


@planter
def special_tokens_injected_decomposed(s: ModelSetup) -> Case:
    return _injected(s, f"{DECOMPOSED[0]} {eos_text(s)} trailing", "special_tokens_injected_decomposed")


def _injected(s: ModelSetup, content: str, name: str) -> Case:
    if s.tools:
        other = s.turn(new=None)
        turn = s.turn(new=[other.setup.result(content)])
    else:
        turn = s.turn(new=[{"role": "user", "content": content}])
    return Case(name, turn.tito(), "special_tokens_injected", 1)


@planter
def generation_prompt_missing(s: ModelSetup) -> Case:
    turn = s.turn()
    with_gen, without = s.text(turn.after), s.text(turn.after, gen=False)
    n = len(with_gen) - len(without)
    if n <= 0 or not with_gen.startswith(without):
        raise CannotPlant("the template has no generation prompt")
    return Case(
        "generation_prompt_missing", turn.tito(d=s.codec.encode(turn.delta[:-n])), "generation_prompt_missing", 1
    )


@planter
def generation_prompt_closed(s: ModelSetup) -> Case:
    """Thinking is switched off behind the right header."""
    turn = s.turn()
    if s.text(turn.after) == s.text(turn.after, gen=False):
        raise CannotPlant("the template has no generation prompt")
    d = s.codec.encode(turn.delta + "<think>\n\n</think>\n\n")
    if not np.array_equal(d[: len(turn.d)], turn.d):
        raise CannotPlant("the header merges with what follows")
    return Case("generation_prompt_closed", turn.tito(d=d), "generation_prompt_missing", 1)


@planter
def delta_differs(s: ModelSetup) -> Case:
    turn = s.turn()
    content = str(turn.new[0]["content"])
    changed = turn.delta.replace(content, content + " (seen)")
    d = s.codec.encode(changed)
    return Case("delta_differs", turn.tito(d=d), "delta_differs", 1, start=first_wrong(turn, d))
