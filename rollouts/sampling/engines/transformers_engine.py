"""The default engine: a Hugging Face causal LM on the CPU with continuous batching and reuse of keys and values."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from rollout_inspector.diagnose.loss_weights.damage import DamageCase
from rollout_inspector.streams.alternatives import KeptSets
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, ids_array
from rollouts.sampling.engines.gradients import MAX_TOKENS, measure
from rollouts.sampling.engines.kv_slots import Slot, SlotCache, grouped_attention
from rollouts.sampling.engines.protocol import (
    EngineError, Generation, GenerationRequest, RequestRefused, Sampling, StopTexts, check_request
)

_BLOCK = 64


class Draws:
    """The uniform random numbers of one request. With a seed they are the same in every batch."""

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed % 2**63)
        self._block: list[float] = []
        self._next = 0

    def next(self) -> float:
        if self._next == len(self._block):
            self._block = torch.rand(_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
            self._next = 0
        self._next += 1
        return self._block[self._next - 1]


Alternatives = tuple[list[int], list[float], float]
"""The likeliest ids at a place, at most as many as there are, their log-probabilities, and the entropy in nats."""


def draw(
    logits: Tensor, samplings: list[Sampling], draws: list[Draws], forced: Sequence[int | None] = ()
) -> list[tuple[int, float, Alternatives | None]]:
    """One token for each row of ``logits [n, V]``, and its log-probability under the distribution it was drawn from.

    Also the alternatives under that distribution, where the request asks for some. ``forced``: of each row the token
    that it takes in place of a drawn one; None = draw.

    The order is vLLM's: temperature, min_p, top_k, top_p. A greedy row (temperature 0) takes the likeliest token; its
    log-probability is that of the model's unchanged distribution.
    """
    logits = logits.float()
    temperatures = [item.temperature or 1.0 for item in samplings]
    if any(value != 1.0 for value in temperatures):
        logits = logits / torch.tensor(temperatures, dtype=torch.float32)[:, None]
    for row, sampling in enumerate(samplings):
        if sampling.temperature and (sampling.min_p or sampling.top_k or sampling.top_p < 1):
            logits[row] = _cut(logits[row], sampling)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    # The inverse of the cumulative distribution, in double precision: one uniform number decides a token.
    cumulative = torch.cumsum(log_probabilities.double().exp(), dim=-1)
    uniform = torch.tensor([item.next() for item in draws], dtype=torch.float64)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform, right=True)[:, 0]
    greedy = torch.tensor([item.temperature == 0 for item in samplings])
    ids = torch.where(greedy, logits.argmax(dim=-1), tokens.clamp_(max=logits.shape[-1] - 1))
    for row, token in enumerate(forced):
        ids[row] = ids[row] if token is None else token
    chosen = log_probabilities.gather(1, ids[:, None])[:, 0]
    return [
        (item, logprob, _alternatives(log_probabilities[row], n) if (n := samplings[row].alternatives) else None)
        for row, (item, logprob) in enumerate(zip(ids.tolist(), chosen.tolist(), strict=True))
    ]


def _alternatives(row: Tensor, n: int) -> Alternatives:
    """The ``n`` likeliest tokens of log-probabilities ``[V]``, and their entropy."""
    top = torch.topk(row, min(n, row.numel()))
    entropy = -(row.double().exp() * row.double()).nan_to_num(nan=0.0).sum()  # 0 * log 0 is 0
    return top.indices.tolist(), top.values.tolist(), max(float(entropy), 0.0)


def _cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """One row in which every token that must not be drawn is at minus infinity."""
    logits = logits.clone()
    if sampling.min_p:
        probabilities = torch.softmax(logits, dim=-1)
        logits[probabilities < sampling.min_p * probabilities.max()] = -torch.inf
    if 0 < sampling.top_k < logits.numel():
        logits[logits < torch.topk(logits, sampling.top_k).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        ordered, order = torch.sort(logits)
        cumulative = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
        drop = cumulative <= 1 - sampling.top_p
        drop[-1] = False
        logits[order[drop]] = -torch.inf
    return logits


ATTENTION = "rollouts_grouped"
PREFILL_TOKENS = 2048
"""Padded prompt tokens in one forward. They bound its memory and the time that live requests wait for it."""
CHUNK = 256  # Prompt tokens of one sequence in one forward.
WORTH_WAITING = 32  # A prompt that shares so many tokens with one being computed waits a step and copies them.


@dataclass(eq=False)
class _Live:
    request: GenerationRequest
    draws: Draws
    room: int  # How many more tokens it may get, by its own limit and the model's.
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)


class TransformersEngine:
    """Any causal LM with full attention that transformers loads. One ``step`` adds one token to each live request."""

    name = "transformers"
    version = transformers.__version__
    logprobs_mode = "processed"

    def __init__(
        self,
        path: str | Path,
        max_live: int = 64,
        kept: int = 32,
        max_model_len: int | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        if not (Path(path) / "config.json").is_file():
            raise EngineError(f"The folder {path} holds no config.json, so there is no model to load.")
        disable_progress_bar()  # a worker's log is not a terminal
        AttentionInterface.register(ATTENTION, grouped_attention)
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise EngineError(
                "The transformers engine serves only models with full attention; this one has "
                f"{', '.join(sorted(kinds))}. Serve it with the vllm engine."
            )
        if getattr(config, "attn_logit_softcapping", None):
            raise EngineError("The transformers engine does not support capped attention scores. Serve it with vllm.")
        self._model = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=torch.float32, attn_implementation=ATTENTION
        ).eval()
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = max_model_len or int(config.max_position_embeddings)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._cache = SlotCache(config.num_hidden_layers, max_live + kept, heads, head_dim, torch.float32)
        self._stops = StopTexts(path)
        self._max_live = max_live
        self._n_live = 0  # slots [0, n_live) are live
        self._waiting: deque[GenerationRequest] = deque()
        self._clock = count(1)

    def add(self, request: GenerationRequest) -> None:
        check_request(request, self.vocab_size, self.max_model_len)
        self._stops.check(request.sampling)
        self._waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._n_live)

    @torch.inference_mode()  # it moves tensors that a step wrote
    def abort(self, request_id: str) -> None:
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return
        for index in range(self._n_live):
            if self._cache.slots[index].owner.request.request_id == request_id:
                self._release(index)
                return

    def close(self) -> None:
        self._waiting.clear()
        self._n_live = 0
        self._cache.slots.clear()
        self._model = None

    @torch.inference_mode()
    def load_weights(self, weights: Mapping[str, torch.Tensor], reset_cache: bool = True) -> None:
        """Take other weights of the same model. Raises :class:`EngineError` while a request is under way.
        ``reset_cache``: forget the keys and values of finished requests, which the old weights have made."""
        if self.has_unfinished():
            raise EngineError("Weights are taken between requests, and one is under way.")
        self._model.load_state_dict(weights)
        if reset_cache:
            for slot in self._cache.slots:
                slot.length = 0

    @torch.inference_mode()
    def score(
        self, streams: Sequence[Ids], temperature: float = 1.0, kept: Sequence[KeptSets] | None = None
    ) -> list[Floats]:
        """The log-probabilities ``[T]`` of each stream at a temperature; the first is NaN: nothing stands before it.
        Each stream may be as long as ``max_model_len``. One stream at a time and ``CHUNK`` tokens in a forward, so that
        the logits of a long stream never stand in memory together. Requests under way are not touched. ``kept``: of
        each stream the kept sets. The logarithms of their mass are returned then, NaN where a token has none."""
        return [self._scored(ids, temperature, None if kept is None else kept[n]) for n, ids in enumerate(streams)]

    def _scored(self, ids: Ids, temperature: float, kept: KeptSets | None = None) -> Floats:
        sizes, sets = kept or (NO_IDS, NO_IDS)
        place_of = np.repeat(np.arange(len(sizes)), sizes)  # of each id of the sets
        is_known = (sets >= 0) & (sets < self.vocab_size)
        values = np.full(len(ids), np.nan, dtype=np.float32)
        tokens, cache = torch.from_numpy(ids.astype(np.int64))[None], DynamicCache()
        for start in range(0, len(ids) - 1, CHUNK):
            stop = min(start + CHUNK, len(ids) - 1)
            positions = torch.arange(start, stop)[None]
            hidden = torch.arange(stop) > positions[:, :, None]
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
            out = self._model(
                input_ids=tokens[:, start:stop],
                position_ids=positions,
                attention_mask=mask[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            logprobs = torch.log_softmax(out.logits[0].float() / temperature, dim=-1)
            if kept is None:
                values[start + 1 : stop + 1] = logprobs.gather(1, tokens[0, start + 1 : stop + 1, None])[:, 0].numpy()
                continue
            here = is_known & (place_of > start) & (place_of <= stop)
            probabilities = logprobs.double().exp()[place_of[here] - start - 1, sets[here]].numpy()
            masses = np.bincount(place_of[here] - start - 1, probabilities, stop - start)
            values[start + 1 : stop + 1] = np.log(masses, where=masses > 0, out=np.full(len(masses), np.nan))
        return values

    def damage(self, case: DamageCase, layers: int | None = None) -> dict[str, Any]:
        """:func:`measure` with the weights of this engine, on a GPU where there is one. Requests are not touched.
        Raises :class:`RequestRefused` for a stream that is too long. Rotary positions have no end."""
        config = self._model.config
        has_end = not any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta"))
        limit = self.max_model_len if has_end else MAX_TOKENS
        for ids in case.sequences:
            if len(ids) > limit:
                raise RequestRefused(f"It has {len(ids):,} tokens, and at most {limit:,} are measured.")
        self._model.set_attn_implementation("sdpa")  # the engine's own has no backward pass
        try:
            return measure(case, self._model.to("cuda" if torch.cuda.is_available() else "cpu"), layers)
        finally:
            self._model.to("cpu").set_attn_implementation(ATTENTION)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Add one token to every live request: one forward for those that go on, one or more for prompts that start."""
        going_on = self._n_live
        self._admit()
        if going_on:
            # Over the last sampled token of each.
            slots = self._cache.slots[:going_on]
            tokens = torch.tensor([[slot.owner.ids[-1]] for slot in slots])
            positions = torch.tensor([[slot.length] for slot in slots])
            for slot in slots:
                slot.extend(ids_array([slot.owner.ids[-1]]))
            self._sample(slots, self._forward(0, going_on, tokens, positions))
        if self._n_live > going_on:
            self._forward_prompts(going_on, self._n_live)
        finished = []
        for index in reversed(range(self._n_live)):
            generation = self._finished(self._cache.slots[index].owner)
            if generation is not None:
                finished.append(generation)
                self._release(index)
        return finished[::-1]

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Assign slots to waiting requests until the batch or this step's prompt budget is full."""
        first_new, longest = self._n_live, 0
        postponed: list[GenerationRequest] = []
        while self._waiting and self._n_live < self._max_live:
            request = self._waiting.popleft()
            prompt = request.prompt_ids
            shared = [slot.shared_with(prompt) for slot in self._cache.slots]
            best = int(np.argmax(shared))
            # The longest prefix that a request admitted in this step is about to compute.
            fresh = (slot.owner.request.prompt_ids for slot in self._cache.slots[first_new : self._n_live])
            promised = max((common_prefix(other, prompt[:-1]) for other in fresh), default=0)
            if promised >= WORTH_WAITING and promised > shared[best]:
                postponed.append(request)
                continue
            chunk = min(len(prompt) - shared[best], CHUNK)
            if self._n_live > first_new and max(longest, chunk) * (self._n_live - first_new + 1) > PREFILL_TOKENS:
                self._waiting.appendleft(request)
                break
            longest = max(longest, chunk)
            self._seat(request, best, shared[best])
        self._waiting.extendleft(reversed(postponed))

    def _seat(self, request: GenerationRequest, source: int, shared: int) -> None:
        """Put a request into the first slot behind the live ones, with the shared keys and values in place."""
        cache, seat = self._cache, self._n_live
        slots = cache.slots
        cache.reserve(min(len(request.prompt_ids) + request.sampling.max_tokens, self.max_model_len))
        if source >= seat and shared == slots[source].length:
            cache.swap(source, seat)
        else:
            spare = [index for index in range(seat, len(slots)) if index != source] or [source]
            victim = min(spare, key=lambda index: (slots[index].length > 0, slots[index].used_at))
            cache.swap(victim, seat)
            if victim != source:
                cache.copy(victim if source == seat else source, seat, shared)
        slot = slots[seat]
        slot.length = shared
        room = min(request.sampling.max_tokens, self.max_model_len - len(request.prompt_ids))
        slot.owner = _Live(request, Draws(request.sampling.seed), room, cached=shared)
        self._n_live += 1

    def _release(self, index: int) -> None:
        """Keep a finished slot's tokens for the next turn and close the gap that it leaves among the live slots."""
        slot = self._cache.slots[index]
        slot.owner = None
        slot.used_at = next(self._clock)
        self._n_live -= 1
        self._cache.swap(index, self._n_live)

    # -- forwards ------------------------------------------------------------------------------------------------------

    def _forward_prompts(self, low: int, high: int) -> None:
        """Compute the missing part of the prompts in slots ``[low, high)``, a chunk at a time, with pads in front."""
        while True:
            slots = self._cache.slots[low:high]
            missing = [slot.owner.request.prompt_ids[slot.length : slot.length + CHUNK] for slot in slots]
            width = max(len(chunk) for chunk in missing)
            tokens = torch.zeros((len(slots), width), dtype=torch.long)
            positions = torch.full((len(slots), width), -1, dtype=torch.long)
            for row, (slot, chunk) in enumerate(zip(slots, missing, strict=True)):
                if len(chunk):
                    tokens[row, width - len(chunk) :] = torch.from_numpy(chunk.astype(np.int64))
                    positions[row, width - len(chunk) :] = torch.arange(slot.length, slot.length + len(chunk))
                    slot.extend(chunk)
            logits = self._forward(low, high, tokens, positions)
            ready = [
                row
                for row, slot in enumerate(slots)
                if len(missing[row]) and slot.length == len(slot.owner.request.prompt_ids)
            ]
            if ready:
                self._sample([slots[row] for row in ready], logits[ready])
            if all(slot.length == len(slot.owner.request.prompt_ids) for slot in slots):
                return

    def _forward(self, low: int, high: int, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The logits ``[n, V]`` after the last token of each row."""
        length = max(slot.length for slot in self._cache.slots[low:high])
        self._cache.begin(low, high, positions, length)
        hidden = torch.arange(length) > positions[:, :, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
        out = self._model(
            input_ids=tokens,
            position_ids=positions.clamp(min=0),
            attention_mask=mask[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _sample(self, slots: list[Slot], logits: torch.Tensor) -> None:
        live = [slot.owner for slot in slots]
        completions = [item.request.forced_ids for item in live]
        forced = [None if ids is None else int(ids[len(item.ids)]) for item, ids in zip(live, completions, strict=True)]
        sampled = draw(logits, [item.request.sampling for item in live], [item.draws for item in live], forced)
        for item, (token, logprob, alternatives) in zip(live, sampled, strict=True):
            item.ids.append(token)
            item.logprobs.append(logprob)
            if alternatives is not None:
                item.alternatives.append(alternatives)

    def _finished(self, live: _Live) -> Generation | None:
        sampling = live.request.sampling
        text = self._stops.completed(live.ids, sampling.stop)
        stopped = live.ids[-1] in sampling.stop_token_ids or bool(text)
        if not stopped and len(live.ids) < live.room:
            return None
        finish, stop = ("stop", text or live.ids[-1]) if stopped else ("length", None)
        generation = Generation.of(live.request.request_id, live.ids, live.logprobs, finish, stop, live.cached)
        if not sampling.alternatives:
            return generation
        return replace(
            generation,
            alternative_ids=ids_array([value for ids, _, _ in live.alternatives for value in ids]),
            alternative_logprobs=np.array(
                [value for _, row, _ in live.alternatives for value in row], dtype=np.float32
            ),
            entropy=np.array([entropy for *_, entropy in live.alternatives], dtype=np.float32),
        )
