"""Expressions of users: a short one costs a sentence and a limited process, through every door that takes one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import regex
from django.core.management import call_command
from django.test import Client

from rollout_inspector.commands.main import main
from rollout_inspector.formats.training_step import checked_rule
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Step, Trajectory
from rollout_inspector.text import expressions
from rollout_inspector.text.chat_templates.sandbox import client
from rollouts.store.models import Run
from tests.samples.pages import share
from tests.web.trajectory_samples import Maker

BOMBS = {
    "nested counts": "(?:(?:a?){9999}){9999}b",
    "one more level": "(?:(?:(?:a?){99}){99}){99}b",
    "alternations": "(?:(?:a|b?|c?){999}){999}",
    "fuzzy": "(?:(?:(?:ab?){e<=2}){999}){999}",
    "in a lookbehind": "(?<=(?:(?:a?){999}){999})b",
    "in a lookahead": "(?=(?:(?:a?){999}){999})b",
    "classes of Unicode": r"(?:(?:\p{Letter}?){999}){999}",
    "folded case": "(?if)(?:(?:ß?ss?){999}){999}",
    "sets of sets": "(?V1)(?:(?:[[a-z]--[(]]?){999}){999}",
    "a conditional group": "(x)?(?:(?(1)(?:a?){999}|(?:b?){999})){999}",
    "optional groups in groups": "((((((a?){20}){20})?){20})?){20}",
    "a branch reset": "(?|(?:(a?){999})|(?:(b?){999})){999}",
    "an atomic group": "(?>(?>(?:a?){999}){999})",
    "counts in a row": "a?{999}{999}{99}",
    "open counts": "(?:(?:a?){999,}){999,}b",
    "a parenthesis in a set": "[(](?:(?:a?){9999}){9999}",
}
"""What each is -> a program of more parts than are compiled."""
UNSEEN = {
    "blanks between": "(?x) (?: (?: a? ) {4999} ) {3999} b",
    "a comment between": "(?:(?:a?)(?#x){2400})(?#x){2400}b",
}
"""The same, where the estimate does not see the counts: the limited process ends them."""
SELF = ("(?R)?a", "(?P<x>a(?&x)?)", "(a(?1)?)", "(?P<x>a(?P>x)?)")
UNREADABLE = (r"\L<names>", "(a", "[a", "(?<=a", "a{2,1}", r"\p{Nonsense}")

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """This process neither grows nor computes, whatever it is asked."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("compile", "search", "finditer"):
            patch.setattr(regex, name, lambda *_, **__: pytest.fail("an expression reached this process"))
        expressions.check("a")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before, used = psutil.Process().memory_info().rss, sum(psutil.Process().cpu_times()[:2])
        yield
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        assert int(peak.split()[1]) * 1024 - before < 100 << 20
        assert sum(psutil.Process().cpu_times()[:2]) - used < 60


@pytest.fixture
def run(tiny_tokenizer: Path) -> Run:
    make = Maker(tiny_tokenizer)
    return make.run([make.conversation("first"), Trajectory("slow", (Step(make.ids("a" * 3000), make.ids("b")),))])


@pytest.mark.parametrize("expression", BOMBS.values(), ids=BOMBS)
def test_an_expression_that_becomes_large_is_refused_before_it_is_compiled(expression: str) -> None:
    for ask in (expressions.check, lambda text: checked_rule(pattern=text)):
        with pytest.raises(Refusal, match=r"has [\d,]+ parts; at most 20,000 are searched for. Use smaller numbers"):
            ask(expression)


@pytest.mark.parametrize("expression", UNSEEN.values(), ids=UNSEEN)
def test_what_the_estimate_does_not_see_ends_with_its_process(expression: str) -> None:
    assert expressions.size_of(expression) <= expressions.MAX_PARTS
    with pytest.raises(Refusal, match="takes too much time or memory to be read"):
        expressions.check(expression)
    idle = client.pool("regular expressions").idle
    assert all(psutil.Process(worker.process.pid).memory_info().rss < 100 << 20 for worker in idle)
    assert [*expressions.matches("b+", ["abb"], 2)] == [(0, 1, 3)]


def test_what_calls_itself_or_cannot_be_read_is_told() -> None:
    for expression in SELF:
        with pytest.raises(Refusal, match="calls itself at character"):
            expressions.check(expression)
    for expression in UNREADABLE:
        with pytest.raises(Refusal, match="cannot be read"):
            expressions.check(expression)


@pytest.mark.parametrize("expression", [
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", r"(?:\d{1,3}\.){3}\d{1,3}", "a{1,9999}",
    r"(?<=check )the (\w+)", r"\{\"name\": \"calc\"", r"(?:[A-Z][a-z]{2,40} ){1,60}", r"(?i)naïve{1,2}", r"\p{Han}+",
])  # fmt: skip
def test_what_people_search_for_is_not_refused(expression: str) -> None:
    expressions.check(expression)


def doors(web: Client, run: Run) -> dict[str, Callable[[str], tuple[int, str]]]:
    """Every door that takes an expression -> what it answers: a status and a text."""
    visitor = Client()
    trajectory = run.trajectories.get(index=0)
    visitor.get(share(web, "trajectory", trajectory.code))
    upload = ("a.jsonl", '{"prompt_ids": [1], "completion_ids": [2]}\n')

    def of(answer: Any) -> tuple[int, str]:
        return answer.status_code, answer.content.decode()

    def imported(path: str, q: str) -> tuple[int, str]:
        from django.core.files.uploadedfile import SimpleUploadedFile

        file = SimpleUploadedFile(upload[0], upload[1].encode())
        return of(web.post(path, {"files": file, "training_step_from": q, "name": "x"}))

    def command(*arguments: str) -> tuple[int, str]:
        try:
            call_command(*arguments)
        except Exception as error:
            return 422, str(error)
        return 200, ""

    return {
        "a share link": lambda q: of(visitor.get(f"/trajectories/{trajectory.code}/find", {"by": "regex", "q": q})),
        "a row": lambda q: of(web.get(f"/trajectories/{trajectory.code}/find", {"by": "regex", "q": q})),
        "all runs": lambda q: of(web.get("/search", {"by": "regex", "q": q})),
        "the twin": lambda q: of(web.get("/search.json", {"by": "regex", "q": q})),
        "a run": lambda q: of(web.get(f"/runs/{run.code}/search.json", {"by": "regex", "q": q})),
        "the API": lambda q: of(web.get("/api/v1/search", {"by": "regex", "q": q})),
        "the command": lambda q: command("search", run.code, "--regex", q),
        "the import form": lambda q: imported("/import.json", q),
        "the API's imports": lambda q: imported("/api/v1/imports", q),
        "the import command": lambda q: command("import_rollouts", __file__, "--training-step-from", q),
    }


def test_every_door_answers_a_bomb_with_a_sentence(member: Client, run: Run) -> None:
    answers = {name: ask(BOMBS["nested counts"]) for name, ask in doors(member, run).items()}
    wrong = {
        name: (status, text[:300]) for name, (status, text) in answers.items()
        if status != 422 or "499,930,003 parts" not in text
    }
    assert not wrong and Run.objects.count() == 1


def test_a_command_without_a_server_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt_ids": [1], "completion_ids": [2]}\n')
    for command in (
        ["check", str(file)], ["audit", str(tmp_path), "--output", str(tmp_path / "audit")],
        ["watch", str(tmp_path), "--url", "http://x", "--token", "t"],
    ):
        assert main([*command, "--training-step-from", f"({BOMBS['nested counts']})"]) == 2
        assert "parts; at most 20,000 are searched for" in capsys.readouterr().err


def test_a_run_without_a_tokenizer_is_not_searched_at_all(member: Client, run: Run) -> None:
    Run.objects.update(tokenizer=None)
    trajectory = run.trajectories.get(index=0)
    for expression in (BOMBS["nested counts"], UNSEEN["blanks between"]):
        answer = member.get(f"/trajectories/{trajectory.code}/find", {"by": "regex", "q": expression})
        assert (answer.status_code, answer.json()["error"]) == (422, "Without a tokenizer only ids are found.")


def test_a_slow_expression_ends_and_the_next_is_answered(member: Client, run: Run) -> None:
    code = run.trajectories.get(index=1).code
    slow = member.get(f"/trajectories/{code}/find", {"by": "regex", "q": "(?:a|aa|aaa)+c"})
    assert slow.status_code == 422 and "took too long" in slow.json()["error"]
    assert member.get(f"/trajectories/{code}/find", {"by": "regex", "q": "a{4}b?$"}).json()["places"]
