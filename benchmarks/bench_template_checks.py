"""The chat-template lab: one check, all checks, repairs and generation tags, each against one pass of plain renders."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_inspector.text.chat_templates import Repair, check, find_marks, find_repair
from rollout_inspector.text.chat_templates.probes.checks import make_render_cache
from rollout_inspector.text.chat_templates.probes.report import CheckReport, CheckStatus, Purpose
from rollout_inspector.text.chat_templates.repair.regression_set import RegressionSet
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer
from rollout_inspector.text.tokenizers import LoadedTokenizer, load

pytestmark = pytest.mark.bench

FAMILIES = ("qwen3", "qwen2.5", "llama3.1", "gpt-oss", "deepseek-r1", "mistral-nemo")
APPENDING = (Purpose.TOOLS, Purpose.USERS)


@pytest.fixture(scope="module")
def templates(corpus: Path) -> dict[str, tuple[LoadedTokenizer, str]]:
    """Each template of the corpus with the tokenizer of its family, or Qwen3's."""
    tokenizers = {name: load(corpus / "tokenizers" / name) for name in FAMILIES}
    found = {}
    for path in sorted((corpus / "templates").glob("*.jinja")):
        name = path.stem.replace("gptoss", "gpt-oss")
        family = next((one for one in FAMILIES if one.split("-")[0] in name), "qwen3")
        found[path.stem] = tokenizers[family], path.read_text(encoding="utf-8")
    return found


def plain_renders(tokenizer: LoadedTokenizer, template: str) -> tuple[int, float]:
    """How many conversations the probes of a template hold, and the seconds that rendering each once takes."""
    cache, _ = make_render_cache(TemplateRenderer(tokenizer, template), None, None)
    regression_set = RegressionSet(cache)
    began = time.perf_counter()
    cache.renderer.render_many(list(regression_set.conversations.values()))
    return len(regression_set.conversations), time.perf_counter() - began


def test_one_template(templates: dict[str, tuple[LoadedTokenizer, str]]) -> None:
    tokenizer, template = templates["qwen3"]
    check(tokenizer, template)
    n, plain = plain_renders(tokenizer, template)
    began = time.perf_counter()
    report = check(tokenizer, template)
    checked = time.perf_counter() - began
    began = time.perf_counter()
    repair, _ = find_repair(tokenizer, report)
    repaired = time.perf_counter() - began
    began = time.perf_counter()
    marks, _ = find_marks(tokenizer, report)
    marked = time.perf_counter() - began
    assert repair is not None and marks is not None
    print(
        f"\nQwen3, warm: {n} conversations rendered once {plain:.3f} s; {len(report.checks)} probes {checked:.2f} s "
        f"({checked / plain:.1f} times; target 1 s); repair {repaired:.2f} s ({repaired / plain:.1f} times; "
        f"target 5 s); generation tags {marked:.2f} s ({marked / plain:.1f} times)"
    )


def test_all_templates(templates: dict[str, tuple[LoadedTokenizer, str]]) -> None:
    plain = sum(plain_renders(*pair)[1] for pair in templates.values())

    def matrix(pair: tuple[LoadedTokenizer, str]) -> CheckReport:
        return check(*pair)

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        reports = dict(zip(templates, pool.map(matrix, templates.values()), strict=True))
    checked = time.perf_counter() - began
    probes = sum(len(report.checks) for report in reports.values())
    print(
        f"\n{len(reports)} templates, {probes} probes, two at a time: {checked:.1f} s (target 30 s), "
        f"{checked / plain:.1f} times their {plain:.1f} s of plain renders"
    )
    broken = {name: report for name, report in reports.items() if _fails(report)}
    slowest, whole = 0.0, 0
    for name, report in broken.items():
        began = time.perf_counter()
        repair, detail = find_repair(templates[name][0], report)
        seconds = time.perf_counter() - began
        slowest = max(slowest, seconds)
        left = _left(repair)
        whole += repair is not None and not left
        print(f"  {name:32} {seconds:5.1f} s  {'whole' if repair and not left else left or detail}")
    print(
        f"{whole} of {len(broken)} templates on which appending breaks a prefix are mended; "
        f"the slowest search took {slowest:.1f} s (target 20 s)"
    )
    own = sum(report.verdicts["masks from generation tags"] == "exact" for report in reports.values())
    marked = sum(find_marks(templates[name][0], report)[0] is not None for name, report in reports.items())
    print(f"generation tags: {own} templates have exact ones of their own, {marked} of the others are given some")


def _fails(report: CheckReport) -> bool:
    return any(
        one.status is CheckStatus.BROKEN and one.decisive and one.purpose in APPENDING and one.comparison is not None
        for one in report.checks
    )


def _left(repair: Repair | None) -> list[str]:
    """The append probes that the widest repair leaves broken."""
    while repair is not None and repair.wider is not None:
        repair = repair.wider
    return [name for name in (repair.still_broken if repair else ()) if not name.startswith("generation_")]
