"""The closed list of causes of a gap: what each means, what to do, and a witness pair. The causes come from public
threads of trainers and engines; docs/gap.md says how each is decided."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GapCause:
    """What a page says of a cause."""

    name: str
    title: str
    meaning: str  # What happens, in one or two sentences.
    remedy: str
    example: str  # Log-probabilities that show the cause: sampler / trainer.
    counter_example: str  # The nearest that does not.
    needs: str  # The columns without which it cannot be decided, beside both log-probabilities; empty = none.
    decides_now: str = ""
    """What decides it at the first training step, where the rows alone need several; empty = they do."""


_SCORE_AGAIN = (
    "To decide it at once, score the run with the weights that the trainer holds and compare that column with both "
    "sides: the one that differs has other weights."
)
_LIST = (
    GapCause(
        "row_retokenized", "Row re-tokenized",
        "The trainer's row holds other ids than the engine sampled, so the two log-probabilities are of different "
        "tokens.",
        "Train on the sampled ids (token-in-token-out). The finding “Row trains unsampled tokens” shows the first one.",
        "sampled 271 at -0.1, the row holds 198 198 and the trainer has -4.0", "the row holds 271 and the trainer has "
        "-0.1",
        "engine calls",
    ),
    GapCause(
        "placeholder", "Placeholder values",
        "One side has runs of exactly 0.0 where the other side has real values: they were filled in, not computed.",
        "Find where the column is padded or created with zeros: a masked loss, a cut at a maximum length, a partial "
        "rollout.",
        "-0.7 -1.2 -0.4 -2.1 / 0.0 0.0 0.0 0.0", "0.0 0.0 0.0 0.0 / -0.0001 0.0 -0.0002 0.0 (certain tokens)", "",
    ),
    GapCause(
        "columns_shifted", "Columns shifted",
        "One column lies a token or two before or behind its place, so each token is compared with its neighbour.",
        "Log-probabilities of next tokens have one entry less than the ids: shift them once, at one place of the code.",
        "-0.1 -2.0 -0.5 / 0.0 -0.1 -2.0", "-0.1 -2.0 -0.5 / -0.1 -2.0 -0.5", "",
    ),
    GapCause(
        "routing_repeated", "Routing rows repeated",
        "Recorded expert routing repeats the row of the token before, so the trainer replays the wrong experts.",
        "Record the routing of each token when it is computed; tokens of a cached prefix need the routing of their "
        "first pass.",
        "routing of tokens 5, 6, 7: experts (1 4), (1 4), (1 4), and a gap of 0.3", "experts (1 4), (0 7), (2 4)",
        "a summary of the routing",
    ),
    GapCause(
        "one_worker", "One bad worker",
        "The rows of one worker, or of few, disagree with the trainer, and the rows of all others agree by far better.",
        "Compare weights, flags and kernels of that worker with another one. Take it out until both agree.",
        "rows of worker 3: gap 0.2; rows of workers 0, 1, 2 and 4: gap 0.004", "gap 0.1 at every worker",
        "the worker of each row",
    ),
    GapCause(
        "packing_leak", "Packed rows leak",
        "The trainer packs several sequences into one row, and tokens of the later ones see the sequence before them.",
        "Give the attention the bounds of each sequence (cu_seqlens, or a block-diagonal mask), and begin positions "
        "again at each.",
        "first in its pack: gap 0.004; second and third: gap 0.3", "first and second in their pack: gap 0.1 alike",
        "the place of each row in its pack",
    ),
    GapCause(
        "mixed_versions", "Mixed policy versions",
        "A row holds tokens of several policy versions, and the trainer compares all of them with one.",
        "Limit how old a partial rollout may get, or store the version of each token and correct with it.",
        "version 3: gap 0.09, version 4: gap 0.004, in one row", "one version in the row", "policy versions",
    ),
    GapCause(
        "near_context_limit", "Near the context limit",
        "Log-probabilities of one side are wrong on the last tokens before the context limit.",
        "Leave a margin before the limit, or mask these tokens; compare the position encodings of both sides.",
        "offset 32,700 of 32,768: -0.2 / -3.1", "offset 20,000: -0.2 / -0.2", "",
    ),
    GapCause(
        "first_token", "First token of completions",
        "The first token of each completion disagrees, and all others agree: one side has another value there.",
        "The log-probability of the first token comes from the last position of the prompt. Keep that position when "
        "the prompt is cut off, and compare the start of the slice on both sides.",
        "first tokens: -0.3 / -2.9; all others agree", "the first token agrees as the others do", "",
    ),
    GapCause(
        "heavy_tokens", "Few heavy tokens",
        "A few tokens hold most of the gap and all others agree, as low precision makes it.",
        "Compute the last layer and its softmax in float32 on both sides; keep outlier channels out of FP8.",
        "id 151657: -0.1 / -2.6 wherever it stands; all other ids agree", "the same gap spread over all ids", "",
    ),
    GapCause(
        "temperature", "Temperature on one side",
        "One side divides its logits by a temperature and the other does not, so the gap grows with the surprise of a "
        "token.",
        "Divide the trainer's logits by the sampling temperature, and ask the engine for processed log-probabilities.",
        "-0.5 -1.0 -3.0 / -0.35 -0.7 -2.1", "-0.5 -1.0 -3.0 / -0.5 -1.0 -3.0", "",
    ),
    GapCause(
        "top_p_renormalised", "Top-p or top-k on one side",
        "One side divides by the mass that top-p or top-k leaves. All differences have one sign, and they are bounded.",
        "Sample with top_p 1 and top_k -1 while training, or give the trainer the same set of tokens.",
        "-0.50 -1.00 -0.02 / -0.55 -1.08 -0.02", "-0.50 -1.00 -0.02 / -0.52 -0.97 -0.02", "",
    ),
    GapCause(
        "stale_cache", "Stale prefix cache",
        "After a weight update the engine goes on with cached keys and values of the old weights.",
        "Reset the prefix cache with each update (vLLM: reset_prefix_cache).",
        "step 5, a prompt of step 4: gap 0.2; a new prompt: gap 0.004", "both have 0.004",
        "training steps or policy versions, and prompts that come again", _SCORE_AGAIN,
    ),
    GapCause(
        "weights_not_delivered", "Weights not delivered",
        "The gap grows with every update and is never reset: the engine still samples from old weights.",
        "Check the sync after an update: does the engine's checksum of a weight change? Are adapters loaded under "
        "their name?",
        "steps 0, 4, 8, 12: gap 0.004, 0.05, 0.11, 0.16", "gap 0.004, 0.02, 0.004, 0.02", "training steps or policy "
        "versions", _SCORE_AGAIN,
    ),
    GapCause(
        "weights_rounded_away", "Weights rounded away",
        "The engine reports each new version and still samples as before: the update was lost when it was delivered, "
        "mostly because the engine's precision cannot hold steps as small as the trainer's.",
        "Train in the precision that the engine holds (autocast to bfloat16), or serve in float32. Count the weights "
        "that an update changes in the engine; adapters need their name. Where the version is the trainer's own count, "
        "check the sync.",
        "engine bfloat16 at version 4, trainer float32 at step 4: 0.0 / -9.3 in all rows",
        "the engine's version stays at 0 (not delivered)",
        "policy versions beside training steps, or the precision of both sides", _SCORE_AGAIN,
    ),
    GapCause(
        "other_inputs", "Other inputs",
        "In some rows the trainer reads other tokens before the completion than the engine did: another prompt, a cut "
        "head, or other positions.",
        "Train on the ids that the engine read, prompt included. Compare the row with the prompt of its engine call.",
        "2 rows of 64: -0.01 / -9.3; all others agree", "all rows: -0.01 / -9.3 (other weights)", "",
    ),
    GapCause(
        "unexplained", "Unexplained",
        "Sampler and trainer disagree, and no rule names a cause.",
        "Look at the worst tokens and at the tables by class and position. Score the rows again with a second engine.",
        "gap 0.1 everywhere, both signs, at all steps", "a mean gap of at most 0.02", "",
    ),
)

CAUSES: dict[str, GapCause] = {cause.name: cause for cause in _LIST}
"""Name -> cause, in the order in which they are told."""

TEACHER_CAUSES: dict[str, GapCause] = {
    cause.name: cause
    for cause in (
        GapCause(
            "placeholder", "Placeholder values",
            "The teacher has exactly 0.0 at tokens that it never scored, so each of them teaches what nobody computed.",
            "Take tokens without a score out of the loss, or score the whole row. Template tokens that the teacher's "
            "prompt lacks have no score.",
            "student -0.7 -1.2 -0.4, teacher 0.0 0.0 0.0", "student -0.0001, teacher 0.0 (both are certain)", "",
        ),
        GapCause(
            "columns_shifted", "Column shifted",
            "The teacher's column lies before or behind its place, so each token learns from a neighbour.",
            "Cut the padding of each row before its values are used. Values of next tokens are one fewer than the ids.",
            "student -0.1 -2.0 -0.5, teacher 0.0 -0.2 -2.1", "student -0.1 -2.0 -0.5, teacher -0.2 -2.1 -0.4", "",
        ),
        GapCause(
            "other_vocabulary", "Other vocabulary",
            "The teacher reads these ids as other tokens than the student, so it finds them impossible wherever they "
            "stand.",
            "Give the teacher ids of its own tokenizer: score the run by bytes. Or choose one of the "
            "same vocabulary. Added tokens may differ within one family of models.",
            "id 151,650: student -0.1, teacher -17 at each of 40 places", "an id that the teacher finds unlikely once",
            "",
        ),
        GapCause(
            "temperature", "Temperature above 1",
            "The teacher is sure of nothing: its logits are divided by a temperature.",
            "Score the teacher at temperature 1, or at that of the student.",
            "student -0.001 -0.002, teacher -0.2 -0.3 at all sure tokens", "student -0.001, teacher -0.004",
            "A temperature below 1 looks like a better teacher. Score the run with the teacher at temperature 1 and "
            "compare both columns.",
        ),
        GapCause(
            "replica_noise", "Noise above the signal",
            "The engine that scores differs from itself as much as the teacher from the student.",
            "Score with one replica, without batches of changing size, or in float32; else average several scores.",
            "the same row twice: 0.04 apart; student and teacher: 0.05 apart", "0.002 and 0.05 apart",
            "The teacher's own noise is not measured. Score a part of the run twice: measure the engine's noise.",
        ),
    )
}
"""The faults of a teacher's column, see :mod:`rollout_inspector.diagnose.gap.teacher`."""
