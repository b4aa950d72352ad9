"""``Guard``: its sample, its bounds, its counters, and what it does with what it finds."""

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.guard import trainer_guard as module
from rollout_inspector.guard.trainer_batches import row_of, step_of
from rollout_inspector.guard.trainer_guard import Guard, GuardFailed
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array
from rollout_inspector.text.chat_templates import TemplateRenderer, renderer
from rollout_inspector.text.tokenizers import load
from tests.conftest import ROOT
from tests.samples.guard import BAD, GOOD


def test_a_finding_warns_raises_or_drops(caplog: pytest.LogCaptureFixture) -> None:
    rows = [GOOD, BAD, GOOD]
    warns = Guard(sample=1)
    with caplog.at_level(logging.WARNING, "rollout_inspector.guard"):
        for _ in range(12):
            assert warns.rows(rows) is rows
    assert [one.args[1] for one in caplog.records if one.args] == [1, 10]  # the first and the tenth
    assert "logprob_invalid" in caplog.text and "call-1-rows-1, row 0" in caplog.text
    with pytest.raises(GuardFailed, match="logprob_invalid: ") as failed:
        Guard(sample=1, on="raise").rows(rows)
    assert failed.value.findings[0].trajectory == "call-1-rows-1"
    assert Guard(sample=1, on="raise").rows([GOOD]) == [GOOD]
    assert Guard(sample=1, on="raise", fail_on="none").rows(rows) is rows
    drops = Guard(sample=1, on="drop")
    assert drops.rows(rows) == [GOOD, GOOD] and drops.rows([GOOD]) == [GOOD]
    assert drops.rows(iter(rows)) == [GOOD, GOOD]
    assert (drops.counters()["dropped"], drops.counters()["seen"]) == (2, 7)


def test_the_share_is_exact_over_many_calls_and_all_is_counted() -> None:
    guard = Guard(sample=0.05, seed=1)
    for _ in range(100):
        guard.rows([GOOD] * 7)
    found = guard.counters()
    assert found["seen"] == 700 and found["checked"] in (35, 36)
    assert found["tokens_seen"] == 5600 and found["tokens_checked"] == 8 * found["checked"]
    assert found["calls"] == 100 and found["errors"] == found["late"] == found["unchecked"] == 0
    assert 0 < found["slowest_seconds"] <= found["seconds"]
    assert Guard(sample=0).rows([BAD]) == [BAD]
    flat = guard.figures("g/")
    assert flat["g/checked"] == found["checked"] and all(type(value) is float for value in flat.values())


def test_a_batch_of_arrays_is_dropped_from_alike() -> None:
    batch: dict[str, Any] = {
        "input_ids": np.stack([GOOD.ids, BAD.ids]),
        "loss_mask": [GOOD.loss_mask.tolist(), BAD.loss_mask.tolist()],
        "rollout_log_probs": np.stack([GOOD.logprobs, BAD.logprobs]),  # type: ignore[arg-type]
        "temperature": 1.0,
    }
    kept = Guard(sample=1, on="drop").rows(batch)
    assert kept["input_ids"].shape == (1, 8) and kept["loss_mask"] == [GOOD.loss_mask.tolist()]
    assert kept["temperature"] == 1.0 and Guard(sample=1).rows(batch) is batch


class Tensor:
    """What a tensor of another library offers."""

    dtype = "torch.bfloat16"

    def __init__(self, values: Any) -> None:
        self.values = values

    def detach(self) -> "Tensor":
        return self

    cpu = float = detach

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.values, dtype)

    def __len__(self) -> int:
        return len(self.values)


def test_the_fields_of_trainers_become_rows() -> None:
    trl = row_of(
        {
            "prompt_ids": Tensor([0, 0, 5, 6]), "prompt_mask": [0, 0, 1, 1], "completion_ids": [7, 8, 9, 0, 0],
            "completion_mask": [1, 1, 1, 0, 0], "tool_mask": [1, 0, 1, 1, 1], "advantages": 2.0,
            "sampling_per_token_logps": Tensor([-1.0, -2.0, -3.0, 0.0, 0.0]),
            "old_per_token_logps": [-1.0, -2.0, -3.0, 0.0, 0.0],
        }
    )
    assert trl.ids.tolist() == [5, 6, 7, 8, 9] and trl.loss_mask.tolist() == [False, False, True, False, True]
    assert trl.columns["advantages"].tolist() == [0, 0, 2, 0, 2]
    assert trl.logprobs is not None and np.isnan(trl.logprobs[:2]).all() and trl.logprobs[2:].tolist() == [-1, -2, -3]
    assert trl.columns["old_log_probs"][2:].tolist() == [-1, -2, -3]
    verl = row_of(
        {
            "input_ids": [0, 5, 6, 7, 0], "responses": [6, 7, 0], "attention_mask": [0, 1, 1, 1, 0],
            "response_mask": [1, 1, 0], "advantages": [1.0, 1.0, 0.0], "rollout_log_probs": [-1.0, -2.0, 0.0],
        }
    )
    assert verl.ids.tolist() == [5, 6, 7] and verl.loss_mask.tolist() == [False, True, True]
    assert verl.columns["advantages"].tolist() == [0, 1, 1]
    labelled = row_of({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
    assert labelled.loss_mask.tolist() == [False, True, True]
    predicting = row_of({"tokens": [5, 6, 7], "mask": [1, 1], "logprobs": [-1.0, -2.0]})
    assert predicting.loss_mask.tolist() == [False, True, True]
    for fields, said in [
        ({"x": 1}, "no token ids: its fields are x"),
        ({"ids": [1, 2]}, "no loss mask"),
        ({"ids": [[1]], "mask": [1]}, "flat list"),
        ({"ids": [2**40], "mask": [1]}, "32 bits"),
    ]:
        with pytest.raises(Refusal, match=said):
            row_of(fields)
    with pytest.raises(Refusal, match="its fields are text"):
        step_of({"text": "a"})


def test_steps_are_one_trajectory_or_many(tiny_tokenizer: Path) -> None:
    codec = load(tiny_tokenizer)
    prompt, reply = codec.encode("What is 2 + 2?"), codec.encode("It is 4.")
    first = {"prompt_ids": prompt, "completion_ids": reply, "finish_reason": "stop", "messages": [{"role": "user"}]}
    lost = Step(ids_array([*prompt, 1, 2]), reply)  # the second prompt forgets what was sampled
    guard = Guard(codec, sample=1, on="drop", fail_on="warning")
    assert guard.steps([first, lost]) == []
    assert guard.steps([first]) == [first] and guard.steps([]) == []
    many = [[first], [first, lost], Trajectory("t", (step_of(first),))]
    assert guard.steps(many) == [many[0], many[2]]
    assert guard.counters()["tokens_seen"] == len(reply) * 7
    with pytest.raises(GuardFailed):
        Guard(codec, sample=1, on="raise", fail_on="warning").steps([first, lost])


def count_renders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []
    made = TemplateRenderer.render_many

    def render_many(self: TemplateRenderer, conversations: Any, lines: bool = False) -> Any:
        asked.extend(conversations)
        return made(self, conversations, lines)

    monkeypatch.setattr(TemplateRenderer, "render_many", render_many)
    return asked


def test_masks_are_checked_with_the_template_of_the_tokenizer(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = load(tiny_tokenizer)
    call = {"type": "function", "function": {"name": "calc", "arguments": {"expr": "2"}}}
    messages = [
        {"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "It is 2."}, {"role": "assistant", "content": "Two."},
    ]
    assert codec.chat_template is not None
    writer = renderer(codec, codec.chat_template)
    ids = writer.render_ids(Conversation(messages))
    first, called, second = (
        len(writer.render_ids(Conversation(messages[:n], add_generation_prompt=prompted)))
        for n, prompted in ((1, True), (2, False), (3, True))
    )
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[first : called - 1] = mask[second : len(ids) - 1] = True
    guard, blind = Guard(codec, sample=1), Guard(codec, sample=1, chat_template="")
    for one in (guard, blind):
        one.rows([Row(ids, mask)])
    assert "Passed" in guard.report() and "mask lacks" not in guard.report()
    assert "mask lacks: chat template (on 1)." in blind.report()
    asked = count_renders(monkeypatch)
    guard.rows([Row(ids, mask)])
    assert asked == []  # what it asks of the template for each row is known
    wrong = mask.copy()
    wrong[called + 4 : called + 7] = True  # the tool's result is trained too
    guard.rows([Row(ids, wrong)])
    assert list(guard.counters()["findings"]) == ["observation_trained"]
    with pytest.raises(Refusal, match="syntax error on line 1"):
        Guard(codec, chat_template="{% if %}")


def test_it_never_raises_unless_asked(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(sample=1)
    broken: list[Any] = [5, "text", {"x": [1]}, [5], [{"a": 1}], [None, GOOD]]
    for value in broken:
        assert guard.rows(value) is value and guard.steps(value) is value
    found = guard.counters()
    assert found["errors"] and found["unreadable"] and found["checked"] == 1
    assert "The guard could not look at a call." in caplog.text
    for value in broken:
        with pytest.raises(Refusal):
            Guard(sample=1, on="raise").rows(value)

    def fault(*_: Any) -> None:
        raise RuntimeError("no thread can be started")

    monkeypatch.setattr(threading.Thread, "start", fault)
    for _ in range(2):  # the turn is free again
        assert guard.rows([GOOD]) == [GOOD]
    assert guard.counters()["checked"] == 1


def test_a_slow_look_does_not_hold_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    free, entered = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        entered.set()
        free.wait(240)
        return diagnosis_of(*arguments)

    diagnosis_of = module.diagnosis_of
    monkeypatch.setattr(module, "diagnosis_of", slow)
    guard = Guard(sample=1, on="drop", max_seconds=0.05)
    assert len(guard.rows([BAD, BAD])) == 2  # it returns although nothing is looked at yet
    assert entered.wait(240) and guard.counters()["late"] == 1
    assert len(guard.rows([BAD])) == 1 and guard.counters()["unchecked"] == 1  # another look is under way
    free.set()
    with guard._turn:
        pass
    found = guard.counters()
    assert (found["checked"], found["unchecked"]) == (1, 2)  # the first row, then the time was over
    guard.max_seconds = 240.0
    assert len(guard.rows([BAD])) == 0


def test_threads_share_it() -> None:
    guard = Guard(sample=1, on="drop", max_seconds=240)
    kept: list[int] = []

    def work() -> None:
        kept.extend(len(guard.rows([GOOD, BAD])) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = guard.counters()
    assert kept == [1] * 160
    assert (found["seen"], found["checked"], found["failing"], found["dropped"]) == (320, 320, 160, 160)
    assert found["findings"]["logprob_invalid"] == 160


def test_what_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    for options, said in [
        ({"on": "shout"}, "there are warn, raise, drop"), ({"sample": 2}, "from 0 to 1"),
        ({"max_seconds": 0}, "above 0"), ({"fail_on": "nothing"}, "no kind of finding"),
    ]:
        with pytest.raises(Refusal, match=said):
            Guard(**options)  # type: ignore[arg-type]
    for tokenizer in (tmp_path, object()):
        with pytest.raises(ValueError, match=r"tokenizer"):
            Guard(tokenizer)


def test_a_tokenizer_of_transformers_is_taken(tiny_tokenizer: Path) -> None:
    class Saved:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.json").write_bytes((tiny_tokenizer / "tokenizer.json").read_bytes())

    codec = load(tiny_tokenizer)
    ids = codec.encode("It is 4.")
    outside = Row(ids_array([*ids, codec.vocab_size + 5]), np.ones(len(ids) + 1, dtype=np.bool_))
    guard = Guard(Saved(), sample=1)
    guard.rows([outside])
    assert guard.counters()["checked"] == 1 and "Read 1 trajectories" in guard.report()


def test_the_report_tells_what_failed() -> None:
    guard = Guard(sample=1)
    assert "Not decided. Nothing was looked at." in guard.report()
    guard.rows([GOOD])
    assert "Passed" in guard.report("text")
    guard.rows([BAD])
    assert "Failed by logprob_invalid." in guard.report("text") and "logprob_invalid" in guard.report("markdown")


def test_its_import_is_light() -> None:
    program = (
        "import sys; import rollout_inspector.guard; n = len(sys.modules)\n"
        "rollout_inspector.guard.Guard(sample=1)\n"
        "heavy = {'django', 'torch', 'transformers', 'celery', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert n < 100 and 'numpy' not in list(sys.modules)[:n], n\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)
