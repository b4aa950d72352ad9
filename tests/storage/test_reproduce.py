"""A finding as a script: it reproduces every kind of the stream and of the delta that can be planted."""

import ast
import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import KINDS, Axis, Finding, Severity, diagnose
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Origin, Row, Step, Trajectory, ids_array
from rollouts.jobs.exports.reproduce import _literal, _material, script
from tests.samples.model_setups import STABLE, model_setup, tokenizer_folder
from tests.samples.planted.plant import planted
from tests.samples.row_faults import LINE, N_HEAD, N_ONE, OPEN, SHUT, TOOL, WITNESSES, S, hotter, merged, row, steps

FOLDERS = {
    "toggling": ("bytes", "<|shut|>"), "stable": ("bytes", "<|shut|>"), "bare": ("bytes", "<|end|>"),
    "headers": ("bytes", "<|user|>"), "pieces": ("pieces", "<|shut|>"),
}


def run(text: str, tmp_path: Path) -> str:
    path = tmp_path / "finding.py"
    path.write_text(text, encoding="ascii")
    said = io.StringIO()
    with redirect_stdout(said):
        runpy.run_path(str(path))
    return said.getvalue()


def test_every_planted_kind_is_reproduced_by_its_script(tmp_path: Path) -> None:
    done: set[str] = set()
    for name, folder in FOLDERS.items():
        s = model_setup(name)
        for case in planted(s, 1):
            if case.kind is None or case.kind in done:
                continue
            found = diagnose(case.trajectory, s.codec, lambda sha, s=s: s.renderer)
            finding = next(f for f in found if f.kind in (case.kind, *case.also) and f.step == case.step)
            text = script(finding, case.trajectory, tokenizer=str(tokenizer_folder(*folder)), chat_template="{{ 1 }}")
            said = run(text, tmp_path)
            assert f"Reproduced: {finding.evidence}"[:40] in said, case.name
            done.add(case.kind)
    wanted = {slug for slug, kind in KINDS.items() if kind.axis != "row"} - {"unclassified", "not_decidable"}
    assert wanted - done == set()


def broken() -> tuple[Finding, Trajectory]:
    first = Step(ids_array([1, 2]), ids_array([3, 4]))
    second = Step(ids_array([1, 2, 3, 9, 5]), ids_array([6]))
    evidence = 'Sampled """ and \\ and \u202e and a\nline.'
    finding = Finding(
        Axis.STREAM, "boundary_merge", Severity.ERROR, step=1, start=3, stop=4, expected_ids=ids_array([4]),
        actual_ids=ids_array([9]), evidence=evidence,
    )
    return finding, Trajectory('t"""\n1', (first, second))


def test_a_process_of_its_own_reproduces_it_and_hostile_text_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "finding.py"
    path.write_text(script(*broken()), encoding="ascii")
    ended = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "Reproduced: Sampled" in ended.stdout, ended.stderr


def test_the_script_of_a_mended_trajectory_fails(tmp_path: Path) -> None:
    text = script(*broken())
    mended = re.sub(r"PROMPT = .*", "PROMPT = [1, 2, 3, 4, 5]", text)
    assert mended != text
    with pytest.raises(AssertionError):
        run(mended, tmp_path)


GOOD = row()
"""A sound row: what the witnesses of row faults were before the fault."""
STEPS = steps()


def with_steps(**changes: Any) -> Trajectory:
    """A trajectory of two steps and their one row, and that row changed."""
    return Trajectory("t", STEPS, (replace(merged(), **changes),))


def longer() -> dict[str, Any]:
    good = merged()
    assert good.origin is not None and good.logprobs is not None
    return {
        "ids": np.append(good.ids, np.int32(SHUT[0])),
        "loss_mask": np.append(good.loss_mask, True),
        "logprobs": np.append(good.logprobs, np.float32(0)),
        "origin": np.append(good.origin, np.uint8(Origin.INSERTED)),
    }


def flipped(start: int, stop: int) -> dict[str, Any]:
    good = merged()
    assert good.logprobs is not None
    mask = good.loss_mask.copy()
    mask[start:stop] ^= True
    return {"loss_mask": mask, "logprobs": np.where(mask, np.nan_to_num(good.logprobs, nan=-0.5), np.nan)}


def flagged(*flags: bool) -> Trajectory:
    return Trajectory("t", (), tuple(replace(GOOD, extra={"is_last_step": flag}) for flag in flags))


def rewarded(place: int, offset: int) -> Trajectory:
    """Two rows of a step-wise batch, of which one has a reward."""
    columns = np.zeros((2, len(GOOD.ids)), np.float32)
    columns[place, offset] = 1
    rows = (
        replace(GOOD, columns={"rewards": rewards}, extra={"is_last_step": n == 1, "batch_index": n})
        for n, rewards in enumerate(columns)
    )
    return Trajectory("t", (), tuple(rows))


def pictured(offset: int) -> Trajectory:
    extra = {"mm_placeholders": {"image": [{"offset": offset, "length": 16}]}}
    return Trajectory("t", (), (replace(GOOD, extra=extra),))


def placed(*places: int) -> Trajectory:
    flags = [place == places[-1] for place in places]
    return Trajectory(
        "t",
        (),
        tuple(
            replace(GOOD, extra={"is_last_step": flag, "batch_index": place})
            for flag, place in zip(flags, places, strict=True)
        ),
    )


def mended(bad: Row) -> Row:
    """The sound row with whatever else the bad one has beside the fault."""
    repeated = len(bad.ids) != len(GOOD.ids)
    good = replace(GOOD, extra={}) if not repeated else hotter(1.0)
    trainer = {} if repeated or "trainer_logprobs" not in bad.columns else {"trainer_logprobs": GOOD.logprobs}
    extra = {"prompt_length": N_HEAD, "routed_experts": [[0]] * (len(GOOD.ids) - 1)}
    return replace(good, columns={**good.columns, **trainer}, extra={k: v for k, v in extra.items() if k in bad.extra})


FIRST, SECOND = STEPS
CUT = replace(FIRST, completion_ids=FIRST.completion_ids[:-1], logprobs=None, finish_reason="length")
ONLY_FIRST = replace(merged_rows(STEPS[:1])[0], step_indices=(0,))
AT = N_HEAD + N_ONE
SOUND = with_steps()

N_PROMPT = int((~GOOD.loss_mask).sum())
CUT_BY_COUNT = replace(
    GOOD, loss_mask=GOOD.loss_mask & (np.arange(len(GOOD.ids)) >= N_PROMPT), columns={}, logprobs=None,
    extra={"prompt_length": N_PROMPT},
)

# kind -> trajectories that have it, each with a sound one.
PAIRS: list[tuple[str, Trajectory, Trajectory]] = [
    *(
        (kind, Trajectory("t", (), (bad,)), Trajectory("t", (), (mended(bad),)))
        for kind, rows in WITNESSES.items()
        for bad in rows
    ),
    (
        "prompt_split_wrong",
        Trajectory("t", (), (CUT_BY_COUNT,)),
        Trajectory("t", (), (replace(GOOD, extra={"prompt_length": N_HEAD}),)),
    ),
    ("row_not_sampled", with_steps(ids=merged().ids + (np.arange(len(merged().ids)) == N_HEAD)), SOUND),
    ("appended_eos_trained", with_steps(**longer()), SOUND),
    ("sampled_masked", with_steps(**flipped(N_HEAD, N_HEAD + 2)), SOUND),
    ("separator_trained", with_steps(**flipped(AT, AT + 1)), SOUND),
    ("observation_trained", with_steps(**flipped(AT + 3, AT + 12)), SOUND),
    ("generation_prompt_trained", with_steps(**flipped(AT + len(LINE + TOOL), AT + len(LINE + TOOL + OPEN))), SOUND),
    ("trained_twice", Trajectory("t", STEPS, (merged(), merged())), SOUND),
    ("never_trained", Trajectory("t", STEPS, (ONLY_FIRST,)), SOUND),
    ("reward_misplaced", rewarded(1, N_HEAD), rewarded(1, -1)),
    ("reward_misplaced", rewarded(0, -1), rewarded(1, -1)),
    ("media_tokens_wrong", pictured(len(GOOD.ids) - 4), pictured(len(GOOD.ids) - 16)),
    ("step_order_invalid", flagged(False, True, True), flagged(False, False, True)),
    ("step_order_invalid", placed(0, 2), placed(0, 1)),
    *(
        (
            "routing_misaligned",
            replace(sound, extra={"routed_experts": [[0]] * 3}),
            replace(sound, extra={"routed_experts": [[0]] * (len(merged().ids) - 1)}),
        )
        for sound in (with_steps(), Trajectory("t", STEPS))
    ),
    (
        "mixed_policy_versions",
        Trajectory("t", (replace(FIRST, policy_version="7"), replace(SECOND, policy_version="8"))),
        Trajectory("t", (replace(FIRST, policy_version="7"), replace(SECOND, policy_version="7"))),
    ),
    (
        "stop_string_misaligned",
        Trajectory("t", (replace(FIRST, text="I call", stop_reason=" the"),)),
        Trajectory("t", (replace(FIRST, text=S.codec.decode(FIRST.completion_ids), stop_reason=" the"),)),
    ),
    (
        "truncated_trained",
        Trajectory("t", (CUT,), extra={"mask_truncated": True}),
        Trajectory("t", (replace(CUT, finish_reason="stop"),), extra={"mask_truncated": True}),
    ),
]


@pytest.mark.parametrize(("kind", "bad", "good"), PAIRS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_script_of_a_row_fault_asserts_the_fault_itself(
    kind: str, bad: Trajectory, good: Trajectory, tmp_path: Path
) -> None:
    finding = next(f for f in diagnose(bad, S.codec, lambda sha: S.renderer) if f.kind == kind)
    text = script(finding, bad, tokenizer=str(tokenizer_folder(*FOLDERS["stable"])), chat_template=STABLE)
    assert f"Reproduced: {finding.evidence}"[:40] in run(text, tmp_path)
    with pytest.raises(AssertionError):
        run(with_data_of(text, finding, good), tmp_path)


def test_a_script_needs_transformers_and_no_torch(tmp_path: Path) -> None:
    bad = WITNESSES["observation_trained"][0]
    (finding,) = diagnose(Trajectory("t", (), (bad,)), S.codec, lambda sha: S.renderer)
    folder = str(tokenizer_folder(*FOLDERS["stable"]))
    path = tmp_path / "finding.py"
    path.write_text(script(finding, Trajectory("t", (), (bad,)), tokenizer=folder, chat_template=STABLE))
    without = "import runpy, sys; sys.modules.update(torch=None, rollouts=None); runpy.run_path(sys.argv[1])"
    ended = subprocess.run([sys.executable, "-c", without, path], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "Reproduced: " in ended.stdout, ended.stderr


def test_every_kind_of_row_fault_has_its_script() -> None:
    assert {kind for kind, _, _ in PAIRS} == {slug for slug, kind in KINDS.items() if kind.axis == "row"}


def with_data_of(text: str, finding: Finding, good: Trajectory) -> str:
    """The same script with the variables of another trajectory."""
    held, _, _ = _material(finding, good)
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in held:
            name = node.targets[0].id
            if name not in ("START", "STOP", "EXPECTED", "ACTUAL"):
                node.value = ast.parse(_literal(name, held[name])).body[0].value  # type: ignore[attr-defined]
    return ast.unparse(tree)


def test_what_cannot_be_asserted_is_refused() -> None:
    finding = Finding(Axis.STREAM, "not_decidable", Severity.INFO, step=0, missing="tokenizer")
    with pytest.raises(Refusal, match="not_decidable"):
        script(finding, Trajectory("t", (Step(ids_array([1]), ids_array([2])),)))
