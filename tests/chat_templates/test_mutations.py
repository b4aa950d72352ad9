"""Damaged templates: a check ends with a report or with one sentence, whatever is left of the template."""

import json
import random
from pathlib import Path

from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.text.chat_templates import check, find_repair
from rollout_inspector.text.tokenizers import load
from tests.samples.damaged_templates import damaged


def test_damaged_templates(corpus: Path, tiny_tokenizer: Path) -> None:
    chance = random.Random(7)
    tokenizer = load(tiny_tokenizer)
    reports = refused = 0
    for path in sorted((corpus / "templates").glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        for n in range(8):
            broken = damaged(text, chance)
            try:
                report = check(tokenizer if n % 2 else None, broken)
            except RenderFailed as failed:
                assert str(failed).startswith(("The template", "Not rendered")), failed
                refused += 1
                continue
            json.dumps(report.to_dict())
            reports += 1
            if n == 0:
                repair, detail = find_repair(None, report, n_candidates=100)
                assert detail and (repair is None or repair.template != broken)
    assert reports > 60 and refused > 20
