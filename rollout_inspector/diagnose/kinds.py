"""The closed list of finding kinds. The slugs are stable: database, URLs and exports hold them."""

from dataclasses import dataclass
from functools import partial

from rollout_inspector.diagnose.finding import Axis, Severity

VERSION = 19  # Raise it when the same trajectory may get other findings than before.


@dataclass(frozen=True)
class FindingKind:
    """One cause, with every fact about it that is not a rule."""

    slug: str
    title: str
    meaning: str  # One sentence: what happened.
    consequence: str  # One or two sentences: what it does to training.
    remedy: str  # What to do about it.
    passes: str  # The smallest input that has not this finding, in words.
    fails: str  # The smallest input that has it, in words.
    axis: Axis
    severity: Severity  # The usual severity of this kind. A single finding may be milder.
    probe: str = ""  # The probe of the template check that tests for the cause. Empty = no chat template causes it.
    said_by_turn: bool = False
    """The page of the loss mask reports it turn by turn, so the page does not repeat the finding."""


_stream_error = partial(FindingKind, axis=Axis.STREAM, severity=Severity.ERROR)
_stream_warning = partial(FindingKind, axis=Axis.STREAM, severity=Severity.WARNING)
_stream_info = partial(FindingKind, axis=Axis.STREAM, severity=Severity.INFO)
_delta_error = partial(FindingKind, axis=Axis.DELTA, severity=Severity.ERROR)
_row_error = partial(FindingKind, axis=Axis.ROW, severity=Severity.ERROR)
_row_warning = partial(FindingKind, axis=Axis.ROW, severity=Severity.WARNING)
_row_info = partial(FindingKind, axis=Axis.ROW, severity=Severity.INFO)

_ALL = (
    _stream_warning("duplicate_call", "Duplicate call",
        "The same prompt was sent twice (a retry, or a call recorded twice), and only one answer was continued.",
        ("The answer that was not continued is trained as well, with the reward of a conversation that it is no "
         "part of."),
        "Keep the call that was continued and drop the other.",
        "One call for each prompt: P -> A, then P A O -> B.",
        "The prompt P twice: P -> A and P -> A', then P A O -> B."),
    _stream_info("branch", "Branch",
        "A sub-agent, a parallel branch or an auxiliary call: a separate conversation beside the main one.",
        ("Nothing is wrong as long as each chain is a row. Joined into one row, a chain would be trained after "
         "tokens that it never read."),
        "Train each chain of steps as a separate row.",
        "P -> A, then P A O -> B: one chain.",
        "P -> A, then S -> T with another system text, then P A O -> B: two chains."),
    _stream_error("chat_template_changed", "Chat template changed",
        ("The chat template or one of its inputs changed between two calls: a switch such as enable_thinking, the "
         "date, or what the server passes to the template and the request does not show."),
        ("What was sampled under the first template is no prefix of the later prompts. A row over both trains "
         "actions on a prompt that the model did not read."),
        "Freeze the chat template, its switches and its date for the whole run, and record what the template is given.",
        "enable_thinking is false in both calls.",
        "enable_thinking is false in the first call and true in the second."),
    _stream_error("request_changed", "Tools or system text changed",
        ("The tools or the system text of the request differ between two calls, so the start of the prompt was "
         "rewritten."),
        ("The sampled tokens stand behind another start than the one they were sampled after, so their "
         "probabilities in training are those of another prompt."),
        "Send the same tools in every call and freeze the system text.",
        "Both calls send the tools [calculator].",
        "The second call sends no tools, so the system block at the start is shorter."),
    _stream_error("bos_mismatch", "BOS doubled or missing",
        "The begin-of-sequence token stands twice at the start of a prompt or row, or is in one of two streams only.",
        ("Every later token stands after a start that the model did not read, so all log-probabilities of the row "
         "are a little wrong."),
        "Never render to text and then encode that text with special tokens added.",
        "Prompt: <s> user ...",
        "Prompt: <s> <s> user ...", probe="bos_once"),
    _stream_error("context_truncated", "Context truncated",
        "The start of the context was cut away to fit a limit.",
        "Tokens sampled before the cut would be trained after a context that is gone, or they are lost.",
        ("Let the engine raise an error instead of cutting, or end the trajectory there. Tokens sampled before the "
         "cut can only be context, with mask 0."),
        "The second prompt starts with the first prompt.",
        "The second prompt starts in the middle of the first prompt."),
    _stream_error("history_rewritten", "History rewritten",
        "Earlier messages were edited, removed or summarised before they were sent again.",
        ("The model answered another history than the row shows. A gradient over the old part teaches actions that "
         "no longer fit what stands before them."),
        "Begin a new row at the rewrite. Everything before it is part of that row's prompt, with mask 0.",
        "The second request repeats the messages of the first.",
        "The second request holds a summary in place of the first messages."),
    _stream_error("assistant_rewritten", "Assistant message rewritten",
        "The harness changed the assistant's message before sending it back.",
        "The changed text is put under the gradient as if the policy had written it, and what it did write is lost.",
        "Send the assistant's message back as it was parsed, or begin a new row at the change.",
        "Sampled call: 12*3. Sent back: 12*3.",
        "Sampled call: 12*3. Sent back: 12 * 3.0."),
    _stream_error("empty_think_toggled", "Empty think block toggled",
        "The template writes an empty think block at one position of a message and leaves it out at another.",
        ("The sampled turn is not in the next prompt as it was sampled. The trajectory falls into two rows, or four "
         "tokens that were never sampled are trained."),
        "Let the template always write the block (for Qwen3 a change of one line), or keep the sampled tokens.",
        "The turn is rendered with <think></think> both times, or without it both times.",
        "Sampled after <think></think>; the next prompt shows the turn without the block.", probe="tool_append"),
    _stream_error("thinking_stripped", "Thinking stripped",
        "The template left out the reasoning of an earlier turn when it rendered the conversation again.",
        ("The reasoning was sampled and paid for, and the next turn does not read it. In one row it is lost from "
         "training, so the policy is not taught to think."),
        ("Switch the template to keep thinking if it can, keep the sampled ids (token-in-token-out), or train one "
         "row a turn."),
        "Next prompt: <think>12 times 3</think> 36",
        "Next prompt: 36", probe="user_append_after_reasoning"),
    _stream_error("reasoning_misparsed", "Reasoning parsed wrong",
        ("The generation prompt had opened the think block. The parser did not know that, so the reasoning came "
         "back as content."),
        ("Later turns read the reasoning as a part of the answer, in tokens that the policy did not write. Training "
         "on them teaches broken think tags."),
        "Pass the end of the prompt to the reasoning parser, together with the completion.",
        "Prompt ends with <think>; parsed: reasoning \"12 times 3\", content \"36\".",
        "Prompt ends with <think>; parsed: content \"12 times 3</think> 36\"."),
    _stream_error("special_tokens_dropped", "Special tokens dropped",
        "The completion was decoded without its special tokens, so they are missing from the next prompt.",
        ("Tokens that steer the model, such as the end of a turn, vanish from what is trained. The policy is not "
         "taught to write them."),
        "Decode with skip_special_tokens=False, or keep the ids.",
        "Sampled: <tool_call> {...} <end>. Next prompt: the same.",
        "Sampled: <tool_call> {...} <end>. Next prompt: {...} <end>."),
    _stream_error("invalid_utf8", "Split UTF-8 character",
        "A completion held part of a character. As text it became U+FFFD, which encodes to other tokens.",
        "The gradient falls on the tokens of U+FFFD, which the policy did not sample, and the sampled bytes are lost.",
        "Keep ids or bytes, never text.",
        "Sampled bytes E2 82 AC (a whole character); as text and back: the same ids.",
        "Sampled bytes E2 82 (two of three); as text and back: the ids of U+FFFD."),
    _stream_error("tool_call_reserialized", "Tool call re-serialised",
        "The tool call was parsed and written again: the same values in other characters.",
        ("The row holds a spelling of the call that the policy did not choose. A gradient on it rewards actions "
         "that were not taken."),
        "Keep the sampled ids from call to call (token-in-token-out), or at least the raw text of the call.",
        "Sampled {\"a\":1}, sent back {\"a\":1}.",
        "Sampled {\"a\":1}, sent back {\"a\": 1}."),
    _stream_error("whitespace_changed", "White space changed",
        "White space next to a tool call or a think marker differs from the sampled white space.",
        ("The tokens around the change are others than the sampled ones, and their log-probabilities belong to no "
         "choice that the policy made."),
        "Keep the sampled ids from call to call (token-in-token-out); parse the text for routing only.",
        "Sampled: I call.\\n<tool_call>. Next prompt: the same.",
        "Sampled: I call.\\n\\n<tool_call>. Next prompt: I call.\\n<tool_call>.", probe="tool_append_after_content"),
    _stream_error("boundary_merge", "Tokens merged across a boundary",
        "Two pieces that had been encoded separately were encoded together, and tokens merged across their seam.",
        "A merged token stands where the policy sampled two. Under the gradient it is an action that was never taken.",
        ("Encode the text between two completions in one piece, from the sampled stop token to the end of the "
         "assistant's header. Tokens never merge across control tokens."),
        "[assistant\\n] + [\\n] sampled, and both are in the next prompt.",
        "[assistant\\n] + [\\n] sampled; the next prompt holds one token [\\n\\n]."),
    _stream_error("template_not_append_only", "Template rewrites earlier text",
        ("The template writes an earlier part of the conversation otherwise when messages follow: its own text, or a "
         "turn that the model sampled."),
        ("Each turn the end of the prompt is written again, so the sampled stream breaks and the trajectory falls "
         "into more rows."),
        ("Before you extend the stream, cut the text that the template takes back, or repair the template: the "
         "template check looks for a repair."),
        "render(messages + 1) starts with render(messages).",
        "render(messages) ends with text that render(messages + 1) does not have.", probe="tool_append"),
    _stream_error("tokenizer_mismatch", "Another tokenizer",
        ("This tokenizer encodes the same messages to other ids than the prompt has: engine and trainer use "
         "different tokenizers or revisions."),
        "Engine and trainer read the ids as different texts. Training on them moves the model towards noise.",
        "Pin the tokenizer's revision in engine and trainer.",
        "encode(render(messages)) is the prompt.",
        "encode(render(messages)) begins with other ids than the prompt."),
    _stream_error("token_ids_missing", "Token ids missing",
        "The source has no real token ids for this call: they are absent, empty, constant or outside the vocabulary.",
        "What was sampled is not known. Ids that are made up from the text are put under the gradient in its place.",
        "Let the gateway pass the ids through (return_token_ids). Do not train this step.",
        "completion_ids: [40, 318, 2]",
        "completion_ids: [] or [0] beside the text \"I am\"."),
    _stream_error("engine_ids_inconsistent", "Ids, text and logprobs disagree",
        "Within one call the ids do not fit the request, the returned text, the logprobs and their tokens, or counts.",
        ("It is not known which of the two was sampled, so log-probabilities may be paired with tokens that they do "
         "not belong to."),
        "Use the ids of the engine. Do not rebuild them from text or from a stream.",
        "3 ids and 3 logprobs; the ids decode to the text.",
        "3 ids and 4 logprobs, or ids of another text."),
    _stream_warning("reply_text_lost", "Message lost sampled text",
        "The sampled ids decode to text that no part of the parsed message holds: a parser dropped it.",
        ("The environment answers a message that says less than the policy said, so the reward is that of another "
         "action. A prompt that is rendered from the message lacks the text too."),
        "The comparison of parsers shows what others read: choose one that holds all of it. Train on the sampled ids.",
        "Sampled: I look. <tool_call>...</tool_call>; message: content \"I look.\" and the call.",
        "Sampled: Now it sums up both. <tool_call>...</tool_call>; message: the call alone."),
    _stream_error("unclassified", "Break of unknown cause",
        "The prompt does not start with the sampled stream, and none of the known causes fits.",
        ("Behind the break the row does not hold what was sampled. Whatever the cause, a gradient there is on "
         "tokens of another stream."),
        "Compare both streams from the named token on.",
        "The next prompt starts with the sampled stream.",
        "It does not, and none of the named causes explains why."),
    _stream_error("noncanonical_sampling", "Non-canonical sampling",
        "The model sampled other tokens than the encoder would choose for the same text.",
        "Kept as ids, it is harmless. If the text is encoded again, other tokens are trained than the policy chose.",
        "Keep the sampled ids from call to call (token-in-token-out); text cannot hold them.",
        "Sampled [hello]; encode(\"hello\") = [hello].",
        "Sampled [hel][lo]; encode(\"hello\") = [hello]."),
    _delta_error("message_dropped", "Message dropped",
        "A message of the request left no trace in the prompt.",
        "The model answered without reading the message, so the reward is for an answer to another question.",
        ("If the template leaves it out, use a template that renders this kind of message. If the delta leaves it "
         "out, render all new messages of a turn together."),
        "Two tool results in the request, both in the prompt.",
        "Two tool results in the request, one in the prompt.", probe="tool_append_marked"),
    _delta_error("tool_messages_split", "Tool messages split",
        "Tool messages that belong together were rendered one by one, each in a separate turn.",
        ("The model reads extra turns that it does not know from its pretraining, and that another renderer would "
         "not write."),
        "Render all tool messages of a turn together.",
        "One turn holds both results.",
        "Two turns hold one result each.", probe="tool_append_one_by_one"),
    _delta_error("turn_separator_lost", "Turn separator lost",
        "The text that the template writes right after a stop token (often a newline) is missing.",
        ("Every later token stands after a form of the conversation that the model has never seen. Its "
         "probabilities shift, in sampling and in training."),
        ("If deltas are rendered after a dummy conversation, cut the conversation right after its last stop token. "
         "Then the separator stays; it gets mask 0."),
        "<end> \\n <start> user",
        "<end> <start> user", probe="seam"),
    _delta_error("stop_token_doubled", "Stop token doubled",
        "The sampled stop token is also the next turn's header, and the delta holds it again.",
        ("The model reads a turn that is empty. Later turns are conditioned on it, and a second stop token may be "
         "trained."),
        "Leave it out of the delta. The sampled one is there already, with its mask and logprob.",
        "... <end> \\n <start> user",
        "... <end> <end> \\n <start> user", probe="seam"),
    _delta_error("system_prompt_injected", "System prompt injected",
        "New messages were rendered alone, so the template put its default system prompt in the middle of the stream.",
        ("The model is told a second time who it is, in the middle of the conversation. What it learns is tied to "
         "that text."),
        ("Never render new messages alone. Put a short conversation with a system message before them, and cut off "
         "its ids."),
        "<end> \\n <start> user",
        "<end> \\n <start> system You are a helpful assistant <end> \\n <start> user", probe="default_system"),
    _delta_error("special_tokens_injected", "Control tokens from content",
        "Text inside a message spells a control token and was encoded as one.",
        "Text of a tool ends or opens turns. The model can be steered by it, and training rewards that.",
        ("Encode the text of messages so that it cannot become control tokens (split_special_tokens=True in "
         "transformers), or escape it."),
        "The result \"<end>\" as the pieces [<][end][>].",
        "The result \"<end>\" as the one control token [<end>].", probe="control_text_in_content"),
    _delta_error("generation_prompt_missing", "Generation prompt missing",
        "The prompt does not end with the assistant header that the template writes.",
        "The model has to write the header itself. It is then sampled and trained, or the answer has the wrong role.",
        "Render with the generation prompt and with the run's own template switches.",
        "The prompt ends with <start> assistant \\n.",
        "The prompt ends with the tool's result.", probe="generation_prompt_written"),
    _delta_error("delta_differs", "Delta differs",
        "The tokens between two completions differ from those that the template writes.",
        ("The model read something else than the template writes. In use, where the template writes the prompt, it "
         "meets a form that it was not trained on."),
        "Look at the deltas: they show both, and the renders that they come from.",
        "The tool said 36, and the prompt holds 36.",
        "The tool said 36, and the prompt holds 36 (seen)."),
    _row_error("row_not_sampled", "Row trains unsampled tokens",
        "The row's ids differ from the ids that the steps read and sampled: the row was encoded again from text.",
        ("The gradient falls on tokens that the policy did not choose. Their log-probabilities were never sampled, "
         "so the importance ratio is meaningless there."),
        "Build the row from the sampled ids.",
        "Row: 5 6 7, sampled 6 7.",
        "Row: 5 8, where 8 is the encoder's token for the text of 6 7."),
    _row_error("length_mismatch", "Lengths disagree",
        "Ids, mask, logprobs or advantages of one row have different lengths.",
        ("From some token on, mask, log-probability and advantage belong to another token. The rest of the row is "
         "trained wrong."),
        "Append ids, mask, logprobs and advantages in one place of the code, all or none.",
        "4 ids, 4 mask values, 4 logprobs.",
        "4 ids, 4 mask values, 3 logprobs."),
    _row_error("observation_trained", "Observation trained",
        "A token of a tool or of the environment is under the gradient.",
        ("The policy is trained to write the tool's answers itself. It learns to make results up instead of calling "
         "the tool."),
        "Set mask 0 on every token that the policy did not sample.",
        "Mask 0 on every token of the result.",
        "Mask 1 on one token of the result.", said_by_turn=True),
    _row_error("generation_prompt_trained", "Generation prompt trained",
        "The assistant header, or a forced think tag, is under the gradient.",
        ("The policy is trained to write a header that the template always writes. It costs capacity and distorts "
         "the loss."),
        "Start the mask at the first sampled token.",
        "The mask starts at the first sampled token.",
        "The mask starts at <start> assistant."),
    _row_error("appended_eos_trained", "Appended stop token trained",
        "A stop token that the model did not sample was appended and put under the gradient.",
        "The policy is rewarded for a stop that it did not choose, with a log-probability that nobody measured.",
        "Set mask 0 on appended tokens.",
        "A stop token was appended after a cut, with mask 0.",
        "A stop token was appended after a cut, with mask 1."),
    _row_error("separator_trained", "Text after the stop token is trained",
        "What the template writes right after a stop token, or the next document begins with, is under the gradient.",
        "The policy is trained to go on after its stop token. It may learn to write text behind the end of its turn.",
        "End the mask at the sampled stop token.",
        "Mask 1 up to <end>, mask 0 on \\n.",
        "Mask 1 on <end> and on \\n."),
    _row_error("mask_overrun", "Mask over everything or nothing",
        "The mask covers the whole row although it has other roles, or covers nothing.",
        "Everything is trained, the user's and the tool's words included, or nothing is.",
        "Check that the template marks assistant turns ({% generation %}) and that the mask was computed with it.",
        "Mask 1 on what was sampled alone.",
        "Mask 1, or mask 0, on the whole row."),
    _row_error("columns_shifted", "Columns off by one",
        "Mask, logprobs or advantages are shifted against each other by a constant number of tokens.",
        "Each token is trained with the value of its neighbour: with the wrong log-probability, or at the wrong place.",
        ("A column of next-token prediction stands one place to the left. Shift it, so that each value stands at "
         "its token."),
        "Mask 0 0 1 1, logprobs 0 0 -0.5 -0.2.",
        "Mask 0 0 1 1, logprobs 0 -0.5 -0.2 0."),
    _row_error("logprob_invalid", "Invalid logprobs",
        "A logprob under the gradient is positive, below -1000 or not a number, or all of them are exactly 0.",
        ("The importance ratio is exp(new - old). With such a value it is zero, infinite or constant, and the "
         "update is ruined or has no correction."),
        "Use the logprobs of the sampling engine unchanged.",
        "logprobs -0.5, -0.2.",
        "logprobs 0.8, or NaN, or 0 on every trained token."),
    _row_error("advantage_misplaced", "Advantage misplaced",
        "Masked tokens have an advantage, or trained tokens have none.",
        ("Tokens that should learn get no signal, or the signal is counted on tokens that are masked, which changes "
         "averages."),
        "Broadcast the trajectory's advantage over the trained tokens, and over nothing else.",
        "Mask 0 1 1, advantages 0 0.7 0.7.",
        "Mask 0 1 1, advantages 0.7 0 0.7."),
    _row_error("reward_misplaced", "Reward misplaced",
        "A token has a reward where the trainer does not read it: on a step that is not the last, or inside a turn.",
        "The trainer drops this reward or gives it to another action, so the policy learns from another score.",
        "Put the reward on the last token of the last step, and 0 on all others.",
        "Mask 0 1 1 1, rewards 0 0 0 1.",
        "Mask 0 1 1 1, rewards 0 1 0 0."),
    _row_error("media_tokens_wrong", "Image tokens cut or miscounted",
        ("The placeholders of an image, video or sound are cut, or are not as many as its grid or its range says."),
        ("The trainer puts a vector in place of each placeholder. It fails, or all later ones get the vectors of other "
         "patches."),
        "Cut a row before an image, never inside one, and expand the placeholders with the processor of the engine.",
        "<image> pad pad pad pad </image>, and a grid of 4 by 4 patches, which makes 4.",
        "<image> pad pad: the row ends there."),
    _row_error("trained_twice", "Trained twice",
        "One sampled token is under the gradient in several rows.",
        "The token counts double in the update, compared with all other tokens.",
        "Mask what another row already trains.",
        "Each sampled token has mask 1 in one row.",
        "A sampled token has mask 1 in two rows."),
    _row_error("step_order_invalid", "Steps out of order",
        "The rows of one trajectory are not adjacent, or its last-step flags are wrong.",
        ("Rewards and advantages are passed along the steps of a trajectory. Out of order, they reach the steps of "
         "another one."),
        "Write all steps of a trajectory one after the other and mark the last one.",
        "Last-step flags: 0 0 1.",
        "Last-step flags: 0 1 1."),
    _row_error("prompt_split_wrong", "Prompt split wrong",
        "Prompt and completion were split by counting the ones of the mask, although they are interleaved.",
        "Sampled tokens are counted as prompt and are not trained, or tool text is counted as completion.",
        "Split at the first sampled token.",
        "Mask 0 0 1 1 0 1, prompt length 2.",
        "Mask 0 0 1 1 0 1, prompt length 3 (the number of zeros)."),
    _row_error("routing_misaligned", "Expert routing misaligned",
        "The recorded expert routing has another number of rows than the tokens it belongs to.",
        ("Replayed routing sends tokens to the experts of their neighbours, so trainer and sampler compute "
         "different models."),
        "Record one routing row for each token except the last.",
        "5 tokens, 4 routing rows.",
        "5 tokens, 3 routing rows."),
    _row_warning("sampled_masked", "Sampled tokens masked",
        "Sampled tokens are not under the gradient, and no recorded reason says so.",
        "These actions get no gradient: part of what the policy did is not learned from.",
        "Put every sampled token under the gradient, or record why not.",
        "Mask 1 on every sampled token.",
        "Mask 0 on two sampled tokens, with no recorded reason.", said_by_turn=True),
    _row_warning("stop_token_untrained", "Stop token untrained",
        "A trained turn ends without its stop token: it is masked, was left out, or is another than the template's.",
        "The policy is never rewarded for ending its turn. Its answers tend to grow until the limit cuts them.",
        "Keep the stop token of the chat template at the end of the turn, and train it.",
        "Mask 1 on the sampled <end>.",
        "Mask 0 on the sampled <end>.", said_by_turn=True),
    _row_warning("stop_string_misaligned", "Stop string misaligned",
        "The ids or logprobs go past the text that a stop string cut.",
        "Tokens behind the cut are trained although the environment never saw them.",
        "Stop on token ids, or mask the ids after the cut.",
        "Text \"I call\", ids of \"I call\".",
        "Text \"I call\", ids of \"I call the\"."),
    _row_warning("logprobs_other_distribution", "Logprobs of another distribution",
        ("The stored logprobs belong to another distribution than the trainer computes (temperature, top-p, raw or "
         "processed)."),
        "The importance ratio is off by a systematic factor, so every update is biased in the same direction.",
        "Record processed logprobs, and score with the sampling temperature.",
        "Sampler -0.50, trainer -0.51.",
        "Sampler -0.50, trainer -0.35 and so on at every token: another temperature."),
    _row_warning("truncated_trained", "Truncated completion trained",
        "A completion that was cut by its length limit is under the gradient, although it should be masked.",
        "The policy is trained on a turn that it did not end, as if the cut were its choice.",
        "Mask truncated completions, or declare that they are wanted.",
        "The completion ends with its stop token, or is masked.",
        "The completion ends at its length limit, and has mask 1."),
    _row_warning("never_trained", "Never trained",
        "Sampled tokens are under the gradient in no row.",
        "A part of the rollout is paid for and never learned from.",
        "Write a row for every step, or merge its tokens into a trained row.",
        "Two steps, and rows that train both.",
        "Two steps, and a row that trains the first alone."),
    _row_info("mixed_policy_versions", "Several policy versions",
        "One row holds tokens that several versions of the policy sampled.",
        "The tokens of older versions are off-policy. Without a correction their gradient is biased.",
        "Correct with per-token importance ratios, or bound the staleness.",
        "Steps of policy version 7 alone.",
        "Steps of policy versions 7 and 8."),
    # It occurs on all three axes.
    _stream_info("not_decidable", "Not decidable",
        "The source lacks a field that a check needs. No report from that check does not mean that nothing is wrong.",
        "It is not known whether this training data is right.",
        "Record the missing field.",
        "The file holds the field that the check needs.",
        "The file lacks it, such as prompt ids or log-probabilities."),
)

KINDS: dict[str, FindingKind] = {kind.slug: kind for kind in _ALL}  # Every kind by slug, in the order of lists.


def title_of(kind: str) -> str:
    """`bos_mismatch` as `BOS doubled or missing`. A kind of a later version keeps the words of its slug."""
    return KINDS[kind].title if kind in KINDS else kind.replace("_", " ").capitalize()
