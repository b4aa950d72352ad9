"""Every fault that can be planted, for any tokenizer and chat template."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tests.samples.planted import (  # noqa: F401 - each registers its planters
    plant_delta, plant_request, plant_text, plant_training_rows
)
from tests.samples.planted.plant_setup import PLANTERS, CannotPlant, Case, ModelSetup

__all__ = ["PLANTERS", "CannotPlant", "Case", "ModelSetup", "planted", "with_lead"]


def with_lead(s: ModelSetup, case: Case) -> Case:
    """The same fault one step later: the earlier exchange of the first prompt as a step of its own."""
    if case.name == "first_prompt_of_other_merges":
        raise CannotPlant("it is no first prompt any more")
    if case.name == "history_summary":
        raise CannotPlant("what goes on from a whole earlier step, with another user message, is a branch")
    if case.trajectory.rows:
        raise CannotPlant("the rows belong to the steps")
    first = case.trajectory.steps[0]
    messages = list(first.request.messages) if first.request else []
    place = next((i for i, m in enumerate(messages) if m.get("content") == "Hello there."), None)
    if place is None:
        raise CannotPlant("no earlier exchange")
    asked, reply = [dict(m) for m in messages[: place + 1]], dict(messages[place + 1])
    prompt, completion = s.answer(asked, reply)
    lead = s.step(asked, s.codec.encode(prompt), s.codec.encode(completion), reply)
    if not np.array_equal(first.prompt_ids[: len(lead.stream)], lead.stream):
        raise CannotPlant("the template does not only append")
    steps = (lead, *case.trajectory.steps)
    step = None if case.step is None else case.step + 1
    return replace(case, name=f"{case.name}_later", trajectory=replace(case.trajectory, steps=steps), step=step)


def planted(setup: ModelSetup, n: int = 3) -> Iterator[Case]:
    """Every fault that the setup has a place for, ``n`` times."""
    for plant in PLANTERS.values():
        for _ in range(n):
            try:
                yield plant(setup)
            except CannotPlant:
                break
