"""Trajectories of the gallery whose calls form a tree: a sub-agent, and a compaction of the conversation."""

from __future__ import annotations

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
    asked = [SIDE_SYSTEM, {"role": "user", "content": f"What is {expression}?"}]
    aside = FaultyTurn(t.policy, replace(t.task, messages=asked), t.seed + 2, temperature=0.0)
    if not aside.reply.get("tool_calls"):
        raise LookupError("the sub-agent called no tool")
    answer = _answered(aside, LEAST_TOLD)
    told = t.with_content(str((answer.reply or {})["content"]))
    first, last = told.on(told.delta).steps
    return t.ended(first, aside.first, answer, last)


def _answered(t: FaultyTurn, least: int = 1) -> Step:
    """The step behind the call that tells its result, in ``least`` characters or more, and calls no tool."""
    result = str(t.following[0]["content"])
    prompt = t.joined(t.first.stream, t.delta)
    origins = t.policy.context.origins(prompt[len(t.first.stream) :], t.following)
    for made in t.policy.samples(prompt, range(t.seed, t.seed + MAX_CALLS)):
        reply = t.policy.parse(prompt, made.completion_ids, t.task.tools)
        said = str(reply.get("content") or "")
        if made.finish_reason == "stop" and len(said) >= least and result in said and not reply.get("tool_calls"):
            return t.policy.step(prompt, made, t.messages, t.task.tools, reply, delta_origin=origins)
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


TREES: dict[str, Callable[[FaultyTurn], Trajectory]] = {one.__name__: one for one in (sub_agent, compaction)}
"""Name of a trajectory -> what makes it, from a question of its own."""
