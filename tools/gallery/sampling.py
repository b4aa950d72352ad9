"""Conversations of the demo policy, turn by turn, in prompts that are put together here."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.strategies import STRATEGIES, Context, start
from rollout_inspector.streams.trajectory import Ids, Message, Request, Step, Trajectory, ids_array
from rollout_inspector.text import chat_templates
from rollout_inspector.text.replies.parsing import parser
from rollout_inspector.text.tokenizers import load
from rollouts.gallery import N_TASKS, TASKS_SEED, chat_templates as templates_of_gallery
from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.sampling.engines.protocol import Generation, GenerationRequest, Sampling
from rollouts.sampling.environments import ENVIRONMENTS, Task

MAX_TURNS = 4
MAX_TOKENS = 96
NAME = "demo"
"""What the trajectories call their tokenizer."""


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Policy:
    """The demo policy, its tokenizer and its chat template. The same seeds sample the same tokens."""

    def __init__(self) -> None:
        from rollouts.sampling.engines.transformers_engine import TransformersEngine  # torch takes seconds to import

        self.engine = TransformersEngine(MODEL_DIR, threads=1)
        self.codec = load(MODEL_DIR)
        self.environment = ENVIRONMENTS["calculator"]()
        self.tasks = self.environment.tasks(N_TASKS, TASKS_SEED)
        self.context = Context(self.codec, self.renderer(""), self.codec.stop_ids)
        self.parse = parser(self.codec.hf, self.codec.stop_ids)
        self.templates = templates_of_gallery()

    def renderer(self, template: str) -> Any:
        """The renderer of a template of the gallery by its name; empty = the demo policy's own."""
        text = self.templates[template] if template else self.codec.chat_template
        return chat_templates.renderer(self.codec, text or "")

    def samples(
        self, prompt: Ids, seeds: Sequence[int], max_tokens: int = MAX_TOKENS, temperature: float = 1.0, stop: str = ""
    ) -> list[Generation]:
        """One completion of a prompt ``[P]`` for each seed, in one batch. ``stop``: a text that ends them too."""
        stops, texts = tuple(sorted(self.codec.stop_ids)), (stop,) if stop else ()
        for seed in seeds:
            sampling = Sampling(temperature, max_tokens=max_tokens, stop_token_ids=stops, stop=texts, seed=seed)
            self.engine.add(GenerationRequest(str(seed), prompt, sampling))
        generations: dict[str, Generation] = {}
        while self.engine.has_unfinished():
            generations |= {done.request_id: done for done in self.engine.step()}
        return [generations[str(seed)] for seed in seeds]

    def sample(self, prompt: Ids, seed: int, *limits: Any) -> Generation:
        """One completion of a prompt ``[P]``; ``limits`` are those of :meth:`samples`."""
        return self.samples(prompt, [seed], *limits)[0]

    def rolled(self, strategy: str, task: Task, seed: int) -> Trajectory:
        """A whole episode under a strategy, as the loop would run it."""
        episode, messages = self.environment.start(task), list(task.messages)
        way = start(STRATEGIES[strategy], self.context)
        prompt, steps, outcome = way.begin(messages, task.tools, {}), [], None
        for turn in range(MAX_TURNS):
            generation = self.sample(prompt, seed + turn)
            reply = self.parse(prompt, generation.completion_ids, task.tools)
            way.sampled(generation.completion_ids, generation.logprobs, reply)
            steps.append(self.step(prompt, generation, messages, task.tools, reply, delta_origin=way.delta_origin))
            outcome = episode.truncated("length") if generation.finish_reason == "length" else episode.step(reply)
            if outcome.done:
                break
            messages = [*messages, reply, *outcome.messages]
            prompt = way.observe(outcome.messages)
        if outcome is None or not outcome.done:
            outcome = episode.truncated("max_turns")
        return Trajectory(
            "", tuple(steps), () if way.rows_follow_from_steps else tuple(way.rows()), reward=outcome.reward,
            reward_parts=outcome.reward_parts, stop_reason=outcome.stop_reason, tokenizer=NAME,
        )

    def step(
        self, prompt: Ids, made: Generation, messages: Sequence[Message], tools: Any, reply: Message | None,
        kwargs: Mapping[str, Any] | None = None, template: str = "", **fields: Any,
    ) -> Step:
        """A step that the policy sampled. ``template``: the name of a template of the gallery."""
        request = Request(tuple(copy.deepcopy(list(messages))), None if tools is None else tuple(tools), kwargs or {})
        return Step(
            ids_array(prompt), made.completion_ids, made.logprobs, self.engine.logprobs_mode, made.finish_reason,
            made.stop_reason, request, copy.deepcopy(reply), temperature=1.0, policy_version=NAME,
            chat_template_sha256=sha256_of(self.templates[template]) if template else "", **fields,
        )


@dataclass(frozen=True, eq=False)
class FaultyTurn:
    """A question, the policy's tool call, and the tool's answer: what a fault is put into."""

    policy: Policy
    task: Task
    seed: int
    template: str = ""
    """The name of a template of the gallery that renders the conversation; empty = the demo policy's own."""
    new: tuple[Message, ...] = ()
    """What follows the call; empty = the calculator's answer."""
    temperature: float = 1.0
    max_tokens: int = MAX_TOKENS
    stop: str = ""
    """A text that ends the call too."""
    asked: Ids | None = None
    """The prompt; None = what the template writes for the question."""
    given: Generation | None = None
    """What the policy answers; None = it is sampled."""
    read: dict[str, Any] | None = None
    """What the harness reads in the answer; None = what is there."""

    @cached_property
    def prompt(self) -> Ids:
        return self.render(self.task.messages) if self.asked is None else self.asked

    @cached_property
    def made(self) -> Generation:
        if self.given is not None:
            return self.given
        return self.policy.sample(self.prompt, self.seed, self.max_tokens, self.temperature, self.stop)

    @cached_property
    def reply(self) -> dict[str, Any]:
        if self.read is not None:
            return self.read
        return self.policy.parse(self.prompt, self.made.completion_ids, self.task.tools)

    @cached_property
    def first(self) -> Step:
        return self.policy.step(
            self.prompt, self.made, self.task.messages, self.task.tools, self.reply, template=self.template
        )

    @cached_property
    def following(self) -> list[Message]:
        if self.new:
            return list(self.new)
        return list(self.policy.environment.start(self.task).step(self.reply).messages)

    @property
    def messages(self) -> list[Message]:
        """The conversation at the second step."""
        return [*self.task.messages, self.reply, *self.following]

    @cached_property
    def delta(self) -> str:
        """What the demo policy's template writes behind the call's stop token."""
        whole = self.text(self.messages)
        return whole[len(self.text([*self.task.messages, self.reply], gen=False).rstrip("\n")) :]

    def text(self, messages: Sequence[Message], gen: bool = True, tools: Any = 0, template: str | None = None) -> str:
        tools = self.task.tools if tools == 0 else tools
        renderer = self.policy.renderer(self.template if template is None else template)
        return str(renderer.render_text(Conversation(list(messages), tools, {}, gen)))

    def render(self, messages: Sequence[Message], **options: Any) -> Ids:
        return self.encode(self.text(messages, **options))

    def encode(self, text: str) -> Ids:
        return self.policy.codec.encode(text)

    def decode(self, ids: Ids) -> str:
        return self.policy.codec.decode(ids)

    def joined(self, *parts: Any) -> Ids:
        """Ids and texts, each encoded alone, as one prompt."""
        return ids_array(np.concatenate([self.encode(part) if isinstance(part, str) else part for part in parts]))

    def on(self, delta: Any, **options: Any) -> Trajectory:
        """Two steps, the second on top of what was sampled and a delta."""
        return self.then(self.joined(self.first.stream, delta), **options)

    def then(self, prompt: Ids, messages: Sequence[Message] | None = None, **options: Any) -> Trajectory:
        """Two steps: the second prompt is as named, and the policy answers it."""
        messages = self.messages if messages is None else messages
        tools = options.pop("tools", self.task.tools)
        template = options.pop("template", self.template)
        generation = self.policy.sample(prompt, self.seed + 1, options.pop("max_tokens", MAX_TOKENS), 0.0)
        reply = self.policy.parse(prompt, generation.completion_ids, tools)
        whole, origins = self.first.stream, None
        if np.array_equal(prompt[: len(whole)], whole):
            origins = self.policy.context.origins(prompt[len(whole) :], self.following)
        last = self.policy.step(prompt, generation, messages, tools, reply, template=template, delta_origin=origins)
        return self.ended(self.first, last)

    def ended(self, *steps: Step) -> Trajectory:
        """Steps as a trajectory with the reward of the last reply."""
        episode = self.policy.environment.start(self.task)
        episode.step(self.reply)
        last = steps[-1]
        outcome = episode.step(last.reply or {}) if last.finish_reason != "length" else episode.truncated("length")
        if not outcome.done:
            outcome = episode.truncated("max_turns")
        return Trajectory(
            "", steps, reward=outcome.reward, reward_parts=outcome.reward_parts, stop_reason=outcome.stop_reason,
            tokenizer=NAME,
        )

    def with_content(self, content: str) -> FaultyTurn:
        """The same turn with another answer of the tool."""
        return replace(self, new=({**self.following[0], "content": content},))
