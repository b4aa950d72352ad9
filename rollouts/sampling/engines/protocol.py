"""What an engine is: ids in, ids and log-probabilities out, many requests at once. Also the checks that all share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from rollout_inspector.formats.engine_fields import ARRAYS, MASK, SPANS, without_arrays_of
from rollout_inspector.streams import alternatives
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Step, ids_array

TOLD = (SPANS, MASK, ARRAYS[0], "metrics")
"""What vLLM names the spans of weight versions, the kept sets, the expert routing, and how drafts were accepted."""
UNNAMED = "default"  # What vLLM calls the weights before somebody names their version.


class EngineError(Exception):
    """The engine cannot go on, or its answer makes no sense. The message is a sentence for the run page."""


class RequestRefused(EngineError):
    """One request that no engine could serve. The engine itself still works."""

    request_id = ""  # The refused request, where a step raises the error.


@dataclass(frozen=True)
class Sampling:
    """How a completion is drawn. Only these fields say what ends it: no engine adds stop tokens of its own."""

    temperature: float = 1.0  # 0 = always the likeliest token.
    top_p: float = 1.0
    top_k: int = 0  # 0 = all tokens.
    min_p: float = 0.0  # Tokens less likely than this share of the likeliest one are never drawn; 0 = off.
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end a completion too, together with the token that completes the text. No sampled id is cut off."""
    alternatives: int = 0
    """Return so many of the likeliest tokens at each place, and the entropy if the engine knows it. It changes no
    sampled token."""
    seed: int | None = None
    """With a seed, the same request returns the same completion again, alone or in a batch, if the engine can do so."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    request_id: str
    prompt_ids: Ids  # ``[P]``
    sampling: Sampling
    forced_ids: Ids | None = None
    """A completion to compute token by token in place of a sampled one, of ``sampling.max_tokens``; None = sample."""


@dataclass(frozen=True, eq=False)
class Generation:
    """A finished completion."""

    request_id: str
    completion_ids: Ids  # ``[C]``, as sampled, stop token included.
    logprobs: Floats  # ``[C]``, of the kind that ``logprobs_mode`` of the engine names.
    finish_reason: str  # ``stop`` or ``length``.
    stop_reason: str = ""  # The stop text, or the id of the stop token, that ended the completion.
    cached_tokens: int = 0  # How many prompt tokens were not computed again.
    alternative_ids: Ids | None = None
    """``[C * K]``: the likeliest ids at each place, as ``alternatives`` packs them. None = not asked."""
    alternative_logprobs: Floats | None = None  # ``[C * K]``, of the same distribution as ``logprobs``.
    entropy: Floats | None = None
    """``[C]``, in nats, of the whole distribution; None = not asked, or the engine does not know it."""
    kept_set: Floats | None = None  # ``[C]``: how many tokens were left to draw from; None = not told.
    kept_ids: Ids | None = None  # The ids of these, one set after the other; None = not told, or too many.
    policy_version: str = ""  # Of the weights that sampled the last token, as the engine names it; empty = not told.
    extra: Mapping[str, Any] = field(default_factory=dict)  # What else the engine tells, as a step keeps it.

    @classmethod
    def of(
        cls, request_id: str, ids: Sequence[int], logprobs: Sequence[float], finish: Any, stop: Any, cached: int = 0,
        alternatives: tuple[Ids, Floats] | None = None, engine_fields: Mapping[str, Any] | None = None,
    ) -> Self:
        """A completion from lists, and from reasons of any type; None = the engine names no reason. ``engine_fields``:
        fields of vLLM or SGLang, of which ``TOLD`` are kept."""
        finish, stop = ("" if value is None else str(value) for value in (finish, stop))
        floats, sampled = np.asarray(logprobs, dtype=np.float32), ids_array(ids)
        fields = {name: value for name in TOLD if (value := (engine_fields or {}).get(name)) is not None}
        step = without_arrays_of(Step(NO_IDS, sampled, extra=fields))
        version = "" if step.policy_version == UNNAMED else step.policy_version
        beside = alternatives or (None, None)
        return cls(
            request_id, sampled, floats, finish, stop, cached, beside[0], beside[1],
            kept_set=step.kept_set, kept_ids=step.kept_ids, policy_version=version, extra=step.extra,
        )


class Engine(Protocol):
    """One loaded model. Not thread-safe: :class:`rollouts.sampling.engines.engine_thread.EngineThread` owns it."""

    name: str
    version: str
    max_model_len: int
    vocab_size: int  # Ids run from 0 to ``vocab_size - 1``.
    logprobs_mode: str
    """``processed``: of the distribution that was sampled from. ``raw``: before temperature, top_k, top_p and min_p."""

    def add(self, request: GenerationRequest) -> None:
        """Take a request, at any time. Raises :class:`RequestRefused`."""

    def step(self) -> list[Generation]:
        """Let every live request grow, and return the generations that finished. Raises :class:`RequestRefused` with
        its ``request_id`` when a server refuses a request late. Every other exception means that the engine is lost."""

    def abort(self, request_id: str) -> None:
        """Drop a request; no generation is returned for it. An unknown or finished id is ignored."""

    def has_unfinished(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is, for those who must not touch it."""

    name: str
    version: str
    max_model_len: int
    vocab_size: int
    logprobs_mode: str

    @classmethod
    def of(cls, engine: Engine) -> Self:
        return cls(engine.name, engine.version, engine.max_model_len, engine.vocab_size, engine.logprobs_mode)


def check_request(request: GenerationRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise :class:`RequestRefused` for a request to which engines react differently, some by dying."""
    ids, sampling = request.prompt_ids, request.sampling
    if not len(ids):
        raise RequestRefused("The prompt is empty. An engine needs at least one token.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestRefused(f"The prompt holds the id {bad}, and the model's ids run from 0 to {vocab_size - 1}.")
    if len(ids) >= max_model_len:
        raise RequestRefused(
            f"The prompt has {len(ids)} tokens, and the model's limit is {max_model_len} for prompt and completion."
        )
    if sampling.max_tokens < 1:
        raise RequestRefused(f"max_tokens is {sampling.max_tokens}; at least one token must be asked for.")
    if not (sampling.temperature >= 0 and sampling.temperature < float("inf")):
        raise RequestRefused(f"The temperature is {sampling.temperature}; it must be 0 or more.")
    if not 0 < sampling.top_p <= 1:
        raise RequestRefused(f"top_p is {sampling.top_p}; it must lie above 0 and at most at 1.")
    if not 0 <= sampling.min_p <= 1:
        raise RequestRefused(f"min_p is {sampling.min_p}; it must lie between 0 and 1.")
    if not 0 <= sampling.alternatives <= alternatives.MAX_ALTERNATIVES:
        raise RequestRefused(
            f"alternatives is {sampling.alternatives}; it must lie between 0 and {alternatives.MAX_ALTERNATIVES}."
        )
    if sampling.top_k < 0:
        raise RequestRefused(f"top_k is {sampling.top_k}; it must be 0 (all tokens) or more.")


def check_generation(generation: Generation, request: GenerationRequest, vocab_size: int) -> None:
    """Raise :class:`EngineError` when an engine's answer is nonsense, before anything of it is kept."""
    ids, logprobs = generation.completion_ids, generation.logprobs
    if not len(ids):
        raise EngineError("The engine returned a completion without a single token.")
    if len(ids) != len(logprobs):
        raise EngineError(f"The engine returned {len(ids)} ids and {len(logprobs)} log-probabilities.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise EngineError(f"The engine returned the id {bad}, and the model's ids run from 0 to {vocab_size - 1}.")
    if request.forced_ids is not None and not np.array_equal(ids, request.forced_ids):
        raise EngineError("The engine decoded other ids than it was given. It cannot replay a completion.")
    if len(ids) > request.sampling.max_tokens:
        raise EngineError(f"The engine returned {len(ids)} tokens where {request.sampling.max_tokens} were allowed.")
    # Written so that NaN fails too: a third pass over each completion would cost as much again.
    if not (logprobs.min() > -np.inf and logprobs.max() <= 1e-3):
        raise EngineError("The engine returned a log-probability that is not a number or is above 0.")
    beside, beside_logprobs, entropy = generation.alternative_ids, generation.alternative_logprobs, generation.entropy
    if beside is None and entropy is None:
        return
    step = Step(NO_IDS, ids, entropy=entropy, alternative_ids=beside, alternative_logprobs=beside_logprobs)
    if fault := alternatives.problem(step):
        raise EngineError(f"The engine's alternatives do not fit its completion: {fault}")
    if beside is not None and beside_logprobs is not None and beside.size:
        if int(beside.min()) < 0 or int(beside.max()) >= vocab_size:
            raise EngineError(f"The engine returned an alternative that is no id from 0 to {vocab_size - 1}.")
        if not beside_logprobs.max() <= 1e-3:
            raise EngineError("The engine returned an alternative whose log-probability is no number or is above 0.")
    if entropy is not None and not (entropy.min() >= -1e-3 and entropy.max() < np.inf):
        raise EngineError("The engine returned an entropy that is not a number of at least 0.")


class StopTexts:
    """Looks for stop texts at the end of a completion. Loads the tokenizer for the first request with a stop text."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._codec: Codec | None = None

    def check(self, sampling: Sampling) -> None:
        """Raise :class:`RequestRefused` when there are stop texts but no tokenizer that tells the text of the ids."""
        if not sampling.stop or self._codec is not None:
            return
        from rollout_inspector.text.tokenizers import TokenizerUnusable, load

        try:
            self._codec = load(self._path)
        except (TokenizerUnusable, OSError) as error:
            raise RequestRefused(f"A stop text needs the model's tokenizer, which cannot be loaded: {error}") from error

    def completed(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        """The stop text that the last id completes; empty when there is none."""
        if not stop or self._codec is None:
            return ""
        pieces = self._codec.token_bytes(ids_array(list(ids[-1 - max(len(text.encode()) for text in stop) :])))
        tail, last = b"".join(pieces), len(pieces[-1])
        for text in stop:
            stop_bytes = text.encode()
            # It must end in the last piece: an earlier one would already have ended the completion.
            place = tail.find(stop_bytes, max(0, len(tail) - last - len(stop_bytes) + 1))
            if place >= 0:
                return text
        return ""


def reason(error: BaseException) -> str:
    """An exception as the end of a sentence: its kind and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__
