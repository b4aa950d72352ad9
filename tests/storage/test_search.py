"""Search finds what reading every row would find, in both stores, in one part or in many."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Row, Step, Trajectory
from rollouts.jobs.search import SearchHit, SearchQuestion, patterns as search_patterns, search, trajectory_search
from rollouts.store import files, models
from rollouts.store.people.access import EVERYTHING, Access
from rollouts.store.runs.runs import create_run
from rollouts.store.token_arrays.stores import SegmentTokens
from rollouts.store.trajectories import search_queries
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.token_encoding import encode_trajectories
from rollouts.store.trajectory_filters import TrajectoryFilters
from tests.storage.build import ids
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


def branching(name: str, seed: int, n_ids: int = 6) -> Trajectory:
    """Steps that extend, leave and branch off each other, over so few ids that they repeat everywhere."""
    rng = np.random.default_rng(seed)
    streams = [rng.integers(0, n_ids, 5, dtype=np.int32)]
    steps = []
    for _ in range(8):
        base = streams[rng.integers(len(streams))]
        cut = len(base) if rng.random() < 0.5 else int(rng.integers(0, len(base) + 1))
        prompt = np.concatenate([base[:cut], rng.integers(0, n_ids, rng.integers(1, 4), dtype=np.int32)])
        steps.append(Step(prompt, rng.integers(0, n_ids, rng.integers(1, 5), dtype=np.int32)))
        streams.append(np.concatenate([steps[-1].prompt_ids, steps[-1].completion_ids]))
    return Trajectory(name, tuple(steps))


@pytest.fixture(params=["database", "segments"])
def run(request: pytest.FixtureRequest, db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[models.Run]:
    monkeypatch.setattr(SegmentTokens, "min_tokens", 1)
    found = create_run(models.Run.Kind.IMPORT, "searched", token_store=request.param)
    own = Row(ids(1, 2, 3, 1, 2, 9), np.ones(6, np.bool_))
    values = [branching(f"t{seed}", seed) for seed in range(6)] + [Trajectory("rows", rows=(own,))]
    save_trajectories(found, values, encoded=encode_trajectories(values, put_for=found))
    yield found
    files.delete_all(f"segments/{found.code}/")


def spans(parts: list[SearchHit]) -> list[tuple[str, int | None, int | None, int | None]]:
    return [(one.trajectory, one.row, one.start, one.stop) for one in parts]


def whole(run: models.Run | None, by: str, text: str, **more: Any) -> list[SearchHit]:
    part = search(EVERYTHING, SearchQuestion.read(by, text), run, limit=10**6, seconds=60, **more)
    assert part.complete
    return part.results


@pytest.mark.parametrize("pattern", ["3", "1 2", "2 * 1", "* 4", "0 * * 0", "1 2 3", "5 5 5 5"])
def test_ids_are_found_where_reading_every_row_finds_them(run: models.Run, pattern: str) -> None:
    wanted = [None if part == "*" else int(part) for part in pattern.split()]
    found = set(spans(whole(run, "ids", pattern)))
    streams = {
        (one.code, row.index): row_window(one, row, 0, row.n_tokens).ids.tolist()
        for one in run.trajectories.all()
        for row in one.rows.all()
    }
    expected = {
        (*key, at, at + len(wanted))
        for key, held in streams.items()
        for at in range(len(held) - len(wanted) + 1)
        if all(id_ is None or id_ == held[at + k] for k, id_ in enumerate(wanted))
    }
    assert found <= expected
    # What rows share is told once, in one of the rows that begin alike.
    for number, row, start, stop in expected - found:
        same = streams[number, row][:stop]
        assert any((number, other, start, stop) in found and held[:stop] == same
                   for (of, other), held in streams.items() if of == number), (number, row, start)


@pytest.mark.parametrize("limit", [1, 7])
def test_parts_hold_together_what_one_part_holds(run: models.Run, limit: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(trajectory_search, "BATCH_TOKENS", 50)
    monkeypatch.setattr(trajectory_search, "BATCH_TRAJECTORIES", 3)
    found, cursor, n = [], "", 0
    question = SearchQuestion.read("ids", "1 *")
    while True:
        # Without time every batch ends a part.
        part = search(EVERYTHING, question, run, cursor, limit, seconds=0 if n % 2 else 60)
        found += part.results
        assert len(part.results) <= limit and part.total == 7 >= part.done
        cursor, n = part.next, n + 1
        if not cursor:
            break
    assert spans(found) == spans(whole(run, "ids", "1 *")) and part.done == 7 and n > 3


def test_the_number_of_queries_does_not_depend_on_what_is_read(run: models.Run) -> None:
    with CaptureQueriesContext(connection) as queries:
        whole(run, "ids", "1 2")
    # Totals, the runs and what follows them, the trajectories and what follows, steps, rows.
    assert len(queries) <= 7


@pytest.fixture
def texts(db: None, tiny_tokenizer: Path) -> Iterator[tuple[models.Run, Maker]]:
    make = Maker(tiny_tokenizer)
    broken, findings = make.broken("broken")
    values = [make.conversation("héllo", hostile=True), broken]
    yield make.run(values, [[], findings]), make


def row_text(run: models.Run, make: Maker, found: SearchHit) -> bytes:
    trajectory = run.trajectories.get(code=found.trajectory)
    assert found.row is not None and found.start is not None and found.stop is not None
    return make.table.join(row_window(trajectory, found.row, found.start, found.stop).ids)


def test_a_text_is_found_across_tokens_and_steps(texts: tuple[models.Run, Maker]) -> None:
    run, make = texts
    for text in ("result", "<|im_end|>\n<|im_start|>tool", "naïve 漢字", "12 * 7", "🙂"):
        found = whole(run, "text", text)
        assert found and all(text.encode() in row_text(run, make, one) for one in found)
        rows = [row_window(one, row, 0, row.n_tokens).ids for one in run.trajectories.all() for row in
                one.rows.all()]
        assert len(found) <= sum(make.table.join(held).count(text.encode()) for held in rows)
    one = whole(run, "text", "84<|im_end|>")[0]
    assert "84" in one.text and one.before.endswith("tool\n") and one.after.startswith("\n<|im_start|>assistant")
    assert whole(run, "text", "Result") == []


def test_a_token_is_named_by_its_text(texts: tuple[models.Run, Maker]) -> None:
    run, make = texts
    end, newline = make.tokenizer.token_id("<|im_end|>"), int(make.ids("\n")[0])
    by_id = spans(whole(run, "ids", f"{end} {newline}"))
    assert by_id == spans(whole(run, "ids", f"`<|im_end|>` {newline}")) != []
    assert by_id == spans(whole(run, "ids", f"{newline} after '<|im_end|>'"))
    with pytest.raises(Refusal, match=r"“no such token” is no single token"):
        whole(run, "ids", "`no such token`")


def test_an_expression_is_found_where_python_finds_it(texts: tuple[models.Run, Maker]) -> None:
    run, make = texts
    for expression in (r"\d+ \* \d+", r"(?<=check )the (\w+)", r"naïve\s.", r"tool\n84"):
        found = whole(run, "regex", expression)
        assert found
        for one in found:
            assert re.search(expression.replace("(?<=check )", ""), row_text(run, make, one).decode("utf-8", "replace"))


def test_an_expression_that_takes_too_long_is_stopped(texts: tuple[models.Run, Maker], monkeypatch: Any) -> None:
    run, make = texts
    monkeypatch.setattr(search_patterns, "REGEX_SECONDS", 0.05)
    slow = Trajectory("slow", (Step(make.ids("a" * 3000), make.ids("<|im_end|>")),))
    save_trajectories(run, [slow])
    part = search(EVERYTHING, SearchQuestion.read("regex", r"(?:a|aa|aaa)+b"), run, seconds=60)
    assert part.too_slow and not part.complete and "“slow”" in part.notes[0]
    after = search(EVERYTHING, SearchQuestion.read("regex", r"(?:a|aa|aaa)+b"), run, part.next)
    assert after.complete and after.done == 3


@pytest.mark.parametrize(
    ("by", "text", "sentence"),
    [
        ("ids", "271 x7", "“x7” at character 5 is no id"),
        ("ids", "* *", "wildcards alone"),
        ("ids", "", "at least one id"),
        ("ids", "3000000000", "no id 3000000000"),
        ("ids", "-1", "no id -1"),
        ("ids", "1 " * 300, "at most 256"),
        ("ids", "1 after", "Nothing stands behind"),
        ("ids", "after 1", "stands once"),
        ("text", "", "Write the text"),
        ("text", "x" * 3000, "at most 2,000"),
        ("regex", "(abc", r"cannot be read at character 5: missing \)"),
        ("regex", "[z-a]", "at character 5"),
        ("regex", "(?R)a", "calls itself at character 1"),
        ("regex", "(?r)a", "search backwards"),
        ("regex", "(?a)(?u)x", "cannot be read: ASCII"),
        ("regex", "x" * 600, "at most 500"),
        ("regex", "", "Write the regular expression"),
        ("metadata", " ", "Write a part"),
        ("finding", "", "Name the kind"),
        ("smell", "x", "not by “smell”"),
    ],
)
def test_what_makes_no_sense_is_told_in_a_sentence(by: str, text: str, sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        SearchQuestion.read(by, text)


def test_findings_and_metadata_are_found(texts: tuple[models.Run, Maker]) -> None:
    run, make = texts
    (found,) = whole(run, "finding", "unclassified")
    finding = models.StoredFinding.objects.get()
    assert (found.kind, found.row, found.start, found.stop) == ("unclassified", 1, finding.start, finding.stop)
    assert found.text == "The prompt leaves the stream."
    extra = replace(make.conversation("third"), extra={"problem": 'prove "lemma 7"'})
    save_trajectories(run, [extra])
    (found,) = whole(run, "metadata", 'prove "Lemma')
    assert (found.external_id, found.row, found.start) == ("third", None, None) and "problem" in found.before
    assert [one.external_id for one in whole(run, "metadata", "héllo")] == ["héllo"]
    filtered = SearchQuestion.read("text", "84", TrajectoryFilters(kind="unclassified"))
    assert {one.external_id for one in search(EVERYTHING, filtered, run, limit=500).results} == {"broken"}


def test_a_search_sees_only_the_projects_of_who_asks(texts: tuple[models.Run, Maker]) -> None:
    run, make = texts
    other = models.Project.objects.create(name="other")
    make.run([make.conversation("there")], project=other)
    question = SearchQuestion.read("text", "84")
    role = models.Role.VIEWER
    here = search(Access(roles={run.project_id: role}), question, limit=500, seconds=60)
    there = search(Access(roles={other.pk: role}), question, limit=500, seconds=60)
    assert {one.external_id for one in here.results} == {"héllo", "broken"} and here.total == 2
    assert {one.external_id for one in there.results} == {"there"} and (there.total, there.done) == (1, 1)
    everything = search(EVERYTHING, question, limit=500, seconds=60)
    assert len(everything.results) == len(here.results) + len(there.results)
    named = search(EVERYTHING, question, limit=500, seconds=60, project=other.code)
    assert {one.external_id for one in named.results} == {"there"}
    assert search(Access(), question).results == [] == search(Access(roles={run.project_id: role}), question,
                                                              make.run([], project=other)).results


def test_all_runs_are_searched_the_newest_first(texts: tuple[models.Run, Maker], monkeypatch: Any) -> None:
    run, make = texts
    monkeypatch.setattr(search_queries, "RUNS_AT_ONCE", 2)
    older = [make.run([make.conversation(f"older {n}", 1)]) for n in range(4)]
    for n, one in enumerate(older):  # two of them in one moment
        models.Run.objects.filter(pk=one.pk).update(created_at=run.created_at - timedelta(days=1 + n // 2))
    bare = create_run(models.Run.Kind.IMPORT, "bare")
    save_trajectories(bare, [branching("bare", 1)])
    question, found, cursor, notes = SearchQuestion.read("text", "84"), list[SearchHit](), "", list[str]()
    assert not whole(older[0], "text", "84")
    question = SearchQuestion.read("text", "12 * 7")
    while True:
        part = search(EVERYTHING, question, None, cursor, 3, 60)
        found, cursor, notes = found + part.results, part.next, notes + part.notes
        if not cursor:
            break
    names = list(dict.fromkeys(one.external_id for one in found))
    assert names == ["héllo", "broken", "older 1", "older 0", "older 3", "older 2"] and len(found) > 6
    assert notes == ["“bare” has no tokenizer that can be read; only ids are found in it."]
    with pytest.raises(ValueError, match="cursor"):
        search(EVERYTHING, question, None, "AAAA")


def command(*arguments: str) -> dict[str, Any]:
    out = StringIO()
    call_command("search", *arguments, "--json", stdout=out, stderr=StringIO())
    return json.loads(out.getvalue())


def test_the_command_prints_what_is_found(texts: tuple[models.Run, Maker]) -> None:
    run, _ = texts
    answer = command(run.code, "--text", "naïve")
    assert answer["complete"] is True and len(answer["results"]) == 1
    found = answer["results"][0]
    assert found["trajectory"] == run.trajectories.get(index=0).code and "naïve" in found["text"]
    ids_found = row_window(run.trajectories.get(index=0), found["row"], found["start"], found["stop"]).ids
    pattern = " ".join(["*" if n == 1 else str(id_) for n, id_ in enumerate(ids_found)])
    assert [one["start"] for one in command("all", "--ids", pattern)["results"]] == [found["start"]]
    assert command(run.code, "--regex", "na.ve")["results"] == answer["results"]
    assert command(run.code, "--finding", "unclassified")["results"][0]["kind"] == "unclassified"
    cut = command("all", "--text", "the", "--limit", "2")
    assert len(cut["results"]) == 2 and cut["complete"] is False
    out = StringIO()
    call_command("search", run.code, "--text", "🙂", stdout=out)
    assert "1 result." in out.getvalue() and "[🙂]I compute" in out.getvalue()
    for arguments, sentence in (
        (["nosuchrun", "--text", "a"], "There is no run"),
        ([run.code, "--regex", "(a"], "at character 3"),
        ([run.code, "--ids", "`qqqq`"], "no single token"),
        ([run.code, "--text", "a", "--seconds", "nan"], "--seconds takes a number above 0"),
        ([run.code, "--text", "a", "--limit", "0"], "--limit takes a number from 1"),
    ):
        with pytest.raises(CommandError, match=sentence):
            call_command("search", *arguments)


def test_a_live_trajectory_is_found_in_the_rows_that_its_page_shows(texts: tuple[models.Run, Maker]) -> None:
    run, _ = texts
    stored = whole(run, "text", "84")
    models.StoredRow.objects.all().delete()
    assert spans(whole(run, "text", "84")) == spans(stored)


def test_what_was_sampled_and_not_trained_is_found_in_its_step(texts: tuple[models.Run, Maker]) -> None:
    run, make = texts
    value = make.conversation("merged", 1)
    stream = np.concatenate([value.steps[0].prompt_ids, value.steps[0].completion_ids])
    changed = stream.copy()
    changed[-2] += 1
    row = Row(changed, np.ones(len(stream), np.bool_), step_indices=(0,))
    save_trajectories(run, [replace(value, rows=(row,))])
    pattern = " ".join(map(str, stream[-3:].tolist()))
    merged = [one for one in whole(run, "ids", pattern) if one.external_id == "merged"]
    assert [(one.row, one.step, one.start) for one in merged] == [(None, 0, len(stream) - 3)]
    prompt = [one for one in whole(run, "text", "12 * 7?") if one.external_id == "merged"]
    assert [(one.row, one.step) for one in prompt] == [(0, None)]


def test_a_finding_without_a_row_is_told_with_its_step(texts: tuple[models.Run, Maker]) -> None:
    run, make = texts
    value = make.conversation("noted")
    note = Finding(Axis.STREAM, "branch", Severity.INFO, step=2, start=3, stop=5, evidence="x")
    save_trajectories(run, [value], [[note]])
    (found,) = whole(run, "finding", "branch")
    assert (found.row, found.step, found.start) == (0, 2, 3)
