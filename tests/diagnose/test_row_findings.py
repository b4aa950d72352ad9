"""Each row fault has a witness pair: a row that has it, and the same row without."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import Finding, diagnose
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Origin, Row, Step, Trajectory, ids_array
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from tests.samples.planted.plant_training_rows import all_moved, to_the_end
from tests.samples.row_faults import (
    HEAD,
    LINE,
    N_HEAD,
    N_ONE,
    ONE,
    OPEN,
    PARTS,
    SHUT,
    TOOL,
    TWO,
    WITNESSES,
    S,
    all_of_it,
    hotter,
    merged,
    row,
    steps,
    with_logprob,
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
    assert shift.evidence == "The logprobs fit the mask exactly 1 token before their place."


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
    # A completion that was cut before its stop token: the template closed it, and nobody sampled that.
    assert kinds(row([(HEAD, 0), (OPEN, 0), (ONE, 1), (SHUT + LINE, 0)])) == []


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
    for bad, kind in ((all_moved(good, 1), "columns_shifted"), (to_the_end(good), "mask_overrun")):
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
    assert kinds(row([*parts[:1], (both + TOOL + OPEN + TWO + SHUT, 1)])) == ["mask_overrun"]


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
    assert kinds(steps=(cut,), extra={"mask_truncated": True}) == ["truncated_trained"]
    assert kinds(steps=(cut,)) == []


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
