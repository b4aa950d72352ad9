"""The TITO loop: many trajectories at once, each a small state machine between the engine and its environment. A
completion joins the stream verbatim. It is parsed only to route the turn; the parsed message is never encoded. A
completion that hits a limit ends its trajectory as it is: nothing is added to it."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.streams.strategies import Strategy, StrategyRefused
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Message, Request, Step
from rollout_inspector.text.replies.parsing import Parse, answering, with_call_ids
from rollouts.sampling.engines import EngineError, Generation, GenerationRequest, Sampling, reason
from rollouts.sampling.engines.engine_owner import EngineClosed, EngineLost, EngineOwner
from rollouts.sampling.engines.protocol import EngineInfo
from rollouts.sampling.environments import Environment, Episode, Outcome, Task
from rollouts.sampling.environments.protocol import Answers

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # How often the loop checks whether it should stop.


@dataclass(frozen=True, eq=False)
class ForkStart:
    """Where a trajectory begins that continues another one. The engine reads the ids as they are."""

    prompt_ids: Ids  # ``[P]``: everything before the first token that is sampled.
    prompt_length: int  # How many of these are prompt. The others begin the assistant's own turn.
    messages: tuple[Message, ...]
    """The conversation so far, without the turn that is continued. It begins with the messages of the task."""
    replies: Mapping[int, Message] = field(default_factory=dict)
    """Place in ``messages`` -> the reply that the environment answered, where another one may stand there."""
    goes_on: bool = False  # Go on with the recorded messages where the environment answers otherwise.
    reply: Message | None = None
    """The message of a turn that is whole: ``observed`` follows it. None = there is no such turn."""
    observed: tuple[Message, ...] = ()
    """What the strategy observes after ``reply``, instead of what the environment answers."""

    def recorded(self, n_task: int) -> list[tuple[Message, list[Message]]]:
        """Each reply behind the ``n_task`` messages of the task, with what was answered to it."""
        turns: list[tuple[Message, list[Message]]] = []
        for place, message in enumerate(self.messages[n_task:], n_task):
            if message.get("role") == "assistant":
                turns.append((self.replies.get(place, message), []))
            elif turns:
                turns[-1][1].append(message)
        return turns


class AnswersDiffer(Exception):
    """The environment answers a recorded reply otherwise than it was answered; the message says how."""


@dataclass(frozen=True, eq=False)
class RolloutJob:
    """A trajectory to make, or to continue."""

    key: Any  # The caller's name for the trajectory.
    task: Task
    seed: int | None = None
    steps: tuple[Step, ...] = ()  # Steps that an earlier attempt has stored. They are taken over, not sampled again.
    start: ForkStart | None = None  # Where it begins, if it continues another trajectory; None = with its task.


@dataclass(frozen=True)
class RolloutLimits:
    sampling: Sampling  # Its ``seed`` is ignored: the seed of each step follows from the job's seed.
    max_turns: int = 8
    environment_seconds: float = 30.0  # How long the environment may take to answer one turn.
    max_live: int = 64  # Trajectories under way at once.


@dataclass(eq=False)
class _Live:
    job: RolloutJob
    strategy: Strategy
    episode: Episode
    messages: list[Message]
    prompt_ids: Ids
    n_steps: int = 0
    n_calls: int = 0
    n_before: int = 0  # Turns of the trajectory that it continues.
    request_id: str = ""
    deadline: float = 0.0  # When the environment must have answered; 0 = no answer is due.


def step_seed(seed: int | None, index: int) -> int | None:
    """The seed of a trajectory's step. A trajectory that is taken up again continues as it would have."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:4], "big") >> 1


def _engine_info(engine: EngineOwner, should_stop: Callable[[], bool]) -> EngineInfo | None:
    """What the engine is, once it is loaded. None when told to stop first; the loading goes on for the next run."""
    info = engine.ask_info()
    while not should_stop():
        try:
            return info.result(POLL_SECONDS)
        except TimeoutError:
            if info.done():
                raise
    return None


def _turn_head(live: _Live) -> Ids:
    """The ids of the turn that a fork continues: they stand before its first completion, in the same message."""
    start = live.job.start
    if start is None or start.reply is not None or live.n_steps:
        return NO_IDS
    return start.prompt_ids[start.prompt_length :]


def _n_calls(reply: Message) -> int:
    calls = reply.get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


def _said_of(fault: BaseException) -> str:
    return f"It broke off on an error of the program: {reason(fault)}."


_numbers = count()
"""Numbers the batches, so that request names in this process are unique. An abort then never ends another request."""


@dataclass(eq=False)
class RolloutBatch:
    """Runs jobs until there are no more. A fault of one trajectory ends that trajectory alone; only what the caller
    takes part by may raise: four functions that are called in the thread of :meth:`run`."""

    engine: EngineOwner
    environment: Environment
    new_strategy: Callable[[], Strategy]
    parse: Parse
    limits: RolloutLimits
    more: Callable[[int, bool], Sequence[RolloutJob] | None]
    """Returns up to so many further jobs; None = no more. Waits for the first job only if the bool is True."""
    on_steps: Callable[[Sequence[tuple[RolloutJob, int, Step]]], None]
    """Takes steps as soon as they are sampled: (job, step index, step)."""
    on_done: Callable[[Sequence[TrajectoryEnd]], None]
    should_stop: Callable[[], bool]  # Called at least every ``POLL_SECONDS``.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    policy_version: str = ""
    call_ids: bool = False
    """Add an id to every parsed call, and the same id to its answer, for templates that need ids."""

    def __post_init__(self) -> None:
        self._number = next(_numbers)
        self._live: set[_Live] = set()
        self._events: SimpleQueue[tuple[_Live, Callable[[], None]]] = SimpleQueue()
        self._steps: list[tuple[RolloutJob, int, Step]] = []
        self._done: list[TrajectoryEnd] = []
        self._exhausted = False
        self._closing = False
        self._lost = ""  # why there is no engine any more

    def run(self) -> tuple[tuple[RolloutJob, ...], str]:
        """Returns the jobs that were under way when the loop was told to stop or lost its engine: they can be taken up
        again. Then a sentence that says why there is no engine any more; empty = there is one."""
        try:
            info = _engine_info(self.engine, self.should_stop)
        except EngineClosed:
            return (), ""
        except EngineError as error:
            return (), str(error)
        if info is None:
            return (), ""
        self._info, self._answers = info, Answers()  # its threads begin here
        stopped: tuple[RolloutJob, ...] = ()
        next_poll = 0.0
        try:
            while True:
                if time.monotonic() >= next_poll:
                    if self._closing or self.should_stop():
                        stopped = tuple(live.job for live in self._live)
                        break
                    self._fail_overdue()
                    next_poll = time.monotonic() + POLL_SECONDS
                self._take_jobs()
                self._flush()
                if self._live:
                    with suppress(Empty):  # wait for the first event, then take all that are there
                        self._handle(*self._events.get(timeout=max(0.0, next_poll - time.monotonic())))
                        while True:
                            self._handle(*self._events.get_nowait())
                elif self._exhausted or self._closing:
                    break
            self._flush()
            return stopped, self._lost
        finally:
            self.engine.abort([live.request_id for live in self._live if live.request_id])
            self._answers.close()

    def _handle(self, live: _Live, event: Callable[[], None]) -> None:
        try:
            event()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:  # a panic of native code is no Exception
            log.exception("trajectory failed key=%s", live.job.key)
            self._end(live, error=_said_of(fault))

    def _take_jobs(self) -> None:
        free = self.limits.max_live - len(self._live)
        if not free or self._exhausted or self._closing:
            return
        jobs = self.more(free, not self._live)
        self._exhausted = jobs is None
        for job in jobs or ():
            self._start(job)

    def _flush(self) -> None:
        """Pass on what has finished: steps before the trajectories they belong to."""
        if self._steps:
            steps, self._steps = self._steps, []
            self.on_steps(steps)
        if self._done:
            done, self._done = self._done, []
            self.on_done(done)

    # -- one trajectory ------------------------------------------------------------------------------------------------

    def _start(self, job: RolloutJob) -> None:
        strategy = self.new_strategy()
        try:
            prompt, messages = self._begin(strategy, job)
        except (StrategyRefused, RenderFailed) as error:
            self._done.append(TrajectoryEnd.of_refusal(job.key, error))
            return
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:
            log.exception("trajectory failed key=%s", job.key)
            self._done.append(TrajectoryEnd(job.key, error=_said_of(fault)))
            return
        try:
            episode = self.environment.start(job.task)
        except Exception as error:
            self._done.append(
                TrajectoryEnd(job.key, error=f"The environment could not start the task: {reason(error)}.")
            )
            return
        live = _Live(job, strategy, episode, messages, np.array(prompt))
        self._live.add(live)
        turns = job.start.recorded(len(job.task.messages)) if job.start else []
        if job.start and job.start.reply is not None:
            turns.append((job.start.reply, []))
        if not job.start or not turns:
            self._handle(live, lambda: self._next_turn(live))
            return
        live.n_before = len(turns)
        live.n_calls = sum(_n_calls(reply) for reply, _ in turns)
        # What the environment answers to the last reply is not compared where something else is observed.
        live.deadline = time.monotonic() + self.limits.environment_seconds * len(turns)
        self._answers.ask(
            lambda: self._bring(episode, turns, job.start),
            lambda outcome: self._events.put((live, lambda: self._brought(live, outcome))),
        )

    def _begin(self, strategy: Strategy, job: RolloutJob) -> tuple[Ids, list[Message]]:
        """The first prompt of a job, and the conversation that it holds."""
        task, start = job.task, job.start
        if start is None:
            return strategy.begin(task.messages, task.tools, self.template_kwargs), list(task.messages)
        strategy.recorded_prompt = start.prompt_ids[: start.prompt_length]
        strategy.begin(start.messages, task.tools, self.template_kwargs)
        if start.reply is None:
            return start.prompt_ids, list(start.messages)
        strategy.sampled(start.prompt_ids[start.prompt_length :], None, start.reply)
        return strategy.observe(start.observed), [*start.messages, start.reply, *start.observed]

    def _bring(
        self, episode: Episode, turns: Sequence[tuple[Message, list[Message]]], start: ForkStart | None
    ) -> Outcome:
        """Bring an environment to where a fork begins, by answering the recorded replies again."""
        outcome = Outcome([], False)
        for number, (reply, recorded) in enumerate(turns):
            outcome = episode.step(reply)
            answers = answering(reply, outcome.messages) if self.call_ids else outcome.messages
            if start is None or start.goes_on or (start.reply is reply and not outcome.done):
                continue
            if outcome.done or [dict(message) for message in answers] != [dict(message) for message in recorded]:
                new = "the end of the episode" if outcome.done else repr(answers)[:300]
                raise AnswersDiffer(
                    f"The environment does not answer turn {number} as it was recorded: {new}, and recorded is "
                    f"{repr(recorded)[:300]}. Go on with the recorded answers, or fork an earlier token."
                )
        return outcome

    def _brought(self, live: _Live, outcome: Outcome | Exception) -> None:
        if live not in self._live:
            return  # it took too long and was given up
        live.deadline = 0.0
        if isinstance(outcome, Exception):
            is_ours = isinstance(outcome, AnswersDiffer)
            self._end(live, error=str(outcome) if is_ours else f"The environment failed: {reason(outcome)}.")
        else:
            self._next_turn(live)

    def _next_turn(self, live: _Live) -> None:
        """Sample the next step, or take it over from an earlier attempt."""
        if live.n_steps < len(live.job.steps):
            stored = live.job.steps[live.n_steps]
            if not np.array_equal(stored.prompt_ids, live.prompt_ids):
                self._end(live, error=f"Step {live.n_steps} cannot be taken up again: its prompt has changed.")
                return
            self._completed(live, stored.completion_ids, stored.logprobs, stored.finish_reason)
            return
        if len(live.prompt_ids) >= self._info.max_model_len:
            self._truncate(live, "length")
            return
        live.request_id = f"{live.job.key}.{live.n_steps}.{self._number}"
        sampling = replace(self.limits.sampling, seed=step_seed(live.job.seed, live.n_steps))
        try:
            future = self.engine.submit(GenerationRequest(live.request_id, live.prompt_ids, sampling))
        except EngineClosed:
            self._closing = True
            return
        future.add_done_callback(lambda done: self._events.put((live, lambda: self._generated(live, done))))

    def _generated(self, live: _Live, future: Future[Generation]) -> None:
        live.request_id = ""
        try:
            generation = future.result()
        except (CancelledError, EngineClosed):
            self._closing = True
            return
        except EngineLost as error:
            self._closing, self._lost = True, str(error)
            return
        except EngineError as error:  # RequestRefused, and an answer that cannot leave the engine's process
            self._end(live, error=str(error))
            return
        reply = self._reply(live, generation.completion_ids)
        self._steps.append((live.job, live.n_steps, self._step(live, generation, reply)))
        self._completed(live, generation.completion_ids, generation.logprobs, generation.finish_reason, reply)

    def _reply(self, live: _Live, ids: Ids) -> Message:
        """A completion as a message. If the prompt ends inside that message, its earlier calls do not count."""
        before = NO_IDS if live.strategy.continues_message else live.prompt_ids
        if len(head := _turn_head(live)):
            before, ids = before[: -len(head)], np.concatenate([head, ids])
        reply = self.parse(before, ids, live.job.task.tools)
        if not self.call_ids:
            return reply
        # Ids follow from the seed if there is one, so that a repeated run renders the same ids.
        return with_call_ids(reply, live.job.key if live.job.seed is None else live.job.seed, live.n_calls)

    def _step(self, live: _Live, generation: Generation, reply: Message) -> Step:
        sampling, info, task = self.limits.sampling, self._info, live.job.task
        return Step(
            prompt_ids=live.prompt_ids,
            completion_ids=generation.completion_ids,
            logprobs=generation.logprobs,
            logprobs_mode=info.logprobs_mode,
            finish_reason=generation.finish_reason,
            stop_reason=generation.stop_reason,
            request=Request(
                tuple(live.messages), None if task.tools is None else tuple(task.tools), self.template_kwargs
            ),
            reply=reply,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            engine=f"{info.name} {info.version}",
            policy_version=generation.policy_version or self.policy_version,
            entropy=generation.entropy,
            kept_set=generation.kept_set,
            kept_ids=generation.kept_ids,
            alternative_ids=generation.alternative_ids,
            alternative_logprobs=generation.alternative_logprobs,
            delta_origin=live.strategy.delta_origin,
            extra=generation.extra,
        )

    def _completed(
        self, live: _Live, ids: Ids, logprobs: Floats | None, finish_reason: str, reply: Message | None = None
    ) -> None:
        """Let the stream grow by a completion, then ask the environment. A truncated completion ends the trajectory."""
        if reply is None:
            reply = self._reply(live, ids)
        if len(head := _turn_head(live)):
            ids, logprobs = np.concatenate([head, ids]), None
        live.messages.append(reply)
        live.n_steps += 1
        live.n_calls += _n_calls(reply)
        try:
            live.strategy.sampled(ids, logprobs, reply)
        except (StrategyRefused, RenderFailed) as error:
            self._refuse(live, error)
            return
        if finish_reason == "length":
            self._truncate(live, "length")
            return
        live.deadline = time.monotonic() + self.limits.environment_seconds
        self._answers.ask(
            lambda: live.episode.step(reply),
            lambda outcome: self._events.put((live, lambda: self._answered(live, outcome))),
        )

    def _answered(self, live: _Live, outcome: Outcome | Exception) -> None:
        if live not in self._live:
            return  # it took too long and was given up
        live.deadline = 0.0
        if isinstance(outcome, Exception):
            self._end(live, error=f"The environment failed: {reason(outcome)}.")
        elif outcome.done:
            self._end(live, outcome)
        elif live.n_before + live.n_steps >= self.limits.max_turns:
            self._truncate(live, "max_turns")
        else:
            messages = answering(live.messages[-1], outcome.messages) if self.call_ids else outcome.messages
            try:
                live.prompt_ids = np.array(live.strategy.observe(messages))
            except (StrategyRefused, RenderFailed) as error:
                self._refuse(live, error)
                return
            live.messages.extend(messages)
            self._next_turn(live)

    def _truncate(self, live: _Live, why: str) -> None:
        try:
            outcome = live.episode.truncated(why)
        except Exception as error:
            self._end(live, error=f"The environment failed: {reason(error)}.")
            return
        self._end(live, outcome)

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        for live in [entry for entry in self._live if entry.deadline and entry.deadline < now]:
            self._answers.spawn()
            self._end(live, error=f"The environment did not answer within {self.limits.environment_seconds:g} seconds.")

    def _refuse(self, live: _Live, error: Exception) -> None:
        self._live.discard(live)
        self._done.append(TrajectoryEnd.of_refusal(live.job.key, error))

    def _end(self, live: _Live, outcome: Outcome | None = None, error: str = "") -> None:
        self._live.discard(live)
        if outcome is None:
            self._done.append(TrajectoryEnd(live.job.key, error=error))
            return
        try:
            # The rows of a fork follow from its own steps: the strategy holds those of its parent too.
            follows = live.strategy.rows_follow_from_steps or live.job.start is not None
            rows = None if follows else tuple(live.strategy.rows())
        except (StrategyRefused, RenderFailed) as refusal:
            self._refuse(live, refusal)
            return
        self._done.append(TrajectoryEnd(
            live.job.key,
            reward=outcome.reward,
            reward_parts=dict(outcome.reward_parts),
            stop_reason=outcome.stop_reason,
            rows=rows,
        ))
