"""Rescoring: an engine scores the stored rows of a run, and the scores become a column of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from django.db.models import QuerySet

from rollout_inspector.diagnose.gap.figures import GapFigures
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.align import AlignedGroup, align_same_bytes
from rollout_inspector.streams.alternatives import KeptSets, kept_sets
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.trajectory import Floats, Ids, Mask, Row
from rollout_inspector.text import tokenizers
from rollout_inspector.text.tokenizers import LoadedTokenizer
from rollouts.jobs.launch import ServedModel, served_models
from rollouts.jobs.warm_engines import engine_of
from rollouts.sampling.engines import EngineError, GenerationRequest, Sampling, engine_spec, scoring_engines
from rollouts.sampling.engines.engine_owner import EngineClosed, EngineOwner
from rollouts.sampling.engines.model_digest import weights_digest
from rollouts.sampling.engines.protocol import EngineInfo
from rollouts.sampling.engines.scoring import score_streams, stream_problem, temperature_problem
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, ask_job, end_job
from rollouts.store.models import Job, Run, ScoredColumn, StoredTrajectory
from rollouts.store.models.scored_columns import DECODED, KEPT_SETS
from rollouts.store.outages import WorkerLeaves
from rollouts.store.runs.logprob_columns import (
    Scored, begin_column, count_scored, delete_column, end_column, find_scored_column, has_kept_sets, keep_scores,
    load_compared, not_scored
)
from rollouts.store.runs.runs import run_of_job
from rollouts.store.text import without_paths
from rollouts.store.trajectories.trajectories import finished_trajectories, next_trajectories

BATCH = 20  # Trajectories that are loaded and stored at once.
BATCH_TOKENS = 200_000  # New tokens of a batch.
CALL_TOKENS = 16_384
"""Tokens that the engine is asked for at once. Requests of a run wait so long, and so does the heartbeat."""
BY_BYTES = " by bytes"  # What the engine of a column ends with whose model read ids of its own for the same text.
WAIT_SECONDS = 0.5  # How often the job looks whether it is to stop while the engine scores.
MAX_NOTES = 20  # Trajectories that the notes of a job name.

EngineOf = Callable[[ServedModel, str], EngineOwner]  # (model, engine) -> the owner of the engine in this worker.
Result = TypeVar("Result")


def ask(
    run: Run, model: str, engine: str = "", user: Any = None, temperature: float = 1.0, replay: bool = False,
    calibrate: bool = False, by_bytes: bool = False,
) -> tuple[Job, bool]:
    """The job that scores a run, and whether a worker has to be sent for it. ``engine``: empty = the model's own.
    ``replay``: a second column has the completions decoded again. ``calibrate``: the noise of the engine is measured.
    ``by_bytes``: the model reads the text of the rows in ids of its own vocabulary.
    Raises :class:`Refusal`. What is scored already is not scored again, so a second job ends at once."""
    served, engine = chosen(model, engine)
    if problem := temperature_problem(engine, temperature):
        raise Refusal(problem)
    options: dict[str, Any] = {"model": served.name, "engine": engine}
    if replay and not engine_spec(engine).replays:
        able = ", ".join(name for name in scoring_engines() if engine_spec(name).replays)
        raise Refusal(f"The engine {engine} cannot decode a completion that is given; choose one of {able}.")
    if by_bytes and (replay or calibrate):
        raise Refusal("A row that is read by bytes is not decoded again, and measures no noise. Ask for one of them.")
    options |= {"temperature": temperature} if temperature != 1 else {}
    switches = {"replay": replay, "calibrate": calibrate, "by_bytes": by_bytes}
    options |= {name: True for name, is_asked in switches.items() if is_asked}
    if not run.n_finished:
        raise Refusal("This run has no finished trajectory, so there is nothing to score.")
    job, is_new = ask_job(run, KIND.slug, options, user)
    if not is_new and job.options != options:
        raise Refusal(
            f"This run is being scored with {job.options['model']} on {job.options['engine']}. Wait until that has "
            "ended, or cancel it."
        )
    return job, is_new


def chosen(model: str, engine: str = "") -> tuple[ServedModel, str]:
    """The served model and the name of the engine. Raises :class:`Refusal`."""
    models = served_models()
    if model not in models:
        raise Refusal(
            f"This installation serves no model named {model[:100]!r}; it serves {', '.join(sorted(models))}. "
            "Add it to INSPECTOR_MODELS."
        )
    served = models[model]
    engine = engine or served.engine
    if fault := served.faults(engine):
        raise Refusal(fault)
    if engine not in scoring_engines():
        raise Refusal(
            f"The engine {engine} cannot score ids that it did not sample; choose one of "
            f"{', '.join(scoring_engines())}."
        )
    return served, engine


def do_job(job: Job, beat: Beat, engine_of: EngineOf = engine_of) -> None:
    """Score the finished trajectories of a run that have no scores in the column of this model and engine."""
    run = run_of_job(job)
    model, engine = chosen(job.options["model"], job.options["engine"])
    finished, temperature = finished_trajectories(run), float(job.options.get("temperature", 1.0))
    beat(progress="the engine is started")
    try:
        owner = engine_of(model, engine)
        info = wait_for(owner.call(EngineInfo.of), beat)
        vocabulary = Vocabulary.of(run, model, info.vocab_size)
        vocabulary.by_bytes = bool(job.options.get("by_bytes"))
        if vocabulary.by_bytes and vocabulary.names is None:
            raise Refusal("To read rows by bytes, the tokenizers of the run and of the model are needed: "
                          f"{vocabulary.notes[0]}")
        scorer = _Scoring(owner, info, temperature, beat, vocabulary)
    except EngineError as error:
        raise engine_failure(error) from error
    weights = "" if engine_spec(engine).is_server else weights_digest(model.path)
    with_masses = engine_spec(engine).sums_kept_sets and not vocabulary.by_bytes and has_kept_sets(run)
    kinds = {"": True, DECODED: bool(job.options.get("replay")), KEPT_SETS: with_masses}
    engine += BY_BYTES if vocabulary.by_bytes else ""
    columns = [
        begin_column(run, model.name, engine + kind, scorer.info.version, weights, job.created_by, temperature)
        for kind, is_made in kinds.items() if is_made
    ]
    report: dict[str, Any] = {"column": columns[0].code, "columns": [column.code for column in columns]}
    if job.options.get("calibrate"):
        report["noise"] = scorer.noise(finished)
    n_before = n_done = min(map(count_scored, columns))
    beat(report=report, n_done=n_done, n_total=finished.count(), progress="")
    left_out: list[str] = []
    try:
        for column in columns:
            left_out, n_done = [], count_scored(column)
            for batch in _batches(not_scored(column, finished)):
                scores = [score for score in scorer.scored(batch, left_out, column) if score is not None]
                beat()  # what a lost worker has scored is not stored
                keep_scores(column, scores)
                n_done += len(batch)
                beat(n_done=n_done)
            if left_out and n_done - n_before == len(left_out) and not n_before:
                raise Refusal(f"No trajectory can be scored. The first: {left_out[0]}")
            end_column(column)
    except ScoredColumn.DoesNotExist:
        raise JobLost from None
    n_scored = n_done - len(left_out)
    sentence = "1 trajectory is scored." if n_scored == 1 else f"{n_scored:,} trajectories are scored."
    notes = [sentence, *vocabulary.notes, *vocabulary.shapes(), *left_out[:MAX_NOTES]]
    if len(left_out) > MAX_NOTES:
        notes.append(f"And {len(left_out) - MAX_NOTES:,} more were left out.")
    if not end_job(job, Job.Status.DONE, n_done=n_done, notes=notes):
        raise JobLost


def fail(job: Job, sentence: str, remedy: str) -> None:
    """End a job as failed. A column that was never whole goes with it."""
    if not end_job(job, Job.Status.FAILED, sentence, remedy=remedy) or not job.report or job.run is None:
        return
    for code in job.report.get("columns", [job.report["column"]]):
        column = find_scored_column(job.run, code)
        if column is not None and column.finished_at is None:
            delete_column(column)


@dataclass
class Vocabulary:
    """What tells whether the ids of a run are other tokens for a model."""

    size: int  # Of the model.
    differs: Mask  # Of each id, whether it is another token in the model's vocabulary than in the run's.
    names: tuple[LoadedTokenizer, LoadedTokenizer] | None
    """The tokenizers of the run and of the model, where both are known."""
    notes: list[str]  # What could not be compared.
    by_bytes: bool = False  # The model reads the text of a row in ids of its own.
    one_to_one: int = 0  # Tokens of rows that were read by bytes, by what stands against them: one token of the model,
    one_to_many: int = 0  # several,
    many: int = 0  # or what several tokens of the row share, so that none of them has a value.

    @classmethod
    def of(cls, run: Run, model: ServedModel, size: int) -> Vocabulary:
        """Compare the tokenizers of a run and a model."""
        none: Mask = np.zeros(0, dtype=np.bool_)
        if run.tokenizer is None:
            sentence = "The run has no tokenizer, so its vocabulary was not compared with the model's."
            return cls(size, none, None, [sentence])
        try:
            pair = load_tokenizer(run.tokenizer.files_sha256), tokenizers.load(model.path)
        except (ValueError, OSError) as error:
            sentence = without_paths(f"The vocabularies of run and model were not compared: {error}")
            return cls(size, none, None, [sentence])
        if pair[0].sha256 == pair[1].sha256:
            return cls(size, none, pair, [])
        ids = np.arange(max(tokenizer.vocab_size for tokenizer in pair), dtype=np.int32)
        mine, theirs = (tokenizer.token_bytes(ids) for tokenizer in pair)
        return cls(size, np.array([a != b for a, b in zip(mine, theirs, strict=True)], dtype=np.bool_), pair, [])

    def stream(self, record: StoredTrajectory, ids: Ids) -> tuple[Ids, list[AlignedGroup], str]:
        """The ids that the model reads for a row; by bytes also how they stand against the row, and why they cannot.
        Raises :class:`Refusal` for another vocabulary where it is not read by bytes."""
        if not self.by_bytes or self.names is None:
            self.check(record, ids)
            return ids, [], ""
        mine, theirs = self.names
        pieces = mine.token_bytes(ids)
        try:
            model_ids = theirs.encode(b"".join(pieces).decode())
            return model_ids, align_same_bytes(pieces, theirs.token_bytes(model_ids), ids, model_ids), ""
        except UnicodeDecodeError:
            return ids, [], "A row is no text: a character of several tokens is not whole."
        except ValueError:
            return ids, [], "The tokenizer of the model changes the text of a row, such as its spaces."

    def spread(self, scores: Floats, groups: Sequence[AlignedGroup], n: int) -> Floats:
        """The scores of the model's tokens as values of the row's ``[n]``: the sum of those that stand against one
        token. Several that share them have none: NaN."""
        values = np.full(n, np.nan, np.float32)
        for group in groups:
            n_row, n_model = group.left_stop - group.left_start, group.right_stop - group.right_start
            if group.equal or n_row == n_model == 1:
                values[group.left_start : group.left_stop] = scores[group.right_start : group.right_stop]
                self.one_to_one += n_row
            elif n_row == 1:
                values[group.left_start] = scores[group.right_start : group.right_stop].sum()
                self.one_to_many += 1
            else:
                self.many += n_row
        return values

    def shapes(self) -> list[str]:
        """How the tokens of rows that were read by bytes stand against the model's, as a sentence."""
        if not self.by_bytes:
            return []
        sentence = (
            f"By bytes, {self.one_to_one:,} tokens stand against one of the model's and {self.one_to_many:,} against "
            f"several. {self.many:,} share theirs with others and have no score."
        )
        return [sentence]

    def check(self, record: StoredTrajectory, ids: Ids) -> None:
        """Raises :class:`Refusal` for an id that is none of the model's, or another token there."""
        other = "Its scores would mean nothing. Choose a model that has the vocabulary of the run."
        outside = ids[(ids < 0) | (ids >= self.size)]
        if len(outside):
            raise Refusal(
                f"Trajectory {record.code} holds the id {int(outside[0])}, and the model's ids run from 0 to "
                f"{self.size - 1}: it has another vocabulary. {other}"
            )
        common = ids[ids < len(self.differs)]
        differing = common[self.differs[common]]
        if len(differing) and self.names is not None:
            mine, theirs = (codec.token_bytes(differing[:1])[0].decode(errors="replace") for codec in self.names)
            raise Refusal(
                f"Trajectory {record.code} holds the id {int(differing[0])}, which is {mine!r} in the run's tokenizer "
                f"and {theirs!r} in the model's: it has another vocabulary. {other}"
            )


@dataclass
class _Scoring:
    """An engine that scores trajectories of one run."""

    owner: EngineOwner
    info: EngineInfo
    temperature: float
    beat: Beat
    vocabulary: Vocabulary

    def noise(self, finished: QuerySet[StoredTrajectory]) -> dict[str, Any]:
        """How far the engine differs from itself: rows scored together, and one by one from the last to the first."""
        records = next(_batches(finished), [])
        rows = [row for value in load_compared(records) for row in value.rows if not stream_problem(row.ids, self.info)]
        rows = next(iter(batched(rows, CALL_TOKENS, lambda row: len(row.ids))), [])
        alone = [values for row in rows[::-1] for values in self._scores([row.ids])][::-1]
        pairs = zip(self._scores([row.ids for row in rows]), alone, strict=True)
        d = np.concatenate([np.zeros(0), *((a - b)[1:].astype(np.float64) for a, b in pairs)])
        return GapFigures.of(d[np.isfinite(d)]).values()

    def scored(
        self, batch: Sequence[StoredTrajectory], left_out: list[str], column: ScoredColumn
    ) -> Iterator[Scored | None]:
        """What a column holds of each trajectory; None = a row is too long, and ``left_out`` got a sentence."""
        fitting: list[tuple[StoredTrajectory, Sequence[Row]]] = []
        streams: list[tuple[Ids, list[AlignedGroup]]] = []
        sets: list[KeptSets] = []
        for record, value in zip(batch, load_compared(batch), strict=True):
            of_rows = [self.vocabulary.stream(record, row.ids) for row in value.rows]
            problem = next(filter(None, (why or stream_problem(ids, self.info) for ids, _, why in of_rows)), "")
            if problem:
                left_out.append(f"Trajectory {record.code} was left out. {problem}")
                yield None
            else:
                fitting.append((record, value.rows))
                streams += [(ids, groups) for ids, groups, _ in of_rows]
                sets += [kept_sets(value.steps, row) for row in value.rows] if column.is_of_kept_sets else []
        rows = [row for _, rows_of in fitting for row in rows_of]
        scores = self._decoded(rows) if column.is_decoded else self._scores([ids for ids, _ in streams], sets)
        values = iter([
            self.vocabulary.spread(of_row, groups, len(row.ids)) if self.vocabulary.by_bytes else of_row
            for of_row, (_, groups), row in zip(scores, streams, rows, strict=True)
        ])
        for record, rows_of in fitting:
            yield record.pk, rows_of, [next(values) for _ in rows_of]

    def _scores(self, streams: Sequence[Ids], kept: Sequence[KeptSets] = ()) -> list[Floats]:
        scores: list[Floats] = []
        try:
            for part in batched(list(zip_longest(streams, kept)), CALL_TOKENS, lambda stream: len(stream[0])):
                ids, sets = zip(*part, strict=True)
                work = partial(score_streams, ids, temperature=self.temperature, kept=sets if kept else None)
                scores += wait_for(self.owner.call(work), self.beat)
        except EngineError as error:
            raise engine_failure(error) from error
        return scores

    def _decoded(self, rows: Sequence[Row]) -> list[Floats]:
        """The log-probabilities ``[T]`` of the trained tokens, each stretch as a completion of all before it; else NaN.
        Requests go the way of sampled ones: in one batch with those of runs, and by the cache."""
        scores = [np.full(len(row.ids), np.nan, np.float32) for row in rows]
        edges = [np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0, append=0)) for row in rows]
        places = [
            (n, max(int(start), 1), int(stop))
            for n, at in enumerate(edges) for start, stop in at.reshape(-1, 2) if stop > 1
        ]
        for part in batched(places, CALL_TOKENS, lambda place: place[2]):
            requests = [
                GenerationRequest(
                    f"replay-{uuid4().hex}", rows[n].ids[:start],
                    Sampling(self.temperature, max_tokens=stop - start), rows[n].ids[start:stop],
                )
                for n, start, stop in part
            ]
            futures = [self.owner.submit(request) for request in requests]
            try:
                for (n, start, stop), future in zip(part, futures, strict=True):
                    scores[n][start:stop] = wait_for(future, self.beat).logprobs
            except EngineError as error:
                raise engine_failure(error) from error
            finally:
                self.owner.abort([request.request_id for request in requests])
        return scores


def _batches(records: QuerySet[StoredTrajectory]) -> Iterator[Sequence[StoredTrajectory]]:
    after = -1
    while page := next_trajectories(records, after, BATCH):
        yield from batched(page, BATCH_TOKENS, lambda one: one.n_tokens)
        after = page[-1].index


def wait_for(future: Future[Result], beat: Beat) -> Result:
    """The result of a future. Raises :class:`JobLost` soon after the job was cancelled."""
    while True:
        try:
            return future.result(WAIT_SECONDS)
        except TimeoutError:
            if future.done():
                raise
            beat.now_and_then()


def engine_failure(error: EngineError) -> Exception:
    """What a job raises for an engine that could not do it."""
    if isinstance(error, EngineClosed):
        return WorkerLeaves("The worker was shut down while the engine worked.")
    return Refusal(str(error))


def _details(options: Mapping[str, Any]) -> str:
    at = f" at temperature {options['temperature']:g}" if "temperature" in options else ""
    return f" with {options['model']} on {options['engine']}{at}{', with a replay' * ('replay' in options)}"


KIND = JobKind(
    "rescore",
    "Scored",
    do_job,
    fail=fail,
    of_engine=True,
    activity="rescoring started",
    page="run-columns",
    details=_details,
    done=lambda job: " ".join(job.notes[:1]),
    cancelled="Cancelled after {done}. The column is shown when all are scored: score it again to go on.",
)
"""An engine scores the rows of a run; ``options`` name model and engine, the temperature where it is not 1, and what
is made beside: ``replay``, ``calibrate``."""
