"""Replays: what shares the work gives the same, rewritten history is frozen, and what cannot be is a sentence."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose.row_checks import length_mismatch
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.strategies import STRATEGIES, Context
from rollout_inspector.streams.strategies.replay import StrategyResult, replay, replay_many, with_replies
from rollout_inspector.streams.trajectory import Message, Request, Step, Trajectory
from rollout_inspector.text.chat_templates import PrefetchingRenderer, renderer
from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.text.tokenizers import load
from rollout_inspector.text.tokenizers.pieces import PieceEncoder

ASK: Message = {"role": "user", "content": "What's 2+2? 漢字"}
TOOLS = ({"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}},)
OTHER = {"qwen3--seed-one-line-fix": "qwen3", "trl-training--qwen3": "qwen3", "trl-training--qwen2-5": "qwen2.5"}


def contexts(corpus: Path, template: str) -> tuple[Context, Context]:
    """One that renders and encodes everything by itself when it is asked for, and one that shares the work."""
    tokenizer = load(corpus / "tokenizers" / OTHER.get(template, template))
    text = (corpus / "templates" / f"{template}.jinja").read_text()
    pieces = PieceEncoder(tokenizer)
    shared = PrefetchingRenderer(tokenizer, text, pieces.encode)
    return (
        Context(tokenizer, renderer(tokenizer, text), tokenizer.stop_ids),
        Context(tokenizer, shared, tokenizer.stop_ids, fast_encode=pieces.encode),
    )


def conversation(template: str, turns: int, name: str) -> list[Message]:
    """User and assistant in turn; every second turn a call and its result, in the form the template wants."""
    said: list[Message] = [{**ASK, "content": f"{ASK['content']} {name}"}]
    for turn in range(turns):
        if turn % 2 == 0:
            arguments: Any = '{"expr": "2+2"}' if template == "deepseek-r1" else {"expr": "2+2"}
            call = {"type": "function", "id": "abcdefghi", "function": {"name": "calc", "arguments": arguments}}
            said += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "calc", "tool_call_id": "abcdefghi", "content": f"{turn} 4\n\n"},
            ]
        else:
            said += [
                {"role": "assistant", "content": f"<think>\nso {turn}\n</think>\n\nIt is {turn}."},
                {"role": "user", "content": f"And {turn} more?\n"},
            ]
    return said


def recorded(context: Context, template: str, name: str, turns: int = 5, tools: Any = TOOLS) -> Trajectory:
    """Prompts as a server that re-renders makes them; completions that no encoder would choose."""
    said = conversation(template, turns, name)
    steps = []
    for turn in range(turns):
        messages = tuple(said[: 2 * turn + 1])
        prompt = context.renderer.render_ids(Conversation(messages, tools, {}, True))
        sampled = [
            *context.codec.encode(f"I say {turn}. "),
            *context.codec.encode(" Done"),
            sorted(context.stop_ids)[0],
        ]
        ids = np.array(sampled, dtype=np.int32)
        logprobs = np.linspace(-1, 0, len(ids), dtype=np.float32) if turn != 1 else None
        reply = said[2 * turn + 1] if turn != 2 else None
        steps.append(Step(prompt, ids, logprobs, request=Request(messages, tools), reply=reply))
    return Trajectory(name, tuple(steps))


def same(a: StrategyResult, b: StrategyResult) -> None:
    for name in ("slug", "refused", "trained_tokens", "lost_tokens", "prompt_tokens_repaid", "sampled_tokens",
                 "frozen_steps", "differs_at"):
        assert getattr(a, name) == getattr(b, name), (a.slug, name)
    assert len(a.rows) == len(b.rows)
    for one, other in zip(a.rows, b.rows, strict=True):
        assert one.step_indices == other.step_indices and one.extra == other.extra
        for name in ("ids", "loss_mask", "logprobs", "origin"):
            left, right = getattr(one, name), getattr(other, name)
            assert (left is None) == (right is None), (a.slug, name)
            assert left is None or (left.dtype == right.dtype and left.tobytes() == right.tobytes()), (a.slug, name)


TEMPLATES = ["qwen2.5", "trl-training--qwen2-5", "qwen3", "trl-training--qwen3", "llama3.1", "mistral-nemo",
             "deepseek-r1", "gpt-oss"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_sharing_the_work_changes_no_byte(corpus: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, shared = contexts(corpus, template)
    monkeypatch.setattr(
        "rollout_inspector.streams.strategies.replay.BATCH_STEPS", 8
    )  # two trajectories, so that there are several
    tools = None if template in ("llama3.1", "mistral-nemo") else TOOLS
    values = [recorded(plain, template, name, tools=tools) for name in "abc"]
    first, second, third, *rest = values[1].steps
    assert second.request is not None
    rewritten = replace(third, request=Request((ASK, {"role": "assistant", "content": "..."}), tools))
    values[1] = Trajectory("rewritten", (first, second, rewritten, *rest))
    values.append(Trajectory("no messages", (first, replace(second, request=None))))
    made = list(replay_many(values, list(STRATEGIES.values()), shared))
    trips: list[int] = []
    monkeypatch.setattr(client.Pool, "render", _counting(client.Pool.render, trips))
    n_refused = 0
    for value, results in zip(values, made, strict=True):
        for make, result in zip(STRATEGIES.values(), results, strict=True):
            same(replay(value, make, plain), result)
            n_refused += bool(result.refused)
    assert n_refused < len(values) * len(STRATEGIES) * 3 / 4
    assert sum(trips) > 40


def _counting(real: Callable[..., Any], trips: list[int]) -> Callable[..., Any]:
    def render(self: client.Pool, template: str, jobs: Sequence[Any]) -> Any:
        trips.append(len(jobs))
        return real(self, template, jobs)

    return render


def test_many_trajectories_are_rendered_in_few_round_trips(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, shared = contexts(corpus, "qwen2.5")
    values = [recorded(plain, "qwen2.5", str(n)) for n in range(40)]
    trips: list[int] = []
    monkeypatch.setattr(client.Pool, "render", _counting(client.Pool.render, trips))
    assert len(list(replay_many(values, list(STRATEGIES.values()), shared))) == 40
    # The probe of a template, the generation prompt and the formats are asked for once, the rest batch by batch.
    assert len(trips) < 18


def test_a_reader_that_stops_early_leaves_no_thread_behind(corpus: Path) -> None:
    import threading

    plain, shared = contexts(corpus, "qwen2.5")
    made = replay_many((recorded(plain, "qwen2.5", str(n)) for n in range(200)), [STRATEGIES["tool_delta"]], shared)
    next(made)
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("foresee")]


class TestRewrittenHistory:
    """Source 3: everything before the last point at which the past was edited is prompt, and masked."""

    def value(self, context: Context) -> Trajectory:
        whole = recorded(context, "qwen2.5", "a", turns=4)
        summary: Message = {"role": "user", "content": "Summary of what was said: 2 + 2 is 4."}
        steps = list(whole.steps)
        # Compaction before step 2: its conversation begins anew, and step 3 continues that one.
        at_2 = (summary,)
        request = steps[3].request
        assert request is not None
        at_3 = (summary, *request.messages[5:])
        for index, messages in ((2, at_2), (3, at_3)):
            prompt = context.renderer.render_ids(Conversation(messages, TOOLS, {}, True))
            steps[index] = replace(steps[index], prompt_ids=prompt, request=Request(messages, TOOLS))
        return replace(whole, steps=tuple(steps))

    @pytest.mark.parametrize("slug", ["tool_delta", "fixed_base", "single_message", "eos_splice"])
    def test_what_lies_before_it_is_not_trained_and_the_share_is_told(self, corpus: Path, slug: str) -> None:
        context, _ = contexts(corpus, "qwen2.5")
        value = self.value(context)
        made = replay(value, STRATEGIES[slug], context)
        sampled = [len(step.completion_ids) for step in value.steps]
        inner_stop = slug == "single_message"  # a message that goes on does not keep the stop token in its middle
        assert made.refused == "" and made.frozen_steps == 2
        assert made.trained_tokens == sum(sampled[2:]) - inner_stop
        assert made.trained_share == (sum(sampled[2:]) - inner_stop) / sum(sampled)
        (row,) = made.rows
        assert row.step_indices == (2, 3)
        n_prompt = len(value.steps[2].prompt_ids)
        assert row.ids[:n_prompt].tolist() == value.steps[2].prompt_ids.tolist() and not row.loss_mask[:n_prompt].any()

    def test_reconcile_opens_a_row_and_trains_both(self, corpus: Path) -> None:
        context, _ = contexts(corpus, "qwen2.5")
        value = self.value(context)
        made = replay(value, STRATEGIES["reconcile"], context)
        assert made.frozen_steps == 0 and made.rows[0].loss_mask.any()
        assert {index for row in made.rows for index in row.step_indices} == {0, 1, 2, 3}
        assert not any({1, 2} <= set(row.step_indices) for row in made.rows)

    def test_without_a_rewrite_nothing_is_frozen(self, corpus: Path) -> None:
        context, _ = contexts(corpus, "qwen2.5")
        made = replay(recorded(context, "qwen2.5", "a"), STRATEGIES["tool_delta"], context)
        assert (made.frozen_steps, made.trained_share, made.lost_tokens) == (0, 1.0, 0)


def test_step_wise_rows_pass_the_five_invariants(corpus: Path) -> None:
    """Source 2, ``_validate_step_wise_fields``: there, as many, the last ends, together, ends where ids change.

    Rows of several trajectories one behind the other are what a generator hands to the trainer.
    """
    context, _ = contexts(corpus, "qwen2.5")
    values = [recorded(context, "qwen2.5", name, turns) for name, turns in (("a", 3), ("b", 2), ("c", 1))]
    rows, is_last, owner = [], [], []
    for value in values:
        for row in replay(value, STRATEGIES["step_wise"], context).rows:
            rows.append(row)
            is_last.append(row.extra["is_last_step"])
            owner.append(value.external_id)
    assert all(flag is not None for flag in is_last) and all(owner)
    assert len(rows) == len(is_last) == len(owner) == 6 and not any(length_mismatch(row) for row in rows)
    assert is_last[-1] is True
    assert owner == sorted(owner)
    assert [n for n, flag in enumerate(is_last) if flag] == [2, 4, 5]
    assert all(is_last[n] for n in range(5) if owner[n] != owner[n + 1])
    for row, step in zip(rows, (step for value in values for step in value.steps), strict=True):
        n = len(step.completion_ids)
        assert row.loss_mask[-n:].all() and not row.loss_mask[:-n].any()


def test_merging_follows_the_two_examples(corpus: Path) -> None:
    context, _ = contexts(corpus, "qwen2.5")

    def rows(*steps: tuple[list[int], list[int]]) -> list[list[int]]:
        made = [Step(np.array(prompt, dtype=np.int32), np.array(sampled, dtype=np.int32)) for prompt, sampled in steps]
        merged = replay(Trajectory("t", tuple(made)), STRATEGIES["step_wise_merged"], context)
        return [row.ids.tolist() for row in merged.rows]

    assert rows(([1], [2]), ([1, 2, 3], [4]), ([9], [5])) == [[1, 2, 3, 4], [9, 5]]
    # The prompt is a prefix, prompt and response together are not.
    assert rows(([1, 2], [3, 4]), ([1, 2, 3, 7], [8])) == [[1, 2, 3, 4], [1, 2, 3, 7, 8]]


def test_text_without_ids_is_a_sentence_for_every_strategy(corpus: Path) -> None:
    context, _ = contexts(corpus, "qwen2.5")
    whole = recorded(context, "qwen2.5", "a", turns=2)
    nothing = np.zeros(0, dtype=np.int32)
    text = Trajectory(
        "t", tuple(replace(s, prompt_ids=nothing, completion_ids=nothing, logprobs=None) for s in whole.steps)
    )
    for make in STRATEGIES.values():
        assert "as text, without token ids" in replay(text, make, context).refused


def test_a_reply_is_parsed_only_where_nobody_recorded_it(corpus: Path) -> None:
    context, _ = contexts(corpus, "qwen2.5")
    whole = recorded(context, "qwen2.5", "a", turns=4)
    silent = replace(whole, steps=tuple(replace(step, reply=None) for step in whole.steps))
    parsed: list[int] = []

    def parse(prompt: Any, ids: Any, tools: Any) -> Message:
        parsed.append(len(prompt))
        return {"role": "assistant", "content": "x"}

    complete = with_replies(silent, parse)
    assert parsed == [len(whole.steps[-1].prompt_ids)] and complete.steps[-1].reply == parse(
        whole.steps[-1].prompt_ids, 0, None
    )
