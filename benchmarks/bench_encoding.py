"""How much faster the exact encoder is than a loop of the reference. Ratios in one run, printed, never timed tests."""

import json
import time
from pathlib import Path

import pytest

from rollout_inspector.text.chat_templates import check
from rollout_inspector.text.tokenizers import load
from rollout_inspector.text.tokenizers.worker.encoders import Reference
from tests.tokenizers.oracles import read_definition


@pytest.mark.bench
def test_encoding_ratio(corpus: Path) -> None:
    for name in ("qwen3", "llama3.1", "gpt-oss", "mistral-nemo", "deepseek-r1"):
        tokenizer = load(corpus / "tokenizers" / name)
        lines = (corpus / "labelled" / "qwen3.calls.jsonl").read_text().splitlines()[:300]
        texts = [text for line in lines for text in _strings(json.loads(line)) if len(text) > 20][:4000]
        reference = Reference(read_definition(tokenizer.path).text)
        began = time.perf_counter()
        slow = [reference.raw.encode(text, add_special_tokens=False).ids for text in texts]
        loop = time.perf_counter() - began
        tokenizer.fastest()
        began = time.perf_counter()
        fast = tokenizer.encode_batch(texts)
        batch = time.perf_counter() - began
        assert [ids.tolist() for ids in fast] == slow
        tokens = sum(map(len, slow))
        print(f"\n{name}: {tokens:,} tokens, {tokenizer.encoder} is {loop / batch:.1f} times as fast as a loop")


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return [text for item in value for text in _strings(item)]
    return []


@pytest.mark.bench
def test_matrix(corpus: Path) -> None:
    tokenizer = load(corpus / "tokenizers" / "qwen3")
    templates = [path.read_text(encoding="utf-8") for path in sorted((corpus / "templates").glob("*.jinja"))]
    check(tokenizer, templates[0])
    began = time.perf_counter()
    checks = sum(len(check(tokenizer, template).checks) for template in templates)
    took = time.perf_counter() - began
    print(
        f"\n{len(templates)} templates, {checks} checks: {took:.1f} s, {1000 * took / len(templates):.0f} ms a template"
    )
