"""The stream out of a trainer: a bounded queue, fragments on disk while the server is away, and each record once."""

import gzip
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollout_inspector.client.adapters import stream as module
from rollout_inspector.client.adapters.stream import RolloutStream
from tests.adapters.conftest import FakeServer, end, until
from tests.conftest import ROOT


def opened(server: FakeServer, folder: Path, **more: Any) -> RolloutStream:
    return RolloutStream(server.url, "t", folder=folder, **{"wait_seconds": 0.02} | more)


def test_records_arrive_in_order_and_leave_nothing_behind(server: FakeServer, tmp_path: Path) -> None:
    with opened(server, tmp_path / "f", name="grpo", tokenizer="qwen3") as stream:
        for step in range(3):
            assert stream.send([{"id": f"{step}-{n}"} for n in range(2)], prefix=f"step-{step}/", step=step)
        assert stream.flush()
    assert server.runs == [{"name": "grpo", "tokenizer": "qwen3"}] and {run for run, _, _ in server.pushes} == {"run1"}
    assert [one["id"] for one in server.records] == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert [query for _, query, _ in server.pushes][2] == {"prefix": "step-2/", "training_step": "2"}
    assert (stream.counts.taken, stream.counts.stored, stream.counts.dropped) == (6, 6, 0)
    assert list((tmp_path / "f").iterdir()) == []


def tracker(monkeypatch: pytest.MonkeyPatch, raises: bool = False) -> dict[str, str]:
    """The modules of three trackers, as far as the stream asks them; what they were told."""
    told: dict[str, str] = {}

    def tell(value: dict[str, str], **_: Any) -> None:
        if raises:
            raise RuntimeError("the tracker is closed")
        told.update(value)

    run = SimpleNamespace(name="lucky-lake-7", config=SimpleNamespace(update=tell), log=tell)
    modules = {
        "wandb": {"run": run},
        "mlflow": {
            "active_run": lambda: SimpleNamespace(info=SimpleNamespace(run_name="other")),
            "set_tag": lambda name, value: told.update({f"tag {name}": value}),
        },
        "trackio.context_vars": {"current_run": SimpleNamespace(get=lambda: run)},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_the_address_is_printed_once_and_linked_in_the_trackers(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tracker(monkeypatch)
    with opened(server, tmp_path, own_name="of the trainer") as stream:
        for n in range(3):
            stream.send({"id": n})
            assert stream.flush()
    url = f"{server.url}/runs/run1"
    assert capsys.readouterr().out == f"Rollout Inspector: {url}\n"
    assert server.runs == [{"name": "lucky-lake-7"}]
    assert told == {"rollout_inspector": url, "tag rollout_inspector": url}


def test_a_run_has_the_name_that_is_said_first(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker(monkeypatch, raises=True)
    monkeypatch.setenv("ROLLOUT_INSPECTOR_NAME", "of the environment")
    for n, more in enumerate([{"name": "said"}, {}]):
        with opened(server, tmp_path / str(n), own_name="own", **more) as stream:
            stream.send({"id": n})
    monkeypatch.delenv("ROLLOUT_INSPECTOR_NAME")
    for name in ("wandb", "mlflow", "trackio.context_vars"):
        monkeypatch.delitem(sys.modules, name)
    for n, own in enumerate(["own", ""]):
        with opened(server, tmp_path / f"own{n}", own_name=own) as stream:
            stream.send({"id": 9 + n})
    names = [run["name"] for run in server.runs]
    assert names[:3] == ["said", "of the environment", "own"] and names[3].startswith("streamed 2")


def test_while_the_server_is_away_fragments_wait_and_come_once(server: FakeServer, tmp_path: Path) -> None:
    server.silent = True
    stream = opened(server, tmp_path, run="r")
    for n in range(4):
        stream.send({"id": n})
    until(lambda: len(stream.waiting()) == 4 and server.asked > 1)
    assert server.records == []
    server.silent = False
    assert stream.flush()
    assert [one["id"] for one in server.records] == [0, 1, 2, 3] and stream.counts.stored == 4
    stream.close()


def test_the_next_process_sends_what_an_ended_one_left(server: FakeServer, tmp_path: Path) -> None:
    """It goes to the run of the process that left it, and a process that still lives keeps what is its."""
    server.silent = True
    ended, living = opened(server, tmp_path, run="r1"), opened(server, tmp_path, run="r2", wait_seconds=60.0)
    for stream in (ended, living):
        stream.send({"id": stream.run})
        until(lambda stream=stream: bool(stream.waiting() and stream._is_away))  # type: ignore[misc]
    end(ended)
    (left,) = ended.waiting()
    assert gzip.decompress(left.read_bytes()).splitlines()[1] == b'{"id":"r1"}'
    server.silent = False
    with opened(server, tmp_path, run="r3") as third:
        third.send({"id": "r3"})
        assert third.flush()
    assert [(run, records) for run, _, records in server.pushes] == [("r1", [{"id": "r1"}]), ("r3", [{"id": "r3"}])]
    assert not left.exists() and len(living.waiting()) == 1
    end(living)


def test_fragments_that_a_token_may_not_push_stop_no_others(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.silent = True
    ended = opened(server, tmp_path, run="theirs")
    ended.send({"id": 1})
    until(lambda: bool(ended.waiting() and ended._is_away))
    end(ended)
    server.silent = False
    real = server.take
    monkeypatch.setattr(
        server, "take", lambda path, body: (403, {"error": "No."}) if "theirs" in path else real(path, body)
    )
    with opened(server, tmp_path, run="mine") as stream:
        stream.send({"id": 2})
        assert stream.flush()
    assert server.records == [{"id": 2}] and len(ended.waiting()) == 1


def test_what_is_left_is_sent_without_a_trainer(server: FakeServer, tmp_path: Path) -> None:
    server.silent = True
    ended = opened(server, tmp_path, run="r")
    for n in range(3):
        ended.send({"id": n}, prefix="p/", step=n)
    until(lambda: len(ended.waiting()) == 3)
    end(ended)
    stream = opened(server, tmp_path)
    assert not stream.send_left_over() and server.records == []
    server.silent = False
    assert stream.send_left_over() and stream.counts.stored == 3 and list(tmp_path.iterdir()) == []
    assert [(run, asked["prefix"], asked["training_step"]) for run, asked, _ in server.pushes] == [
        ("r", "p/", str(n)) for n in range(3)
    ]


def test_a_killed_process_loses_nothing_that_was_written(server: FakeServer, tmp_path: Path) -> None:
    server.silent = True
    program = (
        "import os, time; from rollout_inspector.client.adapters.stream import RolloutStream\n"
        f"s = RolloutStream({server.url!r}, 't', 'r', folder={str(tmp_path)!r})\n"
        "s.send([{'id': 'a'}, {'id': 'b'}])\n"
        "while not s.waiting(): time.sleep(0.01)\n"
        "import sys; assert not {'numpy', 'django', 'torch'} & sys.modules.keys()\n"
        "os.kill(os.getpid(), 9)"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == -9, ran.stderr
    server.silent = False
    with opened(server, tmp_path, run="later") as stream:
        stream.send({"id": "c"})
        assert stream.flush()
    assert [(run, [one["id"] for one in records]) for run, _, records in server.pushes] == [
        ("r", ["a", "b"]), ("later", ["c"]),
    ]


def test_a_full_queue_drops_and_counts(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    gate = threading.Event()
    real = RolloutStream._write
    monkeypatch.setattr(RolloutStream, "_write", lambda self, *batch: (gate.wait(240), real(self, *batch)))
    stream = opened(server, tmp_path, run="r", max_queued_values=250)
    record = {"ids": list(range(100))}
    assert stream.send(record)
    until(lambda: stream._is_busy["write"])  # the disk hangs with the first one
    with caplog.at_level(logging.WARNING, "rollout_inspector"):
        assert [stream.send(record) for _ in range(5)] == [True, True, False, False, False]
    assert stream.counts.taken == 3 and stream.counts.dropped == stream.counts.dropped_queue_full == 3
    assert caplog.text.count("dropped so far") == 1
    gate.set()
    assert stream.close().stored == 3
    assert not stream.send(record) and stream.counts.dropped == 4


def test_one_batch_larger_than_the_queue_is_taken_when_it_is_empty(server: FakeServer, tmp_path: Path) -> None:
    with opened(server, tmp_path, run="r", max_queued_values=10) as stream:
        assert stream.send({"ids": list(range(100))}) and stream.flush()
    assert stream.counts.stored == 1


def test_a_full_folder_drops_and_counts(server: FakeServer, tmp_path: Path) -> None:
    server.silent = True
    stream = opened(server, tmp_path, run="r", max_folder_bytes=2000)
    for n in range(6):
        stream.send({"id": os.urandom(600).hex() + str(n)})
    assert stream.settle()
    assert 0 < len(stream.waiting()) < 6
    assert stream.counts.dropped_folder_full == 6 - len(stream.waiting())
    stream.close()


def test_what_was_refused_counts_in_what_the_folder_holds(server: FakeServer, tmp_path: Path) -> None:
    server.status = 410  # somebody deleted the run, and the trainer goes on
    with opened(server, tmp_path, run="r", max_folder_bytes=2000) as stream:
        for n in range(6):
            stream.send({"id": os.urandom(600).hex() + str(n)})
            assert stream.flush()
        assert 0 < stream.counts.refused < 6 and stream.counts.dropped_folder_full == 6 - stream.counts.refused
        server.status = 200
        for path in tmp_path.glob("*/refused/*.jsonl.gz"):  # as the page on pushes tells
            path.replace(path.parents[1] / path.name)
        assert stream.flush() and len(server.records) == stream.counts.refused


def test_a_fragment_that_is_sent_while_the_folder_is_measured_costs_nothing(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: [self / "gone" / "000000001.jsonl.gz", *real(self, pattern)]
    )
    with opened(server, tmp_path, run="r") as stream:
        stream.send({"id": 1})
        assert stream.flush() and (stream.counts.stored, stream.counts.dropped) == (1, 0)


def test_a_folder_that_somebody_removed_is_made_again(server: FakeServer, tmp_path: Path) -> None:
    with opened(server, tmp_path / "f", run="r") as stream:
        stream.send({"id": 1})
        assert stream.flush()
        shutil.rmtree(tmp_path / "f")
        stream.send({"id": 2})
        assert stream.flush() and (stream.counts.stored, stream.counts.dropped) == (2, 0)


def test_a_long_batch_becomes_several_fragments(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FRAGMENT_BYTES", 100)
    with opened(server, tmp_path, run="r") as stream:
        stream.send([{"id": n, "text": "x" * 40} for n in range(5)])
        assert stream.flush()
    assert [len(records) for _, _, records in server.pushes] == [1, 1, 1, 1, 1]
    assert [one["id"] for one in server.records] == list(range(5))


@pytest.mark.parametrize("status", [400, 404, 410, 413])
def test_what_the_server_refuses_is_set_aside_with_its_reason(server: FakeServer, tmp_path: Path, status: int) -> None:
    server.status = status
    with opened(server, tmp_path, run="r") as stream:
        stream.send([{"id": 1}, {"id": 2}])
        assert stream.flush() and stream.counts.refused == 2
        server.status = 200
        stream.send({"id": 3})
        assert stream.flush() and stream.counts.stored == 1
    (reason,) = tmp_path.glob("*/refused/*.reason.txt")
    assert reason.read_text() == f"Refused with {status}.\n"
    (kept,) = tmp_path.glob("*/refused/*.jsonl.gz")
    assert [json.loads(line)["id"] for line in gzip.decompress(kept.read_bytes()).splitlines()[1:]] == [1, 2]


def test_a_tokenizer_that_is_not_registered_costs_no_fragment(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = server.take
    refusal = (400, {"error": "No tokenizer is registered as 'x'."})
    monkeypatch.setattr(server, "take", lambda path, body: refusal if path == "/api/runs" else real(path, body))
    with opened(server, tmp_path, tokenizer="x") as stream:
        stream.send({"id": 1})
        until(lambda: server.asked > 1)
        assert "No tokenizer is registered" in caplog.text and stream.counts.refused == 0
        monkeypatch.setattr(server, "take", real)
        assert stream.flush() and server.records == [{"id": 1}]


@pytest.mark.parametrize("status", [401, 403, 429, 503, 507])
def test_what_can_be_mended_is_sent_again(server: FakeServer, tmp_path: Path, status: int) -> None:
    server.status = status
    stream = opened(server, tmp_path, run="r")
    stream.send({"id": 1})
    until(lambda: server.asked > 2)
    server.status = 200
    assert stream.flush() and len(server.records) == 1
    assert stream.close().stored == 1 and stream.counts.refused == 0


def test_a_fragment_at_which_the_server_fails_stops_no_other(server: FakeServer, tmp_path: Path) -> None:
    server.status = 500
    with opened(server, tmp_path, run="r") as stream:
        stream.wait_seconds = 0.0
        stream.send({"id": 1})
        assert stream.flush() and stream.counts.refused == 1 and server.asked == module.MAX_FAULTS


def test_a_damaged_fragment_is_set_aside(server: FakeServer, tmp_path: Path) -> None:
    server.silent = True
    ended = opened(server, tmp_path, run="r")
    ended.send({"id": 1})
    until(lambda: bool(ended.waiting() and ended._is_away))
    end(ended)  # nobody reads or sends the fragment while it is damaged
    (fragment,) = ended.waiting()
    fragment.write_bytes(fragment.read_bytes()[:12])
    server.silent = False
    stream = opened(server, tmp_path)
    assert stream.send_left_over() and stream.counts.refused == 1 and server.records == []
    stream.close()


def test_what_json_cannot_hold_is_dropped_alone(server: FakeServer, tmp_path: Path) -> None:
    with opened(server, tmp_path, run="r") as stream:
        stream.send([{"id": 1}, {"id": object()}, {"id": float("nan")}])
        assert not stream.send_made(lambda: [{"id": {}["missing"]}])  # type: ignore[index]
        endless: dict[str, Any] = {}
        endless["self"] = endless
        assert not stream.send([endless])
        assert stream.flush()
    assert server.records == [{"id": 1}, {"id": None}]
    assert (stream.counts.dropped_unwritable, stream.counts.dropped_unreadable, stream.counts.stored) == (1, 2, 2)


def test_a_folder_that_cannot_be_written_stops_no_training(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stream = opened(server, tmp_path / "file", run="r")
    assert stream.send({"id": 1})
    until(lambda: stream.counts.dropped_unwritable == 1)
    stream.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_a_queue_of_its_own(server: FakeServer, tmp_path: Path) -> None:
    program = (
        "import os; from rollout_inspector.client.adapters.stream import RolloutStream\n"
        f"s = RolloutStream({server.url!r}, 't', 'r', folder={str(tmp_path)!r})\n"
        "s.send({'id': 'parent'})\n"
        "child = os.fork()\n"
        "if not child: s.send({'id': 'child'})\n"
        "s.close()\n"
        "if child: assert os.waitpid(child, 0)[1] == 0"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert sorted(one["id"] for one in server.records) == ["child", "parent"]


def test_the_address_and_the_token_may_come_from_the_environment(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="ROLLOUT_INSPECTOR_URL"):
        RolloutStream()
    monkeypatch.setenv("ROLLOUT_INSPECTOR_URL", server.url)
    with pytest.raises(ValueError, match="ROLLOUT_INSPECTOR_TOKEN"):
        RolloutStream()
    for name, value in {"TOKEN": "t", "RUN": "r9", "FOLDER": str(tmp_path)}.items():
        monkeypatch.setenv(f"ROLLOUT_INSPECTOR_{name}", value)
    with module.shared_stream() as stream:
        assert module.shared_stream() is stream
        stream.send({"id": 1})
        assert stream.flush()
    assert server.pushes[0][0] == "r9"
