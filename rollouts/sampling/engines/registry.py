"""The registry of engines: every fact that the launch, its form and the worker need about an engine. An engine is one
module and one entry of ``ENGINES``. No other module knows an engine by its name."""

import importlib
from dataclasses import dataclass
from typing import Any

from rollout_inspector.streams.alternatives import MAX_ALTERNATIVES
from rollouts.sampling.engines.protocol import Engine, EngineError, reason


@dataclass(frozen=True)
class EngineSpec:
    """One engine."""

    name: str
    build: str
    """``package.module:Class``. Imported when an engine is built, because torch and vllm take seconds and gigabytes."""
    title: str = ""  # The engine's name in sentences.
    seed_note: str = ""  # How far a seed makes a run repeatable, for the form and the page of a run.
    is_server: bool = False
    """The engine asks a server. It is built with the server's address instead of a model's folder."""
    is_light: bool = False
    """The engine computes next to nothing here. A worker starts a separate process for each other engine."""
    is_offered: bool = True  # Whether a run can choose the engine. False = for tests alone.
    temperature_range: tuple[float, float] | None = None
    """The lowest and the highest temperature above 0 that the engine samples at. None = all that the form accepts."""

    most_alternatives: int = 0  # The most alternatives of a token that the engine returns; 0 = it returns none.
    knows_entropy: bool = False  # The engine returns the entropy beside the alternatives. It does not follow from them.

    scores: bool = False  # The engine has ``score``: the log-probabilities of ids that it did not sample.
    scores_full_context: bool = False
    """It scores streams as long as the model's limit. The others sample one token more, so they need its place."""

    sums_kept_sets: bool = False  # Its ``score`` also adds up kept sets.

    replays: bool = False  # It computes a given completion token by token (``GenerationRequest.forced_ids``).

    scores_at_temperature: bool = False  # It scores at other temperatures than 1 too.

    has_gradients: bool = False  # The engine has ``damage``: it compares two gradients of its model.

    def alternatives_problem(self, n: int) -> str:
        """Why the engine cannot return so many alternatives of each token, as a sentence; empty = it can."""
        if n <= self.most_alternatives:
            return ""
        if not self.most_alternatives:
            return f"{self.title or self.name} returns no alternatives. Choose 0."
        return f"{self.title or self.name} returns at most {self.most_alternatives} alternatives of a token."

    def temperature_problem(self, temperature: float) -> str:
        """Why the engine cannot sample at a temperature, as a sentence; empty = it can."""
        if not temperature or self.temperature_range is None:
            return ""
        least, most = self.temperature_range
        if least <= temperature <= most:
            return ""
        return f"{self.title} takes 0 (always the likeliest token) or a temperature from {least:g} to {most:g}."


_VLLM_TEMPERATURES = (0.01, 2.0)
"""vLLM samples at 0.01 instead of any lower temperature, and refuses each request above 2."""

ENGINES: dict[str, EngineSpec] = {
    entry.name: entry
    for entry in (
        EngineSpec(
            "transformers",
            "rollouts.sampling.engines.transformers_engine:TransformersEngine",
            title="Transformers",
            seed_note="The same seed gives the same tokens again.",
            most_alternatives=MAX_ALTERNATIVES,
            knows_entropy=True,
            scores=True, scores_full_context=True, scores_at_temperature=True, sums_kept_sets=True,
            replays=True,
            has_gradients=True,
        ),
        EngineSpec(
            "vllm",
            "rollouts.sampling.engines.vllm_engine:VllmEngine",
            title="vLLM",
            seed_note=(
                "vLLM draws by the seed, but its sums depend on what else is in the batch. Two runs with one seed are "
                "nearly equal, but not always identical."
            ),
            temperature_range=_VLLM_TEMPERATURES,
            most_alternatives=MAX_ALTERNATIVES,
            scores=True,
            replays=True,
        ),
        EngineSpec(
            "vllm_server",
            "rollouts.sampling.engines.vllm_server:VllmServerEngine",
            title="vLLM",
            seed_note=(
                "The server draws by the seed, but its sums depend on what else is in its batch, also on other "
                "people's requests. A seed does not make the run repeatable."
            ),
            is_server=True, is_light=True,
            temperature_range=_VLLM_TEMPERATURES,
            # A server counts the sampled token among those it returns, and takes at most 20 unless it is told to.
            most_alternatives=MAX_ALTERNATIVES - 1,
            scores=True,
        ),
        EngineSpec(
            "sglang_server",
            "rollouts.sampling.engines.sglang_server:SglangServerEngine",
            title="SGLang",
            seed_note=(
                "SGLang uses a seed only if it was started with --enable-deterministic-inference. Otherwise a seed "
                "does not make the run repeatable."
            ),
            is_server=True, is_light=True,
            most_alternatives=MAX_ALTERNATIVES,
            scores=True,
        ),
        EngineSpec(
            "scripted",
            "rollouts.sampling.engines.scripted:ScriptedEngine",
            is_light=True,
            is_offered=False,
            most_alternatives=MAX_ALTERNATIVES,
            scores=True, scores_full_context=True,
            replays=True,
        ),
    )
}
"""Every engine by name, in the order of the settings."""


def offered_engines() -> list[str]:
    """The names of the engines that a run can choose."""
    return [name for name, spec in ENGINES.items() if spec.is_offered]


def scoring_engines() -> list[str]:
    """The names of the engines that a run can be scored with."""
    return [name for name in offered_engines() if ENGINES[name].scores]


def engine_spec(name: str) -> EngineSpec:
    """The facts about an engine. An unknown name gets the defaults; ``build_engine`` refuses it."""
    return ENGINES.get(name) or EngineSpec(name, "")


def build_engine(name: str, path: str, **options: Any) -> Engine:
    """Load the model in folder ``path``. Raises :class:`EngineError` with a sentence when it cannot be loaded."""
    if name not in ENGINES:
        raise EngineError(f"There is no engine named {name!r}; there are {', '.join(ENGINES)}.")
    module, _, attribute = ENGINES[name].build.partition(":")
    try:
        engine: Engine = getattr(importlib.import_module(module), attribute)(path, **options)
    except EngineError:
        raise
    except ModuleNotFoundError as error:
        raise EngineError(f"The engine {name} needs the package {error.name}, which is not installed here.") from error
    except Exception as error:
        raise EngineError(f"The engine {name} could not load the model in {path}: {reason(error)}") from error
    return engine
