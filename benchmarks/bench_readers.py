"""Two hundred people read while an import and a launch work: does anybody see an error, how long do pages take.

    python -m benchmarks.bench_readers
    python -m benchmarks.bench_readers --database postgres://postgres@127.0.0.1:5432/NEW_AND_EMPTY

The server is `manage.py serve` with its own workers, in a data folder of its own. Each reader keeps one connection and
asks for a page every few seconds, as a person with an open live page does. Half of the pages belong to the run that is
being imported or launched. The first stretch is measured while the server has nothing else to do, the second while an
import and a launch are always under way. An answer from 500 on and a connection that is refused, reset or not answered
within 30 s count as errors; so does 429, but for the limits that a form has.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measures.gets_under_attack import Server, serving

TIMEOUT_SECONDS = 30.0
FILES_BYTES = 24_000_000
"""Size of the files of one import."""
PROMPTS = 24
"""Of one launch; each has four trajectories."""
FROM_ERROR = 500


@dataclass(frozen=True)
class Asked:
    """One request of a reader."""

    kind: str
    path: str
    headers: dict[str, str]


def pages_of(run: str, trajectories: list[str], rng: random.Random) -> Asked:
    """A page that somebody asks for, drawn by the seed."""
    one = rng.choice(trajectories) if trajectories else ""
    live = {"HX-Request": "true"}
    choices = [
        Asked("list of runs", "/", {}),
        Asked("list, live", "/?have=x", live),
        Asked("list, twin", "/runs.json", {}),
        Asked("search", f"/?text={rng.choice(['import', 'launch', 'under'])}", {}),
        Asked("run", f"/runs/{run}", {}),
        Asked("run, live", f"/runs/{run}?have=x", live),
        Asked("run, twin", f"/runs/{run}.json", {}),
        Asked("run, filtered", f"/runs/{run}?flawed=1&sort=-n_tokens", {}),
        Asked("run, text", f"/runs/{run}?text={rng.randrange(10)}", {}),
    ]
    if one:
        at = rng.randrange(400)
        choices += [
            Asked("trajectory", f"/trajectories/{one}", {}),
            Asked("trajectory, live", f"/trajectories/{one}?have=x", live),
            Asked("tokens", f"/trajectories/{one}?t={at}-{at + 20}", {}),
            Asked("trajectory, twin", f"/trajectories/{one}.json", {}),
            Asked("mask", f"/trajectories/{one}/mask", {}),
        ]
    return rng.choice(choices)


class Readers:
    """Readers of one stretch of time. They know the latest run and read its trajectories from its twin."""

    def __init__(self, server: Server, n: int, pause: float, seed: int) -> None:
        self.server, self.n, self.pause, self.seed = server, n, pause, seed
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.errors: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.run: str | None = None
        """The run that is under way; None = only the one that is there."""

    def read(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._reader, args=(k,)) for k in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _reader(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        time.sleep(rng.uniform(0, self.pause))
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=TIMEOUT_SECONDS)
        known: dict[str, list[str]] = {}
        while time.monotonic() < self._until:
            run = self.run if self.run is not None and rng.random() < 0.5 else self.server.run
            if not known.get(run) and rng.random() < 0.3:
                known[run] = self._trajectories(connection, run)
            self._ask(connection, pages_of(run, known.get(run, []), rng))
            time.sleep(rng.uniform(0.5, 1.5) * self.pause)
        connection.close()

    def _trajectories(self, connection: http.client.HTTPConnection, run: str) -> list[str]:
        body = self._ask(connection, Asked("run, twin", f"/runs/{run}.json", {}))
        try:
            return [one["code"] for one in json.loads(body or b"{}").get("trajectories", [])]
        except (ValueError, TypeError, KeyError):
            return []

    def _ask(self, connection: http.client.HTTPConnection, asked: Asked) -> bytes | None:
        begun = time.perf_counter()
        for last in (False, True):
            fresh = connection.sock is None
            try:
                connection.request("GET", asked.path, headers={"Cookie": self.server.cookie, **asked.headers})
                answer = connection.getresponse()
                body = answer.read()
                break
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                connection.close()
                # A server may end a connection that waits; a browser then asks again over a new one.
                if fresh or last:
                    self.errors[f"{asked.kind}: {type(error).__name__}"] += 1
                    return None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self.errors[f"{asked.kind}: {type(error).__name__}"] += 1
                return None
        self.statuses[answer.status] += 1
        if answer.status >= FROM_ERROR or answer.status == 429:
            self.errors[f"{asked.kind}: {answer.status} {body[:200]!r}"] += 1
        else:
            self.seconds[asked.kind].append(time.perf_counter() - begun)
        return body if answer.status == 200 else None

    def quantile(self, share: float, kind: str | None = None) -> float:
        """Milliseconds that a share of the answers stays below."""
        found = self.seconds[kind] if kind else [one for some in self.seconds.values() for one in some]
        held = sorted(found)
        return 1000 * held[min(int(share * len(held)), len(held) - 1)] if held else 0.0

    @property
    def n_answers(self) -> int:
        return sum(map(len, self.seconds.values()))


class Working:
    """Keeps an import and a launch under way, until it is closed."""

    def __init__(self, server: Server, readers: Readers) -> None:
        from benchmarks import fault_work

        files = fault_work.gym_files(server.data.parent, FILES_BYTES)
        self.kinds: list[Any] = [
            kind(files, f"http://{server.host}:{server.port}", server.token)
            for kind in (fault_work.Imported, fault_work.Launched)
        ]
        self.readers, self.done, self.faults = readers, Counter[str](), list[str]()
        self._stops = threading.Event()
        self._threads = [threading.Thread(target=self._keep, args=(one,)) for one in self.kinds]

    def __enter__(self) -> Working:
        for thread in self._threads:
            thread.start()
        return self

    def _keep(self, one: Any) -> None:
        from django.db import connection

        n = 0
        while not self._stops.is_set():
            n += 1
            one.ask(n)
            self.readers.run = one.run.code
            while not one.has_ended():
                time.sleep(0.3)
            if one.run.status != "done":
                self.faults.append(f"{one.kind}: {one.run.status} {one.run.error[:200]}")
            self.done[one.kind] += 1
        connection.close()

    def __exit__(self, *_: object) -> None:
        self._stops.set()
        for thread in self._threads:
            thread.join(300)


def measure(server: Server, options: argparse.Namespace, environment: dict[str, str]) -> bool:
    """Prints what readers saw. Returns whether nobody saw an error."""
    os.environ.update(environment, INSPECTOR_DATA=str(server.data), DJANGO_SETTINGS_MODULE="inspector.settings")
    import django

    django.setup()
    Readers(server, 8, 0.1, 0).read(3)  # what a first request loads
    idle = Readers(server, options.readers, options.pause, 1)
    idle.read(options.seconds)
    busy = Readers(server, options.readers, options.pause, 2)
    with Working(server, busy) as working:
        time.sleep(2)
        busy.read(options.seconds)
    print(f"{'page':22} {'idle p95':>9} {'busy p95':>9} {'busy n':>7}   ms; {options.readers} readers")
    for kind in sorted(busy.seconds):
        print(
            f"{kind:22} {idle.quantile(0.95, kind):9.0f} {busy.quantile(0.95, kind):9.0f} {len(busy.seconds[kind]):7}"
        )
    before, after = idle.quantile(0.95), busy.quantile(0.95)
    print(f"all: p50 {idle.quantile(0.5):.0f} ms idle, {busy.quantile(0.5):.0f} ms busy")
    print(f"all: p95 {before:.0f} ms idle, {after:.0f} ms busy, {after / max(before, 0.1):.1f} times")
    print(f"longest {idle.quantile(1):.0f} ms idle, {busy.quantile(1):.0f} ms busy")
    print(f"answers {idle.n_answers} idle, {busy.n_answers} busy, {dict(busy.statuses)}")
    print(f"work that ended: {dict(working.done)}; faults of it: {working.faults or 'none'}")
    errors = idle.errors + busy.errors
    print(f"errors: {errors.total()}", *(f"  {n:4} x {said}" for said, n in errors.most_common(20)), sep="\n")
    return not errors and not working.faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each of the two stretches")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two requests of a reader, on average")
    parser.add_argument("--database", default="", help="DATABASE_URL of an empty database (default: SQLite)")
    options = parser.parse_args()
    for name in ("REDIS_URL", "INSPECTOR_FILES", "DATABASE_URL"):
        os.environ.pop(name, None)
    environment = {"DATABASE_URL": options.database, "HF_HUB_OFFLINE": "1"}
    with serving(**environment) as server:
        is_well = measure(server, options, environment)
        print(f"log of the server:\n{_faults_in(server.data.parent / 'said')}")
    sys.exit(0 if is_well else 1)


def _faults_in(log: Path) -> str:
    """The lines of a log that speak of errors."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line or "locked" in line]
    return "\n".join(lines[-20:]) or "no error"


if __name__ == "__main__":
    main()
