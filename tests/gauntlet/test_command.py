"""`rollout-inspector gauntlet`: a gateway as a process, one that runs, our own; what is not offered; refusals."""

import contextlib
import http.client
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollout_inspector.commands.main import main
from rollout_inspector.gauntlet.engine import GauntletEngine
from rollout_inspector.gauntlet.properties import PROPERTIES
from tests.gauntlet.proxy import Fault, Fields, Proxy, verdicts
from tests.ports import HeldPort

NAMES = [property_.name for property_ in PROPERTIES]
START = f"{sys.executable} -m tests.gauntlet.proxy {{engine}} {{port}} "


def test_a_gateway_is_started_driven_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    captured = tmp_path / "captured"
    captured.mkdir()
    status = main(["gauntlet", "--start", f"{START}{captured}", "--captured", str(captured), "--json", "--junit",
                   str(report)])
    answer = json.loads(capsys.readouterr().out)
    assert (status, answer["broken"]) == (0, 0)
    assert [(one["name"], one["verdict"]) for one in answer["properties"]] == [(name, "held") for name in NAMES]
    assert all(set(one) == {"name", "verdict", "evidence"} and one["evidence"] for one in answer["properties"])
    suite = ElementTree.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("15", "0")
    assert [case.get("name") for case in suite] == NAMES


def test_a_gateway_that_runs_is_tested_again_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an earlier test left in the files is not taken for this one's; the gateway writes when it likes."""
    port = HeldPort()
    proxy = Proxy(port.url, tmp_path, Fault(habits=frozenset(["writes at once"])))
    try:
        for _ in range(2):
            arguments = [proxy.url, "--engine-port", str(port.number), "--captured", str(tmp_path)]
            status = main(["gauntlet", *arguments])
            out = capsys.readouterr().out
            assert (status, out.count("held ")) == (0, 15), out
    finally:
        proxy.close()
        port.close()


def test_our_own_recorder_holds_every_property(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["gauntlet", "--own", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert {one["name"]: one["evidence"] for one in answer["properties"] if one["verdict"] != "held"} == {}
    assert status == 0


# -- what is not offered


def no_spans(_: Proxy, line: Fields) -> list[Fields]:
    for choice in line["response"]["choices"]:
        choice.pop("weight_versions", None)
    return [line]


def no_session(proxy: Proxy, line: Fields) -> list[Fields]:
    proxy.n_calls["lines"] += 1
    return [{**line, "session_id": f"call-{proxy.n_calls['lines']}"}]


def no_agent(_: Proxy, line: Fields) -> list[Fields]:
    return [{**line, "session_id": line.pop("agent", line["session_id"])}]


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (Fault(line=no_spans), ["version change"]),
        (Fault(habits=frozenset(["refuses choices"])), ["choices"]),
        (Fault(line=no_session), ["compaction", "sub-agents", "order"]),
        (Fault(line=no_agent), ["sub-agents"]),
    ],
)
def test_what_a_gateway_does_not_offer_is_neither_held_nor_broken(
    tmp_path: Path, fault: Fault, names: list[str]
) -> None:
    found = verdicts(tmp_path, fault)
    assert {name: verdict.outcome for name, verdict in found.items() if verdict.outcome != "held"} == dict.fromkeys(
        names, "not offered"
    )
    assert not any(verdict.is_undecided for verdict in found.values())


def test_rows_alone_decide_masks_and_nothing_else(tmp_path: Path) -> None:
    found = verdicts(tmp_path, Fault(habits=frozenset(["writes rows alone"])))
    assert found.pop("masks").outcome == "held"
    assert {verdict.outcome for verdict in found.values()} == {"not offered"}
    assert found["ids equal"].is_undecided and not found["choices"].is_undecided


def test_a_gateway_that_refuses_holds_nothing(tmp_path: Path) -> None:
    found = verdicts(tmp_path, Fault(habits=frozenset(["refuses everything"])))
    assert [name for name, verdict in found.items() if verdict.outcome == "held"] == []
    offered = {name for name, verdict in found.items() if verdict.outcome == "broken"}
    assert set(NAMES) - offered <= {"choices", "version change", "compaction", "sub-agents", "order"}


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--start", "x {engine} {port}"], "--captured PATH is missing"),
        (["--start", "x {engine}", "--captured", "."], "lacks {port}"),
        (["--start", "'x {engine} {port}", "--captured", "."], "cannot be read: No closing quotation"),
        (["--start", "no-such-program {engine} {port}", "--captured", "."], "cannot be started"),
        (["--start", "false {engine} {port}", "--captured", "."], "ended with 1"),
        (["--own", "--format", "nonsense"], "--format nonsense"),
        (["--own", "--junit", "/no/such/folder/x.xml"], "no such folder"),
        (["https://localhost:1/v1", "--captured", "."], "http://HOST:PORT"),
        (["http://127.0.0.1:9/v1", "--captured", ".", "--engine-port", "0"], "does not answer"),
        (["http://127.0.0.1:9/v1", "--captured", ".", "--engine-port", "70000"], "--engine-port"),
    ],
)
def test_what_cannot_be_decided_is_said_in_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gauntlet", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err and "held" not in said.out


def test_a_gateway_that_captures_nothing_is_not_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calls.jsonl").write_text('{"response": {"choices": [{"token_ids": [1], "prompt_token_ids": [1]}]}}')
    assert main(["gauntlet", "--start", f"{START}{tmp_path}/..", "--captured", str(tmp_path / "calls.jsonl")]) == 2
    assert "holds no call of this test" in capsys.readouterr().err


def test_a_gateway_that_asks_another_engine_is_not_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(GauntletEngine()) as other:
        proxy = Proxy(other.url, tmp_path)
        try:
            assert main(["gauntlet", proxy.url, "--engine-port", "0", "--captured", str(tmp_path)]) == 2
        finally:
            proxy.close()
        assert "did not ask the engine" in capsys.readouterr().err


# -- what a gateway may send and write


ODD = ({"choices": "x"}, {"choices": [{"message": {"tool_calls": ["x"]}}]}, {"choices": [None]}, {}, [], None)


@pytest.mark.parametrize("answer", ODD)
def test_an_answer_of_no_shape_is_broken_and_ends_nothing(tmp_path: Path, answer: object) -> None:
    found = verdicts(tmp_path, Fault(raw_answer=lambda _, body: json.dumps(answer).encode()))
    assert found["answers unchanged"].outcome == "broken" and found["order"].outcome == "broken"


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff\xfe", b""])
def test_bytes_that_are_no_json_are_broken_and_end_nothing(tmp_path: Path, body: bytes) -> None:
    found = verdicts(tmp_path, Fault(raw_answer=lambda _, answer: body))
    assert [name for name, verdict in found.items() if verdict.outcome == "held"] == ["streams", "cancel"]


def test_captured_calls_of_tools_of_no_shape_are_broken(tmp_path: Path) -> None:
    def changed(_: Proxy, line: Fields) -> list[Fields]:
        for choice in line["response"]["choices"]:
            choice["message"] = {"role": "assistant", "tool_calls": [7]}
        return [line]

    assert verdicts(tmp_path, Fault(line=changed))["rewritten arguments"].outcome == "broken"


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[" * 100_000, 400), (b"{}", 400), (b'{"messages": [{"role": 3}]}', 400), (b'{"messages": 3}', 400),
     (b'{"messages": [], "n": 1000000000}', 200), (b'{"messages": [], "n": "x"}', 400)],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_engine_answers_whatever_a_gateway_asks(body: bytes, status: int, is_chunked: bool) -> None:
    with contextlib.closing(GauntletEngine()) as engine:
        connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=60)
        data = iter([body[:5], body[5:]]) if is_chunked and body[5:] else body
        connection.request("POST", "/v1/chat/completions", data, encode_chunked=is_chunked)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
    assert response.status == status and len(answer.get("choices", [])) in (0, 16)
