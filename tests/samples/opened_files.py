"""Files that are opened where they lie: one of each container, and what an index lists of them."""

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_inspector.formats import FORMATS
from rollout_inspector.opened.index import FileIndex
from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from tests.samples.formats import CALL, GYM, TRAIN, changed, jsonl, own_line


def trajectory(name: str, n: int = 3) -> Trajectory:
    first = Step(ids_array(range(n)), ids_array([7, 8]), np.array([-0.5, -0.25], np.float32))
    second = Step(np.concatenate([first.stream, ids_array([9])]), ids_array([4]), np.array([-1.0], np.float32))
    return Trajectory(name, (first, second), reward=float(n))


def own_lines(*names: str) -> bytes:
    return b"".join(own_line(trajectory(name)) for name in names)


def own_parquet(*names: str) -> bytes:
    file = io.BytesIO()
    assert FORMATS["own_parquet"].write is not None
    FORMATS["own_parquet"].write([trajectory(name, 3 + n) for n, name in enumerate(names)], file)
    return file.getvalue()


def rows_of_parquet(values: list[dict[str, object]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(values), file, row_group_size=2)
    return file.getvalue()


SESSIONS = [changed(changed(CALL, "session_id", to=f"s{n % 3}"), "response", "id", to=f"c{n}") for n in range(7)]
TRACE = {"id": "e0", "nodes": [
    {"parent": None, "message": {"role": "user", "content": "a"}, "sampled": False, "token_ids": [1], "mask": [0]},
    {"parent": 0, "message": {"role": "assistant", "content": "b"}, "sampled": True, "token_ids": [3, 4],
     "mask": [1, 1], "logprobs": [-0.1, -0.2]}]}
FILES = {
    "lines.jsonl": own_lines("a", "b", "c"),
    "gym.jsonl": jsonl(*[changed(GYM, "_ng_task_index", to=n) for n in range(4)]),
    "blank.jsonl": b"\n\n" + own_lines("a") + b"  \n\n" + own_lines("b").rstrip(),
    "packed.jsonl.gz": gzip.compress(own_lines("a", "b", "c")),
    "array.json": json.dumps([changed(GYM, "_ng_task_index", to=n) for n in range(3)], indent=1).encode(),
    "own.parquet": own_parquet("a", "b", "c"),
    "gym.parquet": rows_of_parquet([{"token_ids": [1, 2, n], "loss_mask": [0, 1, 1], "reward": 0.5} for n in range(5)]),
    "calls.jsonl": jsonl(*SESSIONS),
    "rows.jsonl": jsonl(TRAIN, changed(TRAIN, "idx", to=8)),
    "traces.jsonl": jsonl(TRACE, changed(TRACE, "id", to="e1")),
    "batch.json": json.dumps([{"traces": [TRACE, TRACE], "id": "one"}, {"traces": [TRACE], "id": "two"}]).encode(),
}


def read_all(index: FileIndex) -> list[str]:
    assert all(True for _ in index.work())
    return [row["name"] for row in index.lines(0, 1000)]
