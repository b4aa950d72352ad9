"""Trajectories of several lanes."""

import json
from typing import Any

from rollout_inspector.streams.trajectory import Trajectory, ids_array
from tests.samples.planted.plant import ModelSetup

SUMMARY = "The user wants a product of two numbers, and the tool was asked once."

ASK = {"role": "user", "content": "Summarise the conversation so far."}


def compacted(s: ModelSetup, taken: bool = True, aside: bool = False, role: str = "user") -> Trajectory:
    """A call, its result, a request for a summary (``aside``: by a call of its own), and a new start."""
    turn = s.turn()
    first, second = turn.tito().steps
    said = {"role": "assistant", "content": SUMMARY}
    answered: list[Any] = [*turn.after, second.reply]
    if aside:
        asked = [
            {"role": "system", "content": "You write summaries."},
            {"role": "user", "content": json.dumps(answered)},
        ]
    else:
        asked = [*answered, ASK]
    prompt = (
        s.render(asked)
        if aside
        else ids_array([*second.stream, *s.codec.encode(s.delta(asked, turn.stop, ASK["content"]))])
    )
    third = s.final(asked, prompt, SUMMARY)
    text = f"What was said before: {SUMMARY}" if taken else "What was said before is gone."
    after: list[Any] = [turn.messages[0], {"role": role, "content": text}]
    if role == "assistant":
        after = [turn.messages[0], said, {"role": "user", "content": "Go on."}]
    return turn.trajectory(first, second, third, s.final(after, s.render(after)))
