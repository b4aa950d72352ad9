"""A server is read by the same interface as files, and the pages of files are those of a server."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.test import Client
from django.urls import reverse

import rollout_inspector
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.opened.index import FileIndex
from rollout_inspector.streams.trajectory import Row, Trajectory, ids_array
from rollouts.jobs import opened
from rollouts.store.models import Run, default_project
from rollouts.store.runs.imports import add_opened, opened_run
from rollouts.store.runs.runs import end_run
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.api.conftest import member_of, token_for
from tests.conftest import ROOT, wait_until
from tests.ports import HeldPort
from tests.samples.formats import GYM, changed, jsonl, own_line
from tests.samples.server import LINK, Visitor, processes_of
from tests.web.trajectory_samples import Maker, own_row


@pytest.mark.django_db(transaction=True)
def test_a_server_is_read_like_files(live_server: Any, tiny_tokenizer: Path, tmp_path: Path) -> None:
    make, project = Maker(tiny_tokenizer), default_project()
    broken, findings = make.broken("broken")
    values = [make.conversation("whole"), broken, own_row(60, advantages=np.ones(60, np.float32))]
    run = make.run(values, [[], findings, []])
    token = token_for(member_of(project, "eve", "member"), project)
    (tmp_path / "a.jsonl").write_bytes(b"".join(map(own_line, values)))
    with rollout_inspector.open(tmp_path) as files:
        for place in (live_server.url, f"{live_server.url}/runs/{run.code}"):
            server = rollout_inspector.open(place, token=token)
            names = [value.external_id for value in values]
            for place_run in (server, files):
                assert place_run.trajectories.to_polars()["id"].to_list() == names
            assert len(server.trajectories) == 3
            for name in names:
                for row, other in zip(server[name].rows, files[name].rows, strict=True):
                    assert row.ids.tolist() == other.ids.tolist() and row.loss_mask.tolist() == other.loss_mask.tolist()
                    assert (row.logprobs is None) == (other.logprobs is None)
                    assert row.logprobs is None or np.array_equal(row.logprobs, other.logprobs, equal_nan=True)
                    assert row.columns.keys() == other.columns.keys()
            (finding,) = server["broken"].findings
            assert (finding.kind, finding.start, finding.expected_ids.tolist()) == (
                findings[0].kind, findings[0].start, findings[0].expected_ids.tolist())
            assert server["broken"]._repr_html_().startswith("<iframe sandbox srcdoc=")


@pytest.fixture
def shown(db: None, tmp_path: Path, settings: Any) -> tuple[Run, FileIndex]:
    """A folder whose trajectories are listed by their index, as the server of the command lists them."""
    lines = [changed(changed(GYM, "_ng_task_index", to=n), "reward", to=n / 4) for n in range(4)]
    (tmp_path / "gym.jsonl").write_bytes(jsonl(*lines))
    opened._index.cache_clear()
    settings.OPENED = json.dumps({"places": [str(tmp_path)], "tokenizer": "", "chat_template": ""})
    run, index = opened_run([str(tmp_path)]), FileIndex([tmp_path])
    assert all(True for _ in index.work())
    add_opened(run, index.lines(0, 10), index.formats())
    end_run(run, Run.Status.DONE)
    run.refresh_from_db()
    return run, index


def test_a_trajectory_is_read_when_its_page_is_opened(
    shown: tuple[Run, FileIndex], admin_client: Client, django_assert_num_queries: Any
) -> None:
    run, index = shown
    before = {name: getattr(run, name) for name in ("n_trajectories", "n_steps", "n_rows", "n_tokens", "n_sampled")}
    assert (run.format, before["n_trajectories"], before["n_steps"], run.reward_sum) == ("nemo_gym", 4, 8, 1.5)
    listed = admin_client.get(reverse("run", args=[run.code]) + ".json").json()
    assert [(one["steps"], one["not_read"]) for one in listed["trajectories"]] == [(2, True)] * 4
    record = run.trajectories.get(index=2)
    assert not record.rows.exists() and record.checks is None
    page = admin_client.get(reverse("trajectory", args=[record.code]))
    assert page.status_code == 200 and b"toks" in page.content
    columns = reverse("run", args=[run.code]) + "?columns=findings,trained"
    assert admin_client.get(columns).content.decode().count("not read yet") == 3  # the findings of the other three
    record = run.trajectories.get(index=2)
    value = index.load(index.lines(2, 3)[0]["id"])
    stored = load_trajectory(record)
    assert [row.ids.tolist() for row in rows_of(stored)] == [row.ids.tolist() for row in rows_of(value)]
    assert record.checks and record.prompt_line and stored.reward == 0.5
    run.refresh_from_db()
    assert {name: getattr(run, name) for name in before} == before
    pk = record.pk
    assert admin_client.get(reverse("trajectory", args=[record.code])).status_code == 200
    assert run.trajectories.get(index=2).pk == pk  # it is read once


def test_what_needs_all_tokens_is_refused_with_the_way_out(shown: tuple[Run, FileIndex], admin_client: Client) -> None:
    run, _ = shown
    answer = admin_client.post(reverse("run-diagnose", args=[run.code]), HTTP_ACCEPT="application/json", follow=True)
    assert "Import them first" in answer.content.decode() and not run.jobs.exists()
    for path in (reverse("run-search", args=[run.code]) + "?by=text&q=hello", reverse("run-export", args=[run.code])):
        answer = admin_client.get(path)
        assert answer.status_code == 422 and "Import them first" in answer.content.decode()


def test_a_file_that_changed_is_refused(shown: tuple[Run, FileIndex], admin_client: Client, tmp_path: Path) -> None:
    run, _ = shown
    (tmp_path / "gym.jsonl").write_bytes(jsonl(changed(GYM, "reward", to=9.0)))
    answer = admin_client.get(reverse("trajectory", args=[run.trajectories.get(index=3).code]))
    assert answer.status_code == 422 and "Open it again" in answer.content.decode()


def test_a_server_without_opened_files_begins_nothing(db: None, admin_client: Client, settings: Any) -> None:
    run = opened_run(["/nowhere"])
    settings.OPENED = ""
    answer = admin_client.post(reverse("opened-import", args=[run.code]), HTTP_ACCEPT="application/json", follow=True)
    assert "no longer open here" in answer.content.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="counts processes through /proc")
def test_the_command_serves_pages_over_a_read_only_folder(tmp_path: Path, cache: Path) -> None:
    folder, said, own = tmp_path / "run", tmp_path / "said", tmp_path / "own"
    folder.mkdir()
    lines = [changed(GYM, "_ng_task_index", to=n) for n in range(30)]
    (folder / "gym.jsonl").write_bytes(jsonl(*lines))
    bad = Row(ids_array([1, 2, 3]), np.array([False, True], np.bool_))
    (folder / "bad.jsonl").write_bytes(own_line(Trajectory("bad", rows=(bad,))))
    folder.chmod(0o555)
    names = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "ROLLOUT_INSPECTOR_CACHE")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    with said.open("w") as output, HeldPort() as port:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout_inspector", "open", folder, "--no-browser", f"--port={port.number}"],
            cwd=ROOT, env={**environment, "INSPECTOR_DATA": str(own)}, stdout=output, stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: bool(LINK.search(said.read_text())) or process.poll() is not None, 180, "it is ready")
        found = LINK.search(said.read_text())
        assert found is not None, said.read_text()
        visitor = Visitor(found[1])
        (run,) = visitor.ask("/runs.json").json()["runs"]
        path = f"/runs/{run['code']}"
        wait_until(lambda: visitor.ask(f"{path}.json").json()["run"]["status"] == "done", 120, "all lines are listed")
        listed = visitor.ask(f"{path}.json").json()["trajectories"]
        assert len(listed) == 31
        list_page = visitor.ask(path).text
        assert all(words in list_page for words in ("Check all", "Import for good", "not read yet", "is checked when"))
        page = visitor.ask(f"/trajectories/{listed[8]['code']}")
        assert page.status_code == 200 and "toks" in page.text
        (folder).chmod(0o755)
        (folder / "more.jsonl").write_bytes(jsonl(*[changed(GYM, "_ng_task_index", to=n) for n in range(50, 55)]))
        wait_until(lambda: visitor.ask(f"{path}.json").json()["run"]["trajectories"] == 36, 120, "it grew")
        assert visitor.submit(f"{path}/check-files").status_code == 302
        (data,) = cache.glob("rollout-inspector/*")
        wait_until(lambda: (data / "audit" / "audit.json").exists(), 180, "all is checked")
        wait_until(lambda: "not read yet" not in visitor.ask(path).text, 60, "the list tells what was found")
        listed = visitor.ask(f"{path}.json").json()["trajectories"]
        counts = Counter(kind for one in listed for kind in one["kinds"] if kind != "not_decidable")
        kinds = json.loads((data / "audit" / "audit.json").read_text())["kinds"]
        assert counts == {kind: count["trajectories"] for kind, count in kinds.items()} and counts["length_mismatch"]
        assert {entry.name for entry in folder.iterdir()} == {"bad.jsonl", "gym.jsonl", "more.jsonl"}
        assert not own.exists()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130, -signal.SIGINT)
        wait_until(lambda: not processes_of(data / "server"), 60, "no process is left behind")
    finally:
        process.kill()
