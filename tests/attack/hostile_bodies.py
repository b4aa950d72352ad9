"""Bodies that are small on the wire and large or slow to read."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, Any

from rollout_inspector.formats.containers.compression import zstd

if TYPE_CHECKING:
    from benchmarks.measures.gets_under_attack import Server

Body = Callable[[float], bytes]
"""Makes a body; its argument scales what the body becomes. At 1 it is as large as the review's."""


def blank_lines(scale: float = 1) -> bytes:
    """70 MB of line ends in 2 kB."""
    return zstd.compress(b"\n" * int(70_000_000 * scale) + b"{}\n")


def lines_of_spaces(scale: float = 1) -> bytes:
    """Blank lines that are not empty."""
    return zstd.compress((b" " * 70 + b"\n") * int(1_000_000 * scale))


def one_line(piece: bytes, n_bytes: float) -> bytes:
    """A list of one value in one line, packed."""
    return gzip.compress(b'{"a":[' + piece * int(n_bytes / len(piece)) + b"0]}\n", 9)


def deltas(n_steps: int, n_lines: int = 1, n_ids: int = 1_000_000) -> bytes:
    """Lines of our own format whose steps all repeat one long prompt."""
    first = {"delta_ids": ["ids"], "completion_ids": [2]}
    again = {"parent": 0, "shared_length": n_ids + 1, "delta_ids": [1], "completion_ids": [2]}
    ids = b",".join([b"1"] * n_ids)
    lines = (own_line(f"t{n}", [first, *[again] * n_steps]).replace(b'"ids"', ids) for n in range(n_lines))
    return gzip.compress(b"".join(lines), 1)


def chained_deltas(n_steps: int, n_ids: int = 1_000_000) -> bytes:
    """As :func:`deltas`, but each step has another parent."""
    steps: list[dict[str, Any]] = [{"delta_ids": [1] * n_ids, "completion_ids": [2]}]
    steps += [
        {"parent": n, "shared_length": n_ids - n, "delta_ids": [n], "completion_ids": [2]} for n in range(n_steps)
    ]
    return gzip.compress(own_line("chain", steps), 6)


def own_line(name: str, steps: list[dict[str, Any]], **more: Any) -> bytes:
    """A line of our own format."""
    value = {"format": "rollout-inspector", "version": 1, "external_id": name, "steps": steps, **more}
    return json.dumps(value).encode() + b"\n"


def parquet_of_one_value(n_rows: int = 500, n_bytes: int = 4_000_000) -> bytes:
    """A Parquet file of 1 kB whose rows all hold one large text."""
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * n_rows, pyarrow.int32()), ["x" * n_bytes])
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), file, compression="zstd")
    return file.getvalue()


def batch_with_a_large_field(n: int = 20_000, n_bytes: int = 1_000_000) -> bytes:
    """One line that is a batch of ``n`` trajectories, with one large text that belongs to all of them."""
    value = {
        "prompt_ids": [[1]] * n, "completion_ids": [[2]] * n, "logprobs": [[0.0]] * n, "note": "x" * n_bytes,
    }
    return gzip.compress(json.dumps(value).encode() + b"\n", 6)


BODIES: dict[str, Callable[[], bytes]] = {
    "line ends": blank_lines,
    "lines of spaces": lines_of_spaces,
    "empty objects": lambda: one_line(b"{},", 40e6),
    "empty lists": lambda: one_line(b"[],", 40e6),
    "small objects": lambda: one_line(b'{"a":1},', 60e6),
    "texts": lambda: one_line(b'"ab",', 60e6),
    "numbers": lambda: one_line(b"1000,", 120e6),
    "fractions": lambda: one_line(b"1e9,", 120e6),
    "escapes": lambda: gzip.compress(b'{"a":"' + rb"\u00e9\n" * 12_000_000 + b'"}\n'),
    "a long number": lambda: gzip.compress(b'{"a":' + b"9" * 100_000_000 + b"}\n"),
    "nesting": lambda: gzip.compress(b"[" * 100_000_000 + b"\n"),
    "keys": lambda: gzip.compress(b"{" + b",".join(b'"%d":1' % n for n in range(4_000_000)) + b"}\n", 6),
    "a long line without end": lambda: gzip.compress(b'{"a":"' + b"x" * 200_000_000),
    "deltas": lambda: deltas(6000),
    "deltas in many lines": lambda: deltas(40, 60),
    "chained deltas": lambda: chained_deltas(6000),
    "one value in Parquet": parquet_of_one_value,
    "a batch with a large field": batch_with_a_large_field,
}
"""Each hostile body by what it is made of."""


def push_them(server: Server, stop: Event, n: int = 8) -> None:
    """Eight clients that push the bodies again and again, each the next one. Prints what was answered."""
    names = list(BODIES)
    made: dict[str, bytes] = {}
    answers: Counter[str] = Counter()

    def client(first: int) -> None:
        turn = first
        while not stop.is_set():
            name = names[turn % len(names)]
            turn += 1
            body = made[name] = made.get(name) or BODIES[name]()
            try:
                status, text = server.push(body)
                answers[f"{name}: {status} {text[:150].decode(errors='replace')}"] += 1
            except (OSError, http.client.HTTPException) as error:
                answers[f"{name}: {error!r}"] += 1

    threads = [threading.Thread(target=client, args=(number * 2,), daemon=True) for number in range(n)]
    for thread in threads:
        thread.start()
    stop.wait()
    for name, count in sorted(answers.items()):
        print(f"{count:4} x {name}", flush=True)
