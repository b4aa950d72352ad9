"""The queries of docs/scale.md answer what they say, in DuckDB, over the tables of an audit and over our own export."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector import formats
from rollout_inspector.commands.main import main
from rollout_inspector.formats import Source
from rollout_inspector.formats.readers import inspector_parquet
from rollout_inspector.guard import shard_audit
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.gallery import BUNDLE
from rollouts.sampling.demo_policy import MODEL_DIR
from tests.conftest import ROOT
from tests.samples.guard import in_this_process, lines_of

QUERIES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(encoding="utf-8"), re.DOTALL)


def answers(folder: Path, queries: list[str]) -> list[list[list[Any]]]:
    """The rows of each query, by one process of its own: DuckDB writes about its own leaks when a process ends."""
    code = (
        "import duckdb, json, sys; print(json.dumps([duckdb.sql(one).fetchall() for one in json.loads(sys.argv[1])]))"
    )
    command = [sys.executable, "-c", code, json.dumps(queries)]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, check=True, env=os.environ).stdout)


def test_the_queries_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_inspector.commands.audit.on_processes", in_this_process)
    for step, names in ((3, ("clean",)), (4, ("clean", "observation_trained"))):
        path = tmp_path / "files" / f"step_{step}" / "rollouts.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(lines_of(*names))
    (tmp_path / "files" / "gallery.jsonl").write_bytes(BUNDLE.read_bytes())
    assert (
        main(["audit", str(tmp_path / "files"), "--output", str(tmp_path / "out"), "--tokenizer", str(MODEL_DIR)]) == 0
    )
    shard_audit.tools_of.cache_clear()
    read = [one for one in formats.read(Source.of_path(BUNDLE))[1] if isinstance(one, Trajectory)]
    with (tmp_path / "out" / "export.parquet").open("wb") as file:
        inspector_parquet.write(read, file)
    ids = next(step.completion_ids.tolist() for one in read for step in one.steps if len(step.completion_ids) > 3)
    first, second = ids[1:3]
    queries = [one.replace("= 9", f"= {first}").replace("= 3", f"= {second}") for one in QUERIES]
    assert len(queries) == 4 and queries[3] != QUERIES[3]
    rates, templates, pairs, places = answers(tmp_path / "out", queries)
    found = {step: (n, rate) for step, n, rate in rates}
    assert found[3] == (1, 0.0) and found[4] == (2, 0.5)
    assert templates and all(n > 0 for _, n, _ in templates)
    lost = [tokens for *_, tokens in templates if tokens is not None]
    assert lost == sorted(lost, reverse=True) and lost[0] > 0
    assert pairs and all(expected != actual and n > 0 for expected, actual, n, _ in pairs)
    wanted = Counter(
        (one.external_id, number, start)
        for one in read
        for number, step in enumerate(one.steps)
        for start in range(len(step.completion_ids) - 1)
        if step.completion_ids[start : start + 2].tolist() == [first, second]
    )
    assert wanted and Counter(map(tuple, places)) == wanted
