"""What was not checked is never told as passed: each check is passed, failed, or lacks a field."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout_inspector.diagnose import KINDS, Diagnosis, Finding, Severity, examine
from rollout_inspector.diagnose.checks import CHECKS, Outcome, all_clear, check_of, check_sentence, totals
from rollout_inspector.diagnose.context import REFUSED
from rollout_inspector.streams.interfaces import Renderer, RenderFailed
from rollout_inspector.streams.trajectory import Ids, Message, Trajectory
from rollout_inspector.text.chat_templates import renderer
from tests.samples.model_setups import STABLE, model_setup
from tests.samples.planted.plant import PLANTERS
from tests.samples.planted.plant_training_rows import alone, clean_row

S = model_setup("stable")
TRAJECTORY, ROW = clean_row(S)
STREAM = ("token_ids", "text", "reply", "first_prompt", "prefix", "canonical", "delta", "control_text")


def checks_of(trajectory: Trajectory, tokenizer: bool = True, template: bool = True) -> dict[str, Outcome]:
    def find(sha256: str) -> Renderer | None:
        return S.renderer if template else None

    return examine(trajectory, S.codec if tokenizer else None, find).checks


def test_a_conversation_with_all_its_fields_passes_all() -> None:
    versioned = replace(TRAJECTORY, steps=tuple(replace(step, policy_version="7") for step in TRAJECTORY.steps))
    assert checks_of(versioned) == dict.fromkeys((*STREAM, "policy_versions", "logprobs"), "passed")
    rewards = np.where(np.arange(len(ROW.ids)) == len(ROW.ids) - 1, np.float32(1), np.float32(0))
    row = replace(ROW, columns=ROW.columns | {"trainer_logprobs": ROW.logprobs, "rewards": rewards})
    found = checks_of(replace(versioned, rows=(row,))) | {"media": "passed"}  # test_media.py has rows with images
    assert found == dict.fromkeys(CHECKS, "passed")


def test_rows_without_steps_pass_no_check_of_steps() -> None:
    found = checks_of(alone(ROW))
    assert {name: found.pop(name) for name in (*STREAM, "sampled")} == {
        name: ["steps"] for name in (*STREAM, "sampled")
    }
    assert found.pop("trainer_logprobs") == ["trainer logprobs"]
    assert found == dict.fromkeys(("lengths", "mask", "columns", "logprobs", "advantages"), "passed")


@pytest.mark.parametrize(
    ("changes", "missing", "undecided"),
    [
        ({"request": None}, "request messages", {"first_prompt", "delta", "control_text"}),
    ],
)
def test_what_the_steps_lack(changes: dict[str, None], missing: str, undecided: set[str]) -> None:
    found = checks_of(replace(TRAJECTORY, steps=tuple(replace(step, **changes) for step in TRAJECTORY.steps)))
    assert {name for name in STREAM if found[name] != "passed"} == undecided
    assert all(found[name] == [missing] for name in undecided)


def test_a_reply_without_a_message_is_not_checked() -> None:
    silent = replace(TRAJECTORY, steps=tuple(replace(step, reply=None, text=None) for step in TRAJECTORY.steps))
    found = checks_of(silent)
    assert (found["text"], found["reply"]) == (["text"], ["message of the reply"])
    assert {name for name in STREAM if found[name] != "passed"} == {"text", "reply"}


def test_what_the_run_lacks() -> None:
    without = checks_of(TRAJECTORY, tokenizer=False)
    assert without["prefix"] == "passed" and without["canonical"] == ["tokenizer"]
    found = checks_of(TRAJECTORY, template=False)
    assert {name for name in STREAM if found[name] != "passed"} == {"first_prompt", "delta"}
    assert checks_of(alone(ROW), template=False)["mask"] == ["chat template"]
    assert checks_of(alone(ROW), tokenizer=False)["mask"] == ["tokenizer"]
    bare = checks_of(alone(replace(ROW, logprobs=None, columns={})))
    assert (bare["logprobs"], bare["advantages"], bare["columns"]) == (["logprobs"], ["advantages"], ["logprobs"])


def test_a_template_that_refuses_the_messages_is_no_pass() -> None:
    class Refusing:
        chat_template_sha256 = ""

        def render_ids(self, *args: object, **kwargs: object) -> Ids:
            raise RenderFailed("The template refuses.")

        render_text = render_ids

    found = examine(TRAJECTORY, S.codec, lambda sha256: Refusing()).checks  # type: ignore[arg-type,return-value]
    assert found["first_prompt"] == found["delta"] == [REFUSED]
    first, last = TRAJECTORY.steps
    assert first.request is not None
    same = replace(last, request=first.request)  # it does not tell which messages are new
    assert checks_of(replace(TRAJECTORY, steps=(first, same)))["delta"] == ["render of the new messages"]


def without_content(trajectory: Trajectory) -> Trajectory:
    """The same calls as a client sends them: null in place of an empty content."""
    def sent(message: Message) -> Message:
        return message if message.get("content") else {**message, "content": None}

    return replace(trajectory, steps=tuple(
        replace(
            step, request=step.request and replace(step.request, messages=tuple(map(sent, step.request.messages))),
            reply=step.reply and sent(step.reply),
        )
        for step in trajectory.steps
    ))


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",  # null is written as the word None
        "{% if '<|open|>' in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.content }}",  # null raises
        "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% endfor %}{% endif %}",
        "{% if m.content is none %}{% else %}{{ m.content }}{% endif %}",
    ],
)
def test_null_beside_calls_is_rendered_as_the_engine_rendered_it(content: str) -> None:
    """vLLM and SGLang pass an empty text to the template."""
    text = STABLE.replace("{{ think(m, true) }}{{ m.content }}", "{{ think(m, true) }}" + content)
    setup = replace(S, renderer=renderer(S.codec, text))
    for name, kind in (("clean", None), ("generation_prompt_missing", "generation_prompt_missing")):
        trajectory = without_content(PLANTERS[name](setup).trajectory)
        diagnosis = examine(trajectory, S.codec, lambda sha256: setup.renderer)
        assert [finding.kind for finding in diagnosis.findings] == ([kind] if kind else [])
        assert diagnosis.checks["delta"] == ("failed" if kind else "passed")
        assert diagnosis.checks["first_prompt"] == "passed"


def test_null_stays_null_where_the_prompt_was_rendered_so() -> None:
    """transformers passes null on, and a template may test for it."""
    content = "{% if m.content is none %}(called){% else %}{{ m.content }}{% endif %}"
    text = STABLE.replace("{{ think(m, true) }}{{ m.content }}", "{{ think(m, true) }}" + content)
    setup = replace(S, renderer=renderer(S.codec, text))
    setup.opening()
    null = setup.calling()
    null["content"] = None
    diagnosis = examine(setup.turn(null).tito(), S.codec, lambda sha256: setup.renderer)
    assert diagnosis.findings == () and diagnosis.checks["delta"] == "passed"


def test_one_call_has_no_prompt_to_compare() -> None:
    assert {"prefix", "delta"} & set(checks_of(replace(TRAJECTORY, steps=TRAJECTORY.steps[:1]))) == set()
    assert checks_of(Trajectory("t")) == {}


def test_a_fault_fails_its_check_and_info_does_not() -> None:
    broken = checks_of(PLANTERS["boundary_merge"](S).trajectory)
    assert broken["prefix"] == "failed" and broken["token_ids"] == "passed"
    assert checks_of(PLANTERS["clean_noncanonical"](S).trajectory)["canonical"] == "noted"
    # A fault that is known fails its check, although other parts could not be decided.
    assert checks_of(PLANTERS["boundary_merge"](S).trajectory, tokenizer=False)["prefix"] == "failed"


def test_a_fault_that_hides_others_leaves_their_checks_open() -> None:
    short = checks_of(alone(replace(ROW, loss_mask=ROW.loss_mask[:-1])))
    assert short["lengths"] == "failed" and short["mask"] == short["logprobs"] == ["columns of one length"]
    shifted = checks_of(PLANTERS["all_columns_shifted"](S).trajectory)
    assert shifted["columns"] == "failed" and shifted["mask"] == ["columns in their place"]


def test_text_alone_passes_nothing() -> None:
    no_ids = np.zeros(0, np.int32)
    said = replace(
        TRAJECTORY.steps[0], prompt_ids=no_ids, completion_ids=no_ids, logprobs=None, finish_reason="", text="Hello."
    )
    assert set(map(str, checks_of(Trajectory("t", (said, said))).values())) == {"['token ids']"}


def test_every_kind_belongs_to_a_check() -> None:
    named = {
        check_of(Finding(kind.axis, slug, severity, step=step))
        for slug, kind in KINDS.items()
        for severity in (kind.severity, Severity.INFO)
        for step in (0, 1)
    }
    assert named == set(CHECKS)


def test_the_docs_name_every_check() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "pages.md").read_text(encoding="utf-8").splitlines()
    first = lines.index("| check | passes when | needs |") + 2
    assert [line.split("`")[1] for line in lines[first : first + len(CHECKS)]] == list(CHECKS)
    assert lines[first + len(CHECKS)] == ""


def test_totals_count_each_trajectory_once() -> None:
    one, other = checks_of(TRAJECTORY), checks_of(PLANTERS["boundary_merge"](S).trajectory)
    counts = {total.name: total for total in totals([(one, 3), (other, 2), (checks_of(alone(ROW)), 4), (None, 9)])}
    prefix = counts["prefix"]
    assert (prefix.checked, prefix.failed, prefix.not_decidable, prefix.needs) == (5, 2, 4, ["steps"])
    assert (counts["mask"].checked, counts["mask"].failed, counts["mask"].not_decidable) == (4, 0, 0)


def test_the_all_clear_says_what_was_checked() -> None:
    clean, bare = totals([(checks_of(TRAJECTORY), 1)]), totals([(checks_of(alone(ROW)), 1)])
    assert all_clear(clean) == "None. Passed 9 of 10 checks; 1 not decidable: no policy versions."
    assert check_sentence(bare) == (
        "Passed 5 of 15 checks; 10 not decidable: no calls in the file, no trainer logprobs."
    )
    both = totals([(checks_of(TRAJECTORY), 1), (checks_of(PLANTERS["boundary_merge"](S).trajectory), 1)])
    assert check_sentence(both) == "Passed 8 of 10 checks; 1 with findings; 1 not decidable: no policy versions."
    assert check_sentence(totals([({"lengths": "passed", "mask": "noted"}, 2)])) == "Passed all 2 checks."
    assert "not known" in all_clear([])
    assert Diagnosis().checks == {}


def test_rows_in_which_nothing_tells_the_turns_pass_no_mask() -> None:
    plain = np.flatnonzero(~np.isin(ROW.ids, list(S.codec.special_ids)))
    row = replace(ROW, ids=ROW.ids[plain], loss_mask=ROW.loss_mask[plain] & False, logprobs=None, columns={})
    row.loss_mask[4:] = True
    assert checks_of(alone(replace(row, origin=None)))["mask"] == ["role headers in the rows"]
