"""What it costs that a tokenizer runs in a process of its own: time of a text, memory here and there. Printed."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.processes import family, megabytes, sums
from rollout_inspector.text.tokenizers import load
from rollout_inspector.text.tokenizers.worker.encoders import Reference, fast_encoder, sample_texts
from tests.tokenizers.oracles import read_definition

pytestmark = pytest.mark.bench


def best(work: Callable[[], object]) -> float:
    """The median of fifty, milliseconds."""
    took = []
    for _ in range(50):
        began = time.perf_counter()
        work()
        took.append(1000 * (time.perf_counter() - began))
    return sorted(took)[25]


def test_a_text_in_a_limited_process(corpus: Path) -> None:
    for name in ("qwen3", "gpt-oss"):
        before = megabytes(os.getpid())
        tokenizer = load(corpus / "tokenizers" / name)
        lines = (corpus / "vectors" / f"drift_{name}.jsonl").read_text().splitlines()
        text = " ".join(json.loads(line)["text"] for line in lines * 4)
        ids = tokenizer.encode(text)[:4096]
        text = tokenizer.decode(ids)
        short = text[:100]
        there = best(lambda: tokenizer.encode(text)), best(lambda: tokenizer.encode(short))  # noqa: B023
        held = sums(megabytes, family())
        definition = read_definition(tokenizer.path)
        reference = Reference(definition.text)
        fast = fast_encoder(definition.text, sample_texts(definition.tokenizer), reference)
        assert fast is not None and fast.encode(text).tolist() == tokenizer.encode(text).tolist()
        here = best(lambda: fast.encode(text)), best(lambda: fast.encode(short))  # noqa: B023
        print(
            f"\n{name}: {len(ids):,} tokens {there[0]:.2f} ms there, {here[0]:.2f} ms here; 100 characters "
            f"{there[1]:.2f} ms there, {here[1]:.2f} ms here. Memory: {held['worker'] - before:.0f} MB more here and "
            f"{held['tokenizers']:.0f} MB there; in one process {megabytes(os.getpid()) - held['worker']:.0f} MB"
        )
        tokenizer.close()
