"""``rollout-inspector watch``: what is complete is pushed, once, whatever happens in between."""

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.client.adapters import folder_watch
from rollout_inspector.client.adapters.folder_watch import STATE_NAME, FolderWatch
from rollout_inspector.client.adapters.pushed_files import prefix_of
from rollout_inspector.client.adapters.stream import RolloutStream
from rollout_inspector.client.client import Client
from rollout_inspector.commands.main import main
from rollout_inspector.refusal import Refusal
from tests.adapters.conftest import FakeServer, end, until
from tests.conftest import ROOT
from tests.samples.watched_files import line, names, write


def watched(server: FakeServer, folder: Path, **more: Any) -> FolderWatch:
    said: list[str] = more.setdefault("said", [])
    del more["said"]
    client = Client(server.url, "t", more.pop("run", None), tries=1)
    return FolderWatch(folder, client, folder / STATE_NAME, say=said.append, **more)


def test_files_are_pushed_in_the_order_of_their_steps_with_step_and_prefix(server: FakeServer, tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write(tmp_path / f"step_{step}" / "rank_0.jsonl", f"s{step}")
    write(tmp_path / ".hidden.jsonl", "hidden")
    write(tmp_path / "metrics.csv", "other")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "step_2" / "rank_0.jsonl")
    (tmp_path / "fragments").mkdir()
    (tmp_path / "fragments" / "stream.json").write_text("{}")
    write(tmp_path / "fragments" / "000000001.jsonl", "of a stream")
    counts = watched(server, tmp_path, name="grpo", tokenizer="qwen3").once()
    assert server.runs == [{"name": "grpo", "tokenizer": "qwen3"}] and names(server) == ["s2", "s9", "s10"]
    assert server.pushes[2][1] == {"prefix": "step_10/rank_0/", "training_step": "10"}
    assert (counts["pushes"], counts["trajectories"], counts["waiting"]) == (3, 3, 0)


def test_each_file_is_pushed_once_over_restarts(server: FakeServer, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "a")
    first = watched(server, tmp_path)
    first.once()
    first.once()
    first.close()
    write(tmp_path / "b.jsonl", "b")
    second = watched(server, tmp_path)
    second.once()
    assert names(server) == ["a", "b"] and len(server.runs) == 1 and second.client.run == "run1"


def test_a_file_that_changes_waits_until_it_is_steady_or_marked(server: FakeServer, tmp_path: Path) -> None:
    session = b'{"session_id": "s", "response": {}}\n'
    (tmp_path / "calls.jsonl").write_bytes(session)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(session)[:-4])
    watch = watched(server, tmp_path, steady_seconds=1000)
    assert watch.once()["waiting"] == 2 and server.records == []
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(session))
    (tmp_path / "packed.jsonl.gz.done").touch()
    assert watch.once()["waiting"] == 1 and len(server.records) == 1
    (tmp_path / "_SUCCESS").touch()
    assert watch.once()["waiting"] == 0 and len(server.records) == 2


def test_of_a_growing_file_whole_trajectories_are_pushed_at_once(server: FakeServer, tmp_path: Path) -> None:
    path = write(tmp_path / "traces.jsonl", "a", "b", age=0, end=line("c")[:10])
    watch = watched(server, tmp_path, steady_seconds=1000)
    watch.once()
    assert names(server) == ["a", "b"]
    with path.open("ab") as file:
        file.write(line("c")[10:] + line("d")[:-1])
    watch.once()
    watch.close()
    assert names(server) == ["a", "b", "c"]  # d is JSON, and may still go on
    os.utime(path, (1, 1))
    again = watched(server, tmp_path, steady_seconds=1000)
    assert again.once()["waiting"] == 0 and names(server) == ["a", "b", "c", "d"]


def test_a_file_of_the_same_name_that_begins_otherwise_is_another_one(server: FakeServer, tmp_path: Path) -> None:
    watch = watched(server, tmp_path)
    write(tmp_path / "a.jsonl", "a", "b")
    watch.once()
    write(tmp_path / "a.jsonl", "x", "y", "z", age=50)
    watch.once()
    write(tmp_path / "a.jsonl", "x", age=40)
    watch.once()
    assert names(server) == ["a", "b", "x", "y", "z", "x"]


def test_a_long_file_goes_in_parts_and_goes_on_where_it_broke_off(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_watch, "MAX_PART_BYTES", 2 * len(line("n0")))
    write(tmp_path / "a.jsonl", *(f"n{i}" for i in range(5)))
    watch = watched(server, tmp_path)
    real = server.take

    def breaks(path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        return (503, {"error": "Busy."}) if len(server.pushes) == 1 else real(path, body)

    monkeypatch.setattr(server, "take", breaks)
    watch.once()
    assert watch.is_away and names(server) == ["n0", "n1"]
    watch.close()
    monkeypatch.setattr(server, "take", real)
    again = watched(server, tmp_path)
    again.once()
    assert not again.is_away
    assert [len(records) for _, _, records in server.pushes] == [2, 2, 1]
    assert names(server) == [f"n{i}" for i in range(5)]


def test_sessions_over_several_lines_are_never_cut(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_watch, "MAX_PART_BYTES", 10)
    path = tmp_path / "calls.jsonl"
    path.write_bytes(b'{"session_id": "s", "response": {}}\n' * 5)
    os.utime(path, (1, 1))
    watched(server, tmp_path).once()
    assert [len(records) for _, _, records in server.pushes] == [5]


def test_what_the_server_refuses_is_said_once_and_stops_no_other_file(server: FakeServer, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "a")
    said: list[str] = []
    server.status = 415
    watch = watched(server, tmp_path, run="r", said=said)
    watch.once()
    server.status = 200
    write(tmp_path / "b.jsonl", "b")
    counts = watch.once()
    assert names(server) == ["b"] and counts["refused"] == 1
    assert [one for one in said if "refused" in one] == ["a.jsonl is refused: Refused with 415."]


@pytest.mark.parametrize("status", [401, 404, 409])
def test_what_concerns_the_run_or_the_token_stops_it(server: FakeServer, tmp_path: Path, status: int) -> None:
    write(tmp_path / "a.jsonl", "a")
    server.status = status
    with pytest.raises(Refusal, match=f"Refused with {status}"):
        watched(server, tmp_path, run="r").once()


def test_two_watchers_of_one_state_and_a_foreign_state_are_refused(server: FakeServer, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "a")
    first = watched(server, tmp_path)
    first.once()
    with pytest.raises(Refusal, match="Another process"):
        watched(server, tmp_path)
    first.close()
    with pytest.raises(Refusal, match="is about the run run1"):
        watched(server, tmp_path, run="other")
    for broken in (
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 1}',
        '{"version": 1, "url": "", "run": 1, "files": {"a": 1}}',
        '{"version": 1, "url": "", "run": "r", "files": {"a": {"size": "x"}}}',
        "[" * 100_000,
    ):
        (tmp_path / STATE_NAME).write_text(broken)
        with pytest.raises(Refusal, match="Move it away"):
            watched(server, tmp_path)


def test_links_and_pipes_in_the_folder_lead_nowhere(server: FakeServer, tmp_path: Path) -> None:
    """Whoever writes to the folder must not have the watcher read or write other files, or wait forever."""
    folder, victim = tmp_path / "f", tmp_path / "victim"
    write(folder / "a.jsonl", "a")
    victim.write_text("of somebody else")
    (folder / f"{STATE_NAME}.part").symlink_to(victim)
    watched(server, folder).once()
    assert names(server) == ["a"] and victim.read_text() == "of somebody else"
    (folder / STATE_NAME).unlink()
    os.mkfifo(folder / STATE_NAME)
    with pytest.raises(Refusal, match="no regular file"):
        watched(server, folder)
    (folder / STATE_NAME).unlink()
    (folder / f"{STATE_NAME}.lock").unlink()
    (folder / f"{STATE_NAME}.lock").symlink_to(tmp_path / "made")
    with pytest.raises(Refusal, match="cannot be written"):
        watched(server, folder)
    assert not (tmp_path / "made").exists()
    (folder / f"{STATE_NAME}.lock").unlink()
    said: list[str] = []
    watch = watched(server, folder, said=said)
    real = watch._paths
    watch._paths = lambda: [*real(), *(folder / name for name in ("link.jsonl", "pipe.jsonl"))]  # type: ignore[method-assign]
    (folder / "link.jsonl").symlink_to(write(tmp_path / "private.jsonl", "private"))  # put there after the look
    os.mkfifo(folder / "pipe.jsonl")
    watch.once()
    assert "private" not in names(server) and said[-1].startswith("link.jsonl cannot be read")


def test_a_line_without_an_end_is_refused_and_not_read_into_memory(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_inspector.client.adapters.pushed_files.MAX_LINE_BYTES", 1000)
    write(tmp_path / "a.jsonl", "a", end=b"x" * 5000)
    said: list[str] = []
    watch = watched(server, tmp_path, said=said)
    assert watch.once()["refused"] == 1 and watch.once()["refused"] == 1 and "A line has more than" in said[-1]


def test_fragments_that_a_trainer_left_are_sent_by_the_command(server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    server.silent = True
    stream = RolloutStream(server.url, "t", "r", folder=tmp_path, wait_seconds=0.02)
    stream.send([{"id": 1}, {"id": 2}])
    until(lambda: bool(stream.waiting()))
    end(stream)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "stream.json").write_text("[]")
    (tmp_path / "odd" / "1.jsonl.gz").touch()
    options = ["watch", str(tmp_path), "--fragments", "--url", server.url, "--token", "t"]
    assert main(options) == 2 and "The next call sends them" in capsys.readouterr().err
    server.silent = False
    assert main(options) == 0 and server.records == [{"id": 1}, {"id": 2}]
    assert main(options) == 0 and "0 trajectories stored" in capsys.readouterr().out


def test_long_and_odd_paths_become_prefixes_that_the_server_takes(server: FakeServer, tmp_path: Path) -> None:
    watch = watched(server, tmp_path)
    keys = [f"{'long' * 30}/{n}/a.jsonl" for n in range(2)] + ["step_1/a.b.jsonl", "a\nb.jsonl"]
    prefixes = [prefix_of(key) for key in keys]
    assert len(set(prefixes)) == 4 and all(len(one) <= 60 and one.isprintable() for one in prefixes)
    assert prefixes[2] == "step_1/a/"
    assert watch.find_step("global_step_12_evals/gsm8k.jsonl") == 12 and watch.find_step("gsm8k.jsonl") is None


def test_the_command_pushes_with_the_standard_library_alone(server: FakeServer, tmp_path: Path) -> None:
    write(tmp_path / "train_data_step3.jsonl", "a")
    (tmp_path / "dump.pt").write_bytes(b"PK")
    program = (
        "import sys; from rollout_inspector.commands.main import main\n"
        f"code = main(['watch', {str(tmp_path)!r}, '--once', '--run', 'r'])\n"
        "assert not {'numpy', 'django', 'msgspec'} & sys.modules.keys(); sys.exit(code)"
    )
    environment = {**os.environ, "ROLLOUT_INSPECTOR_URL": server.url, "ROLLOUT_INSPECTOR_TOKEN": "t"}
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert "train_data_step3.jsonl: 1 trajectories stored." in ran.stdout and "left alone" in ran.stdout
    assert server.pushes[0][:2] == ("r", {"prefix": "train_data_step3/", "training_step": "3"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere"], "is no folder"),
        (["."], "ROLLOUT_INSPECTOR_URL"),
        ([".", "--url", "http://x"], "ROLLOUT_INSPECTOR_TOKEN"),
        ([".", "--url", "ftp://x", "--token", "t"], "begins with http"),
        ([".", "--url", "http://x", "--token", "t", "--training-step-from", "("], "no regular expression"),
        ([".", "--url", "http://x", "--token", "t", "--training-step-from", "a"], "exactly one group"),
        ([".", "--url", "http://x", "--token", "t", "--every", "nan"], "seconds"),
        ([".", "--url", "http://x", "--token", "t", "--state", "/nowhere/x"], "cannot be written"),
    ],
)
def test_options_that_make_no_sense_get_a_sentence(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, options: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "--once", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_cannot_be_created_is_said(server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "a.jsonl", "a")
    server.status = 400
    options = ["watch", str(tmp_path), "--once", "--url", server.url, "--token", "t", "--tokenizer", "x"]
    assert main(options) == 2 and capsys.readouterr().err == "Refused with 400.\n"


def test_a_server_that_is_away_is_an_exit_status(server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "a.jsonl", "a")
    server.silent = True
    options = ["watch", str(tmp_path), "--once", "--url", server.url, "--token", "t", "--run", "r"]
    assert main(options) == 2 and "is sent by the next call" in capsys.readouterr().err
    server.silent = False
    assert main(options) == 0 and names(server) == ["a"]


def test_a_dump_of_slime_is_converted_only_when_asked(server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    import pickle

    sample = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1], "rollout_log_probs": [-1.0, -2.0],
              "reward": 1.0, "index": 0, "group_index": 0, "status": "completed", "weight_versions": ["7"]}
    for name, value in {"rollout_5.pkl": {"rollout_id": 5, "samples": [sample]}, "other.pkl": [1]}.items():
        (tmp_path / name).write_bytes(pickle.dumps(value))
        os.utime(tmp_path / name, (1, 1))
    options = ["watch", str(tmp_path), "--once", "--url", server.url, "--token", "t", "--run", "r"]
    assert main(options) == 0 and server.records == []
    assert main([*options, "--convert-pickles"]) == 1
    (record,) = server.records
    assert record["rows"][0]["ids"] == [1, 2, 3] and server.pushes[0][1]["training_step"] == "5"
    assert "other.pkl is refused" in capsys.readouterr().out
