"""Trajectories of the gallery whose calls form a tree: a sub-agent, and a compaction of the conversation."""

from collections.abc import Callable
from dataclasses import replace

from rollout_inspector.streams.trajectory import Step, Trajectory
from tools.gallery.sampling import FaultyTurn

SIDE_SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
ASK = {"role": "user", "content": "Summarise the conversation so far."}
MAX_CALLS = 40
"""Answers that are sampled in a batch to look for one that can be used."""
LEAST_TOLD = 40
"""Characters of a sub-agent's answer, at least: the text of a shorter one may stand in another message by chance."""


def sub_agent(t: FaultyTurn) -> Trajectory:
    """A sub-agent answers the tool call: it has a prompt of its own, and the first agent reads its last reply."""
    expression = t.reply["tool_calls"][0]["function"]["arguments"]["expression"]
    messages = [SIDE_SYSTEM, {"role": "user", "content": f"What is {expression}?"}]
    aside = FaultyTurn(t.policy, replace(t.task, messages=messages), t.seed + 2, temperature=0.0)
    if not aside.reply.get("tool_calls"):
        raise LookupError("the sub-agent called no tool")
    answer = _answered(aside, LEAST_TOLD)
    turn = t.with_content(str((answer.reply or {})["content"]))
    first, last = turn.on(turn.delta).steps
    return t.ended(first, aside.first, answer, last)


def _answered(t: FaultyTurn, least: int = 1) -> Step:
    """The step behind the call that tells its result, in ``least`` characters or more, and calls no tool."""
    result = str(t.following[0]["content"])
    prompt = t.joined(t.first.stream, t.delta)
    origins = t.policy.context.origins(prompt[len(t.first.stream) :], t.following)
    for generation in t.policy.samples(prompt, range(t.seed, t.seed + MAX_CALLS)):
        reply = t.policy.parse(prompt, generation.completion_ids, t.task.tools)
        content = str(reply.get("content") or "")
        if (
            generation.finish_reason == "stop"
            and len(content) >= least
            and result in content
            and not reply.get("tool_calls")
        ):
            return t.policy.step(prompt, generation, t.messages, t.task.tools, reply, delta_origin=origins)
    raise LookupError("no such answer was sampled")


def compaction(t: FaultyTurn) -> Trajectory:
    """The harness asks for a summary and begins again with it in place of the history."""
    t = replace(t, new=(*t.following, ASK))
    summed = _answered(t)
    system, question = t.task.messages
    after = {**question, "content": f"Summary so far: {(summed.reply or {})['content']} {question['content']}"}
    again = FaultyTurn(t.policy, replace(t.task, messages=[system, after]), t.seed + 2, temperature=0.0)
    if not again.reply.get("tool_calls"):
        raise LookupError("the policy called no tool after the compaction")
    return t.ended(t.first, summed, *again.on(again.delta).steps)


TREES: dict[str, Callable[[FaultyTurn], Trajectory]] = {tree.__name__: tree for tree in (sub_agent, compaction)}
"""Name of a trajectory -> what makes it, from a question of its own."""
