"""An SGLang server that runs elsewhere: ``/generate`` with ``input_ids``."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from rollout_inspector.streams.alternatives import packed
from rollout_inspector.streams.trajectory import Ids
from rollouts.sampling.engines.http import PROBE_SECONDS, HttpEngine, ServerAnswer
from rollouts.sampling.engines.protocol import EngineError, Generation, GenerationRequest


class SglangServerEngine(HttpEngine):
    """An engine on SGLang's native address. ``/abort_request`` drops a request."""

    name = "sglang_server"
    logprobs_mode = "processed"
    """SGLang returns them after the temperature and before top_k, top_p and min_p, unless it was told otherwise."""

    async def _connect(self) -> None:
        info = await self._first("/get_server_info", dict, {}) or await self._first("/server_info", dict, {})
        model = await self._first("/get_model_info", dict, {}) or await self._first("/model_info", dict, {})
        self.version = str(info.get("version", ""))
        self.model = self.model or str(model.get("model_path", ""))
        self.max_model_len = int(info.get("context_length") or info.get("max_req_input_len") or 0)

    async def _ask(self, request: GenerationRequest) -> Generation:
        sampling = request.sampling
        room = self.max_model_len - len(request.prompt_ids)
        body = {
            "rid": request.request_id,
            "input_ids": request.prompt_ids.tolist(),
            "return_logprob": True,
            **({"top_logprobs_num": sampling.alternatives} if sampling.alternatives else {}),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "max_new_tokens": min(sampling.max_tokens, room),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,  # only stop_token_ids end a completion
                "skip_special_tokens": False,
                "no_stop_trim": True,
            }
            | ({"sampling_seed": sampling.seed} if sampling.seed is not None else {})
            | ({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        return await self._generate("/generate", body, request)

    def _scoring(self, ids: Ids) -> tuple[str, Any, Callable[[Any], Sequence[Any] | None]]:
        tokens = ids.tolist()
        body = {
            "input_ids": tokens,
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
        }

        def read(answer: Any) -> list[Any]:
            pairs = answer["meta_info"]["input_token_logprobs"]  # [logprob, id, text]; the first has no value
            return [pair[0] for pair in pairs] if [pair[1] for pair in pairs] == tokens else []

        return "/generate", body, read

    def _read(self, answer: Any, request: GenerationRequest) -> Generation:
        try:
            meta = answer["meta_info"]
            pairs = meta.get("output_token_logprobs")
            # Older servers report the ids only beside their log-probabilities: [logprob, id, text].
            token_ids = answer.get("output_ids")
            if token_ids is None and pairs is not None:
                token_ids = [pair[1] for pair in pairs]
            finish = meta.get("finish_reason") or {}
            finish = finish if isinstance(finish, dict) else {"type": str(finish)}
            logprobs = None if pairs is None else [pair[0] for pair in pairs]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(f"The server at {self.url} did not answer as SGLang's /generate does.") from error
        if token_ids is None:
            raise EngineError(f"The server at {self.url} returns no token ids; it needs an SGLang with output_ids.")
        if logprobs is None:
            raise EngineError(f"The server at {self.url} returns no log-probabilities, though they were asked for.")
        beside = None
        if n := request.sampling.alternatives:
            with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
                places = meta["output_top_logprobs"]
                beside = packed([[(int(pair[1]), float(pair[0])) for pair in place or ()] for place in places], n)
            if beside is None:
                raise EngineError(f"The server at {self.url} returns no alternatives, though they were asked for.")
        reasons = finish.get("type"), finish.get("matched")
        return Generation.of(request.request_id, token_ids, logprobs, *reasons, alternatives=beside, engine_fields=meta)

    async def _drop(self, request_id: str) -> None:
        with contextlib.suppress(ServerAnswer, OSError, ValueError):
            await self._call("/abort_request", {"rid": request_id}, PROBE_SECONDS)
