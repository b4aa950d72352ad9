"""``renderer:NAME`` in place of a chat template: the verdicts, what the renderer reads back, and the strategies."""

import base64
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector import formats
from rollout_inspector.commands.main import main
from rollout_inspector.formats import FORMATS, Source
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.strategies import STRATEGIES, Context, StrategyRefused
from rollout_inspector.streams.trajectory import Request, Step, Trajectory
from rollout_inspector.text import chat_templates
from rollout_inspector.text.chat_templates.package_renderer import PackageRenderer
from rollout_inspector.text.chat_templates.probes.message_shape import CALC, TOOLS, MessageShape, user
from rollout_inspector.text.chat_templates.probes.report import Check, CheckStatus, Purpose, outcome_of
from rollout_inspector.text.tokenizers import load
from tests.conftest import missing

FITTING = {"qwen3": "qwen3", "deepseek-v3": "deepseek-r1", "llama-3": "llama3.1", "qwen3.5": "qwen3"}
"""A renderer -> a tokenizer of the corpus that holds its control tokens."""
PARSED = (Purpose.PARSED_MESSAGES, Purpose.PARSED_IDS)


@pytest.fixture(autouse=True)
def installed() -> None:
    if importlib.util.find_spec("renderers") is None:
        missing("the package renderers is not installed (tests/formats/requirements-trainers.txt)")


def made(corpus: Path, name: str) -> PackageRenderer:
    renderer = chat_templates.renderer(
        load(corpus / "tokenizers" / FITTING.get(name, name)), chat_templates.kept_text(f"renderer:{name}")
    )
    assert isinstance(renderer, PackageRenderer)
    return renderer


def checked(renderer: PackageRenderer) -> chat_templates.CheckReport:
    return chat_templates.check(renderer.tokenizer, renderer.chat_template)


def report(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, list[dict[str, Any]]]:
    status = main(["template", *map(str, arguments), "--format", "json"])
    return status, json.loads(capsys.readouterr().out)["templates"]


def broken(checks: Any, purpose: Purpose) -> list[Check]:
    return [check for check in checks if check.purpose is purpose and check.status is CheckStatus.BROKEN]


def test_it_stands_among_templates_and_comes_out_as_the_template_that_it_writes(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "qwen3.jinja").write_text((corpus / "templates/qwen3.jinja").read_text())
    arguments = ["renderer:qwen3", tmp_path, "--tokenizer", corpus / "tokenizers/qwen3", "--for", "users,generation"]
    status, (by_code, by_template) = report(capsys, *arguments)
    assert status == 1 and by_code["name"] == "renderer:qwen3"
    shared = [purpose.value for purpose in (Purpose.TOOLS, Purpose.USERS, Purpose.GENERATION, Purpose.PER_MESSAGE)]
    for purpose in shared:
        assert by_code["verdicts"][purpose] == by_template["verdicts"][purpose]
    assert by_code["prefix_preserving"] is by_template["prefix_preserving"] is False
    assert by_code["tokenizer_sha256"] == by_template["tokenizer_sha256"]
    of_template = {check["name"]: check["status"] for check in by_template["checks"]}
    appends = {check["name"]: check["status"] for check in by_code["checks"] if "append" in check["name"]}
    assert {name: of_template[name] for name in appends if name in of_template} == {
        name: status for name, status in appends.items() if name in of_template
    }
    assert not [check for check in by_template["checks"] if check["purpose"] in PARSED]


@pytest.mark.parametrize(("name", "is_stable"), [("qwen3", False), ("deepseek-v3", True), ("llama-3", True)])
def test_prefix_parse_and_render_have_verdicts(
    corpus: Path, name: str, is_stable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = corpus / "tokenizers" / FITTING[name]
    purposes = "tools,users,parsed-messages,parsed-ids"
    status, (found,) = report(capsys, f"renderer:{name}", "--tokenizer", folder, "--for", purposes)
    assert (status == 0, found["prefix_preserving"]) == (is_stable, is_stable)
    assert all(found["verdicts"][purpose].startswith("safe") for purpose in PARSED)
    assert main(["template", f"renderer:{name}", "--tokenizer", str(folder), "--for", purposes]) == status
    said = capsys.readouterr().out
    assert "parse(render(m)) = m: safe" in said and "render(parse(ids)) = ids: safe" in said
    assert f"says of itself that it {'is' if is_stable else 'may not be'} prefix-stable" in said


def test_what_an_xml_format_loses_is_found(corpus: Path) -> None:
    """Qwen3.5 writes a truth value as Python does, and its parser reads JSON."""
    checks = checked(made(corpus, "qwen3.5")).checks
    (lost,) = broken(checks, Purpose.PARSED_MESSAGES)
    assert lost.name == "parsed_message_typed_arguments_reasoned" and "is parsed as 'THINKX1 hm'" in lost.detail
    assert [check.name for check in broken(checks, Purpose.PARSED_IDS)] == ["parsed_ids_typed_arguments_reasoned"]


@pytest.fixture
def harmony(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageRenderer:
    """The vocabulary that the package would fetch, written from the corpus; the library checks its hash."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    vocabulary = json.loads((corpus / "tokenizers/gpt-oss/tokenizer.json").read_text())["model"]["vocab"]
    lines = (
        base64.b64encode(bytes(byte_of[letter] for letter in token)) + b" %d\n" % token_id
        for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1])
    )
    (tmp_path / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    return made(corpus, "gpt-oss")


def test_harmony_is_checked_though_no_template_writes_it(harmony: PackageRenderer) -> None:
    found = checked(harmony)
    assert found.verdicts[Purpose.TOOLS] == "safe" and found.verdicts[Purpose.USERS].startswith("not safe")
    assert "holds today's date" in found.verdicts[Purpose.REPRODUCIBLE]
    assert "line None" not in json.dumps(found.to_dict())
    (one_of_two,) = broken(found.checks, Purpose.PARSED_MESSAGES)  # the model stops at the first of two calls
    assert "parallel" in one_of_two.name and one_of_two.detail.endswith("calc {\"expr\": \"ARGX1\"}'.")


def test_a_void_pass_is_told(corpus: Path) -> None:
    found = checked(made(corpus, "llama-3"))
    assert "void for a part of the reply" in found.verdicts[Purpose.PARSED_MESSAGES]
    assert any(check.status is CheckStatus.RAISES and "parallel" in check.name for check in found.checks)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the parser of qwen3 returns, changed by the functions in this list."""
    from renderers.qwen3 import Qwen3Renderer

    changes: list[Any] = []
    real = Qwen3Renderer.parse_response

    def parse_response(self: Any, *arguments: Any, **options: Any) -> Any:
        parsed = real(self, *arguments, **options)
        for change in changes:
            parsed = change(parsed)
        return parsed

    monkeypatch.setattr(Qwen3Renderer, "parse_response", parse_response)
    yield changes


def test_a_parser_that_loses_a_part_fails(corpus: Path, parse: list[Any]) -> None:
    assert all(outcome_of(purpose, checked(made(corpus, "qwen3")).checks) for purpose in PARSED)
    parse.append(lambda parsed: replace(parsed, reasoning_content=None))
    checks = checked(made(corpus, "qwen3")).checks
    assert [outcome_of(purpose, checks) for purpose in PARSED] == [False, False]
    assert broken(checks, PARSED[0])[0].detail.startswith("The reply 'THINKX1 hm")
    assert "disappears" in broken(checks, PARSED[1])[0].detail or "drops" in broken(checks, PARSED[1])[0].detail


def test_the_same_message_in_other_ids_fails_the_second_alone(corpus: Path, parse: list[Any]) -> None:
    def as_text(parsed: Any) -> Any:
        calls = [replace(call, arguments=json.dumps(call.arguments, indent=1)) for call in parsed.tool_calls]
        return replace(parsed, tool_calls=calls)

    parse.append(as_text)
    checks = checked(made(corpus, "qwen3")).checks
    assert [outcome_of(purpose, checks) for purpose in PARSED] == [True, False]


def test_a_parser_that_raises_fails(corpus: Path, parse: list[Any]) -> None:
    parse.append(lambda parsed: parsed.nothing)
    (first, *_) = broken(checked(made(corpus, "qwen3")).checks, PARSED[0])
    assert first.detail.startswith("The renderer cannot parse what it wrote: AttributeError")


def test_what_cannot_be_used_is_said(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ["--tokenizer", str(corpus / "tokenizers/qwen3")]
    status, (other,) = report(capsys, "renderer:deepseek-v4", *folder)
    assert status == 2 and "The renderer deepseek-v4 cannot be made: " in other["reasons"][0]
    for arguments, sentence in (
        (["template", "renderer:nobody", *folder], "has no renderer 'nobody'. It has: deepseek-r1, "),
        (["lock", "renderer:qwen3", *folder, "-o", str(tmp_path / "lock")], "cannot be locked: it has no text"),
        (["check", "none.jsonl", "--chat-template", "renderer:deepseek-v4", *folder], "cannot be made"),
        (["open", str(tmp_path), "--chat-template", "renderer:deepseek-v4", *folder], "cannot be made"),
    ):
        assert main(arguments) == 2
        assert sentence in capsys.readouterr().err
    assert main(["template", "renderer:qwen3"]) == 2
    assert "A renderer writes ids, so it needs a tokenizer." in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["template", "renderer:qwen3", *folder]) == 2
    assert "pip install 'rollout-inspector[renderers]'" in capsys.readouterr().err
    with pytest.raises(Refusal, match="not installed"):
        made(corpus, "qwen3")


CALL = MessageShape().call((CALC, {"expr": "2+2"}))
TURN = '<tool_call>\n{"name": "calc", "arguments": {"expr": "2+2"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("slug", STRATEGIES)
def test_each_strategy_runs_under_it_as_under_the_template(corpus: Path, slug: str) -> None:
    renderer = made(corpus, "qwen3")
    tokenizer: Any = renderer.tokenizer
    template = chat_templates.renderer(tokenizer, (corpus / "templates/qwen3.jinja").read_text())

    def prompts(of: chat_templates.TemplateRenderer) -> list[list[int]] | str:
        strategy = STRATEGIES[slug](Context(tokenizer, of, tokenizer.stop_ids, bridge=renderer.bridge))
        try:
            first = strategy.begin([user("What's 2+2?")], TOOLS, {})
            strategy.sampled(tokenizer.encode(TURN), None, CALL)
            second = strategy.observe([MessageShape().result(CALC, "4")])
            strategy.sampled(tokenizer.encode("4.<|im_end|>"), None, {"role": "assistant", "content": "4."})
            return [prompt.tolist() for prompt in (first, second, *(row.ids for row in strategy.rows()))]
        except StrategyRefused as refusal:
            return str(refusal)

    assert prompts(renderer) == prompts(template)


def test_mend_extends_streams_by_it(corpus: Path, tmp_path: Path) -> None:
    """The harness rewrote the prompt of the second step, so the trajectory fails and is made again."""
    renderer = made(corpus, "qwen3")
    tokenizer: Any = renderer.tokenizer
    asked, said = [user("What's 2+2?")], tokenizer.encode(TURN)
    prompt = renderer.render_ids(Conversation(asked, TOOLS, None, True))
    answered = [*asked, CALL, MessageShape().result(CALC, "4")]
    bridged = renderer.bridge({}).extend(prompt, said, answered[2:], TOOLS)
    assert bridged is not None
    rewritten = np.concatenate([tokenizer.encode("Rewritten. "), bridged])
    steps = [
        Step(ids, sampled, np.full(len(sampled), -0.1, dtype=np.float32), request=Request(tuple(messages), TOOLS))
        for messages, ids, sampled in ((asked, prompt, said), (answered, rewritten, tokenizer.encode("4.<|im_end|>")))
    ]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write = FORMATS["own_jsonl"].write
    assert write is not None
    with path.open("wb") as file:
        write([Trajectory("one", tuple(steps))], file)
    options = ["--tokenizer", str(tokenizer.path), "--chat-template", "renderer:qwen3"]
    assert main(["mend", str(path), "-o", str(output), "--strategy", "bridge", *options]) == 0
    (found,) = formats.read(Source.of_path(output))[1]
    assert isinstance(found, Trajectory) and found.extra["mended"] == {"strategy": "bridge"}
    expected = np.concatenate([bridged, steps[1].completion_ids])
    assert [row.ids.tolist() for row in found.rows] == [expected.tolist()]


def test_a_message_that_it_does_not_take_raises_with_its_words(corpus: Path) -> None:
    two = MessageShape().call((CALC, {"expr": "1"}), (CALC, {"expr": "2"}))
    with pytest.raises(RenderFailed, match="only supports a single tool call"):
        made(corpus, "llama-3").render_text(Conversation([user("UQ1"), two], TOOLS))
