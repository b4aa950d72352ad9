"""Scoring a run again: the stored rows go to an engine, and its log-probabilities become a column of the run."""

import json
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.utils import timezone

from rollout_inspector.diagnose.gap.figures import GapFigures, added, gap_of_rows, pairs_of
from rollout_inspector.diagnose.gap.tokens import GapCollector
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.align import align_same_bytes
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array
from rollout_inspector.text.tokenizers import load
from rollouts.jobs import rescore
from rollouts.jobs.broker import queue_of
from rollouts.jobs.gap_reports import gap_key, read_gap
from rollouts.sampling.engines import ENGINES, GenerationRequest, model_digest
from rollouts.sampling.engines.engine_owner import EngineClosed, EngineLost
from rollouts.sampling.engines.model_digest import weights_digest
from rollouts.sampling.engines.scripted import ScriptedEngine
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.jobs.job_queue import next_engine_job, take_engine_job, take_next_job
from rollouts.store.jobs.jobs import ask_job, cancel_job
from rollouts.store.models import Job, RowScores, Run, ScoredColumn
from rollouts.store.runs import runs
from rollouts.store.runs.logprob_columns import SAMPLER, columns_of, delete_column, load_compared
from rollouts.store.runs.runs import create_run, delete_run, end_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.worker import jobs
from tests.samples.shard_work import change_kind

pytestmark = pytest.mark.django_db
LONG = 40


class _Direct:
    """An owner of an engine that answers in the thread that asks."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.calls = engine, 0

    def call(self, work: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        try:
            future.set_result(work(self.engine))
        except Exception as error:
            future.set_exception(error)
        return future

    def submit(self, request: GenerationRequest) -> Future[Any]:
        def completion(engine: Any) -> Any:
            engine.add(request)
            while not (done := engine.step()):
                pass
            return done[0]

        return self.call(completion)

    def abort(self, request_ids: Any) -> None:
        """Nothing is under way."""


@pytest.fixture
def owner(tiny_tokenizer: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> _Direct:
    """The engine of the models `words` and `others`, which the installation serves: the scripted one."""
    monkeypatch.setitem(ENGINES, "scripted", replace(ENGINES["scripted"], is_offered=True))
    served = {"engine": "scripted", "path": str(tiny_tokenizer)}
    settings.INSPECTOR_MODELS = {"words": served, "others": served}
    found = _Direct(ScriptedEngine(vocab_size=500, max_model_len=LONG))
    do: Any = partial(rescore.do_job, engine_of=lambda model, engine: found)
    change_kind(monkeypatch, "rescore", handler=do)
    return found


def sampled(name: str, start: int, n: int = 4) -> Trajectory:
    """Two steps, the second extends the first; the log-probabilities are those of the scripted engine."""

    def logprobs(ids: range) -> np.ndarray:
        return (-1.0 / (1.0 + np.array(ids))).astype(np.float32)

    a, b, c = range(start, start + 3), range(start + 3, start + 3 + n), range(start + 4 + n, start + 4 + 2 * n)
    first = Step(ids_array(a), ids_array(b), logprobs(b))
    second = Step(ids_array([*a, *b, start]), ids_array(c), logprobs(c))
    return Trajectory(name, (first, second))


def trained(name: str, n: int = 6) -> Trajectory:
    """A training row without the sampler's log-probabilities, and with the trainer's."""
    column = np.linspace(-2, -1, n, dtype=np.float32)
    mask = np.arange(n) >= 2
    return Trajectory(name, rows=(Row(ids_array(range(n)), mask, None, columns={"trainer_logprobs": column}),))


def run_of(*values: Trajectory) -> Run:
    run = create_run("import", "r")
    save_trajectories(run, list(values), [[] for _ in values])
    end_run(run, Run.Status.DONE)
    run.refresh_from_db()
    return run


def scored(run: Run, model: str = "words") -> Job:
    job, _ = rescore.ask(run, model)
    jobs.do_job(job.pk)
    job.refresh_from_db()
    return job


def gap(run: Run, sampler: str, trainer: str) -> GapFigures:
    found = [
        gap_of_rows(value.rows) for value in load_compared(list(run.trajectories.order_by("index")), sampler, trainer)
    ]
    return added(one for one in found if one is not None)


def test_a_scored_column_is_compared_like_sampler_and_trainer(owner: _Direct) -> None:
    run = run_of(sampled("a", 3), sampled("b", 20, 2), trained("rows"))
    assert [one.name for one in columns_of(run)] == [SAMPLER, "trainer_logprobs"]
    job = scored(run)
    assert (job.status, job.n_done, job.n_total, job.error) == ("done", 3, 3, "")
    assert job.notes[0] == "3 trajectories are scored." and "vocabulary was not compared" in job.notes[1]
    *_, column = columns_of(run)
    held = ScoredColumn.objects.get()
    assert (column.name, column.title) == (f"scored:{held.code}", "words on scripted 1")
    assert (column.model, column.engine, column.made_at) == ("words", "scripted 1", held.finished_at)
    assert (held.n_trajectories, held.n_tokens) == (3, (12 - 1) + (8 - 1) + (6 - 1))
    # The engine is the sampler of the first two, so nothing differs there; the third has no sampler's column.
    own = gap(run, SAMPLER, column.name)
    assert own.tokens == 12 and own.largest == 0 and held.gap == own.to_json()
    # A file that brings the trainer's side alone is compared with the engine as its sampler.
    (value,) = load_compared([run.trajectories.get(external_id="rows")], column.name, "trainer_logprobs")
    pairs = pairs_of(value.rows[0])
    assert pairs is not None and pairs[0].tolist() == [2, 3, 4, 5]
    assert pairs[1].tolist() == pytest.approx([-1 / 3, -1 / 4, -1 / 5, -1 / 6])
    assert pairs[2].tolist() == pytest.approx([-1.6, -1.4, -1.2, -1.0])
    assert np.isnan(value.rows[0].logprobs[0])  # type: ignore[index]


def test_two_engines_are_held_against_each_other(owner: _Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(sampled("a", 3))
    scored(run)
    monkeypatch.setattr(ScriptedEngine, "score", lambda self, streams: [np.full(len(ids), -2.0) for ids in streams])
    scored(run, "others")
    _, first, second = columns_of(run)
    figures = gap(run, first.name, second.name)
    held = run.trajectories.get()
    (value,) = load_compared([held])
    ids = value.rows[0].ids[value.rows[0].loss_mask]
    assert figures.tokens == len(ids) == 8 and figures.total == pytest.approx(float((-2 + 1 / (1 + ids)).sum()))
    assert gap(run, second.name, first.name).total == pytest.approx(-figures.total)
    assert gap(run, SAMPLER, "scored:unknown").tokens == 0


def lower_by(values: Any, nats: float) -> Any:
    return values - np.float32(nats)


def test_a_replay_makes_the_gap_a_sum_of_parts(owner: _Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine, decode path, weights and trainer each differ by a known amount, and each lands in its own part."""
    values = [sampled("a", 3), sampled("b", 20, 2)]
    rows = [merged_rows(value.steps)[0] for value in values]
    run = run_of(*[
        Trajectory(value.external_id, rows=(
            Row(row.ids, row.loss_mask, row.logprobs, columns={"trainer_logprobs": lower_by(row.logprobs, 1.0)}),
        ))
        for value, row in zip(values, rows, strict=True)
    ])
    asked = ScriptedEngine.score
    lower = {"words": 0.25, "others": 0.375}

    def scored_by(model: str) -> Job:
        monkeypatch.setattr(
            ScriptedEngine, "score", lambda *given: [lower_by(values, lower[model]) for values in asked(*given)]
        )
        job, _ = rescore.ask(run, model, replay=True)
        jobs.do_job(job.pk)
        job.refresh_from_db()
        assert (job.status, job.n_done, job.error) == ("done", 2, "")
        return job

    job = scored_by("words")
    first, second = (ScoredColumn.objects.get(code=code) for code in job.report["columns"])
    assert (first.is_decoded, second.is_decoded) == (False, True)
    assert columns_of(run)[-1].title == "words on scripted decode 1"
    assert gap(run, SAMPLER, f"scored:{second.code}").largest == 0, "the engine is the sampler's: 0 differences"
    report = read_gap(run, sampler=SAMPLER, trainer="trainer_logprobs")
    lines = {line["name"]: (line["mean"], line["mean_abs"]) for line in report["parts"]["parts of the gap, all tokens"]}
    assert lines == {
        "rest": (0.0, 0.0), "decode against prefill": pytest.approx((-0.25, 0.25)),
        "trainer": pytest.approx((-0.75, 0.75)),
    }
    monkeypatch.setattr(rescore, "weights_digest", lambda path: "of another checkpoint")
    scored_by("others")
    report = read_gap(run, sampler=SAMPLER, trainer="trainer_logprobs")
    lines = {line["name"]: line["mean"] for line in report["parts"]["parts of the gap, all tokens"]}
    assert lines == {
        "rest": 0.0, "decode against prefill": pytest.approx(-0.25), "weights (version)": pytest.approx(-0.125),
        "trainer": pytest.approx(-0.625),
    }
    assert sum(lines.values()) == pytest.approx(-report["k1"], abs=1e-6)
    assert gap_key(run) == report["key"]


def test_a_replay_reads_trained_tokens_alone_and_is_made_once(owner: _Direct) -> None:
    run = run_of(sampled("a", 3), trained("rows"), Trajectory("none", rows=(
        Row(ids_array([5, 6, 7]), np.array([True, False, False]), None),
    )))
    job, _ = rescore.ask(run, "words", replay=True)
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "done", job.error
    decoded = ScoredColumn.objects.get(engine="scripted decode")
    values = {one.trajectory.external_id: one.values for one in decoded.scores.all()}
    assert np.isfinite(values["rows"]).tolist() == [False, False, True, True, True, True]
    assert np.isnan(values["none"]).all()
    calls = owner.calls
    again, _ = rescore.ask(run, "words", replay=True)
    jobs.do_job(again.pk)
    assert owner.calls == calls + 1 and ScoredColumn.objects.count() == 2
    delete_column(decoded)
    assert "parts of the gap, all tokens" not in read_gap(run)["parts"]


def test_an_engine_that_cannot_decode_a_given_completion_is_refused(owner: _Direct, monkeypatch: Any) -> None:
    run = run_of(sampled("a", 3))
    monkeypatch.setitem(ENGINES, "scripted", replace(ENGINES["scripted"], replays=False))
    with pytest.raises(Refusal, match="scripted cannot decode a completion that is given; choose one of transformers"):
        rescore.ask(run, "words", replay=True)


def test_the_mass_of_kept_sets_is_read_from_their_ids(owner: _Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that sums the probabilities of given ids tells what top-p and top-k left, and the gap has that part."""
    monkeypatch.setitem(ENGINES, "scripted", replace(ENGINES["scripted"], sums_kept_sets=True))
    asked, given = ScriptedEngine.score, []

    def score(self: ScriptedEngine, streams: Any, kept: Any = None) -> Any:
        given.append(kept)
        scores = asked(self, streams)
        if kept is not None:  # each id has a tenth of the probability
            with np.errstate(divide="ignore"):
                scores = [np.where(sizes > 0, np.log(sizes / 10), np.nan).astype(np.float32) for sizes, _ in kept]
        return scores

    monkeypatch.setattr(ScriptedEngine, "score", score)
    first, second = sampled("a", 3).steps
    sizes = np.array([2, np.nan, 1, 3], np.float32)
    told = replace(first, kept_set=sizes, kept_ids=ids_array([6, 7, 8, 9, 10, 11]))
    (row,) = merged_rows((first, second))
    column = {"trainer_logprobs": lower_by(row.logprobs, 1.0)}
    row = replace(row, columns=column, step_indices=(0, 1))
    run = run_of(Trajectory("a", (told, second), (row,)), Trajectory("b", rows=(replace(row, step_indices=()),)))
    job = scored(run)
    assert job.status == "done", job.error
    masses = ScoredColumn.objects.get(engine="scripted kept sets")
    assert (masses.gap, masses.n_tokens, masses.is_of_kept_sets) == (None, 3, True)
    assert [one.name for one in columns_of(run)][2:] == [f"scored:{job.report['columns'][0]}"], "no log-probabilities"
    (of_a, of_b), = [kept for kept in given if kept is not None]
    assert of_a[0].tolist() == [0, 0, 0, 2, 0, 1, 3, *[0] * 5] and of_a[1].tolist() == [6, 7, 8, 9, 10, 11]
    assert not of_b[0].any() and not len(of_b[1])
    collector = GapCollector(kept=f"scored:{masses.code}")
    for value in load_compared(list(run.trajectories.order_by("index")), more=[f"scored:{masses.code}"]):
        collector.add(value, enumerate(value.rows))
    tokens = collector.done()
    assert tokens.kept_mass is not None
    expected = [*np.log([0.2, 1, 0.1, 0.3]), *[0] * 12]
    assert tokens.kept_mass.tolist() == pytest.approx(expected, abs=1e-6)
    replay, _ = rescore.ask(run, "words", replay=True)
    jobs.do_job(replay.pk)
    key = gap_key(run)
    report = read_gap(run, sampler=SAMPLER, trainer="trainer_logprobs")
    lines = {line["name"]: line["mean"] for line in report["parts"]["parts of the gap, all tokens"]}
    assert lines["kept set"] == pytest.approx(float(np.mean(expected)), abs=1e-6)
    delete_column(masses)
    report = read_gap(run, sampler=SAMPLER, trainer="trainer_logprobs")
    assert gap_key(run) != key and "rest" in str(report["parts"]) and "kept set" not in str(report["parts"])


def test_the_noise_of_an_engine_raises_the_limits(owner: _Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(sampled("a", 3), sampled("b", 20, 2), trained("rows"))
    assert read_gap(run)["noise"] is None and read_gap(run)["limits"] == {"mean": 0.02, "tail": 0.15}
    asked = ScriptedEngine.score
    monkeypatch.setattr(
        ScriptedEngine, "score", lambda *given: [values - 0.125 * (len(given[1]) > 1) for values in asked(*given)]
    )
    job, _ = rescore.ask(run, "words", calibrate=True)
    jobs.do_job(job.pk)
    report = read_gap(run)
    assert report["noise"]["by"] == "scripted" and report["noise"]["tokens"] == 11 + 7 + 5
    assert report["noise"]["mean_abs"] == pytest.approx(0.125, abs=1e-6)
    assert report["limits"] == {"mean": pytest.approx(0.5, abs=1e-5), "tail": pytest.approx(0.5, rel=0.1)}


def test_another_temperature_is_another_column(owner: _Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(sampled("a", 3))
    with pytest.raises(Refusal, match=r"scripted scores at temperature 1 alone. For 0.5 choose the engine"):
        rescore.ask(run, "words", temperature=0.5)
    for wrong in (0.0, -1.0, 11.0, float("nan"), float("inf")):
        with pytest.raises(Refusal, match=r"at temperatures from 0.01 to 10, not at"):
            rescore.ask(run, "words", temperature=wrong)
    monkeypatch.setitem(ENGINES, "scripted", replace(ENGINES["scripted"], scores_at_temperature=True))
    asked = ScriptedEngine.score

    def score(self: ScriptedEngine, streams: Any, temperature: float = 1.0) -> Any:
        return [values / temperature for values in asked(self, streams)]

    monkeypatch.setattr(ScriptedEngine, "score", score)
    scored(run)
    job, _ = rescore.ask(run, "words", temperature=0.5)
    jobs.do_job(job.pk)
    _, one, half = columns_of(run)
    assert (one.temperature, half.temperature, half.title) == (1.0, 0.5, "words on scripted 1 at temperature 0.5")
    figures = gap(run, SAMPLER, half.name)
    assert figures.total < 0 and figures.total == pytest.approx(gap(run, one.name, half.name).total)


def test_scoring_twice_stores_the_same_and_new_trajectories_are_added(owner: _Direct) -> None:
    run = run_of(sampled("a", 3), sampled("b", 9))
    first = scored(run)
    before, calls = list(RowScores.objects.values_list("pk", "values")), owner.calls
    again = scored(run)
    assert again.pk != first.pk and again.report == first.report and again.n_done == 2
    assert str(list(RowScores.objects.values_list("pk", "values"))) == str(before)
    assert owner.calls == calls + 1, "only the engine's name and limits are asked for"
    save_trajectories(run, [sampled("c", 5)], [[]])
    assert scored(run).n_done == 3
    column = ScoredColumn.objects.get()
    assert (column.n_trajectories, GapFigures.from_json(column.gap).tokens) == (3, 24)  # type: ignore[arg-type]


def test_a_worker_that_is_shut_down_is_followed_by_another(owner: _Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescore, "BATCH", 1)
    run = run_of(*[sampled(str(n), n) for n in range(4)])
    job, _ = rescore.ask(run, "words")
    with monkeypatch.context() as patch:
        patch.setattr(owner, "call", _closing(owner.call, after=3))  # its limits, and two trajectories
        jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, job.error) == ("running", "The worker was shut down while the engine worked.")
    before = set(RowScores.objects.values_list("pk", flat=True))
    assert len(before) == 2 and [one.name for one in columns_of(run)] == [SAMPLER], "no half column is offered"
    Job.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=10))
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, job.attempt, job.n_done) == ("done", 2, 4)
    assert (
        before < set(RowScores.objects.values_list("pk", flat=True)) and ScoredColumn.objects.get().n_trajectories == 4
    )
    assert gap(run, SAMPLER, columns_of(run)[-1].name).largest == 0


def test_an_engine_that_is_lost_leaves_nothing_of_a_new_column(owner: _Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescore, "BATCH", 1)
    run = run_of(*[sampled(str(n), n) for n in range(3)])
    with monkeypatch.context() as patch:
        lost = EngineLost("The engine died: out of memory.")
        patch.setattr(owner, "call", _closing(owner.call, after=2, error=lost))
        job = scored(run)
    assert (job.status, job.error) == ("failed", "The engine died: out of memory.")
    assert not ScoredColumn.objects.exists() and not RowScores.objects.exists()
    assert scored(run).n_done == 3
    save_trajectories(run, [sampled("new", 5)], [[]])
    with monkeypatch.context() as patch:
        patch.setattr(owner, "call", _closing(owner.call, after=1, error=lost))
        assert scored(run).status == "failed"
    assert ScoredColumn.objects.get().scores.count() == 3, "what was whole before stays"


def test_a_cancelled_job_goes_on_when_it_is_asked_again(owner: _Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescore, "BATCH", 1)
    run = run_of(*[sampled(str(n), n) for n in range(3)])
    job, _ = rescore.ask(run, "words")

    def cancel(*stored: Any) -> None:
        keep(*stored)
        cancel_job(job)

    keep = rescore.keep_scores
    with monkeypatch.context() as patch:
        patch.setattr(rescore, "keep_scores", cancel)
        jobs.do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "cancelled" and RowScores.objects.count() == 1 and len(columns_of(run)) == 1
    assert scored(run).n_done == 3 and RowScores.objects.count() == 3 and ScoredColumn.objects.count() == 1


BAD_IDS = ids_array([1, 2, 600])


def test_what_cannot_be_scored_is_a_sentence_and_leaves_nothing(
    owner: _Direct, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run_of(sampled("a", 3), Trajectory("b", (Step(BAD_IDS, ids_array([7])),)))
    job = scored(other)
    assert (
        job.status == "failed"
        and "holds the id 600, and the model's ids run from 0 to 499: it has another" in job.error
    )
    long = run_of(Trajectory("long", (Step(ids_array(range(LONG)), ids_array([7])),)))
    job = scored(long)
    assert job.status == "failed" and f"It has {LONG + 1} tokens, and this engine scores at most {LONG}." in job.error
    assert not RowScores.objects.exists() and not ScoredColumn.objects.exists()
    for ask, sentence in (
        (("nobody", ""), "serves no model named 'nobody'; it serves others, words"),
        (("words", "abacus"), "no engine named 'abacus'"),
        (("words", "vllm_server"), "asks a server, and the options of the model 'words' name none"),
    ):
        with pytest.raises(Refusal, match=sentence):
            rescore.ask(other, *ask)
    monkeypatch.setitem(ENGINES, "scripted", replace(ENGINES["scripted"], scores=False))
    with pytest.raises(Refusal, match="scripted cannot score ids that it did not sample; choose one of"):
        rescore.ask(other, "words")
    with pytest.raises(Refusal, match="no finished trajectory"):
        rescore.ask(create_run("import", "empty"), "words", "transformers")


def test_a_trajectory_that_is_too_long_is_left_out_and_named(owner: _Direct) -> None:
    run = run_of(sampled("a", 3), Trajectory("long", (Step(ids_array(range(LONG)), ids_array([7])),)))
    job = scored(run)
    long = run.trajectories.get(external_id="long")
    assert (job.status, job.notes[0]) == ("done", "1 trajectory is scored.")
    assert job.notes[-1].startswith(f"Trajectory {long.code} was left out. It has {LONG + 1} tokens")
    assert [one.trajectory.external_id for one in RowScores.objects.all()] == ["a"]


def test_another_vocabulary_is_seen_by_the_tokens(owner: _Direct, tiny_tokenizer: Path, tmp_path: Path) -> None:
    """Two tokens have changed places: only a run that holds one of them is refused."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_tokenizer / name).read_bytes())
    body = json.loads((tmp_path / "tokenizer.json").read_text())
    names = {token: key for key, token in body["model"]["vocab"].items()}
    body["model"]["vocab"] |= {names[40]: 41, names[41]: 40}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    tokenizer = register_tokenizer(tmp_path, name="swapped")
    fine, other = run_of(sampled("a", 3)), run_of(sampled("a", 3), sampled("b", 38))
    Run.objects.update(tokenizer=tokenizer)
    assert scored(fine).status == "done"
    job = scored(other)
    assert job.status == "failed" and "in the run's tokenizer and" in job.error and "holds the id 40" in job.error
    assert not other.scored_columns.exists() and len(columns_of(fine)) == 2


def test_a_model_of_another_vocabulary_reads_the_same_bytes(
    owner: _Direct, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """The run's tokenizer has lost its merges, so that several of its tokens are one of the model's, or one is one."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_tokenizer / name).read_bytes())
    body = json.loads((tmp_path / "tokenizer.json").read_text())
    body["model"]["merges"] = body["model"]["merges"][:20]
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    mine, theirs = load(tmp_path), load(tiny_tokenizer)
    owner.engine = ScriptedEngine(vocab_size=theirs.vocab_size, max_model_len=LONG)
    text = "What is 12 plus 30?"
    ids, read = mine.encode(text), theirs.encode(text)
    assert len(ids) > len(read)
    row = Row(ids, np.arange(len(ids)) >= 1, np.full(len(ids), -0.5, np.float32))
    broken = replace(row, ids=mine.encode("\u6771")[:1], loss_mask=row.loss_mask[:1], logprobs=None)
    assert b"".join(mine.token_bytes(broken.ids)) not in ("\u6771".encode(), b"")
    run = run_of(Trajectory("a", rows=(row,)), Trajectory("half a character", rows=(broken,)))
    run.tokenizer = register_tokenizer(tmp_path, name="fewer merges")
    run.save()
    job, _ = rescore.ask(run, "words", by_bytes=True)
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "done", job.error
    column = columns_of(run)[-1]
    assert column.engine == "scripted by bytes 1"
    assert any("a character of several tokens is not whole" in note for note in job.notes)
    held, scores = RowScores.objects.get().values, -1.0 / (1.0 + read)
    groups = align_same_bytes(mine.token_bytes(ids), theirs.token_bytes(read), ids, read)
    alone = [group for group in groups if group.left_stop - group.left_start == 1 or group.equal]
    shared = sum(group.left_stop - group.left_start for group in groups if group not in alone)
    assert alone and shared and int(np.isnan(held).sum()) == shared
    n = 0
    for group in alone:
        for k in range(group.left_start, group.left_stop):
            if k and group.equal:
                assert held[k] == pytest.approx(scores[group.right_start + k - group.left_start])
                n += 1
    assert f"{shared:,} share theirs" in job.notes[1] and n
    with pytest.raises(Refusal, match="Ask for one of them"):
        rescore.ask(run, "words", by_bytes=True, calibrate=True)


def test_scores_go_with_their_trajectory_and_their_run(owner: _Direct) -> None:
    run, kept = run_of(sampled("a", 3), sampled("b", 5)), run_of(sampled("a", 3))
    scored(run), scored(kept)
    runs.delete_trajectories([run.trajectories.get(external_id="a").pk])
    assert [one.trajectory.external_id for one in run.scored_columns.get().scores.all()] == ["b"]
    delete_run(run)
    assert ScoredColumn.objects.get().run == kept and RowScores.objects.get().trajectory.run == kept


def test_scores_of_other_ids_are_not_shown(owner: _Direct) -> None:
    run = run_of(sampled("a", 3))
    scored(run)
    RowScores.objects.update(rows=[12, 1])
    name = columns_of(run)[-1].name
    assert gap(run, SAMPLER, name).tokens == 0


def test_a_worker_of_the_default_queue_leaves_it_to_a_worker_of_the_model(owner: _Direct, sent: list[Any]) -> None:
    run = run_of(sampled("a", 3))
    job, _ = rescore.ask(run, "words")
    assert queue_of(job) == "engine.words"
    assert take_next_job(4) is None
    other, _ = ask_job(run, "diagnose")
    assert take_next_job(4, job.pk) == other and queue_of(other) is None


def test_a_user_has_one_run_scored_at_a_time_by_a_model(owner: _Direct, sent: list[Any]) -> None:
    first, second, third = (run_of(sampled("a", 3)) for _ in range(3))
    (one, _), (two, _), (other, _) = (
        rescore.ask(first, "words"),
        rescore.ask(second, "words"),
        rescore.ask(third, "others"),
    )
    taken = take_engine_job(one.pk)
    assert taken == one and take_engine_job(two.pk) is None and take_engine_job(other.pk) == other
    jobs.do_job(two.pk)
    two.refresh_from_db()
    assert two.status == "queued" and next_engine_job(one) == two
    jobs.work_on(taken)
    jobs.do_job(two.pk)
    two.refresh_from_db()
    assert two.status == "done" and next_engine_job(one) is None
    waiting, _ = rescore.ask(first, "words")
    jobs.do_job(rescore.ask(second, "words")[0].pk)
    assert sent[-1] == waiting.pk, "a worker is sent for the one that waited"


def test_the_digest_of_weights_changes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_digest(tmp_path) == ""
    held = tmp_path / "model.safetensors"
    held.write_bytes(bytes(5000))
    first = weights_digest(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    assert weights_digest(tmp_path) == first and len(first) == 16
    held.write_bytes(bytes(2500) + b"x" + bytes(2499))
    assert weights_digest(tmp_path) != first
    monkeypatch.setattr(model_digest, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(model_digest, "PART_BYTES", 64)
    of_parts = weights_digest(tmp_path)
    held.write_bytes(bytes(5000))
    assert weights_digest(tmp_path) not in (first, of_parts)


SHUT_DOWN = EngineClosed("The engine was shut down before the completion was finished.")


def _closing(call: Any, after: int, error: Exception = SHUT_DOWN) -> Any:
    """The same calls, until the engine goes with an error."""
    done = 0

    def go(work: Any) -> Future[Any]:
        nonlocal done
        done += 1
        if done <= after:
            return call(work)  # type: ignore[no-any-return]
        future: Future[Any] = Future()
        future.set_exception(error)
        return future

    return go
