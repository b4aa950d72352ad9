"""The engine of the demo policy, loaded once, and an owner of it that answers in the thread that asks."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

from rollouts.sampling.demo_policy import MODEL_DIR


@cache
def demo_engine() -> Any:
    from rollouts.sampling.engines.transformers_engine import TransformersEngine  # torch takes seconds to import

    return TransformersEngine(MODEL_DIR, threads=1)


class DemoOwner:
    """Owns it as an ``EngineOwner`` does: an error of the engine is the future's."""

    def call(self, work: Callable[[Any], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(demo_engine()))
        except Exception as error:
            future.set_exception(error)
        return future
