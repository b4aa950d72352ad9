"""A scripted model that speaks the demo policy's tokens, and a loop that runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.strategies import STRATEGIES, Context
from rollout_inspector.streams.trajectory import Ids, Step
from rollout_inspector.text.chat_templates import wants_call_ids
from rollout_inspector.text.replies.parsing import Parse, parser
from rollouts.sampling.engines import Sampling
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.scripted import ScriptedEngine
from rollouts.sampling.environments import ENVIRONMENTS, Environment, Task
from rollouts.sampling.loop import RolloutBatch, RolloutJob, RolloutLimits


@dataclass
class Harness:
    """What the tests of the loop need, and what a run of it left."""

    tokenizer: Any
    context: Context
    steps: dict[Any, list[Step]] = field(default_factory=dict)
    done: dict[Any, TrajectoryEnd] = field(default_factory=dict)
    polls: int = 0
    folder: str = ""
    """Of the tokenizer, for an engine that has to know what ids spell."""
    parse: Parse | None = None
    """None = the tokenizer's own, which takes transformers to load it."""

    def calculator(self) -> Environment:
        return ENVIRONMENTS["calculator"]()

    def tasks(self, n: int, seed: int = 0) -> list[Task]:
        return self.calculator().tasks(n, seed)

    def limits(self, **changes: Any) -> RolloutLimits:
        sampling = {"temperature": 1.0, "max_tokens": 96, "stop_token_ids": tuple(sorted(self.context.stop_ids))}
        return RolloutLimits(Sampling(**(sampling | changes.pop("sampling", {}))), **changes)

    def scripted(self, say: Callable[[Ids, str], str]) -> EngineThread:
        """An engine whose script is a function from the prompt (ids and text) to text."""

        def script(prompt: Ids) -> Sequence[int]:
            return self.context.codec.encode(say(prompt, self.context.codec.decode(prompt))).tolist()

        return EngineThread(lambda: ScriptedEngine(script=script, vocab_size=self.context.codec.vocab_size))

    def run(
        self,
        engine: EngineThread,
        jobs: Sequence[RolloutJob],
        limits: RolloutLimits | None = None,
        environment: Environment | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        strategy: str = "tool_delta",
    ) -> tuple[tuple[RolloutJob, ...], str]:
        waiting = list(jobs)

        def more(n: int, wait: bool) -> list[RolloutJob] | None:
            taken = waiting[:n]
            del waiting[:n]
            return taken or None

        def on_steps(steps: Sequence[tuple[RolloutJob, int, Step]]) -> None:
            for job, index, step in steps:
                assert job.key not in self.done
                kept = self.steps.setdefault(job.key, list(job.steps))
                assert index == len(kept)
                kept.append(step)

        def on_done(finished: Sequence[TrajectoryEnd]) -> None:
            for one in finished:
                assert one.key not in self.done
                self.done[one.key] = one

        def stop() -> bool:
            self.polls += 1
            return should_stop()

        return RolloutBatch(
            engine,
            environment or self.calculator(),
            lambda: STRATEGIES[strategy](self.context),
            self.parse or parser(self.tokenizer.hf, self.context.stop_ids),
            limits or self.limits(),
            more,
            on_steps,
            on_done,
            stop,
            call_ids=wants_call_ids(self.context.renderer.chat_template),  # type: ignore[attr-defined]
        ).run()
