"""Breaks that come from the shape of the trajectory: retries, side calls, branches."""

from collections.abc import Mapping, Sequence

import numpy as np

from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.finding import Fault
from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.prefix import shared_with_stream, stream_length
from rollout_inspector.streams.snippets import counted
from rollout_inspector.streams.trajectory import Message, Step


def duplicate_call(b: Break) -> Fault | None:
    """The prompt equals that of an earlier step: a retry, or one call that was recorded twice."""
    prompt_ids = b.step.prompt_ids
    if b.start < len(prompt_ids) or not len(prompt_ids):
        return None
    case = b.case
    for earlier in range(b.index - 1, -1, -1):
        if _of_one_answer(case.steps[earlier], b.step):
            return None
        if np.array_equal(case.steps[earlier].prompt_ids, prompt_ids):
            first, second = _goes_on(b, earlier), _goes_on(b, b.index)
            which = "both were" if first and second else "neither was"
            if first != second:
                which = f"only step {earlier if first else b.index} was"
            return Fault(
                "duplicate_call",
                f"Step {b.index} sends the same {counted(len(prompt_ids), 'prompt id')} as step {earlier}; "
                f"{which} continued.",
                aside=b.index if first else earlier,
            )
    return None


def _goes_on(b: Break, index: int) -> bool:
    """Whether a later step continues a step: its ids, or the reply that it was parsed to."""
    case = b.case
    if index in case.continued or case.steps[index].reply is None:
        return index in case.continued
    return any(case.continues(index, later) for later in range(b.index + 1, len(case.steps)))


def _of_one_answer(one: Step, other: Step) -> bool:
    """Whether two steps are choices of one answer, by the id that the server gave the answer."""
    ids = [step.extra.get("response") for step in (one, other)]
    names = [item.get("id") if isinstance(item, Mapping) else None for item in ids]
    choices = [step.extra.get("choice") for step in (one, other)]
    return names[0] is not None and names[0] == names[1] and choices[0] != choices[1]


def branch(b: Break) -> Fault | None:
    """A conversation beside the main one. The main one goes on later, or this step goes back before its parent."""
    steps = b.case.steps
    other = next((n for n in range(b.index - 1, -1, -1) if _of_one_answer(steps[n], b.step)), None)
    if other is not None:
        return Fault(
            "branch",
            f"Steps {other} and {b.index} are two choices of one call (n > 1, or several prompts).",
            aside=other if b.index in b.case.continued else b.index,
        )
    if (later := _main_goes_on(b)) is not None:
        return Fault(
            "branch",
            f"Step {b.index} shares {counted(b.start, 'id')} with step {b.parent_index} and is not part of what step "
            f"{later} continues: a sub-agent or an auxiliary call.",
            aside=b.index,
        )
    if (origin := _goes_back_to(b)) is not None:
        return Fault(
            "branch",
            f"Step {b.index} continues step {origin} and leaves out what step {b.parent_index} had said: two "
            f"branches leave step {origin}.",
        )
    if _says_nothing_alike(b):
        return Fault(
            "branch", f"Step {b.index} holds no message of the conversation before it: a separate auxiliary call."
        )
    return None


def _main_goes_on(b: Break) -> int | None:
    """A later step that extends a chain from before this step, and does not continue this step's conversation."""
    case = b.case
    for later in range(b.index + 1, len(case.steps)):
        link = case.links[later]
        if link.parent is None or not link.extends or link.parent >= b.index:
            continue
        continues = case.continues(b.index, later)
        if continues is False or (continues is None and not b.sampled_at(b.start, b.start + 1)):
            return later
    return None


def _goes_back_to(b: Break) -> int | None:
    """An earlier step whose whole stream this step continues, when the parent's answer is gone."""
    case = b.case
    if b.sampled_at(b.start, b.start + 1) or _answer_kept(b):
        return None
    if b.known_messages is not None and _is_rewritten(b, *b.known_messages):
        return None
    for earlier in range(b.index - 1, -1, -1):
        whole = stream_length(case.steps[earlier])
        if earlier == b.parent_index or not 0 < whole <= b.start:
            continue
        if shared_with_stream(b.actual, case.steps[earlier]) == whole and case.continues(earlier, b.index) is not False:
            return earlier
    return None


def _is_rewritten(b: Break, before: Sequence[Message], after: Sequence[Message]) -> bool:
    """Whether the later request cannot be another branch: it is cut short, or holds an answer that no step sampled."""
    n = b.first_changed
    if n is None or n >= len(after):
        return True
    if before[n].get("role") != "assistant":
        return False
    # Another branch has a different answer at the place of the parent's answer.
    replies = (step.reply for step in b.case.steps[: b.index])
    return not any(reply is not None and msg.same(reply, after[n]) for reply in replies)


def _answer_kept(b: Break) -> bool:
    """Whether the parent's completion still stands somewhere after the break."""
    completion = b.parent.completion_ids
    if len(completion) > 1 and completion[:-1].tobytes() in b.actual[b.start :].tobytes():
        return True
    messages = b.known_messages
    reply = b.parent.reply
    return bool(messages and reply is not None and any(msg.same(reply, message) for message in messages[1]))


def _says_nothing_alike(b: Break) -> bool:
    """Whether the request has another system text and no message in common. Then it is not an edited conversation."""
    if b.known_messages is None or b.first_changed != 0:
        return False
    before, after = b.known_messages
    roles = {messages[0].get("role") for messages in (before, after) if messages}
    if not after or not roles & {"system", "developer"}:
        return False
    return not any(msg.same(message, other) for message in b.case.conversation(b.parent_index) or () for other in after)
