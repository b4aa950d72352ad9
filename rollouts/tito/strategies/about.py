"""Each strategy in one sentence, for forms and pages."""

from __future__ import annotations

ABOUT: dict[str, str] = {
    "tool_delta": (
        "What was sampled stays as it is; the ids between two completions are the difference of two renders of a small "
        "conversation that ends in the same tool call."
    ),
    "fixed_base": (
        "What was sampled stays as it is; new messages are rendered behind one fixed short conversation, and its ids "
        "are cut away."
    ),
    "single_message": (
        "The whole episode is one assistant message: observations are encoded raw and put behind what was sampled, "
        "and one end-of-sequence token closes it."
    ),
    "retokenize": (
        "Only text is kept: the whole conversation is rendered and encoded again at every turn and for the row, so the "
        "trainer may see ids that nobody sampled."
    ),
    "message_delta": (
        "New messages are the difference of two renders of the whole conversation as text, and each piece is encoded "
        "alone."
    ),
    "per_message": "Each message is written and encoded alone, and the pieces are put one behind the other.",
    "eos_splice": (
        "The whole conversation is rendered again at every turn, and what lies before its last end-of-turn token is "
        "replaced by the stream as it was."
    ),
    "bridge": "An object that knows the model's format extends the stream, or refuses where it cannot do so exactly.",
    "step_wise": (
        "Every engine call is a row of its own: its prompt masked, its completion trained; the cost grows with the "
        "square of the turns."
    ),
    "step_wise_merged": (
        "The step-wise rows, neighbours merged as long as the next prompt starts with the prompt and completion before."
    ),
    "reconcile": (
        "The conversation is rendered again at every turn; where the stream breaks, a small drift is taken over "
        "masked, and a larger one opens a new row."
    ),
}
"""Slug -> sentence."""
