"""The vLLM engine as a worker builds it, with a witness: what went in and what came out, seen at the engine itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rollouts.engines import Generation, GenerationRequest, Sampling
from rollouts.engines.vllm_engine import VllmEngine
from rollouts.engines.worker import EngineThread
from rollouts.tito.trajectory import Ids, ids_array


class Witness:
    """Ids by request, and how many requests the engine held at once."""

    def __init__(self) -> None:
        self.sent: dict[str, Ids] = {}
        self.received: dict[str, Ids] = {}
        self.cached_tokens = 0
        self.live = self.peak_live = 0

    def forget(self) -> None:
        self.__init__()  # type: ignore[misc]


witness = Witness()
Result = TypeVar("Result")
_errands: dict[str, Callable[[VllmEngine], None]] = {}


class ProofEngine:
    """``VllmEngine`` under a witness. It also runs errands: functions that need the engine to themselves."""

    def __init__(self, path: str, **options: Any) -> None:
        self._vllm = VllmEngine(path, **options)
        self.name, self.version = self._vllm.name, self._vllm.version
        self.max_model_len, self.vocab_size = self._vllm.max_model_len, self._vllm.vocab_size
        self.logprobs_mode = self._vllm.logprobs_mode
        self._due: list[str] = []

    def add(self, request: GenerationRequest) -> None:
        if request.request_id in _errands:
            self._due.append(request.request_id)
            return
        self._vllm.add(request)
        witness.sent[request.request_id] = request.prompt_ids.copy()
        witness.live += 1
        witness.peak_live = max(witness.peak_live, witness.live)

    def step(self) -> list[Generation]:
        if self._due:
            name = self._due.pop()
            _errands.pop(name)(self._vllm)
            return [Generation(name, ids_array([0]), np.zeros(1, dtype=np.float32), "stop")]
        generations = self._vllm.step()
        for generation in generations:
            witness.received[generation.request_id] = generation.completion_ids.copy()
            witness.cached_tokens += generation.cached_tokens
        witness.live -= len(generations)
        return generations

    def abort(self, request_id: str) -> None:
        self._vllm.abort(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._due) or self._vllm.has_unfinished()

    def close(self) -> None:
        self._vllm.close()


def run_errand(thread: EngineThread, work: Callable[[VllmEngine], Result]) -> Result:
    """Call ``work`` with the engine in the thread that owns it, while it has nothing else to do."""
    results: list[Result] = []
    name = f"errand-{uuid.uuid4()}"
    _errands[name] = lambda engine: results.append(work(engine))
    thread.submit(GenerationRequest(name, ids_array([0]), Sampling(max_tokens=1))).result()
    return results[0]
