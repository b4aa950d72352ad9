"""What is stored comes back; windows agree with the rows that follow from the steps; queries do not grow."""

from dataclasses import replace

import numpy as np
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from rollout_inspector.diagnose.finding import Axis, Cost, Finding, Severity
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Origin, Trajectory
from rollouts.store import models
from rollouts.store.runs.runs import create_run, delete_run
from rollouts.store.token_arrays import STORES
from rollouts.store.trajectories import trajectory_parts
from rollouts.store.trajectories.findings import replace_findings
from rollouts.store.trajectories.rows import Span, row_spans, row_window
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.token_encoding import encode_trajectories
from rollouts.store.trajectories.trajectories import load_step_prompt, load_trajectory
from tests.storage.build import DELTA, assert_same, chain, ids, rows_only

pytestmark = pytest.mark.django_db


@pytest.fixture(params=["database", "segments"])
def save(request: pytest.FixtureRequest, run: models.Run, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Stores trajectories of ``run`` in either store, as an import does."""
    monkeypatch.setattr(type(STORES["segments"]), "min_tokens", 1)
    run.token_store = request.param

    def go(*values: Trajectory) -> list[models.StoredTrajectory]:
        encoded = encode_trajectories(values, put_for=run)
        return save_trajectories(run, values, encoded=encoded)

    return go


def queries(call):  # type: ignore[no-untyped-def]
    with CaptureQueriesContext(connection) as context:
        result = call()
    return result, [query["sql"] for query in context.captured_queries]


def branched() -> Trajectory:
    """A break, a fork, a retry and a step without any id."""
    plain = chain("b", turns=4, broken_at=2)
    first, second, third, fourth = plain.steps
    fork = replace(second, prompt_ids=np.concatenate([second.prompt_ids[:10], ids(9, 9)]), delta_origin=None)
    empty = replace(first, prompt_ids=ids(), completion_ids=ids(), logprobs=None, request=None, reply=None, text=None)
    short = replace(fourth, logprobs=np.zeros(2, dtype=np.float32))
    return replace(plain, steps=(first, second, fork, third, second, empty, short))


@pytest.mark.parametrize("value", [chain(), branched(), rows_only(), replace(rows_only(), steps=chain().steps)])
def test_a_trajectory_comes_back_as_it_was(save, value: Trajectory) -> None:  # type: ignore[no-untyped-def]
    (stored,) = save(value)
    assert_same(load_trajectory(models.StoredTrajectory.objects.get(pk=stored.pk)), value)


def test_a_written_delta_origin_comes_back(save) -> None:  # type: ignore[no-untyped-def]
    plain = chain(turns=2)
    value = replace(plain, steps=(plain.steps[0], replace(plain.steps[1], delta_origin=DELTA)))
    (stored,) = save(value)
    assert_same(load_trajectory(stored), value)
    window = row_window(stored, 0, 0, 10**9)
    assert window.origin[12:16].tolist() == DELTA.tolist()


def test_only_new_tokens_are_stored_and_a_break_is_a_column_comparison(run: models.Run) -> None:
    whole, broken = save_trajectories(run, [chain("a", 5), chain("b", 5, broken_at=3)])
    value = load_trajectory(whole)
    assert whole.n_tokens == len(value.steps[-1].stream)
    from django.db.models import F

    breaks = models.StoredStep.objects.filter(shared_length__lt=F("parent_length"))
    assert list(breaks.values_list("trajectory_id", "index")) == [(broken.pk, 3)]
    assert (whole.n_rows, broken.n_rows) == (1, 2)


@pytest.mark.parametrize("value", [chain(turns=5), branched()])
def test_windows_agree_with_the_rows_that_follow(save, value: Trajectory) -> None:  # type: ignore[no-untyped-def]
    (stored,) = save(value)
    rows = merged_rows(value.steps)
    assert stored.n_rows == len(rows)
    for index, row in enumerate(rows):
        whole = row_window(stored, index, 0, 10**9)
        assert np.array_equal(whole.ids, row.ids)
        assert np.array_equal(whole.loss_mask, row.loss_mask)
        sampled = row.origin == Origin.SAMPLED
        assert np.array_equal(whole.origin == Origin.SAMPLED, sampled)
        assert np.array_equal(whole.origin == Origin.PROMPT, row.origin == Origin.PROMPT)
        if row.logprobs is not None and len(value.steps) == 5:
            assert np.array_equal(whole.logprobs, row.logprobs, equal_nan=True)
        for start, stop in [(0, 1), (3, 9), (11, 14), (len(row.ids) - 2, len(row.ids) + 5)]:
            part = row_window(stored, index, start, stop)
            for name in ("ids", "origin", "loss_mask", "step_index"):
                assert np.array_equal(getattr(part, name), getattr(whole, name)[start:stop]), (name, start, stop)
        summaries, steps = trajectory_parts.rows_and_steps(stored)
        handle = summaries[index].handle
        known, sql = queries(lambda handle=handle, steps=steps: row_window(stored, handle, 3, 9, steps))
        assert np.array_equal(known.ids, whole.ids[3:9]) and np.array_equal(known.origin, whole.origin[3:9])
        assert len(sql) <= 1
        spans = row_spans(handle, steps)
        if not len(row.ids):
            assert spans == []
            continue
        assert [spans[0].start, *[span.stop for span in spans]] == [0, *[s.start for s in spans[1:]], len(row.ids)]
        for span in spans:
            assert set(whole.step_index[span.start : span.stop].tolist()) == {span.step_index}
            assert whole.loss_mask[span.start : span.stop].all() == (span.part == "completion")


def test_step_prompts_follow_their_parents(save) -> None:  # type: ignore[no-untyped-def]
    value = branched()
    (stored,) = save(value)
    for step in stored.steps.all():
        prompt, sql = queries(lambda step=step: load_step_prompt(step))
        assert np.array_equal(prompt, value.steps[step.index].prompt_ids)
        assert len(sql) <= 2


def test_a_row_of_its_own_is_drawn_even_when_its_arrays_disagree(save) -> None:  # type: ignore[no-untyped-def]
    (stored,) = save(rows_only())
    window = row_window(stored, 1, 0, 10)
    assert window.ids.tolist() == [5, 6, 7] and window.loss_mask.tolist() == [True, True, False]
    rows, steps = trajectory_parts.rows_and_steps(stored)
    assert row_spans(rows[1].handle, steps) == [Span(0, 3, None, "row")]


def test_queries_of_a_page_do_not_grow_with_turns_or_tokens(save) -> None:  # type: ignore[no-untyped-def]
    small, large = save(chain("s", 2), chain("l", 60))
    for read in (
        lambda t: row_window(t, 0, 0, 4096),
        trajectory_parts.rows_and_steps,
        load_trajectory,
    ):
        assert len(queries(lambda read=read: read(small))[1]) == len(queries(lambda read=read: read(large))[1])


def test_a_window_reads_only_the_arrays_that_overlap(run: models.Run) -> None:
    (stored,) = save_trajectories(run, [chain(turns=30)])
    _, sql = queries(lambda: row_window(stored, 0, 0, 5))
    assert "IN (" in sql[-1] and sql[-1].split("IN (")[1].count(",") == 0
    assert not any("delta_ids" in text for text in queries(lambda: trajectory_parts.rows_and_steps(stored))[1])


def test_many_are_saved_in_few_queries(run: models.Run) -> None:
    few = queries(lambda: save_trajectories(run, [chain(f"a{n}", 3, n) for n in range(3)]))[1]
    many = queries(lambda: save_trajectories(run, [chain(f"b{n}", 3, n) for n in range(9)]))[1]
    assert len(few) == len(many) <= 20


def finding(kind: str, severity: Severity, step: int = 1) -> Finding:
    return Finding(
        Axis.STREAM, kind, severity, step=step, start=3, stop=5, expected_ids=ids(1), actual_ids=ids(2, 3),
        expected_text="a\0b", actual_text="\ufffd", evidence="Because.", cost=Cost(1, 2, 3, 4),
    )


def test_findings_are_counted_where_pages_look(run: models.Run) -> None:
    first, second = save_trajectories(
        run, [chain("a"), chain("b")],
        findings=[[finding("branch", Severity.INFO), finding("unclassified", Severity.ERROR)], []],
    )
    run.refresh_from_db()
    assert run.finding_counts == {"branch": 1, "unclassified": 1}
    assert (first.n_findings, first.worst_severity, second.worst_severity) == (2, "error", "")
    replace_findings(run, [(first, [finding("branch", Severity.INFO)]), (second, [])])
    run.refresh_from_db()
    assert run.finding_counts == {"branch": 1}
    stored = models.StoredFinding.objects.get()
    assert (stored.expected_text, stored.actual_ids.tolist(), stored.rows) == ("a␀b", [2, 3], 3)


def test_deleting_a_run_leaves_nothing_that_only_it_used(run: models.Run) -> None:
    other = create_run(models.Run.Kind.IMPORT, "other")
    save_trajectories(run, [branched(), rows_only()], findings=[[finding("branch", Severity.INFO)], []])
    save_trajectories(other, [chain("x")])
    delete_run(run)
    kept = load_trajectory(other.trajectories.get())
    assert_same(kept, chain("x"))
    for model in (models.StoredStep, models.StepTokens):
        assert model.objects.count() == 3
    assert not models.RowTokens.objects.exists() and not models.StoredFinding.objects.exists()
    used = {"messages_new", "tools", "template_kwargs", "reply", "text", "extra"}
    keys = {key for step in models.StoredStep.objects.values_list(*(f"{n}_id" for n in used)) for key in step}
    assert models.Content.objects.count() == len(keys) + 1  # and the trajectory's extra


def test_totals_of_a_run_are_the_sums(run: models.Run) -> None:
    save_trajectories(run, [chain("a"), branched()])
    save_trajectories(run, [chain("c")])
    fresh = models.Run.objects.get(pk=run.pk)
    assert (fresh.n_trajectories, fresh.n_finished) == (3, 3)
    assert [t.index for t in run.trajectories.order_by("index")] == [0, 1, 2]
    for name in ("n_steps", "n_rows", "n_tokens", "n_sampled"):
        assert getattr(fresh, name) == getattr(run, name) == sum(run.trajectories.values_list(name, flat=True)), name
