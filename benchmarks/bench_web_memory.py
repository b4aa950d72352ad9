"""By how much the web processes grow in ten thousand mixed requests. Prints MB before, after a first round, and after.

    python -m benchmarks.bench_web_memory [--requests 10000] [--clients 4]

A server of its own is started. The first tenth of the requests fills what is kept on purpose: connections, templates,
byte tables, caches with a bound. The growth from there on is what counts; the goal is 64 MB for all processes together.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

from tests.conftest import wait_until
from tests.samples.server import LINK, PAGES, Visitor, gym_lines, processes_of, serving

GOAL_MB = 64


def web_bytes(data: Path) -> int:
    """Memory of the web processes that is theirs alone."""
    n_bytes = 0
    for pid in processes_of(data):
        folder = Path(f"/proc/{pid}")
        if b"gunicorn" in (folder / "cmdline").read_bytes():
            anonymous = re.search(r"RssAnon:\s+(\d+)", (folder / "status").read_text())
            n_bytes += int(anonymous[1]) << 10 if anonymous else 0
    return n_bytes


def addresses(visitor: Visitor, run: str) -> list[str]:
    """Every kind of page, of the run and of many trajectories too, with other windows and searches each time."""
    items = visitor.ask(f"/api/v1/runs/{run}/trajectories?limit=100").json()["items"]
    found = [*PAGES, f"/runs/{run}", f"/runs/{run}.json", f"/api/v1/runs/{run}", f"/api/v1/runs/{run}/trajectories"]
    for n, code in enumerate(item["code"] for item in items):
        found += [f"/trajectories/{code}", f"/trajectories/{code}.json", f"/trajectories/{code}?t={n}-{n + 9}"]
        found += [f"/api/v1/trajectories/{code}", f"/search?by=text&q=a{n}", f"/runs/{run}?sort=-reward&from={n}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    statuses: Counter[int] = Counter()
    folder = tempfile.TemporaryDirectory()
    data = Path(folder.name) / "data"
    with folder, serving(data) as (_, said):
        link = LINK.search(said.read_text())
        assert link is not None
        visitor = Visitor(link[1])
        upload = {"files": ("a.jsonl", gym_lines(0, 300))}
        run = visitor.submit("/import.json", data={"format": "auto"}, files=upload).json()["code"]
        wait_until(lambda: visitor.ask(f"/api/v1/runs/{run}").json()["status"] == "done", 240, "the import ends")
        paths = addresses(visitor, run)
        sizes = [web_bytes(data)]
        began = time.monotonic()
        with ThreadPoolExecutor(options.clients) as pool:
            for n in (options.requests // 10, options.requests - options.requests // 10):
                statuses.update(pool.map(lambda path: visitor.ask(path).status_code, islice(cycle(paths), n)))
                sizes.append(web_bytes(data))
        seconds = time.monotonic() - began
    before, warm, after = (size / 1e6 for size in sizes)
    print(f"{options.requests:,} requests of {len(paths)} addresses in {seconds:.0f} s, by status {dict(statuses)}")
    print(f"web processes: {before:.0f} MB, after a tenth {warm:.0f} MB, at the end {after:.0f} MB")
    print(f"growth after the first tenth: {after - warm:.1f} MB; the goal is at most {GOAL_MB} MB")


if __name__ == "__main__":
    main()
