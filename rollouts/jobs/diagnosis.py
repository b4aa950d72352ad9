"""The diagnosis of trajectories, with the tokenizer and the chat templates of their run."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from rollout_inspector.diagnose.checks import Diagnosis, failed_diagnosis
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.streams.align import trained_tokens
from rollout_inspector.streams.interfaces import Codec, Renderer
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text import chat_templates
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer
from rollout_inspector.text.tokenizers.limited import TokenizerBusy
from rollouts.jobs.broker import send_job
from rollouts.jobs.gap_reports import ask_for_gap
from rollouts.jobs.run_parts import cut_run, range_of
from rollouts.store import models
from rollouts.store.chat_templates.chat_templates import faults_in, find_chat_template
from rollouts.store.chat_templates.tokenizers import byte_table_of, load_tokenizer
from rollouts.store.jobs.jobs import Beat, JobKind, Sharing, ask_job, end_job
from rollouts.store.models import Job
from rollouts.store.outages import is_outage
from rollouts.store.runs.policy_versions import count_due, note_uncounted
from rollouts.store.runs.runs import lock_run, run_of_job, take_figures
from rollouts.store.runs.training_steps import stored_after
from rollouts.store.text import without_paths
from rollouts.store.trajectories.findings import note_diagnosed, replace_findings
from rollouts.store.trajectories.retokenized import keep_retokenized
from rollouts.store.trajectories.save_trajectories import DIAGNOSED_TO, note_pushed_diagnosed
from rollouts.store.trajectories.token_moves import fill_origins
from rollouts.store.trajectories.trajectories import LAST, finished_trajectories, load_trajectories

log = logging.getLogger(__name__)

BATCH = 20  # Trajectories that are held at once while a run is diagnosed.
BATCH_TOKENS = 300_000  # Tokens that these trajectories hold together, so that progress is written every few seconds.


def codec_of(run: models.Run) -> Codec | None:
    """The run's tokenizer in memory; None without one, or when its folder is gone."""
    if run.tokenizer is None:
        return None
    try:
        return _codec(run.tokenizer.files_sha256)
    except TokenizerBusy:
        raise  # it may be there in a minute: a diagnosis without it would say less than it could
    except ValueError as error:
        log.warning("tokenizer of run %s cannot be loaded: %s", run.code, error)
        return None


@lru_cache(maxsize=4)
def _codec(files_sha256: str) -> Codec:
    """A registered tokenizer never changes, so its files are not looked at each time."""
    return load_tokenizer(files_sha256)


@lru_cache(maxsize=64)
def _renderer(run: int, project: int, files_sha256: str, sha256: str) -> TemplateRenderer | None:
    """Each run has its own, so that messages on which a template never ends cost no other run its renders."""
    template = find_chat_template(project, sha256)
    if template is None:
        return None
    loaded, faults = load_tokenizer(files_sha256), faults_in(run, template.text)
    return chat_templates.renderer(loaded, template.text, faults=faults)


def renderer_for(run: models.Run) -> Callable[[str], TemplateRenderer | None]:
    """The renderer of a step's chat template by its sha256; empty = the run's own template. A file can name the hash of
    any template, so only those of the run's project are used."""

    def find(sha256: str) -> TemplateRenderer | None:
        sha256 = sha256 or run.chat_template_id or ""
        if not sha256 or run.tokenizer is None:
            return None
        try:
            return _renderer(run.pk, run.project_id, run.tokenizer.files_sha256, sha256)
        except ValueError:
            return None

    return find


def diagnosis_for(trajectory: Trajectory, run: models.Run) -> Diagnosis:
    """What is wrong with a trajectory. A fault of the diagnosis itself becomes a finding, never an exception."""
    try:
        from rollout_inspector.diagnose import examine

        codec, find = codec_of(run), renderer_for(run)
        diagnosis = examine(trajectory, codec, find, run.rows_chat_template_id or "")
        return replace(
            diagnosis,
            findings=(
                *diagnosis.findings, *_at_the_end(trajectory, run, codec, find(""), diagnosis.findings),
                *_not_rendered(trajectory, find),
            ),
        )
    except Exception as error:
        if is_outage(error):
            raise
        log.exception("diagnosis failed run=%s trajectory=%s", run.code, trajectory.external_id)
        return _failed(f"The diagnosis itself failed on this trajectory ({type(error).__name__}: {error}).")


def _not_rendered(trajectory: Trajectory, find: Callable[[str], TemplateRenderer | None]) -> list[Finding]:
    """Says once that a chat template was not rendered any more, so that its checks are not decided."""
    hashes = dict.fromkeys(["", *(step.chat_template_sha256 for step in trajectory.steps)])
    refusal = next((renderer.refusal for sha256 in hashes if (renderer := find(sha256)) and renderer.refusal), "")
    if not refusal:
        return []
    return [
        Finding(
            Axis.DELTA, "not_decidable", Severity.INFO, step=0 if trajectory.steps else None,
            row=None if trajectory.steps else 0, missing="chat template that renders in time",
            evidence=f"What the chat template writes was not checked. {refusal}",
            remedy="Mend the chat template, or shorten the messages that it does not end on. Then diagnose again.",
        )
    ]


def _failed(evidence: str) -> Diagnosis:
    """The diagnosis of a trajectory that could not be diagnosed. Pages do not show paths of this machine."""
    return failed_diagnosis(without_paths(evidence))


def _at_the_end(
    trajectory: Trajectory, run: models.Run, codec: Codec | None, renderer: Renderer | None, known: Sequence[Finding]
) -> list[Finding]:
    """Compares the stream of a launched trajectory with a full render, in the mode that its launch asked for."""
    from rollout_inspector.diagnose.full_render import compare_with_render

    if run.kind != models.Run.Kind.LAUNCH or codec is None or renderer is None:
        return []
    strategy = STRATEGIES.get(run.strategy)
    if strategy is not None and strategy.continues_message:
        return []
    finding = compare_with_render(trajectory, codec, renderer, run.settings.get("compare", "off"), known)
    return [] if finding is None else [finding]


def diagnose_run(run: models.Run, after: int = -1, last: int = LAST) -> Iterator[list[models.StoredTrajectory]]:
    """Diagnose the finished trajectories after an index again, in the order of the run. Yields each stored batch.
    ``last``: the index of the last one."""
    while batch := _bounded(list(finished_trajectories(run, after + 1, last)[:BATCH])):
        _diagnose(run, batch)
        after = batch[-1].index
        yield batch


def _bounded(records: list[models.StoredTrajectory]) -> list[models.StoredTrajectory]:
    """The first records, as many as hold at most ``BATCH_TOKENS`` tokens together; at least one."""
    n_tokens = 0
    for n, record in enumerate(records):
        n_tokens += record.n_tokens
        if n and n_tokens > BATCH_TOKENS:
            return records[:n]
    return records


def _diagnose(run: models.Run, batch: Sequence[models.StoredTrajectory]) -> None:
    """Diagnose trajectories and store what is found. One that cannot be loaded or stored costs the others nothing."""
    try:
        values = list(load_trajectories(batch))
        if (table := byte_table_of(run)) is not None:
            fill_origins(batch, values, table)
        diagnoses = [diagnosis_for(value, run) for value in values]
        for record, value in zip(batch, values, strict=True):
            record.n_lost = trained_tokens(value.steps, value.rows).n_lost
        _store(run, batch, diagnoses)
    except Exception as error:
        if is_outage(error):
            raise
        if len(batch) > 1:
            for record in batch:
                _diagnose(run, [record])
            return
        log.exception("diagnosis failed run=%s trajectory=%s", run.code, batch[0].external_id)
        _store(run, batch, [_failed(f"The diagnosis failed on this trajectory ({type(error).__name__}: {error}).")])


def _store(run: models.Run, batch: Sequence[models.StoredTrajectory], found: Sequence[Diagnosis]) -> None:
    for record, diagnosis in zip(batch, found, strict=True):
        record.checks, record.gap = diagnosis.checks, gap_json(diagnosis)
    replace_findings(run, [(record, diagnosis.findings) for record, diagnosis in zip(batch, found, strict=True)])
    keep_retokenized(run, [(record.pk, diagnosis.again) for record, diagnosis in zip(batch, found, strict=True)])


def gap_json(found: Diagnosis) -> dict[str, Any] | None:
    """The gap between trainer and sampler as a trajectory keeps it."""
    return None if found.gap is None else found.gap.to_json()


# -- as jobs -----------------------------------------------------------------------------------------------------------


def do_job(job: Job, beat: Beat) -> None:
    """Diagnose the finished trajectories of a job's run again."""
    do_shard(job, beat)
    join(job, beat)


def do_shard(job: Job, beat: Beat) -> dict[str, Any]:
    """Diagnose the trajectories that the options of a job or of a shard name. Returns no columns."""
    run, first, last = run_of_job(job), *range_of(job)
    n_done = finished_trajectories(run, first, job.reached).count()
    beat(n_done=n_done, n_total=finished_trajectories(run, first, last).count())
    for batch in diagnose_run(run, max(job.reached, first - 1), last):
        n_done += len(batch)
        beat(n_done=n_done, reached=batch[-1].index)
    return {}


def join(job: Job, beat: Beat) -> None:
    """End a diagnosis of which every trajectory is done."""
    run = run_of_job(job)
    note_diagnosed(run)
    take_figures(run)
    end_job(job, Job.Status.DONE)


def do_pushed_job(job: Job, beat: Beat) -> None:
    """Diagnose what was pushed to a job's run since the last diagnosis, until nothing new is left."""
    while True:
        run = run_of_job(job)
        if batch := list(_pushed(run)[:BATCH]):
            before = int(run.settings.get(DIAGNOSED_TO, 0))
            _diagnose(run, batch)
            note_pushed_diagnosed(run, batch[-1].pk)
            note_uncounted(run, before)
            beat(n_done=job.n_done + len(batch))
            continue
        count_due(run)
        with transaction.atomic():
            # A push stores before it asks for a job, and asking locks the job that is under way, then the run. So
            # either the push sees that this job has ended, or this query sees what was pushed.
            beat()
            lock_run(run)
            if not _pushed(run).exists():
                end_job(job, Job.Status.DONE)
                return


def fail_pushed_job(job: Job, sentence: str, remedy: str) -> None:
    """End a job that could not be done. What it was at gets a finding, so that it does not keep the others waiting."""
    run, next_job = run_of_job(job), None
    with transaction.atomic():
        if not end_job(job, Job.Status.FAILED, sentence, remedy=remedy):
            return
        # After an outage it is not known that these are to blame: the next push asks for them again.
        if not job.error and (batch := list(_pushed(run)[:BATCH])):
            evidence = (
                f"{len(batch)} trajectories were diagnosed together, and that did not come to its end. {sentence}"
            )
            before = int(run.settings.get(DIAGNOSED_TO, 0))
            _store(run, batch, [_failed(evidence)] * len(batch))
            note_pushed_diagnosed(run, batch[-1].pk)
            note_uncounted(run, before)
        if not job.error and _pushed(run).exists():
            next_job, _ = ask_job(run, PUSHED.slug, user=job.created_by)
    if next_job is not None:
        send_job(next_job)


def _pushed(run: models.Run) -> QuerySet[models.StoredTrajectory]:
    """The trajectories that were pushed since the last diagnosis."""
    return stored_after(run, int(run.settings.get(DIAGNOSED_TO, 0)))


KIND = JobKind(
    "diagnose",
    "Diagnosed again",
    do_job,
    Sharing(cut_run, do_shard, join),
    follow=ask_for_gap,
    activity="diagnosis started",
    done=lambda job: f"{job.n_done:,} trajectories diagnosed.",
    cancelled="Cancelled after {done}: these have new findings, the others keep the old ones.",
)
"""Every finished trajectory of a run is diagnosed again."""

PUSHED = JobKind(
    "diagnose_pushed",
    "Diagnosis of what was pushed",
    do_pushed_job,
    fail=fail_pushed_job,
    follow=partial(ask_for_gap, grows=True),
    done=lambda job: f"{job.n_done:,} trajectories diagnosed.",
    cancelled="Cancelled after {done}. Diagnose again brings the findings of the others.",
)
"""The trajectories that were pushed since the last diagnosis are diagnosed."""
