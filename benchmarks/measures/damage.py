"""Measure how well cheap gradients stand for exact ones: ``python -m benchmarks.measures.damage [--row TOKENS]``.

The damage of the gallery over the last layers of the demo policy against that over all of it; norms of tokens in the
output layer against those over all parameters; and the time of one long row with a finding.
"""

import argparse
import os
import sys
import time
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.loss_weights.damage import DamageCase, damage_case
from rollout_inspector.formats import Source, read
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array
from rollouts.gallery import BUNDLE
from rollouts.sampling.engines.gradients import _forward
from tools.gallery.damage import cases
from tools.gallery.sampling import Policy

LAYERS = (1, 2)
TOKENS = 8
"""Tokens of each trajectory whose whole gradient is computed."""


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.argsort(np.argsort(values)).astype(float)


def correlation(left: list[float], right: list[float]) -> str:
    """That of the values, and that of their ranks."""
    a, b = np.array(left), np.array(right)
    return f"{np.corrcoef(a, b)[0, 1]:.3f}, of ranks {np.corrcoef(ranks(a), ranks(b))[0, 1]:.3f}"


def long_row(n: int) -> DamageCase:
    """A row of ``n`` tokens, an eighth of which is an observation that is trained."""
    rng = np.random.default_rng(0)
    first = Step(ids_array(rng.integers(0, 1190, n // 4)), ids_array(rng.integers(0, 1190, n // 4)))
    delta = ids_array(rng.integers(0, 1190, n // 8))
    rest = n - len(first.stream) - len(delta)
    second = Step(np.concatenate([first.stream, delta]), ids_array(rng.integers(0, 1190, rest)))
    row = Row(second.stream, np.arange(n) >= n // 4, step_indices=(0, 1))
    finding = Finding(Axis.ROW, "observation_trained", Severity.ERROR, row=0, start=n // 2, stop=n // 2 + n // 8)
    return damage_case(Trajectory("long", (first, second), (row,)), [finding], None)


def token_norms(model: Any, case: DamageCase) -> tuple[list[float], list[float]]:
    """For some tokens the norms of the gradient of their log-probability: in the output layer, and over all."""
    ids = case.sequences[0]
    model.set_attn_implementation("sdpa")  # the engine's own reads a mask that only the engine makes
    logprobs, norms = _forward(model, ids, 1.0)
    places = np.linspace(len(ids) // 3, len(ids) - 2, TOKENS).astype(int)
    parameters, whole = list(model.parameters()), []
    for place in places:
        gradient = torch.autograd.grad(logprobs[place], parameters, retain_graph=True)
        whole.append(float(sum(part.square().sum() for part in gradient)) ** 0.5)
    return norms[torch.from_numpy(places)].tolist(), whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--row", type=int, default=4096, help="tokens of the long row (default: %(default)s)")
    options = parser.parse_args()
    policy = Policy()
    torch.set_num_threads(options.threads)
    engine, case = policy.engine, long_row(options.row)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    engine.damage(case)
    spent, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    print(f"A row of {options.row:,} tokens: {spent:.2f} s, {cpu:.2f} s of processor time")
    bundled = [item for item in read(Source.of_path(BUNDLE))[1] if isinstance(item, Trajectory)]
    exact: list[float] = []
    over: dict[int, list[float]] = {n: [] for n in LAYERS}
    heads: list[float] = []
    wholes: list[float] = []
    for _, _, trajectory, findings in cases(policy, bundled):
        try:
            case = damage_case(trajectory, findings, None, "uncorrected")
        except Refusal:
            continue
        error = engine.damage(case)["relative_error"]
        if error:
            exact.append(float(np.log(error)))
            for n in LAYERS:
                over[n].append(float(np.log(engine.damage(case, n)["relative_error"])))
            head, whole = token_norms(engine._model, case)
            heads += head
            wholes += whole
    for n in LAYERS:
        print(f"Logarithms of the errors of {len(exact)} cases, the last {n} layers: {correlation(over[n], exact)}")
    print(f"Norms of {len(heads)} tokens in the output layer against all: {correlation(heads, wholes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
