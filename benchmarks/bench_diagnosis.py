"""How many planted faults are named right, by kind. Printed for setups made here and for tokenizers of the corpus."""

import random
from collections import Counter
from pathlib import Path

import pytest

from rollout_inspector.diagnose import diagnose
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from tests.samples.diagnosis import OPTIONS, PAIRS, SETUPS, problem
from tests.samples.model_setups import model_setup
from tests.samples.planted.plant import ModelSetup, planted

TIMES = 1


def setups(corpus: Path) -> list[ModelSetup]:
    made = [model_setup(name, **options) for name in SETUPS for options in OPTIONS]
    for tokenizer, template in [*PAIRS, ("qwen2.5", "qwen2.5"), ("qwen3", "qwen3"), ("llama3.1", "llama3.1")]:
        codec = load(corpus / "tokenizers" / tokenizer)
        of_template = renderer(codec, (corpus / "templates" / f"{template}.jinja").read_text(encoding="utf-8"))
        name = f"{tokenizer}/{template}"
        made += [
            ModelSetup(name, codec, of_template, random.Random(23), **options)  # type: ignore[arg-type]
            for options in (*OPTIONS, {"string_arguments": True})
        ]
    return made


@pytest.mark.bench
def test_planted_faults_by_kind(corpus: Path) -> None:
    right, all_of, wrong = Counter[str](), Counter[str](), []
    for s in setups(corpus):
        for case in planted(s, TIMES):
            kind = case.kind or "clean"
            text = problem(case, s, diagnose(case.trajectory, s.codec, lambda sha, s=s: s.renderer))
            all_of[kind] += 1
            right[kind] += not text
            wrong += [text] * bool(text)
    print("\n| planted | right |\n|---|---|")
    for kind in sorted(all_of):
        print(f"| {kind} | {right[kind]} of {all_of[kind]} |")
    print(f"| all | {right.total()} of {all_of.total()} |", *wrong, sep="\n")
