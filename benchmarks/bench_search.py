"""Search over 10 million stored tokens: against a loop over lists of ids in Python. Ratios in one run, printed.

Times are processor seconds of this process, which hold on a busy machine; SQLite works in the process. PostgreSQL does
not: there the clock is read.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from django.db import connection

from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.trajectory import Step, Trajectory
from rollouts.jobs.search import SearchQuestion, find_in_row, search
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import byte_table, load_tokenizer, register_tokenizer
from rollouts.store.people.access import EVERYTHING
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.rows import get_row
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectories import load_trajectories

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True)]

TRAJECTORIES, TURNS, DELTA, COMPLETION = 500, 20, 500, 500
TOKENS = TRAJECTORIES * TURNS * (DELTA + COMPLETION)


def stored(tokenizer: models.Tokenizer, vocabulary: int, needle: np.ndarray) -> models.Run:
    """A run of random tokens, with the needle in every fiftieth trajectory, across the border of two steps."""
    rng = np.random.default_rng(7)
    run = create_run("import", "search", tokenizer=tokenizer)
    for numbers in batched(range(TRAJECTORIES), 50):
        values = []
        for number in numbers:
            stream, steps = np.zeros(0, np.int32), []
            for turn in range(TURNS):
                delta, completion = rng.integers(0, vocabulary, (2, DELTA), dtype=np.int32)
                if number % 50 == 0 and turn == 9:
                    completion[-2:] = needle[:2]
                if number % 50 == 0 and turn == 10:
                    delta[: len(needle) - 2] = needle[2:]
                prompt = np.concatenate([stream, delta])
                steps.append(Step(prompt, completion))
                stream = np.concatenate([prompt, completion])
            values.append(Trajectory(f"t{number}", tuple(steps)))
        save_trajectories(run, values)
    run.refresh_from_db()
    return run


def lists(run: models.Run) -> Iterator[list[int]]:
    """The stream of each trajectory as a list, read by the selectors."""
    for some in batched(run.trajectories.order_by("index"), 50):
        for value in load_trajectories(some):
            yield [*value.steps[-1].prompt_ids.tolist(), *value.steps[-1].completion_ids.tolist()]


def timed(what: Callable[[], int], times: int = 3) -> tuple[float, int]:
    """The best time, and what was found."""
    clock = time.process_time if connection.vendor == "sqlite" else time.perf_counter
    best, found = float("inf"), 0
    for _ in range(times):
        begun = clock()
        found = what()
        best = min(best, clock() - begun)
    return best, found


def test_ids_and_text_of_ten_million_tokens(tiny_tokenizer: Path) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "demo")
    loaded, table = load_tokenizer(tokenizer.files_sha256), byte_table(tokenizer.files_sha256)
    text = " zebra quagga okapi"
    needle = loaded.encode(text)
    run = stored(tokenizer, table.vocab_size, needle)
    assert run.n_tokens == TOKENS
    first, second, fourth = needle[0], needle[1], needle[3]
    gram = f"{first} {second} * {fourth}"

    def asked(by: str, q: str) -> Callable[[], int]:
        def ask() -> int:
            part = search(EVERYTHING, SearchQuestion.read(by, q), run, limit=10_000, seconds=600)
            assert part.complete
            return len(part.results)

        return ask

    def loop_ids() -> int:
        n = 0
        for ids in lists(run):
            for at in range(len(ids) - 3):
                if ids[at] == first and ids[at + 1] == second and ids[at + 3] == fourth:
                    n += 1
        return n

    def loop_text() -> int:
        pieces = table.token_bytes(np.arange(table.vocab_size))
        return sum(b"".join([pieces[id_] for id_ in ids]).count(text.encode()) for ids in lists(run))

    print(f"\n{TOKENS:,} tokens, {connection.vendor}")
    for name, ours, reference in (
        ("ids with a wildcard", asked("ids", gram), loop_ids),
        ("text", asked("text", text), loop_text),
        ("regular expression", asked("regex", r" zebra \w+ okapi"), loop_text),
    ):
        (mine, found), (theirs, expected) = timed(ours), timed(reference, 1)
        print(f"{name}: {mine:.2f} s; loop over lists {theirs:.2f} s; {theirs / mine:.1f} times; {found} places")
        assert found == expected >= TRAJECTORIES // 50


def test_find_in_a_row_of_a_million_tokens(tiny_tokenizer: Path) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "demo")
    table = byte_table(tokenizer.files_sha256)
    ids = np.random.default_rng(3).integers(0, table.vocab_size, 1_000_000, dtype=np.int32)
    run = create_run("import", "row", tokenizer=tokenizer)
    save_trajectories(run, [Trajectory("long", (Step(ids[:500_000], ids[500_000:]),))])
    trajectory = run.trajectories.get()
    for by, q in (("text", "the number"), ("text", "e"), ("ids", "5 * 7"), ("regex", r"\d+ of \w+")):

        def find(by: str = by, q: str = q) -> int:
            row = get_row(trajectory, 0)
            return len(find_in_row(trajectory, row, SearchQuestion.read(by, q), table, 5000)[0])

        best, found = timed(find)
        print(f"\nfind {by} {q!r} in 1,000,000 tokens: {best * 1000:.0f} ms, {found} places", end="")
