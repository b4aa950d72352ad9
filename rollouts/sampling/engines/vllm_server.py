"""A vLLM server that runs elsewhere: ids in, ids out, over HTTP."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rollout_inspector.formats.top_logprobs import id_named
from rollout_inspector.streams.alternatives import packed
from rollout_inspector.streams.trajectory import Ids
from rollouts.sampling.engines.http import PROBE_SECONDS, HttpEngine, ServerAnswer
from rollouts.sampling.engines.protocol import EngineError, Generation, GenerationRequest

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


class VllmServerEngine(HttpEngine):
    """Uses ``/inference/v1/generate`` where the server has it, else ``/v1/completions`` with ``return_token_ids``."""

    name = "vllm_server"

    async def _connect(self) -> None:
        self.version = await self._first("/version", lambda body: str(body["version"]), "")
        card = await self._first("/v1/models", self._pick_card, None)
        if card is None:
            model_name = f"the model {self.model!r}" if self.model else "a model"
            raise EngineError(f"The server at {self.url} does not list {model_name} under /v1/models.")
        self.model = card["id"]
        self.max_model_len = int(card.get("max_model_len") or 0)
        self._path = GENERATE if await self._takes_ids() else COMPLETIONS

    def _pick_card(self, body: Any) -> Any:
        return next((card for card in body["data"] if card["id"] == self.model or not self.model), None)

    async def _takes_ids(self) -> bool:
        """Whether the generate address exists and serves. A server that has it refuses an empty prompt (400 or 422)."""
        try:
            await self._call(GENERATE, {"token_ids": [], "sampling_params": {}}, PROBE_SECONDS)
        except ServerAnswer as error:
            return error.status in (400, 422)
        return True

    async def _ask(self, request: GenerationRequest) -> Generation:
        sampling = request.sampling
        room = self.max_model_len - len(request.prompt_ids)
        request_body: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": min(sampling.max_tokens, room),
            "stop_token_ids": list(sampling.stop_token_ids),
            "seed": sampling.seed,
            "ignore_eos": True,  # only stop_token_ids end a completion
            # One more than asked for: /inference/v1/generate counts the sampled token among them.
            "logprobs": sampling.alternatives + 1 if sampling.alternatives else 0,
        }
        if sampling.stop:
            request_body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        ids = request.prompt_ids.tolist()
        if self._path == GENERATE:
            body = {
                "model": self.model,
                "token_ids": ids,
                "sampling_params": request_body | {"detokenize": bool(sampling.stop)},
            }
        else:
            body = {
                "model": self.model, "prompt": ids, "return_token_ids": True, "add_special_tokens": False,
            } | request_body
            if sampling.alternatives:
                body["return_tokens_as_token_ids"] = True
        return await self._generate(self._path, body, request)

    def _scoring(self, ids: Ids) -> tuple[str, Any, Callable[[Any], Sequence[Any] | None]]:
        # A request samples at least one token.
        request_body = {"temperature": 1.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 0}
        tokens = ids.tolist()
        if self._path == GENERATE:
            body: dict[str, Any] = {"model": self.model, "token_ids": tokens, "sampling_params": request_body}
        else:
            body = {"model": self.model, "prompt": tokens, "add_special_tokens": False} | request_body

        def read(answer: Any) -> list[Any]:
            entries = (answer if self._path == GENERATE else answer["choices"][0])["prompt_logprobs"]
            if len(entries) != len(tokens):
                return []
            # At each place the token's value, by its id as text; nothing stands before the first token.
            pairs = zip(tokens[1:], entries[1:], strict=True)
            return [None, *(entry[str(token)]["logprob"] for token, entry in pairs)]

        return self._path, body, read

    def _read(self, answer: Any, request: GenerationRequest) -> Generation:
        try:
            choice = answer["choices"][0]
            token_ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
            content = logprobs.get("content")
            values = [entry["logprob"] for entry in content] if content else logprobs.get("token_logprobs")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(f"The server at {self.url} answered without a choice; is it vLLM?") from error
        if token_ids is None:
            raise EngineError(
                f"The server at {self.url} (vLLM {self.version or 'of an unknown version'}) returns no token ids. "
                "vLLM has return_token_ids since 0.10.2: upgrade the server."
            )
        if values is None:
            raise EngineError(f"The server at {self.url} returns no log-probabilities. Are they switched off?")
        reasons = choice.get("finish_reason"), choice.get("stop_reason")
        beside = None
        if n := request.sampling.alternatives:
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                beside = packed(_alternatives(content, logprobs.get("top_logprobs")), n)
            if beside is None:
                raise EngineError(
                    f"The server at {self.url} returns no alternatives with their ids. Upgrade it, or launch with 0."
                )
        fields = {**answer, **choice}
        return Generation.of(request.request_id, token_ids, values, *reasons, alternatives=beside, engine_fields=fields)


def _alternatives(content: Any, by_text: Any) -> list[list[tuple[int, float]]]:
    """Ids and log-probabilities at each place, in the form of either address."""
    if content:
        return [
            [(_id_of(value.get("token_id"), value.get("token")), float(value["logprob"])) for value in entry]
            for entry in (place["top_logprobs"] for place in content)
        ]
    return [[(_id_of(None, name), float(value)) for name, value in entry.items()] for entry in by_text]


def _id_of(token_id: Any, name: Any) -> int:
    """The id of a token, or that in ``token_id:123``, its name on servers before 0.32. Raises ``TypeError``."""
    number: Any = id_named(name, "The answer") if token_id is None else token_id
    return int(number)
