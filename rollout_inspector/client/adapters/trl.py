"""TRL: streams what ``GRPOTrainer`` or ``RLOOTrainer`` generated and scored. Tested with trl 1.16.0.

    trainer.add_callback(TrlStream(trainer))

The trainer hands no rollouts to its callbacks. So this one stands around two methods of the trainer:
``_calculate_rewards``, which knows the rewards, and ``_generate_and_score_completions``, which returns the batch.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_inspector.client.adapters import records
from rollout_inspector.client.adapters.stream import RolloutStream

_COLUMNS = {"old_per_token_logps": "trainer_logprobs", "ref_per_token_logps": "reference_logprobs"}
"""What the batch has for each token of the completion, and our name of it."""
_METHODS = ("_generate_and_score_completions", "_calculate_rewards")


class TrlStream:
    """A callback of TRL that streams every generation of training, with its rewards, masks and advantages. Without a
    ``stream``, ``options`` go to a new :class:`RolloutStream`. Raises ``TypeError`` for a trainer that generates
    nothing, and ``ValueError`` where several processes train and no run is named."""

    def __init__(self, trainer: Any, stream: RolloutStream | None = None, **options: Any) -> None:
        for name in _METHODS:
            if not callable(getattr(trainer, name, None)):
                raise TypeError(
                    f"{type(trainer).__name__} has no {name}. TrlStream knows GRPOTrainer and RLOOTrainer of trl 1.16."
                )
        own_name = getattr(getattr(trainer, "args", None), "run_name", None) or ""
        self.stream = stream or RolloutStream(**{"own_name": own_name, **options})
        if trainer.accelerator.num_processes > 1 and self.stream.run is None:
            raise ValueError(
                "Several processes train, so name the run that all of them push to: run=... or ROLLOUT_INSPECTOR_RUN."
            )
        self._trainer = trainer
        self._start = secrets.token_hex(2)
        """Tells the rollouts of a start from those of an earlier one that reached the same step."""
        self._n_generations = 0
        self._scored: tuple[Any, ...] | None = None
        self._calculate: Callable[..., Any] = trainer._calculate_rewards
        self._generate: Callable[..., Any] = trainer._generate_and_score_completions
        trainer._calculate_rewards = self._calculate_rewards
        trainer._generate_and_score_completions = self._generate_and_score

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # the other events of a callback
            return lambda *_, **__: None
        raise AttributeError(name)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait until the last step is sent, or lies in a fragment."""
        self.stream.settle()

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """``args``: inputs, prompts, completions, ids of the completions."""
        rewards = self._calculate(*args, **kwargs)
        self._scored = (*args[1:], *kwargs.values(), rewards)
        return rewards

    def _generate_and_score(self, *args: Any, **kwargs: Any) -> Any:
        """What the trainer's method returns. Rollouts of an evaluation are left out."""
        self._scored = None
        step = self._trainer.state.global_step
        batch = self._generate(*args, **kwargs)
        if self._trainer.model.training and self._scored is not None:
            scored, self._scored = self._scored, None
            self._n_generations += 1
            prefix = f"step-{step}/{self._start}-{self._n_generations}-"
            self.stream.send_made(lambda: self._records(batch, scored, step), prefix, step)
        return batch

    def _records(self, batch: Mapping[str, Any], scored: tuple[Any, ...], step: int) -> Sequence[dict[str, Any]]:
        trainer = self._trainer
        prompts, completions, completion_ids, rewards = scored
        n = len(completion_ids)
        first = trainer.accelerator.process_index * n
        rewards = rewards.tolist()
        weights = records.plain(trainer.reward_weights) or []
        prompt_ids, prompt_mask = batch["prompt_ids"].tolist(), batch["prompt_mask"].tolist()
        trained, sampled = batch["completion_mask"].tolist(), records.plain(batch.get("tool_mask"))
        logprobs = records.plain(batch.get("sampling_per_token_logps"))
        columns = {name: batch[key].tolist() for key, name in _COLUMNS.items() if batch.get(key) is not None}
        advantages = batch["advantages"].tolist()
        fields = {
            "policy_version": f"step-{step}", "temperature": trainer.args.temperature,
            "engine": "TRL with vLLM" if getattr(trainer, "use_vllm", False) else "TRL",
        }
        extra = {"mask_truncated": True} if getattr(trainer.args, "mask_truncated_completions", False) else {}
        trajectories = []
        for i, ids in enumerate(completion_ids):
            ids = records.plain(ids) or []
            length = len(ids)
            prompt = [token_id for token_id, is_real in zip(prompt_ids[i], prompt_mask[i], strict=True) if is_real]
            was_sampled = [1] * length if sampled is None else sampled[i][:length]
            mask = [int(a and b) for a, b in zip(trained[i][:length], was_sampled, strict=True)]
            own = None if logprobs is None else logprobs[i][:length]
            steps = records.calls_of(prompt, ids, was_sampled, own, **fields)
            ended = self._finish_reason(ids)
            if steps and was_sampled[-1]:
                steps[-1] |= {"finish_reason": ended} if ended else {}
            if len(steps) == 1:
                steps[0] |= self._messages(prompts[i], completions[i])
            by_token = {name: values[i][:length] for name, values in columns.items()}
            value = advantages[i]
            by_token["advantages"] = value[:length] if isinstance(value, list) else [value * trains for trains in mask]
            parts = dict(zip(trainer.reward_func_names, rewards[first + i], strict=True))
            scores = [reward * weight for reward, weight in zip(rewards[first + i], weights, strict=True)]
            scores = [score for score in scores if score == score]
            trajectories.append(records.trajectory(
                str(first + i), steps=steps,
                rows=[records.row(prompt, ids, mask, own, by_token, range(len(steps)))],
                reward=sum(scores) if scores else None, reward_parts=parts,
                group=str((first + i) // trainer.num_generations), stop_reason=ended, extra=extra,
            ))
        return trajectories

    def _finish_reason(self, completion_ids: Sequence[int]) -> str:
        """Why a completion ended, as TRL decides: without EOS or padding at its end it was cut. Empty = unknown."""
        trainer = self._trainer
        config = getattr(trainer, "generation_config", None)
        tokenizer = getattr(trainer, "processing_class", None)
        ends: set[Any] = set()
        for holder in (trainer, config, getattr(tokenizer, "tokenizer", tokenizer)):
            for name in ("eos_token_id", "pad_token_id"):
                value = getattr(holder, name, None)
                ends.update(value if isinstance(value, (list, tuple)) else (value,))
        ends.discard(None)
        by_string = bool((getattr(trainer.args, "generation_kwargs", None) or {}).get("stop"))
        if not completion_ids or not ends:
            return ""
        return "stop" if completion_ids[-1] in ends else "" if by_string else "length"

    def _messages(self, prompt: Any, completion: Any) -> dict[str, Any]:
        """The request and reply of the only call, where the trainer rendered messages by the tokenizer's template."""
        trainer = self._trainer
        if getattr(trainer, "tools", None) or getattr(trainer, "chat_template", None) is not None:
            return {}
        if not (isinstance(prompt, list) and isinstance(completion, list) and len(completion) == 1):
            return {}
        if not all(
            isinstance(message, dict) and isinstance(message.get("content"), str) for message in (*prompt, *completion)
        ):
            return {}
        request: dict[str, Any] = {"messages_new": prompt}
        if trainer.chat_template_kwargs:
            request["chat_template_kwargs"] = trainer.chat_template_kwargs
        return {"request": request, "reply": completion[0]}
