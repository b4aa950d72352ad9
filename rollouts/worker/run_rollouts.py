"""The work of a launched run: leases trajectories, runs the loop, and saves each step and each end."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery import shared_task, signals
from celery.utils.nodenames import worker_direct
from celery.worker.state import active_requests

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.refusal import Refusal
from rollouts.jobs import broker, template_checks, warm_engines
from rollouts.jobs.forks import fork_start
from rollouts.jobs.launch import LaunchSettings, model_tokenizer, send_run, served_models
from rollouts.jobs.warm_engines import engine_of, live_trajectories
from rollouts.sampling.engines import EngineError, Sampling, reason
from rollouts.sampling.environments import ENVIRONMENTS, Task
from rollouts.sampling.loop import RolloutBatch, RolloutJob, RolloutLimits
from rollouts.store.chat_templates.chat_templates import faults_in
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import ChatTemplate, Run, StoredTrajectory
from rollouts.store.outages import is_outage, said_of, try_again
from rollouts.store.people.members import project_or_default
from rollouts.store.runs.launched_runs import adopt_orphans, begin, count_queued, hand_back, running_launches, settle
from rollouts.store.runs.runs import beat, find_run, get_run, is_cancelled
from rollouts.store.trajectories.launched_trajectories import lease_trajectories, release_trajectories, renew_lease
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker.heartbeat import Heartbeat, queues_of, repeat, shutting_down
from rollouts.worker.lease_prefetch import LeasePrefetcher, Saved, WriteBehind
from rollouts.worker.storage_process import NotStored, StorageBatch, StorageClient, close_idle

if TYPE_CHECKING:
    from rollout_inspector.diagnose.finding import Finding
    from rollout_inspector.streams.strategies import Context, TemplateRewrites
    from rollout_inspector.text.tokenizers import LoadedTokenizer

log = logging.getLogger(__name__)

LEASE_SECONDS = 20.0  # A lease that was not renewed for so long has run out: another worker may take the trajectory.
BEAT_SECONDS = 3.0  # How often the heartbeat is written and the leases are renewed.

_working: set[int] = set()  # Keys of the runs that this worker works on.
_left: set[int] = set()
"""Keys of the runs that this worker could not continue, for example because its engine was lost."""
_at_lock = threading.Lock()


@shared_task(name=broker.RUN_ROLLOUTS)
def run_rollouts(run_id: int) -> None:
    """Do what is left of a run. Several workers of one run divide its trajectories among them by leases."""
    if work_on(run_id):
        ask_for_repair(run_id)


def ask_for_repair(run_id: int) -> None:
    """Send a worker for the check of each template of a refused run, so that its page can offer the repair."""
    run = get_run(run_id)
    for template in _templates(run):
        kwargs = run.settings.get("template_kwargs")
        check, to_do = template_checks.ask(run.tokenizer, template, kwargs=kwargs, project=run.project)
        if to_do:
            broker.send_job(check.job)


def work_on(run_id: int) -> bool:
    """The body of the task, also called in process. Returns True if a chat template was refused: a repair is wanted."""
    run = find_run(templates=True, pk=run_id)
    if run is None or not is_active(run):
        return False
    with _at_lock:
        if run_id in _working:  # sent twice
            return False
        _working.add(run_id)
        _left.discard(run_id)
    try:
        return _work_on(run)
    finally:
        with _at_lock:
            _working.discard(run_id)


def _work_on(run: Run) -> bool:
    begin(run.pk)
    work = _Work(run)
    try:
        sentence = work.do()
    except NotStored as error:
        log.warning("run left run=%s: %s", run.code, error)
        sentence = str(error)
    except Exception as error:
        log.exception("run left run=%s", run.code)
        of_program = f"The run stopped on an error of the program: {reason(error)}"
        sentence = said_of(error) if is_outage(error) else of_program
    leased = list(work.leased.values())
    if shutting_down.is_set():
        hand_back(run.pk, leased)
        return work.refused
    if sentence:
        _left.add(run.pk)
        try_again(partial(release_trajectories, leased))
    try_again(partial(settle, run.pk, sentence))
    return work.refused


class _Work:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = LaunchSettings.of(run.settings)
        self.leased: dict[int, StoredTrajectory] = {}  # by primary key; under way in this worker
        self.refused = False  # True = a chat template is not prefix-preserving
        self._heartbeat = Heartbeat(f"run-{run.pk}", self._beat, BEAT_SECONDS, partial(is_cancelled, run))
        self._storage = StorageClient(self._is_to_stop)
        self._lock = threading.Lock()

    def do(self) -> str:
        """Why this worker cannot go on with the run, as a sentence; empty = nothing is left to do."""
        # From the start: loading a tokenizer may take longer than a run may be silent.
        with self._heartbeat:
            return self._do()

    def _is_to_stop(self) -> bool:
        return self._heartbeat.cancelled.is_set() or shutting_down.is_set()

    def _do(self) -> str:
        from rollout_inspector.streams.strategies import STRATEGIES, start
        from rollout_inspector.text.chat_templates import is_renderer, wants_call_ids
        from rollout_inspector.text.replies.parsing import Way, parser, way_of
        from rollouts.sampling.engines.vllm_engine import tool_call_reader

        run, settings = self.run, self.settings
        model = served_models().get(run.model)
        if model is None:
            return f"This worker serves no model named {run.model!r} (settings: INSPECTOR_MODELS)."
        assert run.tokenizer is not None and run.chat_template is not None
        load = partial(load_tokenizer, run.tokenizer.files_sha256)
        tokenizer = try_again(load, should_stop=self._is_to_stop)
        try:
            context = self.context = _context(run, tokenizer)
            self._start = try_again(partial(fork_start, run), should_stop=self._is_to_stop)
        except Refusal as refusal:
            return refusal.sentence
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            max_tokens=settings.max_tokens,
            stop_token_ids=tuple(sorted(tokenizer.stop_ids)),
            stop=tuple(settings.stop),
            alternatives=settings.alternatives,
        )
        limits = RolloutLimits(
            sampling, settings.max_turns, settings.environment_seconds, live_trajectories(model, run.engine)
        )
        own = getattr(context.renderer, "parse", None)
        try:
            if own is None and (parser_name := str(model.options.get("tool_call_parser", ""))):
                way: Way = tool_call_reader(parser_name, tokenizer.hf), f"vLLM's parser {parser_name}", ""
            else:
                way = way_of(tokenizer, context.renderer)
        except EngineError as error:
            return str(error)
        run.settings |= {"tool_calls": way[1], "tool_calls_note": way[2]}
        try_again(partial(run.save, update_fields=["settings"]))
        recorder = WriteBehind(self._write)
        try:
            with LeasePrefetcher(self._more, limits.max_live // 2) as prefetcher:
                _, sentence = RolloutBatch(
                    engine_of(model, run.engine),
                    ENVIRONMENTS[run.environment](),
                    lambda: start(STRATEGIES[run.strategy], context),
                    parser(tokenizer.hf, tokenizer.stop_ids, way[0], own),
                    limits,
                    prefetcher.more,
                    recorder.steps,
                    recorder.done,
                    lambda: self._is_to_stop() or recorder.error is not None,
                    settings.template_kwargs,
                    policy_version=run.model,
                    call_ids=any(is_renderer(t.text) or wants_call_ids(t.text) for t in _templates(run)),
                ).run()
                recorder.close()
                if recorder.error is not None:
                    raise recorder.error
        finally:
            if recorder.error is None:
                recorder.close()
            self._storage.close()
        return sentence

    # -- called by the loop and by WriteBehind -------------------------------------------------------------------------

    def _more(self, n: int) -> Sequence[RolloutJob]:
        leased = try_again(partial(lease_trajectories, self.run, n, LEASE_SECONDS), should_stop=self._is_to_stop)
        jobs = []
        for trajectory in leased:
            with self._lock:
                self.leased[trajectory.pk] = trajectory
            # Another attempt may have begun the trajectory: the steps that it stored are not sampled again.
            steps = try_again(partial(load_trajectory, trajectory)).steps if trajectory.n_steps else ()
            assert trajectory.task is not None
            task = Task(**json.loads(trajectory.task.body))
            jobs.append(RolloutJob(trajectory.pk, task, trajectory.seed, steps, self._start))
        return jobs

    def _write(self, steps: Sequence[Saved], ends: Sequence[TrajectoryEnd]) -> None:
        """Hand a batch to the storage process. The batch is stored when this method returns."""
        with self._lock:
            attempts = {end.key: self.leased[end.key].attempt for end in ends}
        self._storage.write(StorageBatch(
            self.run.pk,
            [(job.key, index, step) for job, index, step in steps],
            [
                replace(end, attempt=attempts[end.key], findings=self._refusal(end.refused), refused=None)
                for end in ends
            ],
        ))
        with self._lock:
            for key in attempts:
                del self.leased[key]

    def _refusal(self, refused: TemplateRewrites | None) -> tuple[Finding, ...]:
        if refused is None:
            return ()
        from rollout_inspector.diagnose.full_render import finding_of_refusal

        self.refused = True
        return (finding_of_refusal(self.context.codec, refused),)

    def _beat(self) -> None:
        beat(self.run)
        with self._lock:
            leased = list(self.leased.values())
        if leased:
            renew_lease(leased, LEASE_SECONDS)


def _templates(run: Run) -> list[ChatTemplate]:
    """The chat template of the prompts, then the chat template of the rows if it is another one."""
    return [template for template in (run.chat_template, run.rows_chat_template) if template is not None]


def _context(run: Run, tokenizer: LoadedTokenizer) -> Context:
    from rollout_inspector.streams.strategies import Context
    from rollout_inspector.text.chat_templates import cannot_render, is_renderer, renderer
    from rollouts.jobs.replays.renderers_package import bridges_of

    contexts = []
    for template in _templates(run):
        # One date for the whole run, so that a trajectory that is taken up again on another day keeps its prompts.
        rendering = renderer(tokenizer, template.text, run.created_at.isoformat(), faults_in(run.pk, template.text))
        if is_renderer(template.text) and (problem := cannot_render(rendering)):
            raise Refusal(problem)
        bridge = bridges_of(tokenizer, rendering)
        contexts.append(Context(tokenizer, rendering, tokenizer.stop_ids, bridge=bridge))
    prompts, *rows = contexts
    return replace(prompts, rows=rows[0]) if rows else prompts


# -- the life of an engine worker --------------------------------------------------------------------------------------


def close_engines() -> None:
    """Close every engine of this worker and every idle storage process."""
    warm_engines.close()
    close_idle()


signals.worker_shutdown.connect(lambda **_: close_engines(), weak=False)
ADOPT_SECONDS = 5.0
_registered: set[str] = set()  # The models whose tokenizers this worker has registered.


@signals.worker_ready.connect
def _adopt_in_background(sender: Any, **_: Any) -> None:
    """While this worker lives, it sends again runs that have lost their worker, and helps other runs if it is idle."""
    queues = queues_of(sender)
    served = [name for name, model in served_models().items() if model.queue in queues]
    if not served:
        return

    def look() -> None:
        _register_tokenizers(served)
        # If this worker has no free place, perhaps no worker would take what it sends.
        if len(active_requests) >= sender.controller.concurrency:
            return
        for run in adopt_orphans(served):
            send_run(run)
        if not _working:
            ask_to_share(served, worker_direct(sender.hostname).name)

    repeat("adopt-runs", ADOPT_SECONDS, look)


def _register_tokenizers(models: Collection[str]) -> None:
    """Register the tokenizers of this worker's models, so that a web server without their folders can launch them."""
    project = project_or_default()
    for model in (served_models()[name] for name in models if name not in _registered):
        if Path(model.path).exists():
            try:
                model_tokenizer(model, project)
            except ValueError as error:
                log.warning("the tokenizer of the model %s cannot be used: %s", model.name, error)
        _registered.add(model.name)


def ask_to_share(models: Collection[str], own_queue: str) -> Run | None:
    """Send this worker the first run that has more queued trajectories than one worker has under way. Returns the run.
    ``own_queue`` is read by this worker alone. In the queue of the model a worker that is at the run already, with free
    places, may take every such message and ignore it."""
    for run in running_launches(models, _left):
        enough = live_trajectories(served_models()[run.model], run.engine)
        if count_queued(run, enough + 1) > enough:
            broker.send_task(broker.RUN_ROLLOUTS, run.pk, own_queue)
            return run
    return None
