"""Each row fault has a witness pair: a row that has it, and the same row without."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import Finding, Severity, diagnose
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Origin, Row, Step, Trajectory, ids_array
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from tests.samples.planted.plant_training_rows import all_moved, to_the_end
from tests.samples.row_faults import (
    HEAD, LINE, N_HEAD, N_ONE, ONE, OPEN, PARTS, SHUT, TOOL, TWO, WITNESSES, S, all_of_it, hotter, ids as encoded,
    merged, row, steps, with_logprob
)


def found(*rows: Row, steps: tuple[Step, ...] = (), template: bool = True, **fields: Any) -> list[Finding]:
    findings = diagnose(Trajectory("t", steps, rows, **fields), S.codec, (lambda sha: S.renderer) if template else None)
    return [finding for finding in findings if finding.kind not in ("not_decidable", "noncanonical_sampling")]


def kinds(*rows: Row, **options: Any) -> list[str]:
    return [finding.kind for finding in found(*rows, **options)]


@pytest.mark.parametrize("template", [True, False])
def test_a_good_row_has_no_findings(template: bool) -> None:
    assert kinds(row(), template=template) == []
    assert kinds(row(logprobs=None, columns={}), template=template) == []
    nan = row()
    assert nan.logprobs is not None
    assert kinds(replace(nan, logprobs=np.where(nan.loss_mask, nan.logprobs, np.nan)), template=template) == []


def test_sure_tokens_at_the_start_of_the_only_completion_are_no_shift() -> None:
    """Their logprob is exactly 0: a shift would also put values behind the completion's end."""
    one = row([(HEAD, 0), (OPEN, 0), (ONE, 1), (SHUT, 1)])
    assert one.logprobs is not None
    values = one.logprobs.copy()
    values[N_HEAD : N_HEAD + 2] = 0
    assert kinds(replace(one, logprobs=values)) == []
    assert kinds(replace(one, logprobs=np.roll(one.logprobs, -1))) == ["columns_shifted"]


@pytest.mark.parametrize("by", [1, -1])
def test_certain_tokens_inside_a_completion_hide_no_shift(by: int) -> None:
    good = row()
    assert good.logprobs is not None
    values = good.logprobs.copy()
    values[N_HEAD + 2 : N_HEAD + N_ONE - 2] = 0
    assert kinds(replace(good, logprobs=values)) == []
    assert kinds(replace(good, logprobs=np.roll(values, by))) == ["columns_shifted"]


def test_logprobs_of_all_tokens_are_no_shift_where_the_first_sampled_token_is_certain() -> None:
    good = row()
    values = np.full(len(good.ids), -0.5, dtype=np.float32)
    values[[N_HEAD, np.flatnonzero(good.loss_mask)[-len(TWO + SHUT)]]] = 0
    assert kinds(replace(good, logprobs=values)) == []


def test_a_shift_that_pushes_the_last_token_over_the_end() -> None:
    good = row()
    late = np.concatenate([[False], good.loss_mask[:-1]])
    assert kinds(replace(good, loss_mask=late)) == ["columns_shifted"]
    (shift,) = found(replace(good, loss_mask=late, columns={}))
    assert shift.evidence == "The mask stands 1 token behind its place."
    right = late.copy()
    for start, stop in shift.places:
        right[start:stop] ^= True
    assert np.array_equal(right, good.loss_mask)


def test_a_mask_that_runs_over_is_one_finding() -> None:
    good = row()
    for mask in (np.ones_like(good.loss_mask), np.zeros_like(good.loss_mask)):
        assert kinds(replace(good, loss_mask=mask)) == ["mask_overrun"]


@pytest.mark.parametrize(("kind", "bad"), [(kind, bad) for kind, rows in WITNESSES.items() for bad in rows])
def test_a_row_with_the_fault_has_this_finding_and_no_other(kind: str, bad: Row) -> None:
    assert kinds(bad) == [kind]


def test_a_prompt_that_was_cut_by_a_count_holds_a_turn_of_the_assistant() -> None:
    good = row()
    n_prompt = int((~good.loss_mask).sum())
    behind = good.loss_mask & (np.arange(len(good.ids)) >= n_prompt)
    lost = replace(good, loss_mask=behind, columns={}, logprobs=None, extra={"prompt_length": n_prompt})
    assert kinds(lost) == ["prompt_split_wrong"]
    assert not kinds(replace(good, extra={"prompt_length": int(good.loss_mask.argmax())}))


@pytest.mark.parametrize("kind", ["observation_trained", "generation_prompt_trained", "separator_trained"])
def test_without_a_template_the_turns_are_found_in_the_row(kind: str) -> None:
    assert kinds(WITNESSES[kind][-1], template=False) == [kind]


@pytest.mark.parametrize("template", [True, False])
def test_a_stretch_over_several_turns_begins_where_the_assistantsetup_turnended(template: bool) -> None:
    between = [(LINE + TOOL, 1), (OPEN, 1)]
    last = [(LINE + TOOL, 0), (OPEN, 0), (ONE + SHUT, 1)]
    once = [(HEAD, 0), (OPEN, 0), (ONE + SHUT, 1), *between, (TWO + SHUT, 1), *last]
    twice = [*once[:-3], *between, (ONE + SHUT, 1), *last]
    for parts, n in ((once, 1), (twice, 2)):
        findings = {finding.kind: finding for finding in found(row(parts), template=template)}
        observed, header = (findings.pop(kind) for kind in ("observation_trained", "generation_prompt_trained"))
        assert not findings
        at = N_HEAD + N_ONE
        assert (observed.start, observed.stop) == (at, at + len(LINE + TOOL))
        assert (header.start, header.stop) == (observed.stop, observed.stop + len(OPEN))
        assert observed.cost.trained_tokens_wrong == n * len(LINE + TOOL)
        assert header.cost.trained_tokens_wrong == n * len(OPEN)


def test_advantages_where_the_mask_should_be_are_no_second_fault() -> None:
    good, stop = row(), N_HEAD + N_ONE - 1
    for start, end, kind in ((stop, stop + 1, "stop_token_untrained"), (stop + 1, stop + 2, "separator_trained")):
        mask = good.loss_mask.copy()
        mask[start:end] ^= True
        assert kinds(replace(good, loss_mask=mask)) == [kind]
        values = good.columns["advantages"].copy()
        values[N_HEAD] = 0
        two = replace(good, loss_mask=mask, columns={"advantages": values})
        assert sorted(kinds(two)) == sorted([kind, "advantage_misplaced"])


def test_near_misses_are_no_faults() -> None:
    assert kinds(hotter(1.02)) == []
    n = len(row().ids)
    assert kinds(row(columns={"advantages": np.full(n, 0.7, np.float32)})) == []
    assert kinds(row(columns={"advantages": np.linspace(0.1, 0.7, n, dtype=np.float32)})) == ["advantage_misplaced"]
    assert kinds(row(extra={"prompt_length": N_HEAD})) == []
    assert kinds(row(extra={"routed_experts": [[0]] * (len(row().ids) - 1)})) == []
    assert kinds(replace(all_of_it(False), extra={"sample_loss_mask": [0.0]})) == []
    assert kinds(with_logprob(0.0)) == []


# -- rows against steps


def test_the_rows_that_follow_from_steps_are_right() -> None:
    assert kinds(merged(), steps=steps()) == []
    assert kinds(steps=steps()) == []


def test_a_row_that_was_encoded_again() -> None:
    good = merged()
    changed = good.ids.copy()
    changed[N_HEAD] += 1
    assert kinds(replace(good, ids=changed), steps=steps()) == ["row_not_sampled"]


def test_a_row_marks_each_trained_id_that_was_not_sampled() -> None:
    """As a harness makes it that keeps text alone: the later prompt and the row hold one id where two were sampled."""
    first, second = steps()
    cut = slice(N_HEAD + 1, N_HEAD + 3)
    again = np.concatenate([second.prompt_ids[: cut.start], [7], second.prompt_ids[cut.stop :]]).astype(np.int32)
    second = replace(second, prompt_ids=again)
    ids = np.concatenate([second.stream, LINE]).astype(np.int32)
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[N_HEAD : N_HEAD + N_ONE - 1] = mask[len(again) : len(second.stream)] = True
    ids[len(again)] = 9  # the last answer is another one too
    made = Row(ids, mask, step_indices=(0, 1))
    broken, of_row = found(made, steps=(first, second))
    assert (of_row.kind, of_row.row, of_row.start) == ("row_not_sampled", 0, cut.start)
    assert of_row.places == ((cut.start, cut.start + 1), (len(again), len(again) + 1))
    assert of_row.expected_ids.tolist() == first.stream[cut].tolist() and of_row.actual_ids.tolist() == [7]
    assert (of_row.cost.trained_tokens_lost, of_row.cost.trained_tokens_wrong) == (3, 2)
    # The row holds the place of the break too. Of all behind the break, this row loses the two ids alone.
    assert (broken.step, broken.row, broken.start) == (1, 0, cut.start)
    assert (broken.cost.trained_tokens_lost, broken.cost.lost_in_one_row) == (2, N_ONE - 1)
    assert (broken.cost.rows, broken.cost.prompt_tokens_repaid) == (1, 0)


def test_a_row_that_masks_what_was_rewritten_trains_nothing_wrong() -> None:
    first, second = steps()
    again = np.concatenate([second.prompt_ids[:N_HEAD], [7], second.prompt_ids[N_HEAD + 2 :]]).astype(np.int32)
    second = replace(second, prompt_ids=again)
    mask = np.arange(len(second.stream)) >= len(again)
    (broken,) = found(Row(second.stream, mask, step_indices=(0, 1)), steps=(first, second))
    assert (broken.step, broken.cost.trained_tokens_lost, broken.cost.lost_in_one_row) == (1, N_ONE, N_ONE)


def test_trained_twice_and_never() -> None:
    good = merged()
    assert kinds(good, good, steps=steps()) == ["trained_twice", "trained_twice"]
    only_first = replace(merged_rows(steps()[:1])[0], step_indices=(0,))
    assert kinds(only_first, steps=steps()) == ["never_trained"]


def test_an_appended_stop_token() -> None:
    good = merged()
    assert good.origin is not None and good.logprobs is not None
    longer = replace(
        good,
        ids=np.append(good.ids, np.int32(SHUT[0])),
        loss_mask=np.append(good.loss_mask, True),
        logprobs=np.append(good.logprobs, np.float32(0)),
        origin=np.append(good.origin, np.uint8(Origin.INSERTED)),
    )
    assert kinds(longer, steps=steps()) == ["appended_eos_trained"]
    masked = replace(longer, loss_mask=np.append(good.loss_mask, False))
    assert kinds(masked, steps=steps()) == []


def test_sampled_tokens_that_are_masked() -> None:
    good = merged()
    mask = good.loss_mask.copy()
    mask[N_HEAD : N_HEAD + 2] = False
    assert kinds(replace(good, loss_mask=mask), steps=steps()) == ["sampled_masked"]


def test_tokens_that_may_be_left_out_on_purpose() -> None:
    """Reasoning, results of a search inside tags, earlier turns, a long prefill, and the next generation prompt."""
    tagged = encoded("<info>four</info>")
    for parts in (
        [(HEAD + OPEN + encoded("<think>\nIt is easy.\n</think>\n"), 0), (TWO + SHUT, 1)],
        [(HEAD + OPEN, 0), (ONE, 1), (tagged, 0), (TWO + SHUT, 1)],
        [(HEAD + OPEN + ONE + SHUT + LINE + TOOL + OPEN, 0), (TWO + SHUT, 1)],
        [(HEAD + OPEN + ONE * 5, 0), (TWO + SHUT, 1)],
        [(HEAD + OPEN, 0), (ONE + SHUT, 1), (LINE + TOOL + OPEN, 0)],
    ):
        assert kinds(row(parts, logprobs=None, columns={})) == [], parts
    # Without logprobs of their own these are a prefill.
    assert kinds(row([(HEAD + OPEN + ONE[:1], 0), (ONE[1:] + SHUT, 1)])) == []


def test_the_end_of_a_prompt_inside_the_assistants_turn_was_not_sampled() -> None:
    """A prefill is as short as a mask that is late. The length of the prompt tells them apart."""
    late = row([(HEAD + OPEN + ONE[:2], 0), (ONE[2:] + SHUT, 1)], logprobs=None, columns={})
    assert kinds(late) == ["sampled_masked"]
    assert kinds(replace(late, extra={"prompt_length": N_HEAD + 2})) == []
    (rest,) = found(replace(late, extra={"prompt_length": N_HEAD + 1}))
    assert (rest.kind, rest.start, rest.stop) == ("sampled_masked", N_HEAD + 1, N_HEAD + 2)
    assert kinds(replace(late, extra={"prompt_length": "2"})) == ["sampled_masked"]


def test_the_old_part_of_a_resumed_sample_may_be_masked() -> None:
    """https://github.com/THUDM/slime/issues/1440: its versions are the reason. A hole further on has none."""
    fields = {"extra": {"weight_versions": ["7", "8"]}}
    for first, severity in ((0, Severity.INFO), (3, Severity.WARNING)):
        parts = [(HEAD + OPEN, 0), (ONE[:first], 1), (ONE[first : first + 3], 0), (ONE[first + 3 :] + SHUT, 1)]
        bad = row(parts, logprobs=None, columns={}, extra={"prompt_length": N_HEAD})
        (finding,) = found(bad, **fields)
        assert (finding.kind, finding.severity) == ("sampled_masked", severity)
        assert [one.severity for one in found(bad, extra={"weight_versions": ["7", "7"]})] == [Severity.WARNING]


def test_a_mask_over_the_others_turns_is_named_without_their_logprobs() -> None:
    """https://github.com/mll-lab-nu/RAGEN/issues/71: with an inverted mask all trained tokens have the logprob 0."""
    good = row([(HEAD, 0), (OPEN, 0), (ONE + SHUT, 1), (LINE + TOOL + OPEN, 0), (TWO + SHUT, 1)], columns={})
    inverted = ~good.loss_mask & (np.arange(len(good.ids)) >= N_HEAD)
    assert kinds(replace(good, loss_mask=inverted)) == ["observation_trained"]
    assert good.logprobs is not None
    zero = replace(good, logprobs=np.zeros_like(good.logprobs), loss_mask=np.arange(len(good.ids)) >= N_HEAD)
    assert sorted(kinds(zero)) == ["logprob_invalid", "observation_trained"]


@pytest.mark.parametrize("name", ["rm_scores", "token_level_rewards"])
def test_a_reward_on_the_masked_end_of_a_row_is_a_note(name: str) -> None:
    """https://github.com/radixark/miles/pull/1827: a sum over the row reads it, GAE does not."""
    good = row([(HEAD + OPEN, 0), (ONE + SHUT, 1), (LINE + TOOL, 0)], columns={})
    for place, expected in ((len(good.ids) - 1, [Severity.INFO]), (N_HEAD + N_ONE - 1, [])):
        rewards = np.zeros(len(good.ids), np.float32)
        rewards[place] = 1
        findings = found(replace(good, columns={name: rewards}))
        assert [one.severity for one in findings] == expected
        assert {(one.kind, one.start) for one in findings} <= {("reward_misplaced", place)}


def test_a_row_without_its_stop_token() -> None:
    """A limit may have cut it, so it is a note; a trainer that records the cut has another name for it."""
    cut = row([(HEAD + OPEN, 0), (TWO, 1)])
    padded = row([(HEAD + OPEN, 0), (TWO, 1), (SHUT * 4, 0)])
    for bad in (cut, padded):
        (note,) = found(bad)
        assert (note.kind, note.severity) == ("stop_token_untrained", Severity.INFO)
    flag, status = {"is_truncated": True}, {"status": "truncated"}
    for record, changes in ((status, {}), (flag, {}), ({}, {"stop_reason": "length"})):
        assert kinds(replace(cut, extra=record), **changes) == ["truncated_trained"]
    assert kinds(row([(HEAD + OPEN, 0), (TWO + SHUT, 1)], extra={"status": "truncated"})) == []
    (wanted_masked,) = found(replace(cut, extra={"truncated": True}), extra={"mask_truncated": True})
    assert wanted_masked.severity is Severity.WARNING


def test_a_turn_in_the_middle_that_was_closed_without_being_sampled_is_a_note() -> None:
    """https://github.com/jingyaogong/minimind/issues/850: a stop token with mask 0 and no logprob."""
    for behind in ([(TOOL + OPEN, 0), (TWO + SHUT, 1)], []):
        (note,) = found(row([(HEAD + OPEN, 0), (ONE, 1), (SHUT + LINE, 0), *behind]))
        assert (note.kind, note.severity) == ("stop_token_untrained", Severity.INFO)
        assert note.stop == N_HEAD + len(ONE)


def test_a_certain_stop_token_is_no_fact() -> None:
    good = row([(HEAD + OPEN, 0), (TWO + SHUT, 1)])
    assert good.logprobs is not None
    certain = replace(good, logprobs=np.append(good.logprobs[:-1], np.float32(0)))
    assert [(f.kind, f.severity) for f in found(certain)] == [("appended_eos_trained", Severity.INFO)]


def _row_of(codec: Codec, text: str, trained: str) -> Row:
    """A row of rendered text whose only trained stretch is a part of it."""
    tokens = codec.encode(text)
    before = len(codec.encode(text[: text.index(trained)]))
    mask = np.zeros(len(tokens), dtype=np.bool_)
    mask[before : before + len(codec.encode(trained))] = True
    return Row(tokens, mask)


def test_bos_in_rows(corpus: Path) -> None:
    codec = load(corpus / "tokenizers" / "llama3.1")
    llama = renderer(codec, (corpus / "templates" / "llama3.1.jinja").read_text(encoding="utf-8"))

    def of(text: str, trained: str) -> list[tuple[str, int]]:
        row = _row_of(codec, text, trained)
        findings = diagnose(Trajectory("t", rows=(row,)), codec, lambda sha: llama)
        return [(f.kind, f.start) for f in findings if f.kind != "not_decidable"]

    bos, answer = "<|begin_of_text|>", "Paris is it.<|eot_id|>"
    opening = "<|start_header_id|>user<|end_header_id|>\n\nCapital of France?<|eot_id|>"
    turn = f"{opening}<|start_header_id|>assistant<|end_header_id|>\n\n{answer}"
    packed = bos + turn.replace("Paris", "Rome")
    assert of(bos + turn, answer) == of(bos + turn + packed, answer) == of(turn[20:], answer) == []
    assert of(bos * 2 + turn, answer) == [("bos_mismatch", 1)]
    assert of(bos + turn + bos + packed, answer) == [("bos_mismatch", len(codec.encode(bos + turn)) + 1)]
    assert of(turn, answer) == [("bos_mismatch", 0)]
    assert of(bos * 4 + turn, answer) == []  # padding
    assert of(bos + turn + packed, answer + bos) == [("separator_trained", len(codec.encode(bos + turn)))]


def test_an_answer_that_ends_with_another_stop_token(corpus: Path) -> None:
    codec = load(corpus / "tokenizers" / "qwen2.5")
    qwen = renderer(codec, (corpus / "templates" / "qwen2.5.jinja").read_text(encoding="utf-8"))
    for end, expected in (("<|im_end|>", []), ("<|endoftext|>", ["stop_token_untrained"])):
        text = f"<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\nParis.{end}"
        row = _row_of(codec, text, f"Paris.{end}")
        sampled = replace(row, logprobs=np.where(row.loss_mask, -0.5, 0).astype(np.float32))
        for either, right in ((row, expected), (sampled, [])):
            findings = diagnose(Trajectory("t", rows=(either,)), codec, lambda sha: qwen)
            assert [f.kind for f in findings if f.kind != "not_decidable"] == right


def test_origin_tells_observation_from_header_and_separator() -> None:
    good = merged()
    at = N_HEAD + N_ONE
    for start, stop, kind in (
        (at, at + 1, "separator_trained"),
        (at + 3, at + 12, "observation_trained"),
        (at + len(LINE + TOOL), at + len(LINE + TOOL + OPEN), "generation_prompt_trained"),
    ):
        mask = good.loss_mask.copy()
        mask[start:stop] = True
        logprobs = np.where(mask, -0.5, np.nan).astype(np.float32)
        bad = replace(good, loss_mask=mask, logprobs=logprobs)
        assert kinds(bad, steps=steps()) == [kind]


def test_a_mask_fault_has_one_name_with_steps_and_without() -> None:
    good = replace(merged(), logprobs=np.nan_to_num(merged().logprobs))
    for bad, kind in ((all_moved(good, 1), "columns_shifted"), (to_the_end(good), "observation_trained")):
        alone = replace(bad, origin=None, step_indices=())
        (there,), (here,) = found(bad, steps=steps()), found(alone)
        assert (there.kind, there.start, there.stop) == (here.kind, here.start, here.stop)
        assert here.kind == kind
    assert kinds(merged_rows(steps()[:1])[0], steps=steps()[:1]) == []


def test_the_stop_token_and_the_separator_behind_it_are_no_shift() -> None:
    """The first sampled token is trained, so what is trained behind the stop token is the separator."""
    parts = [(stretch, int(flag or stretch is LINE)) for stretch, flag in PARTS]
    for template in (True, False):
        assert kinds(row(parts), template=template) == ["separator_trained"]


def test_a_completion_of_two_messages_is_sampled_with_the_header_between() -> None:
    """The model ends its first message and opens the next one, as reasoning models with channels do."""
    both = ONE + SHUT + OPEN + TWO + SHUT
    for parts in ([(HEAD + OPEN, 0), (both, 1)], [(HEAD + OPEN, 0), (both, 1), *PARTS[4:]]):
        assert kinds(row(parts)) == []
    parts = [(HEAD + OPEN, 0), (ONE + SHUT + LINE + TOOL + OPEN + TWO + SHUT, 1), *PARTS[4:]]
    assert sorted(kinds(row(parts))) == ["generation_prompt_trained", "observation_trained"]
    assert kinds(row([*parts[:1], (both + TOOL + OPEN + TWO + SHUT, 1)])) == ["observation_trained"]


def test_last_step_flags() -> None:
    def flagged(*flags: bool) -> list[Row]:
        return [replace(row(), extra={"is_last_step": flag}) for flag in flags]

    assert kinds(*flagged(False, False, True)) == []
    assert kinds(*flagged(False, True, True)) == ["step_order_invalid"]
    assert kinds(*flagged(True, False, False)) == ["step_order_invalid"]


def test_routing_beside_the_trajectory_is_of_its_only_row() -> None:
    good, n = merged(), len(merged().ids)
    for size, expected in ((n - 1, []), (n, []), (n - 2, ["routing_misaligned"])):
        extra = {"routed_experts": f"nrlre1:u1:{size}x2x8:AAAA"}
        assert kinds(good, extra=extra) == kinds(steps=steps(), extra=extra) == expected
        assert "routing_misaligned" not in kinds(good, good, extra=extra)


def test_several_policy_versions_in_one_row_are_worth_knowing() -> None:
    first, second = steps()
    mixed = (replace(first, policy_version="7"), replace(second, policy_version="8"))
    assert kinds(steps=mixed) == ["mixed_policy_versions"]
    assert kinds(steps=(replace(first, policy_version="7"), replace(second, policy_version="7"))) == []


def test_a_row_may_record_several_policy_versions_itself() -> None:
    good = row()
    n, n_trained, first = len(good.ids), int(good.loss_mask.sum()), int(good.loss_mask.argmax())
    mixed = ["mixed_policy_versions"]
    for extra, expected in (
        ({"version_rle": [["7", n - 1], ["8", 1]]}, mixed),
        ({"version_rle": [["7", n_trained - 1], [8, 1]]}, mixed),
        ({"policy_versions": [7] * (n - 2) + [8, 8]}, mixed),
        ({"policy_versions": [["7", n - 1], ["8", 1]]}, mixed),
        ({"version_rle": [["-1", first], ["8", n - first]]}, []),  # the prompt was not sampled
        ({"policy_versions": [None] * first + [8] * (n - first)}, []),
        ({"version_rle": [["7", n], ["8", 0]]}, []),
        ({"version_rle": [["7", n], ["8", 1]]}, []),  # longer than the row
        ({"version_rle": [["7", 10**30], ["8", -1]]}, []),
        ({"version_rle": "7", "policy_versions": [[], {}]}, []),
    ):
        assert kinds(replace(good, extra=extra)) == expected, extra
    told = found(replace(good, extra={"version_rle": [["7", n - 1], ["8" * 10_000, 1]]}))[0].evidence
    assert "the policy versions 7, 8888" in told and len(told) < 200
    # What the steps tell counts first.
    same = tuple(replace(one, policy_version="7") for one in steps())
    assert kinds(replace(merged(), extra={"version_rle": [["7", 1], ["8", len(merged().ids) - 1]]}), steps=same) == []


def test_ids_behind_a_stop_string() -> None:
    first, _ = steps()
    cut = replace(first, text="I call", stop_reason=" the")
    assert kinds(steps=(cut,)) == ["stop_string_misaligned"]
    assert kinds(steps=(replace(first, text="I call the tool.", stop_reason=str(SHUT[0])),)) == []


def test_a_truncated_completion_where_they_are_to_be_masked() -> None:
    first, _ = steps()
    cut = replace(first, completion_ids=first.completion_ids[:-1], logprobs=None, finish_reason="length")
    for extra, severity in (({"mask_truncated": True}, Severity.WARNING), ({}, Severity.INFO)):
        (finding,) = found(steps=(cut,), extra=extra)
        assert (finding.kind, finding.severity) == ("truncated_trained", severity)
    assert kinds(steps=(replace(first, finish_reason="length"),)) == []  # it ended by itself, with its stop token


@pytest.mark.parametrize(
    "fields",
    [{"finish_reason": {"type": "length"}}, {"truncated": [1.0]}, {"extra_fields": {"stop_reason": "max_new_tokens"}},
     {"is_truncated": [[True]]}, {"stop_reasons": ["LENGTH"]}],
)
def test_each_way_to_say_that_a_completion_was_cut(fields: dict[str, Any]) -> None:
    cut = row([(HEAD + OPEN, 0), (TWO, 1)])
    assert kinds(replace(cut, extra=fields)) == ["truncated_trained"]
    for other in ({"finish_reason": "stop"}, {"truncated": [0]}, {"extra_fields": {"max_new_tokens": 1}}):
        assert kinds(replace(cut, extra=other)) == ["stop_token_untrained"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -9999.0, -1000.0, 0.5])
def test_impossible_logprobs_of_calls_are_named_as_in_rows(value: float) -> None:
    first, second = steps()
    assert second.logprobs is not None and first.logprobs is not None
    values = second.logprobs.copy()
    values[1] = value
    bad = (first, replace(second, logprobs=values))
    (finding,) = found(steps=bad)
    at = len(second.prompt_ids) + 1
    assert (finding.kind, finding.step, finding.start, finding.places) == ("logprob_invalid", 1, at, ((at, at + 1),))
    assert kinds(merged(), steps=bad) == []  # the row has logprobs of its own
    zero = tuple(replace(step, logprobs=np.zeros_like(step.logprobs)) for step in (first, second))
    assert kinds(steps=zero) == ["logprob_invalid"] * 2
    assert kinds(steps=(zero[0], second)) == []  # the tokens of one call may all be certain


def test_the_seam_of_a_preference_pair(corpus: Path) -> None:
    codec = load(corpus / "tokenizers" / "qwen2.5")
    text, more = "The answer is num", "ber four"
    apart, whole = [*codec.encode(text).tolist(), *codec.encode(more).tolist()], codec.encode(text + more).tolist()
    n = len(codec.encode(text))

    def seam(ids: list[int], start: int, **extra: Any) -> list[tuple[str, str]]:
        made = Row(ids_array(ids), np.arange(len(ids)) >= start, extra=extra)
        findings = diagnose(Trajectory("t", rows=(made,), extra={"preference": "chosen"}), codec)
        return [(f.kind, f.severity) for f in findings if f.kind == "boundary_merge"]

    assert apart != whole and seam(apart, n) == [("boundary_merge", "info")]
    assert seam([*codec.encode("The answer is"), *codec.encode(" four")], len(codec.encode("The answer is"))) == []
    assert seam(whole, n - 1, prompt_tail=codec.encode(text)[-1:].tolist()) == [("boundary_merge", "error")]


def test_without_a_tokenizer_it_says_so() -> None:
    findings = diagnose(Trajectory("t", (), (row(),)), None)
    assert [(f.kind, f.axis, f.missing) for f in findings] == [("not_decidable", "row", "tokenizer")]


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1"])
def test_corpus_rows(corpus: Path, name: str) -> None:
    codec = load(corpus / "tokenizers" / name)
    template = renderer(codec, codec.chat_template or "")
    expected = json.loads((corpus / "labelled" / f"{name}.rows.expect.json").read_text())
    source = Source.of_path(corpus / "labelled" / f"{name}.train_data_step1.jsonl")
    wrong = []
    for trajectory in read(source)[1]:
        assert isinstance(trajectory, Trajectory)
        label = expected.pop(trajectory.external_id)
        for renderer_for in (lambda sha: template, None):
            got = [f.kind for f in diagnose(trajectory, codec, renderer_for) if f.severity != "info"]
            if got != ([label] if label else []):
                wrong.append((trajectory.external_id, label, got))
    assert wrong == [] and expected == {}


def test_a_row_that_a_strategy_encoded_again_is_judged_against_its_steps_alone() -> None:
    first = Step(prompt_ids=ids_array(HEAD + OPEN), completion_ids=ids_array(ONE + SHUT))
    second = Step(
        prompt_ids=ids_array(HEAD + OPEN + ONE + SHUT + LINE + TOOL + OPEN), completion_ids=ids_array(TWO + SHUT)
    )
    made = row()
    origin = np.where(made.loss_mask, Origin.INSERTED, Origin.TEMPLATE).astype(np.uint8)
    again = replace(made, origin=origin, logprobs=None, columns={}, step_indices=(0, 1))
    assert found(again, steps=(first, second)) == []
    longer = replace(again, loss_mask=again.loss_mask.copy())
    longer.loss_mask[N_HEAD + N_ONE] = True  # the line end that only the template writes
    assert [finding.kind for finding in found(longer, steps=(first, second))] == ["separator_trained"]
    drifted = replace(again, ids=np.concatenate([again.ids[:N_HEAD], [7], again.ids[N_HEAD + 1 :]]).astype(np.int32))
    assert [finding.kind for finding in found(drifted, steps=(first, second))] == ["row_not_sampled"]
