"""The addresses whose calls are recorded: how each is asked for token ids, and how its calls are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts.recorder.choices import Calls, generate_calls, join_sglang, join_stream, sglang_calls
from rollouts.recorder.messages import join_messages, messages_calls
from rollouts.recorder.responses import RAW, join_responses, responses_calls


@dataclass(frozen=True)
class Dialect:
    """How an address speaks."""

    title: str
    ids_field: str = ""  # The field of a request that asks for token ids; empty = they come unasked, or not at all.
    ids: tuple[str, ...] = ()  # The fields of an answer or a choice that only this brings.
    logprobs: str = "logprobs"
    """The field that asks for log-probabilities of sampled tokens; empty = the recorder does not ask."""
    logprobs_value: bytes = b"true"
    settings: str = ""  # The object of a request that holds that field; empty = the request itself.
    has_ids: bool = True  # Some server tells the ids of a call.
    join: Callable[[Sequence[Any], bool], Any] = join_stream
    """Adds up the events of a stream; the second argument says that it broke off."""
    calls: Callable[[dict[str, Any], Any], Calls] | None = None
    """Request and answer in the shape of Chat Completions; None = they have it."""


_CHOICE_IDS = ("prompt_token_ids", "token_ids")
DIALECTS = {
    "/v1/chat/completions": Dialect("Chat Completions", "return_token_ids", _CHOICE_IDS),
    "/v1/completions": Dialect("Completions", "return_token_ids", _CHOICE_IDS, logprobs_value=b"0"),
    "/inference/v1/generate": Dialect(
        "vLLM's tokens in, tokens out", "return_token_ids", ("prompt_token_ids", "mm_placeholders"),
        logprobs_value=b"0", settings="sampling_params", calls=generate_calls,
    ),
    "/generate": Dialect("SGLang's generate", logprobs="", join=join_sglang, calls=sglang_calls),
    "/v1/responses": Dialect(
        "Responses", "enable_response_messages", RAW, logprobs="",
        join=join_responses, calls=responses_calls,
    ),
    "/v1/messages": Dialect("Messages", logprobs="", has_ids=False, join=join_messages, calls=messages_calls),
}
"""Address -> dialect."""
NO_TOKENS = ("/tokenize", "/detokenize", "/render", "/derender", "/count_tokens")
"""How addresses end that sample nothing. They pass, and are not missed."""
