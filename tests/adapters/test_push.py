"""``rollout-inspector push``: files are sent once, in parts where they are long, and every refusal is a sentence."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.commands import push
from rollout_inspector.commands.main import main
from tests.adapters.conftest import FakeServer
from tests.conftest import ROOT
from tests.samples.watched_files import line, names, write


@pytest.fixture
def asked(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """The server, which the environment names, and an empty folder to work in."""
    monkeypatch.setenv("ROLLOUT_INSPECTOR_URL", server.url)
    monkeypatch.setenv("ROLLOUT_INSPECTOR_TOKEN", "t")
    monkeypatch.chdir(tmp_path)
    return server


def test_a_file_goes_to_a_new_run_and_its_address_is_said(asked: FakeServer, capsys: Any) -> None:
    write(Path("calls.jsonl"), "a", "b")
    Path("chat.jinja").write_text("{{ messages }}")
    assert main(["push", "calls.jsonl", "--tokenizer", "qwen3", "--chat-template", "chat.jinja"]) == 0
    assert asked.runs == [{"name": "pushed calls.jsonl", "tokenizer": "qwen3", "chat_template": "{{ messages }}"}]
    assert names(asked) == ["a", "b"] and asked.pushes[0][:2] == ("run1", {"first": "yes"})
    assert f"2 trajectories stored, 0 known, 0 rejected; 0 files refused. See {asked.url}/runs/run1" in (
        capsys.readouterr().out
    )


def test_several_files_keep_their_ids_and_steps_apart(asked: FakeServer) -> None:
    for step in (2, 3):
        write(Path(f"step_{step}/rank_0.jsonl"), "0")
    assert main(["push", "step_2/rank_0.jsonl", "step_3/rank_0.jsonl", "--run", "r"]) == 0
    assert [query for _, query, _ in asked.pushes] == [
        {"prefix": f"step_{step}/rank_0/", "training_step": str(step)} for step in (2, 3)
    ]
    assert main(["push", "step_3/rank_0.jsonl", "--run", "r", "--prefix", "p-", "--training-step", "9"]) == 0
    assert asked.pushes[-1][1] == {"prefix": "p-", "training_step": "9"}


def test_a_long_file_goes_in_parts_and_a_rejected_line_has_its_number(
    asked: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Path("long.jsonl").write_bytes(line("a") + b"\n" + line("b") + line("c"))
    Path("whole.jsonl").write_bytes(b'{"session_id": "s", "response": {}}\n' * 9)
    Path("packed.jsonl.gz").write_bytes(gzip.compress(line("a") * 9))
    monkeypatch.setattr(push, "MAX_PART_BYTES", 2 * len(line("a")) + 1)
    take = asked.take

    def rejecting(path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        status, answer = take(path, body)
        return status, answer | {"rejected": [{"line": 1, "reason": "No \x1b[31mids."}]}

    asked.take = rejecting  # type: ignore[method-assign]
    assert main(["push", "long.jsonl", "whole.jsonl", "packed.jsonl.gz", "--run", "r"]) == 1
    assert [len(records) for _, _, records in asked.pushes] == [2, 1, 9, 9]
    said = capsys.readouterr().out
    assert "line 1: No" in said and "1 rejected; line 4: No \\x1b[31mids.\n" in said and "\x1b" not in said


def test_standard_input_is_pushed(asked: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line("a"))))
    assert main(["push", "-"]) == 0
    assert asked.runs == [{"name": "pushed standard input"}] and names(asked) == ["a"]
    assert "standard input: 1 trajectories stored." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file"),
        ([""], "An argument is empty"),
        (["."], "watch --once ."),
        (["pipe"], "is no file"),
        (["empty.jsonl"], "is empty"),
        (["a.jsonl", "a.jsonl"], "named twice"),
        (["a.jsonl", "--url", "http://[x"], "begins with http"),
        (["a.jsonl", "--url", "http://x y"], "begins with http"),
        (["a.jsonl", "--token", "a\nb"], "no API key"),
        (["a.jsonl", "--run", "../x"], "no code of a run"),
        (["a.jsonl", "--run", "r", "--name", "n"], "of a new run"),
        (["a.jsonl", "--prefix", "x" * 61], "at most 60 characters"),
        (["a.jsonl", "--chat-template", "nowhere"], "cannot be read"),
    ],
)
def test_what_cannot_be_pushed_gets_a_sentence_before_anything_is_sent(
    asked: FakeServer, capsys: Any, options: list[str], words: str
) -> None:
    write(Path("a.jsonl"), "a")
    Path("empty.jsonl").touch()
    os.mkfifo("pipe")
    assert main(["push", *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and asked.asked == 0


def test_what_the_server_refuses_is_told_and_the_others_are_pushed(asked: FakeServer, capsys: Any) -> None:
    write(Path("a.jsonl"), "a")
    write(Path("b.jsonl"), "b")
    take, n = asked.take, iter(range(9))
    asked.take = lambda *given: (415, {"error": "A pickle."}) if next(n) == 0 else take(*given)  # type: ignore
    assert main(["push", "a.jsonl", "b.jsonl", "--run", "r"]) == 1
    assert names(asked) == ["b"] and "a.jsonl is refused: A pickle." in capsys.readouterr().err
    asked.take = lambda *_: (401, {"error": "This API key is unknown."})  # type: ignore[method-assign]
    assert main(["push", "a.jsonl", "b.jsonl", "--run", "r"]) == 2
    assert capsys.readouterr().err == "This API key is unknown.\n"


def test_a_run_of_which_nothing_is_taken_is_made_anew_with_the_next_file(asked: FakeServer, capsys: Any) -> None:
    for name in "abc":
        write(Path(f"{name}.jsonl"), name)
    take = asked.take
    asked.take = lambda path, body: (  # type: ignore[method-assign]
        (415, {"error": "A pickle."}) if path.startswith("/api/runs/run1/") else take(path, body)
    )
    assert main(["push", "a.jsonl", "b.jsonl", "c.jsonl"]) == 1
    assert [(run, query.get("first")) for run, query, _ in asked.pushes] == [("run2", "yes"), ("run2", None)]
    assert f"See {asked.url}/runs/run2" in capsys.readouterr().out
    asked.take = lambda path, body: (415, {"error": "No."}) if "/trajectories" in path else take(path, body)  # type: ignore[method-assign]
    assert main(["push", "a.jsonl"]) == 1
    assert "1 files refused. Nothing was taken, so there is no run." in capsys.readouterr().out


def test_it_needs_the_standard_library_alone(asked: FakeServer) -> None:
    write(Path("train_data_step3.jsonl"), "a")
    program = (
        "import sys; from rollout_inspector.commands.main import main\n"
        "code = main(['push', 'train_data_step3.jsonl', '--run', 'r'])\n"
        "assert not {'numpy', 'django', 'msgspec'} & sys.modules.keys(); sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    assert json.dumps(asked.pushes[0][:2]) == json.dumps(["r", {"training_step": "3"}])
