"""A deterministic engine without a model: a function from prompt ids to completion ids."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rollout_inspector.streams.alternatives import packed
from rollout_inspector.streams.trajectory import Floats, Ids, ids_array
from rollouts.sampling.engines.protocol import Generation, GenerationRequest, StopTexts, check_request

Script = Callable[[Ids], Sequence[int]]
"""The whole continuation of a prompt. The engine cuts it at stop tokens and limits."""


def echo(vocab_size: int) -> Script:
    """A script that depends on every id of the prompt: each next id is a hash of all ids before it."""

    def continue_(prompt: Ids) -> list[int]:
        state = 17
        for value in prompt.tolist():
            state = (state * 31 + value + 1) % 1_000_003
        out = []
        for _ in range(4096):
            state = (state * 48271 + 11) % 1_000_003
            out.append(state % vocab_size)
        return out

    return continue_


class ScriptedEngine:
    """Each ``step`` adds the next token of its script to each live request, with log-probability ``-1 / (1 + id)``."""

    name = "scripted"
    version = "1"
    logprobs_mode = "processed"

    def __init__(
        self, path: str | Path = "", script: Script | None = None, vocab_size: int = 512, max_model_len: int = 2048
    ) -> None:
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._script = script or echo(vocab_size)
        self._stops = StopTexts(path)
        self._live: dict[str, tuple[GenerationRequest, Generation]] = {}
        self._n_sampled: Counter[str] = Counter()

    def add(self, request: GenerationRequest) -> None:
        check_request(request, self.vocab_size, self.max_model_len)
        self._stops.check(request.sampling)
        self._live[request.request_id] = request, self._generation(request)
        self._n_sampled[request.request_id] = 0

    def step(self) -> list[Generation]:
        finished = []
        for request_id, (_, generation) in list(self._live.items()):
            self._n_sampled[request_id] += 1
            if self._n_sampled[request_id] == len(generation.completion_ids):
                finished.append(generation)
                del self._live[request_id]
        return finished

    def _generation(self, request: GenerationRequest) -> Generation:
        sampling, room = request.sampling, self.max_model_len - len(request.prompt_ids)
        script = self._script(request.prompt_ids) if request.forced_ids is None else request.forced_ids
        planned = [int(value) for value in script][: min(sampling.max_tokens, room)]
        if not planned:
            raise ValueError("a script must return at least one id")
        stop = ""
        for n, last in enumerate(planned, start=1):
            stop = self._stops.completed(planned[:n], sampling.stop) or str(last) * (last in sampling.stop_token_ids)
            if stop:
                break
        ids = ids_array(planned[:n])
        logprobs = (-1.0 / (1.0 + ids.astype(np.float64))).astype(np.float32)
        more = self._alternatives(ids, sampling.alternatives) or (None, None)
        return Generation(request.request_id, ids, logprobs, "stop" if stop else "length", stop, 0, *more)

    def score(self, streams: Sequence[Ids]) -> list[Floats]:
        """The log-probabilities ``[T]`` of each stream, by the rule of its completions; the first is NaN."""
        scores = []
        for ids in streams:
            values = (-1.0 / (1.0 + ids.astype(np.float64))).astype(np.float32)
            values[:1] = np.nan
            scores.append(values)
        return scores

    def _alternatives(self, ids: Ids, n: int) -> tuple[Ids, Floats] | None:
        """The next ids take half of what is left, one after the other, so no entropy is told."""
        entries = []
        for value in ids.tolist() if n else ():
            mass, entry = -np.expm1(-1.0 / (1.0 + value)), [(value, -1.0 / (1.0 + value))]
            for other in range(1, n):
                mass /= 2
                entry.append(((value + other) % self.vocab_size, float(np.log(mass))))
            entries.append(entry)
        return packed(entries)

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def close(self) -> None:
        self._live.clear()
