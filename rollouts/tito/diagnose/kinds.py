"""The closed list of finding kinds. The slugs are stable: database, URLs and exports hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollouts.tito.diagnose.finding import Axis, Severity

VERSION = 12
"""Raise it when the same trajectory may get other findings than before."""


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
    """The usual severity of this kind. A single finding may be milder."""
    probe: str = ""
    """The probe of the template check that tests for the cause. Empty = no chat template causes it."""
    said_by_turn: bool = False
    """The page of the loss mask reports it turn by turn, so the page does not repeat the finding."""


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
        "The same prompt was sent twice (a retry, or a call recorded twice), and only one answer was continued.",
        "Keep the call that was continued and drop the other."),
    _stream_info("branch", "Branch",
        "A sub-agent, a parallel branch or an auxiliary call: a separate conversation beside the main one.",
        "Train each chain of steps as a separate row."),
    _stream_error("chat_template_changed", "Chat template changed",
        "The chat template, or a switch such as enable_thinking, changed between two calls of one trajectory.",
        "Freeze the chat template and its switches for the whole run."),
    _stream_error("request_changed", "Tools or system text changed",
        ("The tools or the system text of the request differ between two calls, so the start of the prompt was "
         "rewritten."),
        "Send the same tools in every call and freeze the system text."),
    _stream_error("bos_mismatch", "BOS doubled or missing",
        "The begin-of-sequence token stands twice at the start of a prompt, or in only one of the two streams.",
        "Never render to text and then encode that text with special tokens added.", probe="bos_once"),
    _stream_error("context_truncated", "Context cut",
        "The start of the context was cut away to fit a limit.",
        ("Let the engine raise an error instead of cutting, or end the trajectory there. Tokens sampled before the "
         "cut can only be context, with mask 0.")),
    _stream_error("history_rewritten", "History rewritten",
        "Earlier messages were edited, removed or summarised before they were sent again.",
        "Begin a new row at the rewrite. Everything before it is part of that row's prompt, with mask 0."),
    _stream_error("assistant_rewritten", "Assistant message rewritten",
        "The harness changed the assistant's message before sending it back.",
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
        ("The generation prompt had opened the think block. The parser did not know that, so the reasoning came "
         "back as content."),
        "Pass the end of the prompt to the reasoning parser, together with the completion."),
    _stream_error("special_tokens_dropped", "Special tokens dropped",
        "The completion was decoded without its special tokens, so they are missing from the next prompt.",
        "Decode with skip_special_tokens=False, or keep the ids."),
    _stream_error("invalid_utf8", "Half a character",
        "A completion held part of a character. As text it became U+FFFD, which encodes to other tokens.",
        "Keep ids or bytes, never text."),
    _stream_error("tool_call_reserialized", "Tool call written again",
        "The tool call was parsed and written again: the same values in other characters.",
        "Keep the sampled ids from call to call (token-in-token-out), or at least the raw text of the call."),
    _stream_error("whitespace_changed", "White space changed",
        "White space next to a tool call or a think marker differs from the sampled white space.",
        "Keep the sampled ids from call to call (token-in-token-out); parse the text for routing only.",
        probe="tool_append_after_content"),
    _stream_error("boundary_merge", "Tokens merged across a boundary",
        "Two pieces that had been encoded separately were encoded together, and tokens merged across their seam.",
        ("Encode the text between two completions in one piece, from the sampled stop token to the end of the "
         "assistant's header. Tokens never merge across control tokens.")),
    _stream_error("template_not_append_only", "Template rewrites its own text",
        "The template wrote text into the earlier prompt that it does not write there when messages follow.",
        ("Before you extend the stream, cut the text that the template takes back, or repair the template (page "
         "Chat templates)."), probe="tool_append"),
    _stream_error("tokenizer_mismatch", "Another tokenizer",
        ("This tokenizer encodes the same messages to other ids than the prompt has: engine and trainer use "
         "different tokenizers or revisions."),
        "Pin the tokenizer's revision in engine and trainer."),
    _stream_error("token_ids_missing", "Token ids missing",
        "The source has no real token ids for this call: they are absent, empty, constant or outside the vocabulary.",
        "Let the gateway pass the ids through (return_token_ids). Do not train this step."),
    _stream_error("engine_ids_inconsistent", "Ids, text and logprobs disagree",
        "Within one call the ids do not fit the returned text or the logprobs.",
        "Use the ids of the engine. Do not rebuild them from text or from a stream."),
    _stream_error("unclassified", "Break of unknown cause",
        "The prompt does not start with the sampled stream, and none of the known causes fits.",
        "Compare both streams on the trajectory's page, from the named token on."),
    _stream_error("noncanonical_sampling", "Non-canonical sampling",
        "The model sampled other tokens than the encoder would choose for the same text.",
        "Keep the sampled ids from call to call (token-in-token-out); text cannot hold them."),
    _delta_error("message_dropped", "Message dropped",
        "A message of the request left no trace in the prompt.",
        ("If the template leaves it out, use a template that renders this kind of message. If the delta leaves it "
         "out, render all new messages of a turn together."), probe="tool_append_marked"),
    _delta_error("tool_messages_split", "Tool messages split",
        "Tool messages that belong together were rendered one by one, each in a separate turn.",
        "Render all tool messages of a turn together.", probe="tool_append_one_by_one"),
    _delta_error("turn_separator_lost", "Turn separator lost",
        "The text that the template writes right after a stop token (often a newline) is missing.",
        ("If deltas are rendered after a dummy conversation, cut the conversation right after its last stop token. "
         "Then the separator stays; it gets mask 0."), probe="seam"),
    _delta_error("stop_token_doubled", "Stop token doubled",
        "The sampled stop token is also the next turn's header, and the delta holds it again.",
        "Leave it out of the delta. The sampled one is there already, with its mask and logprob.", probe="seam"),
    _delta_error("system_prompt_injected", "System prompt injected",
        "New messages were rendered alone, so the template put its default system prompt in the middle of the stream.",
        ("Never render new messages alone. Put a short conversation with a system message before them, and cut off "
         "its ids."), probe="default_system"),
    _delta_error("special_tokens_injected", "Control tokens from content",
        "Text inside a message spells a control token and was encoded as one.",
        ("Encode the text of messages so that it cannot become control tokens (split_special_tokens=True in "
         "transformers), or escape it."), probe="control_text_in_content"),
    _delta_error("generation_prompt_missing", "Generation prompt missing",
        "The prompt does not end with the assistant header that the template writes.",
        "Render with the generation prompt and with the run's own template switches.",
        probe="generation_prompt_written"),
    _delta_error("delta_differs", "Delta differs",
        "The tokens between two completions differ from those that the template writes.",
        "Open the page of deltas. It shows both, and the renders that they come from."),
    _row_error("row_not_sampled", "Row was not sampled",
        "The row's ids differ from the ids that the steps read and sampled: the row was encoded again from text.",
        "Build the row from the sampled ids."),
    _row_error("length_mismatch", "Lengths disagree",
        "Ids, mask, logprobs or advantages of one row have different lengths.",
        "Append ids, mask, logprobs and advantages in one place of the code, all or none."),
    _row_error("observation_trained", "Observation trained",
        "A token of a tool or of the environment is under the gradient.",
        "Set mask 0 on every token that the policy did not sample.", said_by_turn=True),
    _row_error("generation_prompt_trained", "Generation prompt trained",
        "The assistant header, or a forced think tag, is under the gradient.",
        "Start the mask at the first sampled token."),
    _row_error("appended_eos_trained", "Appended stop token trained",
        "A stop token that the model did not sample was appended and put under the gradient.",
        "Set mask 0 on appended tokens."),
    _row_error("separator_trained", "Separator trained",
        "Text that the template writes right after a stop token is under the gradient.",
        "End the mask at the sampled stop token."),
    _row_error("mask_overrun", "Mask over everything or nothing",
        "The mask covers the whole row although it has other roles, or covers nothing.",
        "Check that the template marks assistant turns ({% generation %}) and that the mask was computed with it."),
    _row_error("columns_shifted", "Columns off by one",
        "Mask, logprobs or advantages are shifted against each other by a constant number of tokens.",
        ("A column of next-token prediction stands one place to the left. Shift it, so that each value stands at "
         "its token.")),
    _row_error("logprob_invalid", "Invalid logprobs",
        "A logprob under the gradient is positive, not a number or infinite, or all of them are exactly 0.",
        "Use the logprobs of the sampling engine unchanged."),
    _row_error("advantage_misplaced", "Advantage misplaced",
        "Masked tokens have an advantage, or trained tokens have none.",
        "Broadcast the trajectory's advantage over the trained tokens, and over nothing else."),
    _row_error("trained_twice", "Trained twice",
        "One sampled token is under the gradient in several rows.",
        "Mask what another row already trains."),
    _row_error("step_order_invalid", "Steps out of order",
        "The rows of one trajectory are not adjacent, or its last-step flags are wrong.",
        "Write all steps of a trajectory one after the other and mark the last one."),
    _row_error("prompt_split_wrong", "Prompt split wrong",
        "Prompt and completion were split by counting the ones of the mask, although they are interleaved.",
        "Split at the first sampled token."),
    _row_error("routing_misaligned", "Expert routing misaligned",
        "The recorded expert routing has another number of rows than the tokens it belongs to.",
        "Record one routing row for each token except the last."),
    _row_warning("sampled_masked", "Sampled tokens masked",
        "Sampled tokens are not under the gradient, and no recorded reason says so.",
        "Put every sampled token under the gradient, or record why not.", said_by_turn=True),
    _row_warning("stop_token_untrained", "Stop token untrained",
        "The end of turn that the model sampled is masked, so the model never learns to stop.",
        "Include the sampled stop token in the mask.", said_by_turn=True),
    _row_warning("stop_string_misaligned", "Stop string misaligned",
        "The ids or logprobs go past the text that a stop string cut.",
        "Stop on token ids, or mask the ids after the cut."),
    _row_warning("logprobs_other_distribution", "Logprobs of another distribution",
        ("The stored logprobs belong to another distribution than the trainer computes (temperature, top-p, raw or "
         "processed)."),
        "Record processed logprobs, and score with the sampling temperature."),
    _row_warning("truncated_trained", "Truncated completion trained",
        "A completion that was cut by its length limit is under the gradient, although it should be masked.",
        "Mask truncated completions, or declare that they are wanted."),
    _row_warning("never_trained", "Never trained",
        "Sampled tokens are under the gradient in no row.",
        "Write a row for every step, or merge its tokens into a trained row."),
    _row_info("mixed_policy_versions", "Several policy versions",
        "One row holds tokens that several versions of the policy sampled.",
        "Correct with per-token importance ratios, or bound the staleness."),
    # It occurs on all three axes.
    _stream_info("not_decidable", "Not decidable",
        "The source lacks a field that a check needs. No report from that check does not mean that nothing is wrong.",
        "Record the missing field."),
)
# fmt: on

KINDS: dict[str, FindingKind] = {kind.slug: kind for kind in _ALL}
"""Every kind by slug, in the order of lists."""
