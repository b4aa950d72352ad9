"""What every list, filter, order and count costs among a million trajectories, on PostgreSQL.

    python -m benchmarks.bench_scale --database postgres://postgres@127.0.0.1:5432/NEW_AND_EMPTY
    python -m benchmarks.bench_scale --database postgres://... --only "run"      the pages whose name has that word
    python -m benchmarks.bench_scale --database postgres://... --explain 50      also the plans of slower queries

The first call fills the database, in some minutes; the next ones use it again. Each page is asked many times through
Django's test client, with other runs, filters and places each time. Printed are the median, the 95th percentile and the
greatest time of a whole request in ms; the 95th percentile of the time without what this process and the process of the
database stood ready and got no core, which is the figure that counts where other programs use the machine; and the
median of the processor's time in this process, of which the rest is the database's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

if TYPE_CHECKING:
    from django.test import Client

    from rollouts.store.models import Run

GOAL_MS = 100
Ask = Callable[[random.Random], str]


@dataclass(frozen=True)
class World:
    """What addresses are made of."""

    large: list[Run]
    """Runs of most trajectories that have ended."""
    live: Run
    """The largest run; it works."""
    some: list[Run]
    """Runs of any size."""
    codes: dict[int, list[tuple[str, int]]]
    """Key of a large run -> codes of trajectories with tokens, and their positions."""
    kinds: list[str]
    """The most frequent first."""


def world() -> World:
    """Read it from the database."""
    from django.db.models import F

    from benchmarks.scale_data import TOKENS_EVERY
    from rollouts.store.models import Run, StoredTrajectory

    runs = list(Run.objects.order_by("-n_trajectories", "pk"))
    live, large = runs[0], runs[1:7]
    with_tokens = StoredTrajectory.objects.annotate(place=F("index") % TOKENS_EVERY).filter(place=0, n_steps__gt=0)
    codes = {run.pk: list(with_tokens.filter(run=run).values_list("code", "index")) for run in large}
    counts = large[0].finding_counts
    return World(
        large, live, runs[7::40], codes,
        sorted(counts, key=counts.__getitem__, reverse=True),
    )


STOPS = ("answered", "max_turns", "length", "cancelled", "context_full", "never")


def filters(world: World) -> dict[str, Callable[[random.Random, Any], dict[str, Any]]]:
    """Name of a filter of a run's list -> its parameters for a run."""

    def part(dice: random.Random, run: Any) -> dict[str, Any]:
        start = dice.randrange(run.n_trajectories)
        return {"from": start, "to": start + dice.choice([100, run.n_trajectories // 20])}

    return {
        "nothing": lambda dice, run: {},
        "kind": lambda dice, run: {"finding": dice.choice(world.kinds)},
        "kind and severity": lambda dice, run: {"finding": dice.choice(world.kinds), "severity": "info"},
        "kind and step": lambda dice, run: {"finding": dice.choice(world.kinds), "at": dice.randrange(7)},
        "step": lambda dice, run: {"at": dice.randrange(8)},
        "severity": lambda dice, run: {"severity": dice.choice(["error", "warning", "info"])},
        "stop reason": lambda dice, run: {"stop": dice.choice(STOPS)},
        "status": lambda dice, run: {"status": dice.choice(["done", "failed", "cancelled", "queued", "running"])},
        "group": lambda dice, run: {"group": f"prompt {dice.randrange(run.n_trajectories // 8 + 9)}"},
        "part of an id": lambda dice, run: {"text": dice.choice([str(dice.randrange(10**7)), "T-00", "99", "none"])},
        "rewards": lambda dice, run: {"min": round(dice.random(), 3), "max": round(dice.random(), 3)},
        "no such reward": lambda dice, run: {"min": 2},
        "lengths": lambda dice, run: {"tokens_min": dice.randrange(8000), "tokens_max": dice.randrange(9000)},
        "flawed": lambda dice, run: {"flawed": 1},
        "flawed in a part": lambda dice, run: {"flawed": 1, **part(dice, run)},
        "kind in a part": lambda dice, run: {"finding": dice.choice(world.kinds), **part(dice, run)},
        "stop reason and kind": lambda dice, run: {"stop": dice.choice(STOPS), "finding": dice.choice(world.kinds)},
        "status and id": lambda dice, run: {"status": "done", "text": str(dice.randrange(10**6))},
        "reward and stop reason": lambda dice, run: {"min": 0.5, "stop": dice.choice(STOPS)},
    }


def pages(world: World) -> dict[str, Ask]:
    """What is asked: page -> the next address of it."""
    from inspector.runs.filters import ORDERS
    from rollouts.store.paging import cursor_of

    def any_run(dice: random.Random) -> Any:
        return dice.choice(world.large if dice.random() < 0.6 else world.some)

    def listed(sort: str | None, name: str, path: str = "") -> Ask:
        def ask(dice: random.Random) -> str:
            run = dice.choice([*world.large, world.live])
            order = sort or dice.choice(list(ORDERS))
            asked = filters(world)[name](dice, run)
            if order != "index":
                asked["sort"] = order
            if dice.random() < 0.4:  # far down in the list
                column = order.removeprefix("-")
                value = {"index": None, "reward": dice.random(), "n_tokens": dice.randrange(200, 8000)}.get(column, 1)
                asked["after"] = cursor_of(order, value, dice.randrange(run.n_trajectories))
            return f"/runs/{run.code}{path}?{urlencode(asked)}"

        return ask

    def trajectory(name: str, tab: str = "") -> Ask:
        def ask(dice: random.Random) -> str:
            run = dice.choice(world.large)
            code, _ = dice.choice(world.codes[run.pk])
            asked = filters(world)[name](dice, run) | {"sort": dice.choice(list(ORDERS))}
            return f"/trajectories/{code}{tab}?{urlencode(asked)}"

        return ask

    def of_run(path: str, *queries: str) -> Ask:
        return lambda dice: f"/runs/{any_run(dice).code}{path}{dice.choice(queries or ('',))}"

    found: dict[str, Ask] = {
        "list of runs": lambda dice: f"/?after={dice.choice([*world.some, *world.large]).code}",
        "list of runs, first part": lambda dice: dice.choice(["/", "/runs.json"]),
        "list of runs, filtered": lambda dice: (
            "/?" + urlencode({
                "text": dice.choice(["math", "grpo", "code 77", "nothing", "qwen", ""]),
                "status": dice.choice(["", "done", "failed", "running", "cancelled"]),
                "kind": dice.choice(["", "launch", "import"]),
            })
        ),
        "run": lambda dice: f"/runs/{any_run(dice).code}",
        "run, live": lambda dice: f"/runs/{world.live.code}",
        "run as JSON": of_run(".json"),
        "run, list of jobs": lambda dice: f"/runs/{any_run(dice).code}?part=run-jobs",
        "run, cost": of_run("/cost", "", *(f"?finding={kind}" for kind in world.kinds)),
        "run, cost as JSON": of_run("/cost.json"),
        "run, live, cost": lambda dice: f"/runs/{world.live.code}/cost",
        "checks": lambda dice: "/templates",
        "checks as JSON": lambda dice: "/templates.json",
        "check matrix": lambda dice: "/templates/matrix",
        "tokenizers": lambda dice: dice.choice(["/tokenizers", "/tokenizers.json"]),
        "shares": lambda dice: dice.choice(["/shares", "/shares.json"]),
        "API keys": lambda dice: dice.choice(["/tokens", "/tokens.json"]),
        "workers": lambda dice: dice.choice(["/workers", "/workers.json"]),
        "form of a launch": lambda dice: f"/runs/new?again={any_run(dice).code}",
        "form of an import": lambda dice: "/import",
    }
    for name in filters(world):
        found[f"run, by {name}"] = listed("index", name)
        found[f"run, by {name}, sorted"] = listed(None, name)
        found[f"trajectory, siblings by {name}"] = trajectory(name)
    for sort in ORDERS:
        found[f"run, sorted by {sort}"] = listed(sort, "nothing")
    found["run, filtered, as JSON"] = listed(None, "kind", ".json")
    for tab in ("/record", "/mask", "/deltas", "/compare", "/strategies"):
        found[f"trajectory{tab}"] = trajectory("nothing", tab)
    return found


class Slow:
    """Keeps the slowest form of each slow query, to explain it afterwards."""

    def __init__(self, ms: float) -> None:
        self._ms = ms
        self.found: dict[str, tuple[float, Any]] = {}

    def __call__(self, execute: Any, sql: str, params: Any, *more: Any) -> Any:
        start = time.perf_counter()
        try:
            return execute(sql, params, *more)
        finally:
            ms = (time.perf_counter() - start) * 1e3
            if ms > self._ms and ms > self.found.get(sql, (0.0, None))[0]:
                self.found[sql] = ms, params


class Cores:
    """For how long this process and its process in the database stood ready and got no core."""

    def __init__(self) -> None:
        from django.db import connection

        connection.ensure_connection()
        pids = ("self", str(connection.connection.info.backend_pid))
        # A database on another machine has no such file here.
        self._files = [file for pid in pids if (file := Path(f"/proc/{pid}/schedstat")).exists()]

    def waited_ms(self) -> float:
        return sum(int(file.read_text().split()[1]) for file in self._files) / 1e6


@dataclass(frozen=True)
class Measured:
    """The requests of one page, each in milliseconds."""

    whole: list[float]
    on_a_core: list[float]
    """Without the wait for a core."""
    own: list[float]
    """Processor time of this process."""
    queries: int
    """Of the last request."""


def measure(web: Client, ask: Ask, times: int, slow: Slow) -> Measured:
    """Ask for a page with other addresses, one after the other."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    dice, found = random.Random(1), Measured([], [], [], 0)
    web.get(ask(dice))  # templates are compiled, pages of the database read
    cores = Cores()
    for _ in range(times):
        address = ask(dice)
        start, cpu, waited = time.perf_counter(), time.process_time(), cores.waited_ms()
        with connection.execute_wrapper(slow):
            answer = web.get(address)
        found.whole.append((time.perf_counter() - start) * 1e3)
        found.own.append((time.process_time() - cpu) * 1e3)
        found.on_a_core.append(found.whole[-1] - (cores.waited_ms() - waited))
        if answer.status_code != 200:
            raise SystemExit(f"{address} is answered {answer.status_code}: {answer.content[:500]!r}")
    with CaptureQueriesContext(connection) as context:
        web.get(address)
    return replace(found, queries=len(context))


def percentile(values: list[float], part: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(part * 100) - 1]


def explained(slow: Slow) -> Iterator[str]:
    from django.db import connection

    for sql, (ms, params) in sorted(slow.found.items(), key=lambda one: -one[1][0]):
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS) {sql}", params)
            yield f"{ms:.0f} ms: {sql} {params}\n  " + "\n  ".join(row[0] for row in cursor.fetchall())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--database", required=True, help="DATABASE_URL of a PostgreSQL database of its own")
    parser.add_argument("--scale", type=float, default=1.0, help="of a million trajectories, when it is empty")
    parser.add_argument("--times", type=int, default=60, help="requests for each page")
    parser.add_argument("--only", default="", help="a word in the names of the pages")
    parser.add_argument("--explain", type=float, default=0, help="print the plans of queries above this many ms")
    options = parser.parse_args()
    os.environ.update(DATABASE_URL=options.database, DJANGO_SETTINGS_MODULE="tests.settings")
    if "INSPECTOR_TEST_DATA" not in os.environ:
        os.environ["INSPECTOR_TEST_DATA"] = tempfile.mkdtemp(prefix="inspector-scale-")
    import logging

    import django

    django.setup()
    from django.contrib.auth import get_user_model
    from django.core.management import call_command
    from django.test import Client

    from benchmarks.scale_data import fill
    from rollouts.store.models import Run, StoredFinding, StoredStep, StoredTrajectory

    call_command("migrate", verbosity=0)
    user, _ = get_user_model().objects.get_or_create(username="bench", defaults={"is_superuser": True})
    if not Run.objects.exists():
        start = time.monotonic()
        fill(options.scale)
        print(f"filled in {time.monotonic() - start:.0f} s")
    held = {"runs": Run, "trajectories": StoredTrajectory, "steps": StoredStep, "findings": StoredFinding}
    for words, model in held.items():
        print(f"{model.objects.count():>9,} {words}")
    logging.disable(logging.INFO)
    web, slow, late = Client(), Slow(options.explain or 1e9), []
    web.force_login(user)
    print(f"{'page':46} {'median':>7} {'p95':>7} {'max':>7} {'p95 on a core':>14} {'own':>6} queries")
    for name, ask in pages(world()).items():
        if options.only in name:
            found = measure(web, ask, options.times, slow)
            p95 = percentile(found.on_a_core, 0.95)
            late += [name] * (p95 > GOAL_MS)
            print(
                f"{name:46} {statistics.median(found.whole):7.1f} {percentile(found.whole, 0.95):7.1f} "
                f"{max(found.whole):7.1f} {p95:14.1f} {statistics.median(found.own):6.1f} {found.queries:3}"
                f"{'  LATE' * (p95 > GOAL_MS)}",
                flush=True,
            )
    for text in explained(slow):
        print(f"\n{text}")
    print(f"\n{len(late)} pages take more than {GOAL_MS} ms at p95{': ' * bool(late)}{', '.join(late)}")


if __name__ == "__main__":
    main()
