"""Every stream and delta kind, planted and not, on tokenizers and templates made here."""

from dataclasses import replace

import numpy as np
import pytest

from rollout_inspector.diagnose import BREAK_RULES, KINDS, Finding, Severity, diagnose
from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.strategies.replay import repaid_tokens
from rollout_inspector.streams.trajectory import Ids, Step, Trajectory, ids_array
from tests.samples.diagnosis import OPTIONS, SETUPS, problem
from tests.samples.model_setups import model_setup
from tests.samples.planted.plant import PLANTERS, CannotPlant, Case, ModelSetup, planted, with_lead

MILD = {"duplicate_call"}


def findings_of(case: Case, s: ModelSetup) -> list[Finding]:
    return diagnose(case.trajectory, s.codec, lambda sha: s.renderer)


@pytest.mark.parametrize("name", SETUPS)
def test_planted_faults_are_named(name: str) -> None:
    problems = []
    for options in OPTIONS:
        s = model_setup(name, **options)
        for case in planted(s, 1):
            problems.append(problem(case, s, findings_of(case, s)))
            try:
                later = with_lead(s, case)
            except CannotPlant:
                continue
            problems.append(problem(later, s, findings_of(later, s)))
    assert len(problems) > 10
    assert [text for text in problems if text] == []


def test_every_stream_and_delta_kind_has_a_witness() -> None:
    seen = {"unclassified", "not_decidable"}  # witnessed below
    for name in SETUPS:
        seen |= {case.kind for case in planted(model_setup(name), 1) if case.kind}
    assert {slug for slug, kind in KINDS.items() if kind.axis != "row"} - seen == set()


def test_every_rule_returns_kinds_of_the_list() -> None:
    """A rule that is called like a kind returns that kind, and each kind of such a rule is planted."""
    kinds: dict[str, set[str]] = {rule.__name__: set() for rule in BREAK_RULES}
    for name in SETUPS:
        s = model_setup(name)
        for case in planted(s, 1):
            context = DiagnosisContext(case.trajectory, s.codec, lambda sha, s=s: s.renderer)
            for index, link in enumerate(context.links):
                if link.parent is None or link.extends or not link.parent_length:
                    continue
                for rule in BREAK_RULES:
                    if (fault := rule(Break(context, index, link))) is not None:
                        kinds[rule.__name__].add(fault.kind)
    assert set().union(*kinds.values()) <= set(KINDS)
    of_own_name = {name: found for name, found in kinds.items() if name in KINDS}
    others = {"tokenizer_mismatch": {"engine_ids_inconsistent"}}
    assert {name: found - others.get(name, set()) for name, found in of_own_name.items()} == {
        name: {name} for name in of_own_name
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("message_repeated", "holds the result of call callaaaa1 (message 3) twice; the template writes it there once"),
        ("message_repeated_later", "holds message 1 (user) once; the template writes it there not at all"),
        ("prompt_of_another_request", "is not the render of its request: it lacks most texts of its messages"),
    ],
)
def test_what_a_prompt_holds_instead_is_told(name: str, words: str) -> None:
    s = model_setup("stable")
    s.opening()
    case = PLANTERS[name](s)
    (finding,) = [found for found in findings_of(case, s) if found.severity is not Severity.INFO]
    assert words in finding.evidence and finding.remedy != KINDS[finding.kind].remedy


def first(name: str, kind: str, **options: object) -> tuple[ModelSetup, Case, Finding]:
    s = model_setup(name, **options)
    case = PLANTERS[kind](s)
    finding = next(f for f in findings_of(case, s) if f.kind == case.kind and f.step == case.step)
    return s, case, finding


def test_offsets_and_ids_of_a_boundary_merge() -> None:
    s, case, finding = first("stable", "boundary_merge")
    before, after = case.trajectory.steps
    assert finding.start < len(before.prompt_ids)
    assert finding.actual_ids.tolist() == after.prompt_ids[finding.start : finding.stop].tolist()
    sampled = before.stream[finding.start : finding.start + len(finding.expected_ids)]
    assert finding.expected_ids.tolist() == sampled.tolist()
    assert s.bytes(finding.expected_ids) == s.bytes(finding.actual_ids)
    assert len(finding.expected_ids) + len(finding.actual_ids) < 8


def test_what_a_break_pays_again_is_what_a_replay_counts() -> None:
    s = model_setup("toggling")
    repaid = {}
    for case in planted(s, 1):
        if case.kind == "token_ids_missing":
            continue  # the breaks that follow from it are not reported
        paid = sum(found.cost.prompt_tokens_repaid for found in findings_of(case, s))
        repaid[case.name] = paid, repaid_tokens(merged_rows(case.trajectory.steps))
    assert {name: pair for name, pair in repaid.items() if pair[0] != pair[1]} == {}
    assert repaid["boundary_merge"][0] > 0 and repaid["clean"] == (0, 0)


def test_offsets_and_ids_of_a_noncanonical_sample() -> None:
    s, case, finding = first("stable", "noncanonical_sampling")
    before, after = case.trajectory.steps
    stop = finding.start + len(finding.expected_ids)
    assert finding.expected_ids.tolist() == before.stream[finding.start : stop].tolist()
    assert finding.actual_ids.tolist() == after.prompt_ids[finding.start : finding.stop].tolist()
    assert (len(finding.expected_ids), len(finding.actual_ids)) == (2, 1)
    assert finding.expected_text == finding.actual_text and s.codec.decode(finding.actual_ids) in finding.actual_text
    assert finding.cost.rows == 2 and finding.cost.lost_in_one_row > 0 == finding.cost.trained_tokens_lost
    assert finding.evidence and finding.remedy


def test_a_lost_separator_is_a_place_where_something_is_missing() -> None:
    s, case, finding = first("stable", "turn_separator_lost")
    before, _ = case.trajectory.steps
    assert (finding.start, finding.stop) == (len(before.stream), len(before.stream))
    assert s.decode(finding.expected_ids) == "\n" and not len(finding.actual_ids)


def test_kept_noncanonical_samples_are_information() -> None:
    s = model_setup("stable")
    case = PLANTERS["clean_noncanonical"](s)
    (finding,) = [f for f in findings_of(case, s) if f.kind == "noncanonical_sampling"]
    assert finding.severity is Severity.INFO
    assert len(finding.actual_ids) == 2 and len(finding.expected_ids) == 1
    assert finding.actual_ids.tolist() == case.trajectory.steps[0].stream[finding.start : finding.stop].tolist()


def test_a_long_difference_is_bounded_and_says_so() -> None:
    s = model_setup("stable")
    messages = s.opening()
    text = "word " * 900
    p, g = s.codec.encode(s.text(messages)), s.codec.encode(text + "<|shut|>")
    other = s.codec.encode("other " * 900 + "<|shut|>")
    steps = (
        s.step(messages, p, g, {"role": "assistant", "content": text}),
        s.step([*messages, {"role": "assistant", "content": "other " * 900}], np.concatenate([p, other]), g, None),
    )
    finding = next(f for f in diagnose(Trajectory("t", steps), s.codec) if f.severity is Severity.ERROR)
    assert finding.kind == "assistant_rewritten"
    assert len(finding.expected_ids) == len(finding.actual_ids) == 256
    assert "the first 256" in finding.evidence


def bare(*steps: tuple[list[int], list[int]]) -> Trajectory:
    return Trajectory("t", tuple(Step(ids_array(p), ids_array(g)) for p, g in steps))


def named(trajectory: Trajectory) -> list[tuple[str, int | None, str]]:
    return [(f.kind, f.step, f.missing) for f in diagnose(trajectory, None)]


def test_without_a_tokenizer_what_ids_tell_is_still_found() -> None:
    gap = ("not_decidable", 0, "tokenizer")
    assert named(bare(([1, 2], [3]), ([1, 2, 3, 4], [5]))) == [gap]
    assert set(named(bare(([1, 2], [3]), ([1, 2], [4]), ([1, 2, 4, 5], [6])))) == {gap, ("duplicate_call", 1, "")}
    assert set(named(bare(([1, 2, 8, 9, 7, 6, 5], [3]), ([8, 9, 7, 6, 5, 3, 4], [5])))) == {
        gap,
        ("context_truncated", 1, ""),
    }
    assert set(named(bare(([1, 2, 8, 9, 7], [3]), ([1, 1, 2, 8, 9, 7, 3, 4], [5])))) == {gap, ("bos_mismatch", 1, "")}
    assert set(named(bare(([1, 2, 3], [4, 5, 6]), ([1, 2, 3, 4, 9, 6, 7], [8])))) == {
        gap,
        ("unclassified", 1, "the tokenizer"),
    }
    assert set(named(bare(([1, 2], [])))) == {gap, ("token_ids_missing", 0, "")}


def test_text_alone_is_not_decidable_and_a_call_without_its_ids_is_an_error() -> None:
    nothing = ids_array([])
    said = Step(nothing, nothing, text="4")
    assert named(Trajectory("t", (said, said))) == [("not_decidable", 0, "token ids")]
    called = replace(said, finish_reason="stop")
    assert ("token_ids_missing", 1, "") in named(Trajectory("t", (said, called)))
    assert ("token_ids_missing", 0, "") in named(Trajectory("t", (called,)))


def test_without_messages_what_text_tells_is_still_found() -> None:
    s = model_setup("stable")
    for kind in (
        "boundary_merge",
        "noncanonical_sampling",
        "whitespace_changed",
        "invalid_utf8",
        "thinking_stripped",
        "special_tokens_dropped",
        "tool_call_reserialized",
        "turn_separator_lost",
        "context_truncated",
    ):
        try:
            case = PLANTERS[kind](model_setup("toggling") if kind == "thinking_stripped" else s)
        except CannotPlant:
            continue
        steps = tuple(replace(step, request=None, reply=None) for step in case.trajectory.steps)
        findings = diagnose(Trajectory("t", steps), s.codec, lambda sha: s.renderer)
        assert kind in [f.kind for f in findings], kind
        assert ("not_decidable", "request messages") in [(f.kind, f.missing) for f in findings]


def test_a_clean_trajectory_without_a_template_says_what_was_not_checked() -> None:
    s = model_setup("stable")
    findings = diagnose(PLANTERS["clean"](s).trajectory, s.codec)
    assert [(f.kind, f.axis, f.missing) for f in findings] == [("not_decidable", "delta", "chat template")]


def test_the_same_trajectory_always_gets_the_same_findings() -> None:
    s = model_setup("toggling")
    for case in planted(s, 1):
        once, twice = findings_of(case, s), findings_of(case, s)
        assert [(f.kind, f.step, f.start, f.stop, f.evidence) for f in once] == [
            (f.kind, f.step, f.start, f.stop, f.evidence) for f in twice
        ]


def test_what_follows_from_missing_ids_is_not_reported_again() -> None:
    s = model_setup("stable")
    case = PLANTERS["token_ids_missing"](s)
    assert [f.kind for f in findings_of(case, s) if f.severity is not Severity.INFO] == ["token_ids_missing"]


def test_renders_do_not_grow_with_the_number_of_steps() -> None:
    """A linear trajectory asks for one short render a step, not for the whole conversation again and again."""
    s = model_setup("stable")
    turn = s.turn()
    messages, stream, steps = list(turn.messages), turn.p, []
    for index in range(12):
        steps.append(s.step(messages, stream, turn.g, turn.reply))
        messages = [*messages, turn.reply, *turn.new]
        stream = np.concatenate([stream, turn.g, turn.d])
        assert index < 12
    sizes: list[int] = []

    class Counting:
        chat_template_sha256 = ""

        def render_text(self, *args: object, **kwargs: object) -> str:
            raise AssertionError

        def render_ids(self, conversation: Conversation) -> Ids:
            sizes.append(len(conversation.messages))
            return s.renderer.render_ids(conversation)

    counting = Counting()
    findings = diagnose(Trajectory("t", tuple(steps)), s.codec, lambda sha: counting)
    assert [f.kind for f in findings if f.severity is not Severity.INFO] == []
    assert len(sizes) <= 2 + len(steps) and max(sizes) <= 6
