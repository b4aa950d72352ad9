"""What an engine is: ids in, ids and log-probabilities out, many requests at once; and the checks they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollouts.tito.trajectory import Floats, Ids


class EngineError(Exception):
    """The engine cannot go on, or what it returned makes no sense. The message is a sentence for the run page."""


class RequestRefused(EngineError):
    """One request that no engine could serve; the engine itself is well."""

    request_id = ""
    """Which one, where a step raises it."""


@dataclass(frozen=True)
class Sampling:
    """How a completion is drawn. What ends it is said here alone: no engine adds stop tokens of its own."""

    temperature: float = 1.0
    """0 = the likeliest token each time."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are never drawn; 0 = off."""
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end it too, with the token that completes one: no sampled id is cut off."""
    seed: int | None = None
    """Set = the same request gives the same completion again, alone or in a batch, where the engine can."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    request_id: str
    prompt_ids: Ids
    """``[P]``"""
    sampling: Sampling


@dataclass(frozen=True, eq=False)
class Generation:
    """A finished completion."""

    request_id: str
    completion_ids: Ids
    """``[C]``, as sampled, the stop token included."""
    logprobs: Floats
    """``[C]``, of the mode that the engine names."""
    finish_reason: str
    """``stop`` or ``length``."""
    stop_reason: str = ""
    """The id of the stop token, or the stop text, that ended it."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""


class Engine(Protocol):
    """One model, loaded. Not thread-safe: :class:`rollouts.engines.worker.EngineThread` owns it."""

    name: str
    version: str
    max_model_len: int
    vocab_size: int
    """Ids run from 0 to ``vocab_size - 1``."""
    logprobs_mode: str
    """``processed``: of the distribution that was sampled from. ``raw``: before temperature and cuts."""

    def add(self, request: GenerationRequest) -> None:
        """Take a request; allowed at any time. Raises :class:`RequestRefused`."""
        ...

    def step(self) -> list[Generation]:
        """Let every live request grow and return those that finished.

        Raises :class:`RequestRefused` with its ``request_id`` for one that a server refused after all, and anything
        else when the engine is lost.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request; no generation is returned for it. An id that is unknown or finished is ignored."""
        ...

    def has_unfinished(self) -> bool: ...

    def close(self) -> None: ...


def check_request(request: GenerationRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise :class:`RequestRefused` for what engines answer in many ways, some of them fatal."""
    ids, sampling = request.prompt_ids, request.sampling
    if not len(ids):
        raise RequestRefused("The prompt is empty; an engine needs at least one token to go on from.")
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
    if sampling.top_k < 0:
        raise RequestRefused(f"top_k is {sampling.top_k}; it must be 0 (all tokens) or more.")


def check_generation(generation: Generation, request: GenerationRequest, vocab_size: int) -> None:
    """Raise :class:`EngineError` where an engine's answer is nonsense, before anything of it is kept."""
    ids, logprobs = generation.completion_ids, generation.logprobs
    if not len(ids):
        raise EngineError("The engine returned a completion without a single token.")
    if len(ids) != len(logprobs):
        raise EngineError(f"The engine returned {len(ids)} ids and {len(logprobs)} log-probabilities.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise EngineError(f"The engine returned the id {bad}, and the model's ids run from 0 to {vocab_size - 1}.")
    if len(ids) > request.sampling.max_tokens:
        raise EngineError(f"The engine returned {len(ids)} tokens where {request.sampling.max_tokens} were allowed.")
    # Written so that NaN fails it: a third pass over each completion would cost as much again.
    if not (logprobs.min() > -np.inf and logprobs.max() <= 1e-3):
        raise EngineError("The engine returned a log-probability that is no number or lies above 0.")


def reason(error: BaseException) -> str:
    """An exception as the end of a sentence: its kind and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__
