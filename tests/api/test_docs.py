"""The examples of docs/api.md work as they are written."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from inspector.api.app import schema
from rollout_inspector.client import client
from rollouts.store.models import default_project
from tests.api.conftest import member_of, token_for
from tests.conftest import ROOT, missing
from tests.push.conftest import episodes
from tests.web.trajectory_samples import Maker

TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.django_db(transaction=True)
def test_the_examples(make: Maker, live_server: Any, answered: None, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        missing("there is no curl")
    broken, findings = make.broken("broken")
    run = make.run([make.conversation("whole"), broken], [[], findings])
    project = default_project()
    token = token_for(member_of(project, "eve", "member"), project)
    values = {
        "SERVER": live_server.url,
        "TOKEN": token,
        "RUN": run.code,
        "TRAJECTORY": run.trajectories.get(external_id="whole").code,
    }
    (tmp_path / "rollouts.jsonl").write_text("\n".join(json.dumps(call) for call in episodes(1)))
    commands = block("sh").replace("\ncurl ", "\necho; curl -f ").replace("curl -H", "curl -f -H", 1)
    ran = subprocess.run(
        ["sh", "-ec", commands], env={**os.environ, **values}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    runs, trajectories, tokens, imported = (json.loads(line) for line in ran.stdout.splitlines())
    assert [one["code"] for one in runs["items"]] == [run.code]
    assert [one["external_id"] for one in trajectories["items"]] == ["broken"]
    assert len(tokens["ids"]) == 64 and tokens["logprobs"] is None
    assert imported["run"]["name"] == "grpo-7"

    program = (
        block("python")
        .replace("from client import Client", "")
        .replace('"run.jsonl"', "path")
        .replace('"finding.html"', "page")
    )
    names: dict[str, Any] = {
        "Client": client.Client, "url": live_server.url, "token": token, "run": run.code,
        "path": tmp_path / "run.jsonl",
        "page": tmp_path / "finding.html",
    }
    exec(program, names)
    assert names["job"]["status"] == "done" and names["path"].stat().st_size > 100
    assert set(names["columns"]) == {"ids", "loss_mask", "logprobs"}


def test_every_address_stands_in_the_table() -> None:
    """Each last word of a path of the schema is named in docs/api.md."""
    paths = json.loads(schema())["paths"]
    words = {path.rstrip("/").rpartition("/")[2] for path in paths} - {
        "{code}",
        "{index}",
        "{number}",
        "{comment}",
        "{id}",
    }
    assert [word for word in sorted(words) if word not in TEXT] == []
