"""``rollout-inspector audit``: the same tables wherever it runs, resumed where it was stopped, whatever is read."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_inspector.commands.main import main
from rollout_inspector.guard import audit_runners, shard_audit
from rollout_inspector.guard.audit_folder import FINDINGS, SUMMARY, TRAJECTORIES, UNREAD, AuditFolder
from rollout_inspector.guard.audit_runners import on_processes
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.checked_files import check_files
from rollout_inspector.guard.shard_audit import Shard, audit, cut_files, key_of, trajectories_at
from rollouts.gallery import BUNDLE
from rollouts.sampling.demo_policy import MODEL_DIR
from tests.conftest import ROOT
from tests.samples.guard import in_this_process, lines_of

PLAIN = AuditSettings()
SMALL = 20_000
"""Bytes of a shard: the gallery makes several."""


def run(*arguments: str | Path) -> int:
    return main(["audit", *map(str, arguments)])


def written(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (FINDINGS, TRAJECTORIES, UNREAD, SUMMARY)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_inspector.commands.audit.cut_files", partial(cut_files, n_bytes=SMALL))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_inspector.commands.audit.on_processes", in_this_process)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a large file, two small ones of training steps, and one that cannot be read."""
    folder = tmp_path / "outputs"
    for step, name in ((9, "observation_trained"), (10, "duplicate_call")):
        path = folder / f"step_{step}" / "rollouts.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(lines_of("clean", name))
    (folder / "gallery.jsonl").write_bytes(BUNDLE.read_bytes())
    (folder / "torn.json").write_bytes(b'{"a": ')
    return folder


def test_two_processes_write_the_bytes_of_one_and_find_what_check_finds(
    files: Path, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(files, "--output", tmp_path / "two", "--processes", 2) == 2  # torn.json was not read
    monkeypatch.setattr("rollout_inspector.commands.audit.on_processes", in_this_process)
    assert run(files, "--output", tmp_path / "one") == 2
    assert written(tmp_path / "one") == written(tmp_path / "two")
    summary, checked = json.loads((tmp_path / "one" / SUMMARY).read_text()), check_files([files])
    assert summary["shards"] > 3 and summary["files"] == 4
    assert (summary["trajectories"], summary["tokens"], summary["unread"]) == (
        checked.n_trajectories, checked.n_tokens, checked.n_unread,
    )
    assert {kind: (one["findings"], one["trajectories"]) for kind, one in summary["kinds"].items()} == {
        kind: (one.n_findings, one.n_trajectories) for kind, one in checked.kinds.items()
    }
    found = pq.read_table(tmp_path / "one" / FINDINGS).to_pylist()
    assert [(one["kind"], one["line"], one["trajectory"], one["start"], one["stop"]) for one in found] == [
        (one.finding.kind, one.line, one.trajectory, one.finding.start, one.finding.stop)
        for one in checked.found
    ]
    (unread,) = pq.read_table(tmp_path / "one" / UNREAD).to_pylist()
    assert unread["file"] == str(files / "torn.json") and unread["unread"]


def test_a_stopped_audit_goes_on_and_a_changed_file_is_read_again(
    files: Path, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[str] = []

    def counting(todo: Any, settings: AuditSettings, *_: Any) -> Iterator[tuple[str, pa.Table]]:
        for key, shard in todo.items():
            read.append(shard[0]["path"])
            yield key, audit(shard, settings)

    monkeypatch.setattr("rollout_inspector.commands.audit.on_processes", counting)
    run(files, "--output", tmp_path / "out")
    first, n_shards = written(tmp_path / "out"), len(read)
    shard = next((tmp_path / "out" / "shards").glob("*.parquet"))
    shard.rename(shard.with_name(f".{shard.name}.{'0' * 16}.part"))  # as a kill leaves it
    (tmp_path / "out" / SUMMARY).unlink()
    read.clear()
    run(files, "--output", tmp_path / "out")
    assert len(read) == 1 and written(tmp_path / "out") == first and not list(tmp_path.glob("out/**/*.part"))
    assert f"{n_shards - 1} of {n_shards} shards are done already." in capsys.readouterr().err
    path = files / "step_10" / "rollouts.jsonl"
    path.write_text(lines_of("clean"))
    read.clear()
    run(files, "--output", tmp_path / "out")
    assert 0 < len(read) < n_shards and written(tmp_path / "out") != first
    read.clear()
    run(files, "--output", tmp_path / "out", "--training-step", 7)
    assert len(read) >= n_shards - 1  # other settings: nothing of before counts
    assert set(pq.read_table(tmp_path / "out" / TRAJECTORIES)["training_step"].to_pylist()) == {7}


def failing(shard: Shard, settings: AuditSettings) -> pa.Table:
    raise RecursionError("too deep")


def test_a_reader_that_fails_costs_its_shard(files: Path) -> None:
    shards = {str(n): shard for n, shard in enumerate(cut_files([files / "step_9"]).shards)}
    (found,) = dict(on_processes(shards, PLAIN, 1, failing)).values()
    assert str(found).startswith("A shard could not be read (RecursionError: too deep).")


def dying(shard: Shard, settings: AuditSettings) -> pa.Table:
    if "step_9" in shard[0]["path"]:
        os._exit(9)
    return audit(shard, settings)


def test_a_process_that_dies_costs_only_its_shard(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_runners, "MAX_DEATHS", 1)
    cut = cut_files([files / "step_9", files / "step_10", files / "gallery.jsonl"], n_bytes=SMALL)
    alone = [(piece,) for shard in cut.shards for piece in shard]
    found = dict(on_processes({str(n): shard for n, shard in enumerate(alone)}, PLAIN, 2, dying))
    assert set(found) == {str(n) for n in range(len(alone))}
    for n, shard in enumerate(alone):
        if "step_9" in shard[0]["path"]:
            assert f"killed {audit_runners.MAX_DEATHS} times" in found[str(n)]
        else:
            assert found[str(n)].equals(audit(shard, PLAIN))


def slow(shard: Shard, settings: AuditSettings) -> pa.Table:
    print(os.getpid(), flush=True)
    time.sleep(60)
    return audit(shard, settings)


def test_a_killed_audit_leaves_no_process(files: Path) -> None:
    program = (
        "import sys\n"
        "from tests.guard.test_audit import PLAIN, cut_files, on_processes, slow\n"
        "if __name__ == '__main__': list(on_processes({'a': cut_files(sys.argv[1:]).shards[0]}, PLAIN, 1, slow))"
    )
    script = files / "audit.py"
    script.write_text(program)
    with subprocess.Popen([sys.executable, script, files / "step_9"], stdout=subprocess.PIPE, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline().strip().isdigit()
        ran.send_signal(signal.SIGKILL)
        (ended,), _, _ = select.select([ran.stdout], [], [], 20)
        assert ended.read() == b""  # the last process that held the pipe is gone


def test_a_shard_survives_json_and_flagged_trajectories_are_found_again(files: Path) -> None:
    for shard in cut_files([files], n_bytes=SMALL).shards:
        again = tuple(json.loads(json.dumps(shard)))
        assert again == shard and key_of(again, "d") == key_of(shard, "d") != key_of(shard, "e")
        rows = [one for one in audit(shard, PLAIN).to_pylist() if one["unread"] is None]
        flagged = {one["place"]: one["trajectory"] for one in rows if one["findings"]}
        assert [one.external_id for one in trajectories_at(again, PLAIN, set(flagged))] == list(flagged.values())


def test_the_tokenizer_decides_what_is_found(tmp_path: Path, alone: None) -> None:
    path = tmp_path / "gallery.jsonl"
    path.write_bytes(BUNDLE.read_bytes())
    assert run(path, "--output", tmp_path / "out", "--tokenizer", MODEL_DIR) == 0
    found = pq.read_table(tmp_path / "out" / FINDINGS).to_pylist()
    assert {"boundary_merge", "noncanonical_sampling"} <= {one["kind"] for one in found}
    assert all(one["chat_template_sha256"] for one in found if one["kind"] == "boundary_merge")
    shard_audit.tools_of.cache_clear()


def test_hostile_lines_become_rows(tmp_path: Path, alone: None) -> None:
    line = json.loads(lines_of("observation_trained"))
    lone = json.dumps(line | {"external_id": "half \ud800 pair"})
    path = tmp_path / "hostile.jsonl"
    torn = json.dumps(line | {"rows": 7})
    path.write_text(f"{lone}\n{torn}\n{torn[:-9]}\n{json.dumps(line)}\n")
    assert run(path, "--output", tmp_path / "out") == 2
    assert pq.read_table(tmp_path / "out" / UNREAD)["line"].to_pylist() == [1, 2, 3]
    assert pq.read_table(tmp_path / "out" / TRAJECTORIES).num_rows == 1


def test_a_pipe_among_the_files_is_said_and_holds_up_no_other(files: Path, tmp_path: Path, alone: None) -> None:
    os.mkfifo(files / "pipe.jsonl")
    assert run(files, "--output", tmp_path / "out") == 2
    unread = pq.read_table(tmp_path / "out" / UNREAD).to_pylist()
    assert [Path(one["file"]).name for one in unread] == ["torn.json", "pipe.jsonl"]


def test_a_file_that_is_gone_or_changed_is_no_result(files: Path, tmp_path: Path, small: None) -> None:
    shards = cut_files([files], n_bytes=SMALL).shards
    (files / "gallery.jsonl").write_text("{}")
    with pytest.raises(OSError, match="changed since the audit began"):
        audit(next(one for one in shards if "gallery" in one[0]["path"]), PLAIN)
    step = next(one for one in shards if "step_9" in one[0]["path"])
    os.utime(files / "step_9" / "rollouts.jsonl", (1, 1))  # as long as before, and written again
    with pytest.raises(OSError, match="changed since the audit began"):
        audit(step, PLAIN)
    (files / "gallery.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="Mount it at the same path"):
        audit(next(one for one in shards if "gallery" in one[0]["path"]), PLAIN)


def test_what_an_audit_wrote_is_not_read_by_the_next_one(files: Path, small: None, alone: None) -> None:
    for _ in range(2):
        run(files, "--output", files / "audit")
        assert json.loads((files / "audit" / SUMMARY).read_text())["files"] == 4


def test_another_tokenizer_or_a_change_in_its_folder_is_another_audit(tmp_path: Path) -> None:
    digests = set()
    for name in (None, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if name is None:
            (tmp_path / "tokenizer.json").write_text("{}")
        else:
            (tmp_path / name).write_text('{"a": 1}')
        digests.add(AuditSettings(str(tmp_path)).digest())
        digests.add(AuditSettings(str(tmp_path / "tokenizer.json")).digest())
    assert len(digests) == 10 and AuditSettings(str(tmp_path)).digest() in digests


def test_a_log_has_a_line_of_progress_now_and_then(
    files: Path, tmp_path: Path, small: None, alone: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("rollout_inspector.commands.audit.LOG_SECONDS", 0.0)
    run(files / "gallery.jsonl", "--output", tmp_path / "out")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3 and lines[-1].startswith(f"{len(lines)} of {len(lines)} shards, ")


def test_what_cannot_be_done_is_said(
    files: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(files, "--output", files) == 2
    assert "holds other files" in capsys.readouterr().err
    assert run(files, "--output", tmp_path / "a", "--tokenizer", tmp_path) == 2
    assert run(files, "--output", tmp_path / "b", "--training-step", "x") == 2
    assert run(tmp_path / "nothing", "--output", tmp_path / "c") == 2
    said = capsys.readouterr()
    assert "'x' is no training step" in said.err and "0 trajectories" in said.out and "Traceback" not in said.err
    monkeypatch.setattr(
        "rollout_inspector.commands.audit.on_processes", lambda todo, *_: ((key, "The disk is gone.") for key in todo)
    )
    assert run(files, "--output", tmp_path / "d") == 2
    said = capsys.readouterr()
    assert "The disk is gone." in said.err and "shards were not read" in said.err
    assert not (tmp_path / "d" / SUMMARY).exists() and AuditFolder(tmp_path / "d")
