"""The worked examples of the field, on the tokenizers they were written for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.strategies import STRATEGIES, Context, Strategy, StrategyRefused
from rollout_inspector.streams.strategies.replay import replay
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Origin, Row, Step, Trajectory, ids_array
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.replies.parsing import parser
from rollout_inspector.text.replies.tool_calls import learn
from rollout_inspector.text.tokenizers import load

Make = Callable[..., Context]

USER = {"role": "user", "content": "What's 2+2?"}
TOOLS = [{"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}]
REPLY = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "calc", "arguments": {"expr": "2+2"}}}],
}
RESULT = {"role": "tool", "name": "calc", "content": "4"}
ANSWER = {"role": "assistant", "content": "4."}
THOUGHT = {
    "role": "assistant",
    "content": "<think>user asked about a simple math question.</think> 2 + 2 = 4",
}
THANKS = {"role": "user", "content": "Thank you!"}
MORE = {"role": "user", "content": "?"}
# What the model "sampled" in the post: a call that its own template would have written with other white space.
SAMPLED = [
    *(151657, 198, 4913, 606, 788, 330, 88821, 497, 330, 16370, 788, 5212),
    *(9413, 788, 330, 17, 10, 17, 95642, 151658, 151645),
]
DELTA = [151644, 872, 198, 27, 14172, 9655, 397, 19, 198, 522, 14172, 9655, 29, 151645, 198, 151644, 77091, 198]


@pytest.fixture(scope="session")
def context(corpus: Path) -> Make:
    def make(tokenizer: str, template: str | None = None) -> Context:
        loaded = load(corpus / "tokenizers" / tokenizer)
        text = (corpus / "templates" / f"{template or tokenizer}.jinja").read_text()
        return Context(loaded, renderer(loaded, text), loaded.stop_ids)

    return make


def started(slug: str, context: Context, tools: Any = None) -> tuple[Strategy, Ids]:
    strategy = STRATEGIES[slug](context)
    return strategy, strategy.begin([USER], tools, {})


class TestTheConversationOfThePost:
    """Its other printed ids: a whole conversation, an answer and a call read back."""

    def test_a_conversation_is_rendered_to_the_printed_ids(self, context: Make) -> None:
        made = context("qwen2.5")
        system = [2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 1446, 525, 264, 10950, 17847, 13]
        asked = [151644, 872, 198, 3838, 594, 220, 17, 10, 17, 30, 151645, 198]
        answered = [151644, 77091, 198, 19, 13, 151645, 198]
        whole = [151644, 8948, 198, *system, 151645, 198, *asked, *answered]
        assert made.renderer.render_ids(Conversation([USER, ANSWER])).tolist() == whole

    def test_a_completion_is_read_to_know_where_the_turn_goes(self, context: Make) -> None:
        made = context("qwen2.5")
        parse = parser(made.codec.hf, made.stop_ids, learn(made.renderer))  # type: ignore[attr-defined]
        assert parse(NO_IDS, ids_array([19, 13, 151645]), None) == ANSWER
        function = {"name": "calculator", "arguments": {"expr": "2+2"}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        assert parse(NO_IDS, ids_array(SAMPLED), None) == called
        cut = parse(NO_IDS, ids_array(SAMPLED[:-4]), None)  # a limit in the middle of the call: nothing is dispatched
        assert "tool_calls" not in cut


class TestToolDelta:
    def test_the_delta_is_the_one_of_the_post(self, context: Make) -> None:
        """Behind the sampled <|im_end|> comes the newline that no engine samples, then the ids as printed there."""
        strategy, prompt = started("tool_delta", context("qwen2.5"))
        strategy.sampled(ids_array(SAMPLED), None, REPLY)
        following = strategy.observe([RESULT])
        assert following.tolist() == prompt.tolist() + SAMPLED + [198, *DELTA]
        (row,) = strategy.rows()
        assert row.loss_mask.tolist() == [False] * len(prompt) + [True] * len(SAMPLED) + [False] * 19
        assert row.origin is not None
        inserted = row.origin[len(prompt) + len(SAMPLED) :]
        assert [DELTA[i - 1] for i, one in enumerate(inserted) if one == Origin.OBSERVATION] == [19]

    def test_all_tool_messages_of_a_turn_are_rendered_together(self, context: Make) -> None:
        made = context("qwen2.5")
        strategy, prompt = started("tool_delta", made)
        strategy.sampled(ids_array(SAMPLED), None, REPLY)
        following = strategy.observe([RESULT, {**RESULT, "content": "5"}])
        text = made.codec.decode(following[len(prompt) + len(SAMPLED) :])
        responses = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
        assert text == f"\n<|im_start|>user\n{responses}<|im_end|>\n<|im_start|>assistant\n"

    def test_a_template_that_rewrites_the_past_is_refused_before_sampling(self, context: Make) -> None:
        with pytest.raises(StrategyRefused, match=r"not prefix-preserving.*repair the template"):
            started("tool_delta", context("qwen3"), TOOLS)
        # One line of the template mends it.
        _, prompt = started("tool_delta", context("qwen3", "qwen3--seed-one-line-fix"), TOOLS)
        assert len(prompt)

    @pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "mistral-nemo", "deepseek-r1", "gpt-oss"])
    def test_the_delta_is_what_the_whole_render_has(self, context: Make, name: str) -> None:
        """On a canonical completion the buffer is the full render, whatever the family."""
        made = context(name)
        arguments: Any = '{"expr": "2+2"}' if name == "deepseek-r1" else {"expr": "2+2"}
        function = {"name": "calc", "arguments": arguments}
        call = {**REPLY, "tool_calls": [{"type": "function", "function": function, "id": "abcdefghi"}]}
        result = {**RESULT, "tool_call_id": "abcdefghi"}
        strategy, prompt = started("tool_delta", made, TOOLS)
        whole = made.renderer.render_ids(Conversation([USER, call, result], TOOLS, None, True))
        until_call = made.renderer.render_ids(Conversation([USER, call], TOOLS, None, False))
        stop = made.after_last(until_call, made.stop_ids) or len(until_call)
        assert whole[: len(prompt)].tolist() == prompt.tolist() and len(prompt) < stop
        strategy.sampled(whole[len(prompt) : stop], None, call)
        assert strategy.observe([result]).tolist() == whole.tolist()

    def test_truncation_leaves_the_buffer_as_it_is(self, context: Make) -> None:
        strategy, prompt = started("tool_delta", context("qwen2.5"))
        strategy.sampled(ids_array(SAMPLED[:9]), None, REPLY)
        (row,) = strategy.rows()
        assert row.ids.tolist() == prompt.tolist() + SAMPLED[:9] and row.loss_mask.sum() == 9


class TestFixedBase:
    def test_the_newline_behind_the_eos_comes_back_with_the_observation(self, context: Make) -> None:
        made = context("qwen2.5")
        strategy, prompt = started("fixed_base", made)
        response = made.codec.encode("Response1<|im_end|>")
        strategy.sampled(response, None, {"role": "assistant", "content": "Response1"})
        following = strategy.observe([{"role": "user", "content": "Observation1"}])
        delta = made.codec.decode(following[len(prompt) + len(response) :])
        assert delta == "\n<|im_start|>user\nObservation1<|im_end|>\n<|im_start|>assistant\n"

    def test_the_whole_conversation_of_the_document(self, context: Make) -> None:
        """As printed there, but for the newline behind the last sampled <|im_end|>; trained are the responses."""
        made = context("qwen2.5")
        strategy = STRATEGIES["fixed_base"](made)
        system = {"role": "system", "content": "System prompt here"}
        strategy.begin([system, {"role": "user", "content": "Question here"}], None, {})
        for n in (1, 2):
            strategy.sampled(made.codec.encode(f"Response{n}<|im_end|>"), None, None)
            strategy.observe([{"role": "user", "content": f"Observation{n}"}])
        strategy.sampled(made.codec.encode("Response3<|im_end|>"), None, None)
        (row,) = strategy.rows()
        assert made.codec.decode(row.ids) == (
            "<|im_start|>system\nSystem prompt here<|im_end|>\n<|im_start|>user\nQuestion here<|im_end|>\n"
            "<|im_start|>assistant\nResponse1<|im_end|>\n<|im_start|>user\nObservation1<|im_end|>\n"
            "<|im_start|>assistant\nResponse2<|im_end|>\n<|im_start|>user\nObservation2<|im_end|>\n"
            "<|im_start|>assistant\nResponse3<|im_end|>"
        )
        assert made.codec.decode(row.ids[row.loss_mask]) == "Response1<|im_end|>Response2<|im_end|>Response3<|im_end|>"

    @pytest.mark.parametrize(("tokenizer", "template"), [("qwen3", "qwen3"), ("qwen2.5", "qwq-32b")])
    def test_thoughts_that_the_template_would_strip_stay(self, context: Make, tokenizer: str, template: str) -> None:
        made = context(tokenizer, template)
        strategy, _ = started("fixed_base", made)
        sampled = made.codec.encode(f"{THOUGHT['content']}<|im_end|>")
        strategy.sampled(sampled, None, THOUGHT)
        following = strategy.observe([THANKS])
        assert f"{THOUGHT['content']}<|im_end|>\n<|im_start|>user\nThank you!" in made.codec.decode(following)
        stripped = made.renderer.render_text(Conversation([USER, THOUGHT, THANKS], None, None, True))
        assert "simple math question" not in stripped and "2 + 2 = 4" in stripped

    def test_a_template_that_looks_back_at_the_call_renders_otherwise(self, context: Make) -> None:
        """The trap: the base ends in a user turn, so a template that wants a call before a result has none."""
        made = context("mistral-nemo")
        strategy, _ = started("fixed_base", made)
        strategy.sampled(made.codec.encode("x</s>"), None, REPLY)
        with pytest.raises(Exception, match=r"(?i)prefix-preserving|tool|role|alternat"):
            strategy.observe([{**RESULT, "tool_call_id": "abcdefghi"}])


class TestSingleMessage:
    def turns(self, made: Context, last: str) -> tuple[Ids, Row]:
        strategy, prompt = started("single_message", made)
        strategy.sampled(made.codec.encode("Response1\n<|im_end|>"), None, None)
        strategy.observe([{"role": "user", "content": "<observation>Observation1</observation>\n"}])
        strategy.sampled(made.codec.encode(last), None, None)
        (row,) = strategy.rows()
        return prompt, row

    def test_everything_is_one_message_with_one_eos(self, context: Make) -> None:
        made = context("qwen2.5")
        prompt, row = self.turns(made, "Response2<|im_end|>")
        text = made.codec.decode(row.ids[len(prompt) :])
        assert text == "Response1\n<observation>Observation1</observation>\nResponse2<|im_end|>"
        trained = made.codec.decode(row.ids[row.loss_mask])
        assert trained == "Response1\nResponse2<|im_end|>"

    def test_each_result_of_a_turn_is_encoded_alone(self, context: Make) -> None:
        """As SkyRL's loop over the observations does; ``">\\n" + "\\n<"`` joined would be other ids."""
        made = context("qwen2.5")
        strategy, prompt = started("single_message", made)
        strategy.sampled(made.codec.encode("Response1\n<|im_end|>"), None, None)
        texts = ["<observation>1</observation>\n", "\n<observation>2</observation>"]
        following = strategy.observe([{"role": "user", "content": text} for text in texts])
        apart = [i for text in ("Response1\n", *texts) for i in made.codec.encode(text).tolist()]
        assert following[len(prompt) :].tolist() == apart
        assert apart != made.codec.encode("Response1\n" + "".join(texts)).tolist()

    def test_an_eos_that_was_not_sampled_has_mask_0(self, context: Make) -> None:
        made = context("qwen2.5")
        _, row = self.turns(made, "Response2")
        assert row.origin is not None
        assert (int(row.ids[-1]), bool(row.loss_mask[-1]), int(row.origin[-1])) == (151645, False, Origin.INSERTED)


class TestRetokenize:
    def test_the_mask_comes_from_generation_tags(self, context: Make) -> None:
        made = context("qwen2.5", "trl-training--qwen2-5")
        strategy, _ = started("retokenize", made)
        strategy.sampled(made.codec.encode("4.<|im_end|>"), None, ANSWER)
        (row,) = strategy.rows()
        assert made.codec.decode(row.ids[row.loss_mask]).strip("\n") == "4.<|im_end|>"
        assert row.logprobs is None
        reference = made.codec.hf.apply_chat_template(  # type: ignore[attr-defined]
            [USER, ANSWER], chat_template=made.renderer.chat_template, return_dict=True,  # type: ignore[attr-defined]
            return_assistant_tokens_mask=True,
        )
        assert row.ids.tolist() == list(reference["input_ids"])
        assert row.loss_mask.astype(int).tolist() == list(reference["assistant_masks"])

    @pytest.mark.parametrize("kept", [True, False])
    def test_the_templates_of_skyrl_keep_or_drop_earlier_thoughts(self, context: Make, kept: bool) -> None:
        """Their third code path: the mask is that of the tags, and the row holds the thoughts that they write."""
        made = context("qwen3", f"skyrl--qwen3_with{'' if kept else 'out'}_thinking")
        strategy, _ = started("retokenize", made)
        replies = [{"role": "assistant", "content": f"<think>\nthought {n}\n</think>\n\nResponse{n}"} for n in (1, 2)]
        for n, reply in enumerate(replies):
            strategy.sampled(made.codec.encode(f"{reply['content']}<|im_end|>"), None, reply)
            if n == 0:
                strategy.observe([{"role": "user", "content": "Observation1"}])
        (row,) = strategy.rows()
        trained = made.codec.decode(row.ids[row.loss_mask])
        assert "Response1" in trained and "thought 2" in trained and "Observation1" not in trained
        assert ("thought 1" in made.codec.decode(row.ids)) is kept

    def test_a_template_without_tags_is_refused(self, context: Make) -> None:
        with pytest.raises(StrategyRefused, match="generation"):
            started("retokenize", context("qwen2.5"))

    def test_what_was_sampled_is_lost(self, context: Make) -> None:
        """The post's call, sampled with other white space than the template's: the row holds other ids."""
        made = context("qwen2.5", "trl-training--qwen2-5")
        strategy, prompt = started("retokenize", made)
        strategy.sampled(ids_array(SAMPLED), None, REPLY)
        following = strategy.observe([RESULT])
        stream = np.concatenate([prompt, ids_array(SAMPLED)])
        assert following[: len(stream)].tolist() != stream.tolist()


class TestMessageDelta:
    def test_separate_pieces_encode_otherwise_than_the_whole(self, context: Make) -> None:
        """Two newlines that meet between pieces are one token in the whole render and two here."""
        made = context("qwen2.5")
        strategy, _ = started("message_delta", made)
        strategy.sampled(made.codec.encode("4.<|im_end|>"), None, ANSWER)
        strategy.observe([{"role": "user", "content": "Thank you!"}])
        assert made.codec.decode(strategy.rows()[0].ids).endswith("<|im_start|>assistant\n")

    @pytest.mark.parametrize(("tokenizer", "template"), [("qwen3", "qwen3"), ("qwen2.5", "qwq-32b")])
    def test_a_template_that_drops_earlier_thoughts_is_refused(
        self, context: Make, tokenizer: str, template: str
    ) -> None:
        strategy, _ = started("message_delta", context(tokenizer, template))
        with pytest.raises(StrategyRefused, match="changed the text before"):
            strategy.sampled(ids_array(SAMPLED), None, THOUGHT)  # QwQ's begins the thought, and writes none here
            strategy.observe([THANKS])


class TestPerMessage:
    def test_two_newlines_are_one_token_together_and_two_apart(self, context: Make) -> None:
        """The ids as printed: the same text, and other ids where the pieces meet."""
        codec = context("qwen2.5").codec
        pieces = ["<|im_start|>user", "\n<tool_response>\n", "\n1 + 1 = 2\n", "\n</tool_response>", "<|im_end|>"]
        together = codec.encode("".join(pieces)).tolist()
        apart = [i for piece in pieces for i in codec.encode(piece).tolist()]
        value = [16, 488, 220, 16, 284, 220, 17]
        assert together == [151644, 872, 198, 27, 14172, 9655, 1339, *value, 271, 522, 14172, 9655, 29, 151645]
        assert apart == [151644, 872, 198, 27, 14172, 9655, 397, 198, *value, 198, 198, 522, 14172, 9655, 29, 151645]
        assert codec.decode(ids_array(together)) == codec.decode(ids_array(apart))

    def test_each_message_brings_its_own_default_system_text(self, context: Make) -> None:
        made = context("qwen2.5")
        strategy = STRATEGIES["per_message"](made)
        prompt = strategy.begin([{"role": "system", "content": "S"}, USER], None, {})
        assert made.codec.decode(prompt).count("You are Qwen, created by Alibaba Cloud") == 1
        whole = made.renderer.render_ids(Conversation([{"role": "system", "content": "S"}, USER], None, None, True))
        assert "created by Alibaba" not in made.codec.decode(whole)


    @pytest.mark.parametrize("system", [[], [{"role": "system", "content": "S"}]])
    def test_an_injected_system_text_is_never_trained(self, context: Make, system: list[Any]) -> None:
        made = context("qwen2.5")
        strategy = STRATEGIES["per_message"](made)
        strategy.begin([*system, USER], None, {})
        strategy.sampled(made.codec.encode("4.<|im_end|>"), None, ANSWER)
        (row,) = strategy.rows()
        assert made.codec.decode(row.ids).count("created by Alibaba Cloud") == 2
        assert made.codec.decode(row.ids[row.loss_mask]) == "4.<|im_end|>"


class TestRoleFormats:
    """verl's table of formats: its pieces, read from the chat template of each family."""

    def turn(self, made: Context, call: Any, results: list[Any]) -> tuple[Strategy, Ids, Ids]:
        strategy, _ = started("role_formats", made, TOOLS)
        strategy.sampled(NO_IDS, None, call)
        before = strategy.rows()[0].ids
        return strategy, before, strategy.observe(results)[len(before) :]

    def test_the_pieces_are_those_of_the_post(self, context: Make) -> None:
        """Its two results, and its printed ids of a result that begins and ends with a newline."""
        made = context("qwen2.5")
        values = ["1 + 1 = 2", "2 + 2 = 4"]
        _, _, delta = self.turn(made, REPLY, [{"role": "tool", "content": value} for value in values])
        result = ["\n<tool_response>\n", "{}", "\n</tool_response>"]
        pieces = [piece.format(value) for value in values for piece in result]
        pieces = ["\n", "<|im_start|>user", *pieces, "<|im_end|>", "\n<|im_start|>assistant\n"]
        assert delta.tolist() == [i for piece in pieces for i in made.codec.encode(piece).tolist()]
        _, _, delta = self.turn(made, REPLY, [{"role": "tool", "content": "\n1 + 1 = 2\n"}])
        value = [16, 488, 220, 16, 284, 220, 17]
        apart = [151644, 872, 198, 27, 14172, 9655, 397, 198, *value, 198, 198, 522, 14172, 9655, 29, 151645]
        assert delta.tolist() == [198, *apart, 198, 151644, 77091, 198]

    @pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1", "mistral-nemo", "deepseek-r1", "gpt-oss"])
    def test_each_family_has_its_table_and_trains_what_the_assistant_wrote(self, context: Make, name: str) -> None:
        made = context(name)
        arguments: Any = '{"expr": "2+2"}' if name == "deepseek-r1" else {"expr": "2+2"}
        call = {"type": "function", "function": {"name": "calc", "arguments": arguments}, "id": "abcdefghi"}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {**RESULT, "content": "four", "tool_call_id": "abcdefghi"}
        strategy, before, delta = self.turn(made, reply, [result])
        text = made.codec.decode(delta)
        whole = made.renderer.render_text(Conversation([USER, reply, result], TOOLS, None, True))
        assert whole.endswith(text) or name == "qwen3"  # whose template would move the thoughts
        strategy.sampled(NO_IDS, None, ANSWER)
        strategy.observe([THANKS])
        (row,) = strategy.rows()
        trained = made.codec.decode(row.ids[row.loss_mask])
        assert "2+2" in trained and "4." in trained and "four" not in trained and "Thank" not in trained
        assert "created by Alibaba" not in made.codec.decode(row.ids[len(before) :])
        assert int(row.ids[row.loss_mask][-1]) in made.stop_ids

    @pytest.mark.parametrize(
        ("tokenizer", "template"), [("qwen2.5", "qwq-32b"), ("deepseek-r1", "trl-training--deepseekv3")]
    )
    def test_a_call_behind_a_begun_thought_is_trained_from_its_first_token(
        self, context: Make, tokenizer: str, template: str
    ) -> None:
        """The prompt ends with ``<think>``, and the tag of a call begins like it."""
        made = context(tokenizer, template)
        call = {"type": "function", "function": {"name": "calc", "arguments": '{"expr": "2+2"}'}, "id": "abcdefghi"}
        strategy, _ = started("role_formats", made, TOOLS)
        strategy.sampled(NO_IDS, None, {"role": "assistant", "content": "", "tool_calls": [call]})
        (row,) = strategy.rows()
        assert made.codec.decode(row.ids[row.loss_mask]).startswith(("<tool_call>", "<｜tool▁calls▁begin｜>"))

    def test_no_control_token_is_cut_in_two(self, context: Make) -> None:
        """The first header and the later ones end alike, from the middle of their control tokens on."""
        loaded: Any = context("qwen2.5").codec
        text = (
            "{% for m in messages %}{% set again = not loop.first and loop.previtem.role == m.role %}"
            "{{ '<|im_end|>' if again else '<|im_start|>' }}{{ m.role }}:{{ m.content }}{% endfor %}"
        )
        made = Context(loaded, renderer(loaded, text), loaded.stop_ids)
        _, _, delta = self.turn(made, ANSWER, [RESULT, RESULT])
        assert delta.tolist() == [i for header in ("<|im_start|>", "<|im_end|>")
                                  for piece in (header, "tool:", "4") for i in loaded.encode(piece).tolist()]

    def test_a_template_that_hides_results_is_refused(self, context: Make) -> None:
        loaded: Any = context("qwen2.5").codec
        text = "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
        strategy, _ = started("role_formats", Context(loaded, renderer(loaded, text), loaded.stop_ids))
        strategy.sampled(NO_IDS, None, ANSWER)
        with pytest.raises(StrategyRefused, match="does not write each new message once"):
            strategy.observe([RESULT])


class TestEosSplice:
    def test_the_sampled_stream_replaces_what_lies_before_the_eos(self, context: Make) -> None:
        made = context("qwen2.5")
        strategy, prompt = started("eos_splice", made)
        strategy.sampled(ids_array(SAMPLED), None, REPLY)
        following = strategy.observe([RESULT])
        assert following.tolist() == prompt.tolist() + SAMPLED + [198, *DELTA]
        (row,) = strategy.rows()
        assert row.loss_mask.sum() == len(SAMPLED)


class TestStepWise:
    def play(self, slug: str, made: Context) -> tuple[list[Ids], list[Row]]:
        strategy, first = started(slug, made)
        strategy.sampled(ids_array(SAMPLED), np.full(len(SAMPLED), -0.5, dtype=np.float32), REPLY)
        second = strategy.observe([RESULT])
        strategy.sampled(made.codec.encode("4.<|im_end|>"), np.full(3, -0.25, dtype=np.float32), ANSWER)
        return [first, second], strategy.rows()

    def test_one_row_for_each_step(self, context: Make) -> None:
        prompts, rows = self.play("step_wise", context("qwen2.5"))
        assert [len(row.ids) for row in rows] == [len(prompts[0]) + len(SAMPLED), len(prompts[1]) + 3]
        for row, prompt in zip(rows, prompts, strict=True):
            assert row.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(row.ids) - len(prompt))
            assert row.logprobs is not None and np.isnan(row.logprobs[: len(prompt)]).all()
            assert not np.isnan(row.logprobs[len(prompt) :]).any()
        assert [row.extra["is_last_step"] for row in rows] == [False, True]

    def test_a_recorded_trajectory_keeps_its_prompts_also_where_they_were_rewritten(self, context: Make) -> None:
        first = Step(ids_array([1, 2, 3]), ids_array([4, 5]))
        extends = Step(ids_array([1, 2, 3, 4, 5, 6]), ids_array([7]))
        rewritten = Step(ids_array([1, 9, 6]), ids_array([8]))
        trajectory = Trajectory("t", (first, extends, rewritten))
        apart = replay(trajectory, STRATEGIES["step_wise"], context("qwen2.5"))
        assert [row.ids.tolist() for row in apart.rows] == [s.stream.tolist() for s in trajectory.steps]
        assert (apart.trained_tokens, apart.lost_tokens, apart.differs_at, apart.refused) == (4, 0, None, "")
        merged = replay(trajectory, STRATEGIES["step_wise_merged"], context("qwen2.5"))
        assert [row.step_indices for row in merged.rows] == [(0, 1), (2,)]

    def test_merged_rows_train_the_same_tokens_once(self, context: Make) -> None:
        _, rows = self.play("step_wise", context("qwen2.5"))
        _, merged = self.play("step_wise_merged", context("qwen2.5"))
        assert len(merged) == 1 and merged[0].ids.tolist() == rows[-1].ids.tolist()
        assert merged[0].loss_mask.sum() == sum(row.loss_mask.sum() for row in rows)


class TestReconcile:
    def after(self, made: Context, completion: list[int], reply: Any, following: Any) -> Any:
        strategy = STRATEGIES["reconcile"](made)
        strategy.begin([USER], None, {})
        strategy.sampled(ids_array(completion), None, reply)
        strategy.observe([following])
        return strategy

    def test_clean_when_nothing_was_lost(self, context: Make) -> None:
        made = context("qwen2.5")
        strategy = self.after(
            made, made.codec.encode("4.<|im_end|>").tolist(), ANSWER, {"role": "user", "content": "?"}
        )
        assert strategy.decisions == ["clean"] and len(strategy.rows()) == 1

    def test_a_small_drift_in_the_last_response_is_realigned_with_mask_0(self, context: Make) -> None:
        made = context("qwen2.5")
        completion = [19, 13, 220, 151645]  # "4. ": the parsed message has lost the blank
        strategy = self.after(made, completion, ANSWER, MORE)
        (row,) = strategy.rows()
        assert strategy.decisions == ["realign"]
        assert row.ids[row.loss_mask].tolist() == [19, 13]
        whole = Conversation([USER, ANSWER, {"role": "user", "content": "?"}], add_generation_prompt=True)
        assert row.ids.tolist() == made.renderer.render_ids(whole).tolist()

    @pytest.mark.parametrize(("n", "decision"), [(17, "realign"), (1023, "realign"), (1024, "fork")])
    def test_it_forks_from_the_threshold_of_trl_and_slime_on(self, context: Make, n: int, decision: str) -> None:
        made = context("qwen2.5")
        completion = [*[19] * (n - 1), 151645]  # the parsed message has lost all of it
        strategy = self.after(made, completion, {"role": "assistant", "content": "No."}, MORE)
        assert strategy.decisions == [decision] and len(strategy.rows()) == 1 + (decision == "fork")

    def test_a_large_one_forks(self, context: Make) -> None:
        made = context("qwen2.5")
        completion = made.codec.encode("Let me think. " * 400 + "4.<|im_end|>")
        strategy = self.after(made, completion.tolist(), ANSWER, MORE)
        rows = strategy.rows()
        assert strategy.decisions == ["fork"] and len(rows) == 2
        assert rows[0].loss_mask.sum() == len(completion) and rows[1].loss_mask.sum() == 0
