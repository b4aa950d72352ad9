"""The vLLM engine as a worker builds it, with a witness that records what went in and what came out."""

from collections.abc import Sequence
from typing import Any

from rollout_inspector.streams.trajectory import Floats, Ids
from rollouts.sampling.engines import Generation, GenerationRequest
from rollouts.sampling.engines.vllm_engine import VllmEngine
from tools.gpu_proof.bare import Measured, PlainVllm, Plan, run_bare


class Witness:
    """Ids by request, and how many requests the engine held at once."""

    def __init__(self) -> None:
        self.sent: dict[str, Ids] = {}
        self.received: dict[str, Ids] = {}
        self.cached_tokens = 0
        self.live = self.peak_live = 0


class ProofEngine(VllmEngine):
    """``VllmEngine`` with a witness."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.witness = Witness()

    def add(self, request: GenerationRequest) -> None:
        super().add(request)
        self.witness.sent[request.request_id] = request.prompt_ids.copy()
        self.witness.live += 1
        self.witness.peak_live = max(self.witness.peak_live, self.witness.live)

    def step(self) -> list[Generation]:
        generations = super().step()
        for generation in generations:
            self.witness.received[generation.request_id] = generation.completion_ids.copy()
            self.witness.cached_tokens += generation.cached_tokens
        self.witness.live -= len(generations)
        return generations


# -- run in the engine's process by ``EngineOwner.call``; nothing here may need Django ---------------------------------


def new_witness(engine: ProofEngine) -> None:
    engine.witness = Witness()


def witness_of(engine: ProofEngine) -> Witness:
    return engine.witness


def reset_cache(engine: ProofEngine) -> None:
    engine.llm_engine.reset_prefix_cache()


def score(streams: Sequence[Ids], engine: ProofEngine) -> list[Floats]:
    """The log-probabilities ``[T]`` of each stream, by vLLM itself."""
    return engine.score(streams)


def bare(work: Sequence[Plan], max_live: int, engine: ProofEngine) -> Measured:
    reset_cache(engine)
    return run_bare(PlainVllm(engine), work, max_live)
