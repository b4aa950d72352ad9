"""The closed list of what a finding can be. The slugs are stable: database, URLs and exports hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollouts.tito.diagnose.finding import Axis, Severity

VERSION = 11
"""Goes up when the same trajectory may get other findings than before."""


@dataclass(frozen=True)
class FindingKind:
    """One cause, with every fact about it that is not a rule."""

    slug: str
    title: str
    meaning: str
    """One sentence: what happened."""
    remedy: str
    """What to do about it."""
    axis: Axis
    severity: Severity
    """What a finding of this kind usually has; a single one may be milder."""
    probe: str = ""
    """The probe of the template check that asks for the cause; empty = no chat template causes it."""
    said_by_turn: bool = False
    """The page of the loss mask says it turn by turn, so that it does not repeat the finding."""


_stream_error = partial(FindingKind, axis=Axis.STREAM, severity=Severity.ERROR)
_stream_warning = partial(FindingKind, axis=Axis.STREAM, severity=Severity.WARNING)
_stream_info = partial(FindingKind, axis=Axis.STREAM, severity=Severity.INFO)
_delta_error = partial(FindingKind, axis=Axis.DELTA, severity=Severity.ERROR)
_row_error = partial(FindingKind, axis=Axis.ROW, severity=Severity.ERROR)
_row_warning = partial(FindingKind, axis=Axis.ROW, severity=Severity.WARNING)
_row_info = partial(FindingKind, axis=Axis.ROW, severity=Severity.INFO)

# fmt: off
_ALL = (
    _stream_warning("duplicate_call", "Duplicate call",
        "The same prompt was sent twice (a retry, or a double capture), and only one answer was continued.",
        "Keep the call that was continued and drop the other."),
    _stream_info("branch", "Branch",
        "A sub-agent, a parallel branch or an auxiliary call: a conversation of its own beside the main one.",
        "Train each chain of steps as its own row."),
    _stream_error("chat_template_changed", "Chat template changed",
        "The chat template, or a switch such as enable_thinking, changed between two calls of one trajectory.",
        "Freeze the chat template and its switches for the whole run."),
    _stream_error("request_changed", "Tools or system text changed",
        ("The tools or the system text of the request differ between two calls, so the start of the prompt was "
         "rewritten."),
        "Send the same tools in every call and freeze the system text."),
    _stream_error("bos_mismatch", "BOS doubled or missing",
        "The begin-of-sequence token stands twice at the start of a prompt, or on one side only.",
        "Never render to text and then encode that text with special tokens added.", probe="bos_once"),
    _stream_error("context_truncated", "Context cut",
        "The start of the context was cut away to fit a limit.",
        ("Let the engine raise an error instead of cutting, or end the trajectory there. What was sampled before "
         "the cut can only be context, with mask 0.")),
    _stream_error("history_rewritten", "History rewritten",
        "Earlier messages were edited, removed or summarised before they were sent again.",
        "Begin a new row at the rewrite: everything before it is prompt there, with mask 0."),
    _stream_error("assistant_rewritten", "Assistant message rewritten",
        "The harness changed what the assistant had said before sending it back.",
        "Send the assistant's message back as it was parsed, or begin a new row at the change."),
    _stream_error("empty_think_toggled", "Empty think block toggled",
        "The template writes an empty think block at one position of a message and leaves it out at another.",
        "Let the template always write the block (for Qwen3 a change of one line), or keep the sampled tokens.",
        probe="tool_append"),
    _stream_error("thinking_stripped", "Thinking stripped",
        "The template left out the reasoning of an earlier turn when it rendered the conversation again.",
        ("Switch the template to keep thinking if it can, keep the sampled ids (token-in-token-out), or train one "
         "row a turn."), probe="user_append_after_reasoning"),
    _stream_error("reasoning_misparsed", "Reasoning parsed wrong",
        ("The generation prompt had opened the think block, the parser did not know it, and the reasoning came back "
         "as content."),
        "Give the reasoning parser the end of the prompt along with the completion."),
    _stream_error("special_tokens_dropped", "Special tokens dropped",
        "The completion was decoded without its special tokens, so they are missing from the next prompt.",
        "Decode with skip_special_tokens=False, or keep the ids."),
    _stream_error("invalid_utf8", "Half a character",
        "A completion held part of a character; as text it became U+FFFD and was encoded as something else.",
        "Keep ids or bytes, never text."),
    _stream_error("tool_call_reserialized", "Tool call written again",
        "The tool call was parsed and written again: the same values in other characters.",
        "Keep the sampled ids from call to call (token-in-token-out), or at least the raw text of the call."),
    _stream_error("whitespace_changed", "White space changed",
        "White space next to a tool call or a think marker is not what was sampled.",
        "Keep the sampled ids from call to call (token-in-token-out); parse the text for routing only.",
        probe="tool_append_after_content"),
    _stream_error("boundary_merge", "Tokens merged across a boundary",
        "Two pieces that had been encoded apart were encoded together, and tokens merged across their seam.",
        ("Encode what stands between two completions in one piece, from the sampled stop token to the end of the "
         "assistant's header: nothing merges across control tokens.")),
    _stream_error("template_not_append_only", "Template rewrites its own scaffold",
        "The template wrote scaffold into the earlier prompt that it does not write once messages follow.",
        ("Before you extend the stream, cut the scaffold that the template takes back; or repair the template (page "
         "Chat templates)."), probe="tool_append"),
    _stream_error("tokenizer_mismatch", "Another tokenizer",
        ("The prompt's ids are not what this tokenizer gives for the same messages: engine and trainer use "
         "different tokenizers or revisions."),
        "Pin the tokenizer's revision in engine and trainer."),
    _stream_error("token_ids_missing", "Token ids missing",
        "The source has no real token ids for this call: they are absent, empty, constant or outside the vocabulary.",
        "Make the gateway pass the ids through (return_token_ids); do not train this step."),
    _stream_error("engine_ids_inconsistent", "Ids, text and logprobs disagree",
        "Within one call the ids do not fit the returned text or the logprobs.",
        "Do not rebuild ids from text or from a stream; take the engine's own."),
    _stream_error("unclassified", "Break of unknown cause",
        "The prompt does not start with what was sampled, and none of the known causes fits.",
        "Compare both sides on the trajectory's page, from the named token on."),
    _stream_error("noncanonical_sampling", "Non-canonical sampling",
        "The model sampled a segmentation that the encoder would not choose for the same text.",
        "Keep the sampled ids from call to call (token-in-token-out); text cannot hold them."),
    _delta_error("message_dropped", "Message dropped",
        "A message of the request left no trace in the prompt.",
        ("Where the template leaves it out, use one that renders this kind of message; where the delta does, render "
         "all new messages of a turn together."), probe="tool_append_marked"),
    _delta_error("tool_messages_split", "Tool messages split",
        "Tool messages that belong together were rendered one by one, each in a turn of its own.",
        "Render all tool messages of a turn together.", probe="tool_append_one_by_one"),
    _delta_error("turn_separator_lost", "Turn separator lost",
        "What the template writes right behind a stop token (often a newline) is missing.",
        ("If deltas are rendered behind a dummy conversation, cut that right behind its last stop token, so that "
         "the separator stays; it gets mask 0."), probe="seam"),
    _delta_error("stop_token_doubled", "Stop token doubled",
        "The sampled stop token is also the next turn's header, and the delta brings it again.",
        "Leave out the delta's: the sampled one is there already, with its mask and logprob.", probe="seam"),
    _delta_error("system_prompt_injected", "System prompt injected",
        "New messages were rendered alone, so the template put its default system prompt in the middle of the stream.",
        ("Never render new messages alone: put a short conversation with a system message in front, and cut its ids "
         "away again."), probe="default_system"),
    _delta_error("special_tokens_injected", "Control tokens from content",
        "Text inside a message spells a control token and was encoded as one.",
        ("Encode the text of messages so that it cannot become control tokens (split_special_tokens=True in "
         "transformers), or escape it."), probe="control_text_in_content"),
    _delta_error("generation_prompt_missing", "Generation prompt missing",
        "The prompt does not end with the assistant header that the template gives.",
        "Render with the generation prompt and with the run's own template switches.",
        probe="generation_prompt_written"),
    _delta_error("delta_differs", "Delta differs",
        "The tokens put in between two completions are not those that the template gives.",
        "Open the page of deltas: it shows both, and the renders they come from."),
    _row_error("row_not_sampled", "Row was not sampled",
        "The row's ids are not those that the steps read and sampled: it was encoded again from text.",
        "Build the row from the sampled ids."),
    _row_error("length_mismatch", "Lengths disagree",
        "Ids, mask, logprobs or advantages of one row have different lengths.",
        "Append ids, mask, logprobs and advantages in one place of the code, all or none."),
    _row_error("observation_trained", "Observation trained",
        "A token of a tool or of the environment is under the gradient.",
        "Give everything that the policy did not sample mask 0.", said_by_turn=True),
    _row_error("generation_prompt_trained", "Generation prompt trained",
        "The assistant header, or a forced think tag, is under the gradient.",
        "Start the mask at the first sampled token."),
    _row_error("appended_eos_trained", "Appended stop token trained",
        "A stop token that the model did not sample was appended and put under the gradient.",
        "Give appended tokens mask 0."),
    _row_error("separator_trained", "Separator trained",
        "What the template writes right behind a stop token is under the gradient.",
        "End the mask at the sampled stop token."),
    _row_error("mask_overrun", "Mask over everything or nothing",
        "The mask covers the whole row although it has other roles, or covers nothing.",
        "Check that the template marks assistant turns ({% generation %}) and that the mask was computed with it."),
    _row_error("columns_shifted", "Columns off by one",
        "Mask, logprobs or advantages are shifted against each other by a constant number of tokens.",
        ("A column of next-token prediction stands one place to the left. Shift it, so that each value stands at "
         "the token it speaks of.")),
    _row_error("logprob_invalid", "Invalid logprobs",
        "A logprob under the gradient is positive, not a number or infinite, or all of them are exactly 0.",
        "Take the logprobs of the sampling engine as they are."),
    _row_error("advantage_misplaced", "Advantage misplaced",
        "An advantage sits on masked tokens, or trained tokens have none.",
        "Broadcast the trajectory's advantage over the trained tokens, and over nothing else."),
    _row_error("trained_twice", "Trained twice",
        "One sampled token is under the gradient in several rows.",
        "Mask what another row already trains."),
    _row_error("step_order_invalid", "Steps out of order",
        "The rows of one trajectory are not adjacent, or its last-step flags are wrong.",
        "Write all steps of a trajectory one after the other and mark the last one."),
    _row_error("prompt_split_wrong", "Prompt split wrong",
        "Prompt and completion were split by counting mask ones, although they are interleaved.",
        "Split where the first sampled token stands."),
    _row_error("routing_misaligned", "Expert routing misaligned",
        "The recorded expert routing has another number of rows than the tokens it belongs to.",
        "Record one routing row for each token but the last."),
    _row_warning("sampled_masked", "Sampled tokens masked",
        "Sampled tokens are not under the gradient, and no recorded reason says so.",
        "Put every sampled token under the gradient, or record why not.", said_by_turn=True),
    _row_warning("stop_token_untrained", "Stop token untrained",
        "The end of turn that the model sampled is masked, so it never learns to stop.",
        "Include the sampled stop token in the mask.", said_by_turn=True),
    _row_warning("stop_string_misaligned", "Stop string misaligned",
        "The ids or logprobs go past the text that a stop string cut.",
        "Stop on token ids, or keep the ids behind the cut masked."),
    _row_warning("logprobs_other_distribution", "Logprobs of another distribution",
        ("The stored logprobs are not of the distribution that the trainer computes (temperature, top-p, raw or "
         "processed)."),
        "Record processed logprobs, and score with the sampling temperature."),
    _row_warning("truncated_trained", "Truncated completion trained",
        "A completion that was cut by its length limit is under the gradient although the policy is to mask it.",
        "Mask truncated completions, or say that they are wanted."),
    _row_warning("never_trained", "Never trained",
        "Sampled tokens are under the gradient in no row.",
        "Write a row for every step, or merge its tokens into one that is trained."),
    _row_info("mixed_policy_versions", "Several policy versions",
        "One row holds tokens that several versions of the policy sampled.",
        "Correct with per-token importance ratios, or bound the staleness."),
    # It occurs on all three axes.
    _stream_info("not_decidable", "Not decidable",
        "The source lacks what a check needs; that it reports nothing does not mean that nothing is wrong.",
        "Record the missing field."),
)
# fmt: on

KINDS: dict[str, FindingKind] = {kind.slug: kind for kind in _ALL}
"""Every kind by slug, in the order of lists."""
