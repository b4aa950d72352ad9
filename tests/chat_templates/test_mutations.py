"""Damaged templates: a check ends with a report or with one sentence, whatever is left of the template."""

import json
import random
from pathlib import Path

from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.text.chat_templates import check, find_repair
from rollout_inspector.text.tokenizers import load


def damaged(text: str, chance: random.Random) -> str:
    """The template with a stretch cut out, doubled, or put elsewhere."""
    a, b = sorted((chance.randrange(len(text)), chance.randrange(len(text))))
    b = min(b, a + chance.choice((1, 3, 20, 200)))
    match chance.randrange(4):
        case 0:
            return text[:a] + text[b:]
        case 1:
            return text[:b] + text[a:]
        case 2:
            return text.replace(chance.choice(("loop", "message", "==", "not ", "endif", "content", "role")), "x", 1)
        case _:
            place = chance.randrange(len(text))
            return text[:place] + text[a:b] + text[place:]


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
