"""Every case of the corpus and the table of the TITO post come out right."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts.chat_templates import check
from rollouts.chat_templates.probes.checks import check_append
from rollouts.chat_templates.probes.conversations import Probe
from rollouts.chat_templates.probes.message_shape import MessageShape
from rollouts.chat_templates.probes.render_cache import RenderCache
from rollouts.chat_templates.probes.report import CheckStatus, Purpose
from rollouts.chat_templates.sandbox.render import TemplateRenderer
from rollouts.tokenizers import LoadedTokenizer, load


@pytest.fixture(scope="module")
def surrogates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("surrogates")


def with_tokens(corpus: Path, folder: Path, name: str, extra: list[str]) -> LoadedTokenizer:
    """A corpus tokenizer, with control tokens added that the family's own vocabulary has."""
    if not extra:
        return load(corpus / "tokenizers" / name)
    place = folder / f"{name}-{abs(hash(tuple(extra)))}"
    if not place.exists():
        place.mkdir()
        definition = json.loads((corpus / "tokenizers" / name / "tokenizer.json").read_text())
        known = {token["content"] for token in definition["added_tokens"]}
        free = max([*definition["model"]["vocab"].values(), *(t["id"] for t in definition["added_tokens"])]) + 1
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for content in extra:
            if content not in known:
                definition["added_tokens"].append({"id": free, "content": content, **flags, "special": True})
                free += 1
        (place / "tokenizer.json").write_text(json.dumps(definition))
        (place / "tokenizer_config.json").write_bytes(
            (corpus / "tokenizers" / name / "tokenizer_config.json").read_bytes()
        )
    return load(place)


def test_every_case(corpus: Path, surrogates: Path) -> None:
    groups: dict[tuple[str, str, tuple[str, ...]], list[dict[str, Any]]] = {}
    for line in (corpus / "cases" / "prefix_cases.jsonl").read_text().splitlines():
        row = json.loads(line)
        groups.setdefault((row["template"], row["tokenizer"], tuple(row["extra_special_tokens"])), []).append(row)
    wrong = []
    for (template, name, extra), rows in groups.items():
        tokenizer = with_tokens(corpus, surrogates, name, list(extra))
        renderer = TemplateRenderer(tokenizer, (corpus / "templates" / template).read_text(encoding="utf-8"))
        cache = RenderCache(renderer, MessageShape())

        def answer(row: dict[str, Any], cache: RenderCache) -> tuple[str, str]:
            prompted = row.get("add_generation_prompt_prefix", False)
            assert row["add_generation_prompt_full"] is not prompted
            found = check_append(
                Probe(row["id"], "", Purpose.TOOLS, tuple(row["prefix"]), tuple(row["append"]), row["tools"],
                      row["kwargs"] or None, prompted), cache,
            )
            if found.comparison is None:
                return "error", "error"
            words = {True: "ok", False: "BREAK"}
            return words[found.comparison.text_passed], words[found.comparison.passed]

        for row, got in zip(rows, cache.answer([lambda b, r=row: answer(r, b) for row in rows]), strict=True):
            if got != (row["text"], row["tokens"]):
                wrong.append((row["id"], got, row["text"], row["tokens"]))
    assert wrong == []


SURROGATES = {
    "qwen3.5-surrogate": "qwen3", "llama3.2": "llama3.1", "glm-4.5": "qwen3",
}


def test_the_table_of_the_post(corpus: Path, surrogates: Path) -> None:
    table = json.loads((corpus / "cases" / "table_dev.json").read_text())
    assert len(table) > 10
    for line in table:
        name = SURROGATES.get(line["tok"], line["tok"])
        extra = {"glm-4.5": ["<|assistant|>", "<|observation|>", "<|system|>", "<|user|>", "[gMASK]", "<sop>"]}
        tokenizer = with_tokens(corpus, surrogates, name, extra.get(line["tok"], []))
        report = check(tokenizer, (corpus / "templates" / f"{line['tpl']}.jinja").read_text(encoding="utf-8"))
        assert report.prefix_preserving is line["ok"], line["label"]
        found = report.check("tool_append").to_dict(report.chat_template)
        assert found["index"] == line["first_diff"], line["label"]
        if line["ok"]:
            assert found["delta"]["text"] == line["delta"], line["label"]
        else:
            assert found["expected_text"].startswith(line["before"])
            assert found["actual_text"].startswith(line["after"][:30])


def test_no_family_surprises(corpus: Path) -> None:
    """Every template of the corpus can be checked, with every part of the report in place."""
    tokenizers = {name: load(corpus / "tokenizers" / name) for name in ("qwen3", "llama3.1", "gpt-oss", "deepseek-r1")}
    for path in sorted((corpus / "templates").glob("*.jinja")):
        family = next((name for name in tokenizers if path.stem.startswith(name.split("-")[0])), "qwen3")
        report = check(tokenizers[family], path.read_text(encoding="utf-8"))
        found = json.loads(json.dumps(report.to_dict()))
        assert len(found["checks"]) >= 40
        for one in found["checks"]:
            assert one["detail"] and one["title"], (path.stem, one["name"])
            if one["status"] == CheckStatus.BROKEN and one["index"] is not None:
                assert one["expected_ids"] or one["actual_ids"]
                assert one["line"], (path.stem, one["name"])
                assert one["window"]["expected"] or one["window"]["actual"]
