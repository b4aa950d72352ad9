"""The whole proof: launch, work as a worker does, verify what is stored, and measure beside a bare loop."""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings

from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text import tokenizers
from rollouts.jobs.launch import LaunchSettings, launch, served_models
from rollouts.jobs.warm_engines import engine_of, live_trajectories
from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.sampling.engines import ENGINES, EngineSpec
from rollouts.sampling.engines.engine_owner import EngineOwner
from rollouts.sampling.environments import ENVIRONMENTS
from rollouts.store.models import Run
from rollouts.store.people.members import project_or_default
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.worker.run_rollouts import close_engines, work_on
from tools.gpu_proof.bare import Measured, plan
from tools.gpu_proof.checks import check_ids, check_logprobs
from tools.gpu_proof.engine import bare, new_witness, reset_cache, score, witness_of
from tools.gpu_proof.model import FULL, SMALL, Shape, make_model
from tools.gpu_proof.rounds import RoundsEnvironment

DEMO, RANDOM = "proof-demo", "proof-random"
MAX_SCORED = 256
"""How many trajectories of a run have their log-probabilities scored again."""


class ProofFailed(Exception):
    """A run of the proof did not reach its end. The message says why."""


@dataclass(frozen=True)
class Plans:
    """What is run. The defaults are for a GPU; ``on_cpu`` returns small plans that exercise the same code."""

    cpu: bool = False
    trajectories: int = 1024
    live: int = 512
    """Completions that the engine samples at once."""
    rounds: int = 4
    """Turns of each trajectory."""
    mean_tokens: int = 96
    max_tokens: int = 512
    repeats: int = 3
    """Pairs of a measured run and a measured bare loop."""
    demo_trajectories: int = 256
    max_model_len: int = 4096
    tolerance: float = 0.05
    """Mean absolute difference of a re-scored log-probability in nats. One bfloat16 logit is off by up to 0.015."""
    shape: Shape = FULL
    seed: int = 7

    def on_cpu(self, trajectories: int) -> Plans:
        return replace(
            self, cpu=True, trajectories=trajectories, live=trajectories, mean_tokens=12, max_tokens=64, rounds=3,
            repeats=1, demo_trajectories=trajectories, max_model_len=1024, tolerance=1e-4, shape=SMALL,
        )


@dataclass(frozen=True)
class ProofVerdict:
    name: str
    passed: bool
    sentence: str


Say = Callable[[str], None]


def prove(plans: Plans, folder: Path, say: Say) -> dict[str, Any]:
    """Run everything and return what was found as JSON-ready values. Raises :class:`ProofFailed`.

    ``verdicts`` says what passed.
    """
    began = datetime.now(UTC)
    say("Making the model with random weights ...")
    parameters = make_model(folder / "random", plans.shape, plans.mean_tokens)
    with ExitStack() as stack:
        _register(plans, folder, stack)
        stack.callback(close_engines)
        demo = _demo(plans, say)
        close_engines()
        loaded = _load(plans, say)
    verdicts = [*demo.pop("verdicts"), *loaded.pop("verdicts")]
    if not plans.cpu:
        verdicts.append(_verdict("model size", parameters >= 500_000_000, f"The model has {parameters:,} parameters."))
    return {
        "date": began.strftime("%Y-%m-%d %H:%M UTC"),
        "versions": _versions(plans.cpu, loaded.pop("vllm")),
        "plans": asdict(plans),
        "parameters": parameters,
        "demo": demo,
        "load": loaded,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "passed": all(verdict.passed for verdict in verdicts),
    }


def _register(plans: Plans, folder: Path, stack: ExitStack) -> None:
    """Serve the two models from this process while ``stack`` is open."""
    common: dict[str, Any] = {"max_live": plans.live}
    if not plans.cpu:
        # Two engines follow each other in one process. The second must find room next to what the first left.
        common |= {"gpu_memory_utilization": 0.35, "dtype": "bfloat16"}
    else:
        common |= {"kv_cache_bytes": 256 << 20}
    before = settings.INSPECTOR_MODELS
    settings.INSPECTOR_MODELS = {
        **before,
        DEMO: {"engine": "proof", "path": str(MODEL_DIR), "options": common},
        RANDOM: {
            "engine": "proof",
            "path": str(folder / "random"),
            "options": {**common, "max_model_len": plans.max_model_len},
        },
    }
    ENGINES["proof"] = EngineSpec("proof", "tools.gpu_proof.engine:ProofEngine")
    ENVIRONMENTS["rounds"] = lambda: RoundsEnvironment(plans.rounds)

    def undo() -> None:
        settings.INSPECTOR_MODELS = before
        del ENGINES["proof"], ENVIRONMENTS["rounds"]

    stack.callback(undo)


def _demo(plans: Plans, say: Say) -> dict[str, Any]:
    """The demo policy with its calculator: real tool calls, right answers."""
    say(f"Demo policy: {plans.demo_trajectories} trajectories with the calculator ...")
    launch_settings = LaunchSettings(
        model=DEMO, environment="calculator", prompts=plans.demo_trajectories, group=1, temperature=1.0, seed=plans.seed
    )
    run, seconds = _work(launch_settings)
    stored = _stored(run)
    ids = check_ids(stored, _owner(DEMO).call(witness_of).result())
    scores = _scores(DEMO, [trajectory for _, trajectory in stored], plans.tolerance)
    right = sum((trajectory.reward or 0) >= 1 for _, trajectory in stored) / len(stored)
    longest = max(len(trajectory.steps) for _, trajectory in stored)
    return {
        "run": run.code,
        "ids": asdict(ids),
        "scores": asdict(scores),
        "share_right": right,
        "most_steps": longest,
        "seconds": seconds,
        "verdicts": [
            _ids_verdict("demo: ids", ids),
            _verdict("demo: tools", longest > 1, f"Trajectories have up to {longest} steps; {right:.0%} end right."),
            _agreement("demo: log-probabilities", scores),
        ],
    }


def _load(plans: Plans, say: Say) -> dict[str, Any]:
    """The model of a real size under load."""
    launch_settings = LaunchSettings(
        model=RANDOM, environment="rounds", prompts=plans.trajectories, group=1, temperature=1.0, seed=plans.seed,
        max_tokens=plans.max_tokens, max_turns=plans.rounds,
    )
    say("Random weights: warming up ...")
    _work(replace(launch_settings, prompts=min(plans.trajectories, plans.live), seed=plans.seed + 1000))
    owner, live = _owner(RANDOM), live_trajectories(served_models()[RANDOM], "proof")
    pairs: list[tuple[Measured, Measured]] = []
    peak, cached = 0, 0
    run, stored = None, []
    for repeat in range(plans.repeats):
        say(f"Random weights: {plans.trajectories} trajectories, run {repeat + 1} of {plans.repeats} ...")
        owner.call(reset_cache).result()
        run, seconds = _work(replace(launch_settings, seed=plans.seed + repeat))
        stored = _stored(run)
        measured = Measured(run.n_sampled, seconds)
        witness = owner.call(witness_of).result()
        peak, cached = witness.peak_live, witness.cached_tokens
        ids = check_ids(stored, witness)
        work = [plan(trajectory, plans.seed + repeat) for _, trajectory in stored]
        say("Random weights: the same work in a bare loop ...")
        pairs.append((measured, owner.call(partial(bare, work, live)).result()))
    say("Random weights: scoring what was stored ...")
    assert run is not None
    trajectories = [trajectory for _, trajectory in stored]
    scores = _scores(RANDOM, trajectories, plans.tolerance)
    turns = sum(len(trajectory.steps) for trajectory in trajectories) / len(trajectories)
    # Some trajectories end while the last ones begin, so fewer than asked are in the engine at once.
    n_live = min(256, math.ceil(min(plans.live, plans.trajectories) * 0.75))
    return {
        "vllm": owner.ask_info().result().version,
        "run": run.code,
        "ids": asdict(ids),
        "scores": asdict(scores),
        "peak_live": peak,
        "cached_tokens": cached,
        "mean_steps": turns,
        "throughput": [
            {
                "tokens": worker.tokens,
                "worker_seconds": worker.seconds,
                "bare_seconds": plain.seconds,
                "worker_tokens_per_second": worker.tokens_per_second,
                "bare_tokens_per_second": plain.tokens_per_second,
                "ratio": worker.tokens_per_second / plain.tokens_per_second,
            }
            for worker, plain in pairs
        ],
        "verdicts": [
            _verdict(
                "load: concurrency",
                peak >= n_live,
                f"The engine held up to {peak} trajectories at once; at least {n_live} must be.",
            ),
            _verdict("load: turns", turns > 1.5, f"A trajectory has {turns:.2f} steps on average."),
            _ids_verdict("load: ids", ids),
            _agreement("load: log-probabilities", scores),
            _verdict(
                "load: re-tokenized",
                scores.retokenized_disagrees,
                f"{scores.retokenized} of {scores.completions} completions get other ids when decoded and encoded; "
                f"scored there they differ by {scores.retokenized_mean:.3g} nats each, on the stored stream they "
                f"differ by {scores.completion_mean:.3g}.",
            ),
            _verdict(
                "load: same work",
                all(worker.tokens == plain.tokens for worker, plain in pairs),
                "Worker and bare loop sampled equally many tokens.",
            ),
        ],
    }


def _work(launch_settings: LaunchSettings) -> tuple[Run, float]:
    """Launch, then work like the worker's task. Returns the run and the seconds from the task's start to its end."""
    run = launch(
        launch_settings, name=f"GPU proof: {launch_settings.model}", enqueue=False, project=project_or_default()
    )
    # This also loads the engine before the clock starts: a worker's engine is warm.
    _owner(launch_settings.model).call(new_witness).result()
    began = time.perf_counter()
    work_on(run.pk)
    seconds = time.perf_counter() - began
    run.refresh_from_db()
    if run.status != Run.Status.DONE or run.n_failed:
        failed = run.trajectories.exclude(error="").values_list("error", flat=True).first()
        raise ProofFailed(f"The run {run.code} ended as {run.status}: {run.error or failed or 'no reason was stored'}")
    return run, seconds


def _owner(model: str) -> EngineOwner:
    return engine_of(served_models()[model], "proof")


def _stored(run: Run) -> list[tuple[int, Trajectory]]:
    records = list(run.trajectories.order_by("index"))
    return [(record.pk, trajectory) for record, trajectory in zip(records, load_trajectories(records), strict=True)]


def _scores(model: str, trajectories: Sequence[Trajectory], tolerance: float) -> Any:
    codec = tokenizers.load(served_models()[model].path)
    owner = _owner(model)
    some = [trajectory for trajectory in trajectories if trajectory.steps][:MAX_SCORED]
    return check_logprobs(some, lambda streams: owner.call(partial(score, streams)).result(), codec, tolerance)


def _verdict(name: str, passed: bool, sentence: str) -> ProofVerdict:
    return ProofVerdict(name, bool(passed), sentence)


def _ids_verdict(name: str, ids: Any) -> ProofVerdict:
    wrong = ids.wrong_prompts + ids.wrong_completions + ids.unknown_requests + ids.broken_steps
    return _verdict(
        name,
        ids.passed,
        f"{ids.steps} stored steps of {ids.trajectories} trajectories against what the engine received "
        f"({ids.tokens_in:,} ids) and returned ({ids.tokens_out:,} ids): {wrong} differences.",
    )


def _agreement(name: str, scores: Any) -> ProofVerdict:
    return _verdict(
        name,
        scores.agrees,
        f"{scores.tokens:,} stored log-probabilities against vLLM's prompt_logprobs: mean difference {scores.mean:.2g} "
        f"(at most {scores.tolerance:g} passes), highest {scores.highest:.2g}.",
    )


def _versions(cpu: bool, vllm: str) -> dict[str, str]:
    import torch
    import transformers

    versions = {
        "vllm": vllm,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": platform.processor() or platform.machine(),
    }
    if not cpu:
        versions |= {"device": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda), "driver": _driver()}
    return versions


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n", 1)[0]
