"""Whatever a source holds, the diagnosis answers and never raises."""

from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from rollout_inspector.diagnose import KINDS, diagnose
from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.trajectory import Request, Row, Step, Trajectory, ids_array
from tests.samples.model_setups import model_setup

S = model_setup("stable")
SIZE = S.codec.vocab_size
SPECIAL = sorted(S.codec.special_ids)

token = st.one_of(st.integers(0, SIZE - 1), st.sampled_from(SPECIAL), st.integers(-3, SIZE + 3))
tokens = st.lists(token, max_size=14)
texts = st.one_of(st.none(), st.text(max_size=20), st.sampled_from(["four", "<|shut|>", "\ud800", "\x00", '{"a": 1}']))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "other"])},
    optional={
        "content": st.one_of(texts, json_values),
        "tool_calls": json_values,
        "reasoning_content": texts,
        "tool_call_id": texts,
    },
)
requests = st.builds(
    Request,
    messages=st.lists(messages, max_size=4).map(tuple),
    tools=st.one_of(st.none(), st.just(())),
    chat_template_kwargs=st.dictionaries(st.text(max_size=4), st.booleans(), max_size=1),
)
floats = st.lists(st.floats(width=32), max_size=14).map(lambda values: np.array(values, np.float32))
steps = st.builds(
    Step,
    prompt_ids=tokens.map(ids_array),
    completion_ids=tokens.map(ids_array),
    logprobs=st.one_of(st.none(), floats),
    finish_reason=st.sampled_from(["", "stop", "length", "abort"]),
    stop_reason=st.sampled_from(["", "x", "12"]),
    request=st.one_of(st.none(), requests),
    reply=st.one_of(st.none(), messages),
    text=texts,
    extra=st.dictionaries(st.sampled_from(["routed_experts"]), json_values),
)
rows = st.builds(
    Row,
    ids=tokens.map(ids_array),
    loss_mask=st.lists(st.booleans(), max_size=14).map(lambda values: np.array(values, bool)),
    logprobs=st.one_of(st.none(), floats),
    columns=st.dictionaries(st.sampled_from(["advantages", "trainer_logprobs"]), floats),
    step_indices=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    extra=st.dictionaries(st.sampled_from(["is_last_step", "sample_loss_mask", "routed_experts"]), json_values),
)


class Fragile:
    """A template that refuses what it does not like."""

    chat_template_sha256 = ""

    def render_text(self, *args: Any, **kwargs: Any) -> str:
        raise RenderFailed("no")

    def render_ids(self, conversation: Conversation) -> Any:
        if any(not isinstance(message.get("content"), str) for message in conversation.messages):
            raise RenderFailed("a content is missing")
        whole = "".join(f"<|open|>{m['role']}\n{m['content']}<|shut|>\n" for m in conversation.messages)
        return S.codec.encode(whole + "<|open|>assistant\n" * conversation.add_generation_prompt)


@settings(max_examples=250, deadline=None)
@given(st.lists(steps, max_size=4), st.lists(rows, max_size=2), st.booleans(), st.booleans())
def test_any_trajectory_gets_findings(some: list[Step], more: list[Row], with_codec: bool, with_template: bool) -> None:
    trajectory = Trajectory("t", tuple(some), tuple(more))
    codec = S.codec if with_codec else None
    for finding in diagnose(trajectory, codec, (lambda sha: Fragile()) if with_template else None):
        assert finding.kind in KINDS and finding.evidence
        assert 0 <= finding.start <= finding.stop
        assert finding.step is not None or finding.row is not None
        assert len(finding.expected_ids) <= 256 and len(finding.actual_ids) <= 256
        if finding.step is not None and finding.kind not in ("not_decidable",):
            stream = trajectory.steps[finding.step].stream
            assert finding.stop <= len(stream)
            assert finding.actual_ids.tolist() == stream[finding.start : finding.stop][:256].tolist() or (
                finding.kind in ("engine_ids_inconsistent",)
            )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_steps_that_extend_have_no_stream_break(lengths: list[int], data: st.DataObject) -> None:
    stream = S.codec.encode("<|open|>user\nhi<|shut|>\n<|open|>assistant\n")
    made = []
    for _ in lengths:
        sampled = ids_array([data.draw(st.integers(1, SIZE - 1)) for _ in range(3)])
        made.append(Step(stream, sampled))
        stream = np.concatenate([stream, sampled, S.codec.encode("\n<|open|>tools\nx<|shut|>")])
    kinds = {f.kind for f in diagnose(Trajectory("t", tuple(made)), S.codec) if f.axis == "stream"}
    assert kinds <= {"noncanonical_sampling", "not_decidable", "token_ids_missing"}


def test_a_row_may_name_its_steps_in_any_order() -> None:
    short = Step(ids_array([1]), ids_array([2, 3]), logprobs=np.zeros(2, np.float32))
    long = Step(ids_array([1, 2, 3, 4, 5, 6]), ids_array([7]), logprobs=np.zeros(1, np.float32))
    row = Row(ids_array([9]), np.array([True]), step_indices=(1, 0))
    kinds = {finding.kind for finding in diagnose(Trajectory("t", (short, long), (row,)), None, None)}
    assert "row_not_sampled" in kinds
