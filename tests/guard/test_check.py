"""``rollout-inspector check``: its exit status, its reports, its sentences."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollout_inspector.commands.main import main
from rollout_inspector.guard import Guard
from rollout_inspector.guard.checked_files import CheckedFiles, check_files, diagnosis_of
from rollout_inspector.guard.fail_rules import ExitStatus, fail_rule, verdict_on
from rollout_inspector.guard.report_formats import REPORTS
from rollout_inspector.refusal import Refusal
from rollout_inspector.text.chat_templates import renderer
from rollouts.gallery import BUNDLE
from tests.conftest import ROOT
from tests.samples.guard import CLEAN, lines_of
from tests.samples.model_setups import model_setup
from tests.samples.planted.plant import PLANTERS, CannotPlant


def check(*arguments: str | Path) -> int:
    return main(["check", *map(str, arguments)])


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    path = tmp_path / "clean.jsonl"
    path.write_text(lines_of(CLEAN))
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.jsonl"
    path.write_text(lines_of(CLEAN, "observation_trained", "duplicate_call"))
    return path


def report(path: Path, *arguments: str) -> tuple[int, dict]:
    output = path.with_suffix(".report.json")
    status = check(path, "--format", "json", "--output", output, *arguments)
    return status, json.loads(output.read_text())


def test_clean_rows_pass_and_what_was_not_checked_is_said(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(clean) == 0
    said = capsys.readouterr().out
    assert "Passed" in said and "canonical lacks: tokenizer (on 1)." in said


def test_a_file_without_any_stop_token_is_a_warning(tmp_path: Path) -> None:
    """One row may have been cut by a limit. All rows of a file lost it."""
    path, setup = tmp_path / "rows.jsonl", model_setup("stable")
    head, answer, stop = (setup.codec.encode(text).tolist() for text in (
        "<|open|>user\nTwo?<|shut|>\n<|open|>assistant\n", "It is two.", "<|shut|>"))

    def severities(*ends: list[int]) -> list[str]:
        rows = [{"input_ids": [*head, *answer, *answer[n:], *end],
                 "labels": [*[-100] * len(head), *answer, *answer[n:], *end]} for n, end in enumerate(ends)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        checked = check_files([path], setup.codec, setup.renderer)
        assert checked.n_trajectories == len(ends)
        return [placed.finding.severity for placed in checked.found if placed.finding.kind == "stop_token_untrained"]

    assert severities([], [], []) == ["warning"] * 3
    assert severities([], [], stop) == ["info"] * 2 and severities([], []) == ["info"] * 2
    assert severities(stop, stop, stop) == []


def test_a_closing_tag_before_a_masked_stop_token_is_no_stop_token(tmp_path: Path) -> None:
    """https://github.com/jingyaogong/minimind/issues/850: stop tokens were filtered out of every row."""
    path, setup = tmp_path / "rows.jsonl", model_setup("stable")
    head, call, stop, after, last = (setup.codec.encode(text).tolist() for text in (
        "<|open|>user\nTwo?<|shut|>\n<|open|>assistant\n", "<call>\n{}\n</call>", "<|shut|>",
        "\n<|open|>tools\n<result>\n2\n</result><|shut|>\n<|open|>assistant\n", "It is two."))
    for sampled, expected in (([*call], ["warning"] * 3), ([*call, *stop], ["info"] * 3)):
        closed = after if sampled[-1] == stop[0] else [*stop, *after]
        mask = [1] * len(sampled) + [0] * len(closed) + [1] * len(last)
        row = {"prompt_ids": head, "response_ids": [*sampled, *closed, *last], "response_mask": mask,
               "response_logprobs": [-0.5 * bit for bit in mask]}
        path.write_text(f"{json.dumps(row)}\n" * 3)
        found = check_files([path], setup.codec, setup.renderer).found
        assert [one.finding.severity for one in found if one.finding.kind == "stop_token_untrained"] == expected


def test_an_error_fails_and_names_its_place(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(broken) == 1
    said = capsys.readouterr().out
    assert f"{broken}:2: observation_trained, row 0" in said
    assert "Remedy:" in said and "Cost:" in said and "Failed by observation_trained." in said
    assert "rollout-inspector push FILE" in said  # all that is found opens in the browser


@pytest.mark.parametrize(
    ("arguments", "failing"),
    [
        (["--fail-on", "warning"], {"observation_trained", "duplicate_call"}),
        (["--fail-on", "duplicate_call"], {"duplicate_call"}),
        (["--fail-on", "none"], set()),
        (["--fail-on", "error", "--max-rate", "observation_trained=0.34"], set()),
        (["--fail-on", "error", "--max-rate", "observation_trained=0.33"], {"observation_trained"}),
    ],
)
def test_the_rule_decides(broken: Path, arguments: Sequence[str], failing: set[str]) -> None:
    status, value = report(broken, *arguments)
    assert status == (1 if failing else 0) and set(value["failing"]) == failing


def test_a_baseline_accepts_what_is_known_and_nothing_more(broken: Path, tmp_path: Path) -> None:
    _, value = report(broken)
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(value))
    assert check(broken, "--baseline", baseline) == 0
    broken.write_text(lines_of("observation_trained", CLEAN))  # half instead of a third
    assert check(broken, "--baseline", baseline) == 1
    broken.write_text(lines_of(CLEAN, "row_not_sampled", "duplicate_call"))
    status, value = report(broken, "--baseline", str(baseline))
    assert status == 1 and "observation_trained" not in value["failing"]


def test_a_line_that_cannot_be_read_is_no_pass(clean: Path) -> None:
    clean.write_text(lines_of(CLEAN) + '{"broken\n')
    status, value = report(clean)
    assert status == 2 and value["unread"][0]["line"] == 2 and value["trajectories"] == 1


def test_no_file_and_no_trajectory_are_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "nowhere.jsonl") == 2
    assert check(tmp_path) == 2
    (tmp_path / "empty.jsonl").write_text("")
    assert check(tmp_path) == 2
    assert "There is no file" in capsys.readouterr().out


def test_a_named_kind_that_cannot_be_told_is_no_pass(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(clean, "--fail-on", "reply_text_lost") == 2
    assert "reply_text_lost could not be checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fail_on", "rates", "sentence"),
    [
        ("errors", [], "There is no kind of finding 'errors'"),
        ("error", ["row_not_sampled"], "Write KIND=RATE"),
        ("error", ["row_not_sampled=2"], "a rate from 0 to 1"),
        ("error", ["row_not_sampled=nan"], "a rate from 0 to 1"),
    ],
)
def test_a_rule_that_cannot_be_used_is_a_sentence(fail_on: str, rates: list[str], sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        fail_rule(fail_on, rates)


@pytest.mark.parametrize("text", ["[]", "{}", '{"kinds": {"a": {"rate": "x"}}}', "\0", '{"kinds": {"a": 1}}'])
def test_a_baseline_that_is_none_is_a_sentence(
    clean: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "baseline").write_text(text)
    assert check(clean, "--baseline", tmp_path / "baseline") == 2
    assert "The baseline" in capsys.readouterr().err


def test_every_report_is_well_formed(broken: Path, tmp_path: Path) -> None:
    text = broken.read_text().replace('"duplicate_call"', '"a\\u001b[31m::error::<b>|\\u202e&"')
    broken.write_text(text + '{"x": 1}\n')
    said = {}
    for name in REPORTS:
        assert check(broken, "--fail-on", "warning", "--format", name, "--output", tmp_path / name) == 1
        said[name] = (tmp_path / name).read_text()
        assert "\x1b" not in said[name] and "\u202e" not in said[name]
    suite = ElementTree.fromstring(said["junit"])
    assert suite.get("failures") == "2" and len(suite.findall("testcase/failure")) == 2
    (run,) = json.loads(said["sarif"])["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["observation_trained", "duplicate_call"]
    assert run["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] == 2
    assert "<b>" not in said["markdown"]
    assert all(line.startswith("::") for line in said["github"].splitlines())
    assert said["github"].count("::error ") == 3  # a finding, a line that was not read, the verdict


def test_the_package_is_light_and_runs_without_django() -> None:
    program = (
        "import sys; import rollout_inspector.guard, rollout_inspector.commands.main\n"
        "light = len(sys.modules)\n"
        "from rollout_inspector.guard import check_files\n"
        f"found = check_files([{str(BUNDLE)!r}])\n"
        "heavy = {'django', 'torch', 'transformers', 'celery', 'redis'} & set(sys.modules)\n"
        "assert found.n_trajectories > 40 and not heavy, heavy\n"
        "print(light)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert int(done.stdout) < 250


def test_a_report_is_written_in_several_forms(broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(broken, "--also", f"json={tmp_path / 'a=b.json'}", "--also", f"sarif={tmp_path / 's'}") == 1
    assert "Failed by observation_trained." in capsys.readouterr().out
    assert json.loads((tmp_path / "a=b.json").read_text())["outcome"] == "failed" and (tmp_path / "s").exists()
    for also, said in [
        ("poem=x", "write FORMAT=FILE"),
        ("json=", "write FORMAT=FILE"),
        ("json=no/x", "no such folder"),
    ]:
        assert check(broken, "--also", also) == 2
        assert said in capsys.readouterr().err


REFUSALS = {
    "every message": "{{ raise_exception('no') }}",
    "what follows a call": "{% for m in messages if m.role in ('tool', 'user') and not loop.first %}"
    "{{ raise_exception('no') if loop.index > 1 }}{% endfor %}",
    "answers": "{% for m in messages if m.role == 'assistant' %}{{ raise_exception('no') }}{% endfor %}",
}
ABSENT = {"policy versions", "steps", "trainer logprobs", "text", "message of the reply"}
"""What these files lack."""


@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize("name", [name for name in PLANTERS if name.startswith("clean")])
def test_a_check_that_the_file_should_decide_is_decided_or_the_file_has_not_passed(name: str, refused: str) -> None:
    setup = model_setup("stable")
    setup.opening()
    try:
        trajectory = PLANTERS[name](setup).trajectory
    except CannotPlant:
        pytest.skip("the template has no place for it")
    refusing = renderer(setup.codec, REFUSALS[refused] + setup.renderer.chat_template)
    for template, is_whole in ((setup.renderer, True), (refusing, False)):
        checked = CheckedFiles(files=["calls.jsonl"])
        checked.add("calls.jsonl", None, trajectory, diagnosis_of(trajectory, setup.codec, template))
        verdict = verdict_on(checked, fail_rule("none"))
        open_checks = {check for check, lacking in checked.undecided.items() if not ABSENT & set(lacking)}
        assert verdict.outcome is (ExitStatus.UNDECIDED if open_checks else ExitStatus.PASSED)
        assert not (is_whole and open_checks)
        for check in open_checks:
            sentence = f"{check} could not be decided on 1 of 1 trajectories"
            assert any(reason.startswith(sentence) for reason in verdict.reasons)
            assert sentence in REPORTS["text"](checked, verdict).splitlines()[0]
            assert all(sentence in REPORTS[form](checked, verdict) for form in ("json", "junit", "github"))
            assert json.loads(REPORTS["sarif"](checked, verdict))["runs"][0]["invocations"][0]["exitCode"] == 2
    guard = Guard(setup.codec, chat_template=refusing.chat_template, sample=1, fail_on="none", max_seconds=240)
    guard.steps(trajectory.steps)
    assert not trajectory.steps or ("Not decided. " in guard.report()) is bool(open_checks)
    assert open_checks or not trajectory.steps or refused != "every message"


def test_the_first_line_says_what_rows_alone_do_not_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [10, 11, 12, 13], "labels": [-100, -100, 12, 13]}) + "\n")
    assert check(path) == 0
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert "rows alone do not tell what the prompts were and which tokens were sampled." in first
    assert last.startswith("Passed ") and "not decidable: no calls in the file, no tokenizer" in last
    _, value = report(path)
    assert value["sentence"] == last
