"""vLLM inside this process: ids in, ids out. The only module that imports vllm, and only at first use."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollout_inspector.streams.alternatives import packed
from rollout_inspector.streams.recorded_renders import parsed
from rollout_inspector.streams.trajectory import Floats, Ids
from rollouts.sampling.engines.protocol import (
    EngineError, Generation, GenerationRequest, RequestRefused, StopTexts, check_request, reason
)

# vllm reads these when it is imported. The engine stays in this process and sends no usage reports. On a CPU more than
# one thread makes a small model ten times slower. A GPU without flashinfer's kernels needs vllm's own sampler.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # a command's standard output is its result
    "OMP_NUM_THREADS": "1",
    # On the CPU each number of tokens in a step has separate kernels. By default 1,024 of them are kept, some 300 MB.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


class SampledTokens(NamedTuple):
    """Tokens of a completion, and what vLLM tells at the place of each."""

    ids: list[int]
    logprobs: list[float]
    entries: list[Any]
    """Ids and log-probabilities of the likeliest tokens and of the sampled one; empty = none were asked for."""
    masks: list[Any]  # The ids that were left to draw from; None = the engine does not tell them.


def _sampled(out: Any, has_alternatives: bool) -> SampledTokens:
    """The tokens of an output. ``flat_logprobs`` are a few lists, where vLLM else makes two objects for each token."""
    completion = out.outputs[0]
    ids, flat = list(completion.token_ids), completion.logprobs
    starts = [] if flat is None else flat.start_indices
    if [flat.token_ids[start] for start in starts] != ids:  # the sampled token stands first at its place
        raise EngineError(f"vLLM returned {len(ids)} ids without a log-probability for each.")
    entries: list[Any] = [()] * len(ids)
    if has_alternatives:
        places = zip(starts, flat.end_indices, strict=True)
        entries = [dict(zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True)).items() for a, b in places]
    masks = [None] * len(ids) if completion.sampling_mask is None else list(completion.sampling_mask.token_ids)
    return SampledTokens(ids, [flat.logprobs[start] for start in starts], entries, masks)


class VllmEngine:
    """vLLM's ``LLMEngine`` with continuous batching and prefix caching, on its CPU build and on a GPU. The calls are
    the same. What runs below differs: Model Runner V1 on the CPU build, V2 where Triton has a backend."""

    name = "vllm"
    logprobs_mode = "processed"

    def __init__(
        self,
        path: str | Path,
        max_model_len: int | None = None,
        max_live: int = 256,
        kv_cache_bytes: int | None = None,
        dtype: str | None = None,
        gpu_memory_utilization: float = 0.85,
        **options: Any,
    ) -> None:
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        import torch
        import vllm
        import vllm.exceptions
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        self.version = str(vllm.__version__)
        arguments: dict[str, Any] = {
            "model": str(path),
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "max_num_seqs": max_live,
            "disable_log_stats": True,
            # The model folder's generation_config would add sampling rules that the run does not name.
            "generation_config": "vllm",
        }
        if current_platform.is_cpu():
            # enforce_eager leaves some small functions compiled: ten seconds of a C++ compiler at the first request.
            torch.compiler.set_stance("force_eager")
            arguments |= {
                "dtype": dtype or "float32",
                "enforce_eager": True,
                # A seeded request with a split prompt kills the engine of the CPU build.
                "enable_chunked_prefill": False,
                "kv_cache_memory_bytes": kv_cache_bytes or 64 << 20,
                "block_size": 32,  # with larger blocks a short prompt is never cached
            }
        else:
            arguments |= {"dtype": dtype or "auto", "gpu_memory_utilization": gpu_memory_utilization}
            if kv_cache_bytes:
                arguments["kv_cache_memory_bytes"] = kv_cache_bytes
        if max_model_len:
            arguments["max_model_len"] = max_model_len
        self.llm_engine: Any = LLMEngine.from_engine_args(EngineArgs(**(arguments | options)))
        """vLLM's own engine, for measurements without this one."""
        model_config = self.llm_engine.model_config
        self.max_model_len = int(model_config.max_model_len)
        self.vocab_size = int(model_config.get_vocab_size())
        self._params, self._kinds = SamplingParams, RequestOutputKind
        # Until some release before 0.32, vllm refused a request with a ValueError.
        self._refusals = ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError)
        self._internal: dict[str, str] = {}  # our request ids -> vllm's ids
        self._stops = StopTexts(path)
        self._watched: dict[str, tuple[tuple[str, ...], SampledTokens]] = {}  # stop texts, and what came so far
        self._tells_masks = bool(options.get("return_sampling_mask"))
        self._alternatives: dict[str, int] = {}  # of the requests that ask for some
        self._finished: list[Generation] = []  # while streams were scored

    def add(self, request: GenerationRequest) -> None:
        check_request(request, self.vocab_size, self.max_model_len)
        self._stops.check(request.sampling)
        sampling = request.sampling
        prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
        try:
            params = self.new_params(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                # Asked for kept sets, vLLM wants a bound of their size.
                top_k=sampling.top_k or (self.vocab_size if self._tells_masks else 0),
                min_p=sampling.min_p,
                max_tokens=min(sampling.max_tokens, self.max_model_len - len(request.prompt_ids)),
                stop_token_ids=list(sampling.stop_token_ids),
                seed=sampling.seed,
                ignore_eos=True,  # only stop_token_ids end a completion
                logprobs=sampling.alternatives,  # beside that of the sampled token
                output_kind=self._kinds.DELTA if sampling.stop else self._kinds.FINAL_ONLY,
                **({} if request.forced_ids is None else {"trace_decode_token_ids": request.forced_ids.tolist()}),
            )
            self._internal[request.request_id] = self.llm_engine.add_request(request.request_id, prompt, params)
        except self._refusals as error:  # vllm's own checks of one request; the engine still works
            raise RequestRefused(f"vLLM refused the request: {error}") from error
        if sampling.stop:
            self._watched[request.request_id] = sampling.stop, SampledTokens([], [], [], [])
        if sampling.alternatives:
            self._alternatives[request.request_id] = sampling.alternatives

    def new_params(self, **values: Any) -> Any:
        """vLLM's sampling parameters: ids without text, returned when a completion ends, unless ``values`` differ."""
        fixed = {"detokenize": False, "flat_logprobs": True}
        return self._params(**fixed, **{"output_kind": self._kinds.FINAL_ONLY, **values})

    def score(self, streams: Sequence[Ids]) -> list[Floats]:
        """The log-probabilities ``[T]`` of each stream at temperature 1; the first is NaN: nothing stands before it.
        Each stream must be shorter than ``max_model_len``. Requests under way grow meanwhile; the next step returns
        what finished. Raises :class:`RequestRefused`."""
        # vLLM scores the prompt of a request, and a request samples at least one token.
        params = self.new_params(temperature=1.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        names = [f"score-{place}" for place in range(len(streams))]
        scored: dict[str, Floats | None] = dict.fromkeys(names)
        try:
            for name, ids in zip(names, streams, strict=True):
                self.llm_engine.add_request(name, {"prompt_token_ids": ids.tolist()}, params)
        except self._refusals as error:
            self.llm_engine.abort_request(names)
            raise RequestRefused(f"vLLM refused to score a stream: {error}") from error
        while any(values is None for values in scored.values()):
            for out in self.llm_engine.step():
                if out.request_id not in scored:
                    self._finished += self._taken(out)
                elif out.finished:
                    # At each place the prompt's token stands first, and nothing at the first place.
                    flat = out.prompt_logprobs
                    values = [np.nan, *(flat.logprobs[start] for start in flat.start_indices[1:])]
                    scored[out.request_id] = np.asarray(values, dtype=np.float32)
        return [values for values in scored.values() if values is not None]

    def step(self) -> list[Generation]:
        done, self._finished = self._finished, []
        if done:
            return done
        return [generation for out in self.llm_engine.step() for generation in self._taken(out)]

    def _taken(self, out: Any) -> list[Generation]:
        """What an output of vLLM finishes: a generation, or none."""
        watched = self._watched.get(out.request_id)
        if watched is not None:
            generation = self._watch(out, *watched)
            return [] if generation is None else [generation]
        return [self._generation(out, _sampled(out, out.request_id in self._alternatives))] if out.finished else []

    def _watch(self, out: Any, stop: tuple[str, ...], sampled: SampledTokens) -> Generation | None:
        """Take the new tokens of a completion that a stop text may end. When one does, the later tokens are dropped."""
        columns: Sequence[Any] = sampled
        for values in zip(*_sampled(out, out.request_id in self._alternatives), strict=True):
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            if text := self._stops.completed(sampled.ids, stop):
                generation = self._generation(out, sampled, text)
                if not out.finished:
                    self.llm_engine.abort_request([out.request_id])
                return generation
        return self._generation(out, sampled) if out.finished else None

    def _generation(self, out: Any, sampled: SampledTokens, text: str = "") -> Generation:
        self._internal.pop(out.request_id, None)
        self._watched.pop(out.request_id, None)
        completion = out.outputs[0]
        finish, stop = ("stop", text) if text else (completion.finish_reason, completion.stop_reason)
        n = self._alternatives.pop(out.request_id, 0)
        # The sampled token is there too. It goes out again where it is not among the n likeliest.
        beside = packed([list(entry) for entry in sampled.entries], n) if n else None
        drafts = completion.spec_decode_metrics
        fields = {
            "weight_versions": [vars(span) for span in completion.weight_versions or ()] or None,
            "sampling_mask": None if None in sampled.masks else sampled.masks,
            "routed_experts": completion.routed_experts,
            "metrics": None if drafts is None else {"speculative_decoding": drafts.to_dict()},
        }
        cached = int(out.num_cached_tokens or 0)
        return Generation.of(out.request_id, sampled.ids, sampled.logprobs, finish, stop, cached, beside, fields)

    def abort(self, request_id: str) -> None:
        self._finished = [generation for generation in self._finished if generation.request_id != request_id]
        self._watched.pop(request_id, None)
        self._alternatives.pop(request_id, None)
        if self._internal.pop(request_id, None) is not None:
            self.llm_engine.abort_request([request_id])

    def has_unfinished(self) -> bool:
        return bool(self._finished) or bool(self.llm_engine.has_unfinished_requests())

    def close(self) -> None:
        self._finished.clear()
        self._internal.clear()
        self._watched.clear()
        self._alternatives.clear()
        self.llm_engine.engine_core.shutdown()


def tool_call_reader(name: str, tokenizer: Any) -> Callable[[str, Any], tuple[str, list[dict[str, Any]]]]:
    """``(text, tools) -> (content, calls)``, by the parser that ``vllm serve --tool-call-parser NAME`` takes.
    ``tokenizer`` is a transformers tokenizer. Raises :class:`EngineError` with a sentence. The import takes seconds."""
    option = f"The option tool_call_parser names {name!r}"
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise EngineError(
            f"{option}, a parser of vLLM, and the worker's machine lacks the package {error.name}. Install vLLM there, "
            "or remove the option."
        ) from error
    if name not in (names := sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})):
        raise EngineError(f"{option}, and this vLLM has no such parser; it has {', '.join(names)}.")
    parsers: dict[str, Any] = {}  # one for each set of tools: building a parser reads the whole vocabulary

    def read(text: str, tools: Any) -> tuple[str, list[dict[str, Any]]]:
        try:
            key = json.dumps(tools, sort_keys=True)
            if key not in parsers:
                parsers.clear()
                request = ChatCompletionRequest(messages=[], tools=list(tools) if tools else None)
                parsers[key] = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools), request
            extracted = parsers[key][0].extract_tool_calls(text, parsers[key][1])
            calls = [call.model_dump(include={"id", "type", "function"}) for call in extracted.tool_calls]
        except Exception:
            return text, []  # a model may write any text
        for call in calls:
            function = call["function"]
            call["function"] = {"name": function["name"], "arguments": parsed(function["arguments"])}
        return (extracted.content or "", calls) if calls else (text, [])

    try:
        ToolParserManager.get_tool_parser(name)(tokenizer, None)
    except Exception as error:
        raise EngineError(f"{option}, which cannot be used with this model: {reason(error)}") from error
    return read
