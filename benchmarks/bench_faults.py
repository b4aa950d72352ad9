"""Kills random processes of a running server in the middle of its work, and looks at what is left in the database.

    python -m benchmarks.bench_faults --rounds 300 --record faults.jsonl
    python -m benchmarks.bench_faults --rounds 40 --database postgres://postgres@127.0.0.1:5432/NEW_AND_EMPTY
    python -m benchmarks.bench_faults --rounds 40 --own-postgres

In the background, with what was counted so far at any time:

    nice -n 19 python -m benchmarks.bench_faults --rounds 300 --minutes 25 --record faults.jsonl > faults.log 2>&1 &
    python -m benchmarks.bench_faults --summary --record faults.jsonl

Each round asks for a launch, an import, pushes, an export, a template check, a replay, weights and searches at once.
In every second round it kills one to four processes with SIGKILL, chosen by the seed, and waits until all have ended.
What they stored must equal what an undisturbed round stored, where one followed the other. In the other rounds nothing
is killed: there one writer may only disturb another. ``--record`` appends each round to a file, and goes on after the
rounds that stand there: many short measurements make a long one.
The server is `manage.py serve` in a data folder of its own. With ``--own-postgres`` the measurement makes
a PostgreSQL, and restarting it like a crash (``pg_ctl restart -m immediate``) is one more way to kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.fault_work import Work

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"Rollout Inspector is ready: (http://[^/]+)/")
FILES_BYTES = 8_000_000
"""Size of the two files that are imported and pushed."""
ROUND_SECONDS = 300.0
"""Work that has not ended after so long is stuck."""
LATEST_KILL_SECONDS = 8.0


# -- the processes of the server ---------------------------------------------------------------------------------------


def read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ")
    except OSError:  # it has ended
        return ""


def processes(data: Path) -> dict[int, tuple[int, str]]:
    """Key of each living process of the server -> (its parent's key, its command line)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        # A Redis writes its title where its environment stood.
        ours = f"INSPECTOR_DATA={data} " in read(pid, "environ") or f"unixsocket:{data}/" in read(pid, "cmdline")
        if ours and pid != os.getpid():
            fields = read(pid, "stat").rpartition(")")[2].split()
            if fields and fields[0] != "Z":
                found[pid] = int(fields[1]), read(pid, "cmdline")
    return found


def is_child_of_its_kind(pid: int, running: dict[int, tuple[int, str]], word: str) -> bool:
    parent, command = running[pid]
    return word in command and word in running.get(parent, (0, ""))[1]


def is_main_of_its_kind(pid: int, running: dict[int, tuple[int, str]], word: str) -> bool:
    return word in running[pid][1] and not is_child_of_its_kind(pid, running, word)


Test = Callable[[int, dict[int, tuple[int, str]]], bool]
TARGETS: dict[str, Test] = {
    "engine worker": lambda pid, running: is_main_of_its_kind(pid, running, "-P threads"),
    "engine child": lambda pid, running: "import engine_process;" in running[pid][1],
    "storage process": lambda pid, running: "import storage_process;" in running[pid][1],
    "default worker": lambda pid, running: is_main_of_its_kind(pid, running, "-P prefork"),
    "default child": lambda pid, running: is_child_of_its_kind(pid, running, "-P prefork"),
    "web worker": lambda pid, running: is_child_of_its_kind(pid, running, "gunicorn"),
    "Redis": lambda pid, running: "unixsocket:" in running[pid][1],
}


POSTGRES = "PostgreSQL, restarted"


class OwnPostgres:
    """A PostgreSQL of this measurement, with the installed programs, as the user `postgres` where we are root."""

    def __init__(self, folder: Path) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
        self._bin = found[-1].parent if found else Path(shutil.which("pg_ctl") or "pg_ctl").parent
        self._prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self.folder = folder
        folder.mkdir()
        if self._prefix:
            folder.parent.chmod(0o755)
            shutil.chown(folder, "postgres")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"postgres://postgres@127.0.0.1:{port}/postgres"
        self._run("initdb", "-U", "postgres", "-A", "trust")
        self._options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"
        self._run("pg_ctl", "start", "-w", "-o", self._options, "-l", str(folder / "log"))

    def _run(self, name: str, *arguments: str) -> None:
        command = [*self._prefix, str(self._bin / name), "-D", str(self.folder / "cluster"), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")

    def restart(self) -> None:
        """End it at once, as a crash does, and start it again. It reads its log back before it answers."""
        from django.db import connections

        connections.close_all()
        self._run("pg_ctl", "restart", "-m", "immediate", "-w", "-o", self._options, "-l", str(self.folder / "log"))

    def close(self) -> None:
        self._run("pg_ctl", "stop", "-m", "immediate")


def kill(data: Path, target: str, rng: random.Random, postgres: OwnPostgres | None) -> bool:
    """Kill a process of this kind. False if there is none now."""
    if target == POSTGRES:
        if postgres is not None:
            postgres.restart()
        return postgres is not None
    running = processes(data)
    pids = sorted(pid for pid in running if TARGETS[target](pid, running))
    if not pids:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(pids), signal.SIGKILL)
        return True
    return False


@contextlib.contextmanager
def serving(data: Path) -> Iterator[str]:
    """A server; gives its address."""
    said = data.parent / "said"
    with said.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "serve", "--port", "8000"],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )
    try:
        while not (found := LINK.search(said.read_text())):
            assert process.poll() is None, said.read_text()
            time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


# -- rounds ------------------------------------------------------------------------------------------------------------


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.3)
    return condition()


def ask_all(work: list[Work], n: int) -> None:
    for one in work:
        one.ask(n)


def kills_of_a_round(data: Path, rng: random.Random, work: list[Work], postgres: OwnPostgres | None) -> list[str]:
    """Kill one to four processes at random moments of the work; several at once in a third of the rounds."""
    done = []
    at_once = rng.random() < 1 / 3
    began = time.monotonic()
    moments = sorted(rng.uniform(0, LATEST_KILL_SECONDS) for _ in range(rng.choice([1, 2, 3, 4])))
    for moment in [moments[0]] * len(moments) if at_once else moments:
        time.sleep(max(0.0, began + moment - time.monotonic()))
        if all(one.has_ended() for one in work):
            break
        targets = [*sorted(TARGETS), *[POSTGRES] * (postgres is not None)]
        for target in rng.sample(targets, len(targets)):
            if kill(data, target, rng, postgres):
                done.append(target)
                break
    return done


def judge(one: Work) -> dict[str, Any]:
    """How a piece of work ended, after what a person would do if it did not end by itself. ``why`` is for a reader."""
    verdict = one.verdict() if one.has_ended() else None
    if verdict is not None and verdict.is_whole:
        return {"how": "unaided"}
    why = f"{verdict.why if verdict else 'it has not ended'}"
    if verdict is not None:
        with contextlib.suppress(ValueError):  # there is nothing to resume
            one.resume()
        if wait(one.has_ended, ROUND_SECONDS) and (verdict := one.verdict()).is_whole:
            return {"how": "after Resume", "why": why}
    counts = {} if verdict is None else {"lost": verdict.lost, "doubled": verdict.doubled}
    return {"how": "stuck", "why": f"{why}; Resume did not help: {verdict or 'it has not ended'}"} | counts


def rounds(data: Path, url: str, options: argparse.Namespace, postgres: OwnPostgres | None, record: list[Any]) -> None:
    """Rounds until ``record`` has as many as asked for."""
    from benchmarks import fault_work

    files = fault_work.gym_files(data.parent, FILES_BYTES)
    token = fault_work.token_for_pushes()
    work = [kind(files, url, token) for kind in fault_work.KINDS]
    imported = next(one for one in work if isinstance(one, fault_work.Imported))
    assert wait(lambda: is_well(url), 120), "the server is not well"
    # Undisturbed: what every later round must equal.
    began = time.monotonic()
    for one in work:
        if isinstance(one, fault_work.OfRun | fault_work.Searched):
            one.source = imported.run
        one.ask(0)
        assert wait(one.has_ended, ROUND_SECONDS) and one.verdict().is_whole, (one.kind, one.verdict())
        one.keep()
    print(f"undisturbed, one after another: {time.monotonic() - began:.0f} s", flush=True)
    running = processes(data)
    absent = [name for name, is_target in TARGETS.items() if not any(is_target(pid, running) for pid in running)]
    assert not absent, f"no process is {' or '.join(absent)}: nothing could be killed"
    end = time.monotonic() + 60 * options.minutes
    while len(record) < options.rounds and time.monotonic() < end:
        n = len(record) + 1
        if not wait(lambda: is_well(url), 120):
            print("the server is not well after 120 s", flush=True)
        ask_all(work, n)
        began = time.monotonic()
        rng = random.Random(1000 * options.seed + n)
        kills = [] if n % 2 else kills_of_a_round(data, rng, work, postgres)
        last = time.monotonic()
        ended: dict[str, float] = {}

        def have_ended(ended: dict[str, float] = ended, last: float = last) -> bool:
            for one in work:
                if one.kind not in ended and one.has_ended():
                    ended[one.kind] = max(0.0, time.monotonic() - last)
            return len(ended) == len(work)

        wait(have_ended, ROUND_SECONDS)
        seconds = round(time.monotonic() - began)
        outcomes = {one.kind: judge(one) | {"seconds": round(ended.get(one.kind, ROUND_SECONDS))} for one in work}
        record.append({"n": n, "is_calm": n % 2 == 1, "kills": kills, "seconds": seconds, "work": outcomes})
        if options.record:
            with options.record.open("a") as file:
                file.write(json.dumps(record[-1]) + "\n")
        said = [f"{kind}: {outcome['how']}, {outcome['why']}" for kind, outcome in outcomes.items() if "why" in outcome]
        what = f"round {n}: {', '.join(kills) or 'no kills'}; {seconds} s."
        print(f"{what} {' | '.join(said) or 'all whole'}", flush=True)


def summary(record: list[Any]) -> str:
    """A table of what was counted, and the rounds in which a piece of work was not whole unaided."""
    calm, killed = ([one for one in record if one["is_calm"] == is_calm] for is_calm in (True, False))
    columns = ("without kills", "whole", "with kills", "whole unaided", "after Resume", "stuck", "lost", "doubled",
               "longest [s]")
    lines = [f"| work | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for kind in record[0]["work"] if record else ():
        each = [one["work"][kind] for one in record]
        how = Counter(outcome["how"] for outcome in each)
        unaided = [sum(one["work"][kind]["how"] == "unaided" for one in part) for part in (calm, killed)]
        sums = (sum(outcome.get(name, 0) for outcome in each) for name in ("lost", "doubled"))
        cells = (len(calm), unaided[0], len(killed), unaided[1], how["after Resume"], how["stuck"], *sums,
                 max(outcome["seconds"] for outcome in each))
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    kills = Counter(name for one in record for name in one["kills"])
    lines.append(f"{len(record)} rounds in {sum(one['seconds'] for one in record) / 60:.0f} minutes; killed "
                 f"{kills.total()}: {', '.join(f'{name} {times}' for name, times in sorted(kills.items())) or 'none'}")
    lines += [f"round {one['n']} ({', '.join(one['kills']) or 'no kills'}): {kind} {outcome['how']}: {outcome['why']}"
              for one in record for kind, outcome in one["work"].items() if "why" in outcome]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds in all; every second one without kills")
    parser.add_argument("--record", type=Path, help="a file that each round is appended to, and that is gone on from")
    parser.add_argument("--summary", action="store_true", help="only show what the record holds")
    parser.add_argument("--minutes", type=float, default=600, help="begin no round after so many minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", default="", help="DATABASE_URL of an empty database (default: SQLite)")
    parser.add_argument("--own-postgres", action="store_true", help="make a PostgreSQL, and restart it too")
    options = parser.parse_args()
    record = []
    if options.record and options.record.exists():
        record = [json.loads(line) for line in options.record.read_text().splitlines()]
    if options.summary:
        print(summary(record))
        return
    with tempfile.TemporaryDirectory(prefix="inspector-faults-") as folder, contextlib.ExitStack() as stack:
        data = Path(folder) / "data"
        postgres = OwnPostgres(Path(folder) / "postgres") if options.own_postgres else None
        if postgres is not None:
            stack.callback(postgres.close)
            options.database = postgres.url
        os.environ |= {"INSPECTOR_DATA": str(data), "DATABASE_URL": options.database, "HF_HUB_OFFLINE": "1",
                       "DJANGO_SETTINGS_MODULE": "inspector.settings"}
        os.environ.pop("REDIS_URL", None)
        with serving(data) as url:
            import django

            django.setup()
            rounds(data, url, options, postgres, record)
        print(summary(record))


if __name__ == "__main__":
    main()
