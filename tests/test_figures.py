"""Every figure has one source: the table "Figures" of docs/architecture.md, the pages and the code agree."""

import ast
import dataclasses
import itertools
import re
import typing
from collections.abc import Iterator
from importlib import import_module
from types import UnionType
from typing import Any

from inspector import urls
from inspector.web.twins import Page
from rollout_inspector.diagnose.finding import Cost
from rollout_inspector.diagnose.gap.figures import GapFigures
from rollout_inspector.streams.strategies.replay import StrategyResult
from rollouts.store.runs.figures import KindCost, TrainedTotals
from tests.conftest import ROOT
from tests.samples.product import modules

NO_FIGURES = {
    "which one": "id token_id index line number parent version diagnosis_version taken_by read_by repeats lane",
    "a place": (
        "row drawn_row step offset start stop first last first_step last_step from_step after_step worst_step next "
        "next_from next_step training_step first_training_step last_training_step training_min training_max began"
    ),
    "as the source or a person wrote it": (
        "reward reward_parts logprob seed temperature top_p top_k limit vocab_size upload_max_bytes"
    ),
}
"""Numeric keys of pages that count nothing."""


def table() -> list[tuple[str, list[str], str, str]]:
    """Figure, keys, dotted name of its function, definition: the lines of the table in docs/architecture.md."""
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Figures\n")[2]
    lines = re.findall(r"^\| (.+?) \| (.*?) ?\| `([\w.]+)` \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return [(figure, re.findall(r"`(\w+)`", keys), function, sentence) for figure, keys, function, sentence in lines]


def function_at(name: str) -> Any:
    """What a dotted name leads to. Raises ``AttributeError`` or ``ImportError`` where nothing has it."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def test_every_figure_of_the_table_has_its_function() -> None:
    assert len(table()) > 40
    for figure, _, function, _ in table():
        assert callable(function_at(function)) or isinstance(function_at(function), property), figure


# A figure of a page is in the table.


def is_number(kind: Any) -> bool:
    """Whether a field holds a number, a number or None, or numbers by name."""
    if typing.get_origin(kind) in (UnionType, typing.Union):
        return any(is_number(one) for one in typing.get_args(kind))
    return kind in (int, float) or (typing.get_origin(kind) is dict and is_number(typing.get_args(kind)[1]))


def numeric_keys(kind: Any, known: set[type]) -> Iterator[tuple[str, str]]:
    """Class and name of each numeric field of a value, and of the values that it holds."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in known:
        known.add(kind)
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if is_number(hints[field.name]):
                yield kind.__name__, field.name
            yield from numeric_keys(hints[field.name], known)
    for part in typing.get_args(kind):
        yield from numeric_keys(part, known)


def pages(base: type = Page) -> Iterator[type]:
    """The values of pages, twins and the API."""
    assert urls.urlpatterns  # every page is imported
    for kind in base.__subclasses__():
        if kind.__module__.startswith("inspector."):
            yield kind
        yield from pages(kind)


def missing_keys(kinds: list[type], known: set[str]) -> dict[str, str]:
    """Name of a numeric key that is not known -> a class that has it."""
    seen: set[type] = set()
    return {key: name for kind in kinds for name, key in numeric_keys(kind, seen) if key not in known}


def known_keys() -> set[str]:
    return {key for _, keys, _, _ in table() for key in keys} | set(" ".join(NO_FIGURES.values()).split())


def test_every_number_of_a_page_is_in_the_table() -> None:
    kinds = [*pages(), Cost, KindCost, StrategyResult, TrainedTotals]
    assert len(kinds) > 60
    assert missing_keys(kinds, known_keys()) == {}, "name it in docs/architecture.md, or in NO_FIGURES"
    assert set(GapFigures().values()) <= known_keys()


def test_a_number_that_the_table_lacks_would_be_found() -> None:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        surprise: float | None

    @dataclasses.dataclass(frozen=True)
    class NewPage:
        title: str
        lost: int
        inner: list[Inner]
        by_kind: dict[str, int]

    NewPage.__annotations__["inner"] = list[Inner]
    assert missing_keys([NewPage], known_keys()) == {"surprise": "Inner", "by_kind": "NewPage"}


# No second function computes a figure.

TWICE = (
    ("rows per call", "rows / steps", ""),
    ("ended", r"finished \+ failed", ""),
    ("reward, mean", "rewards? / rewards?", ""),
    ("reward, mean", r"reward_sum / \w+", ""),
    ("reward, mean", "Avg reward", ""),
    ("trained as sampled, still trained", r"sampled - lost", ""),
    ("trained, and not sampled", r"trained - (kept|trained_as_sampled)", ""),
    ("lost or wrong, of a finding", r"lost \+ wrong", ""),
    ("share, percent", r"100 \* .* :\.1f %", ""),
    ("a row's tokens under the loss mask", "count loss_mask", "rollout_inspector rollouts"),
    ("a run's trained, lost, unknown", "Sum (lost|trained)", ""),
    ("these of a run", "Sum (repaid|lost_in_one_row)", ""),
    ("gap: tokens, mean, k3, median, 99th pct., largest, effective sample size", r"(total_abs|k3) / \w+", ""),
)
"""(figure of the table, what computes it as :func:`sums` writes it, the houses that are searched; empty = all)."""

ALSO = {
    "rollouts.store.runs.logprob_columns.trajectories_with_gap": "how many tokens are read, which no page shows",
    "rollouts.store.trajectories.rows.row_totals": "the stored rows of a range, beside those of each strategy",
}
"""Functions that write the same sum, and why it is another figure."""


def word(node: ast.AST) -> str:
    """What an operand is called, without what says that it counts: ``run.n_sampled`` is ``sampled``."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            pass
        case ast.Subscript(slice=ast.Constant(value=str(name))) | ast.Constant(value=str(name)):
            pass
        case ast.Call(func=ast.Name(id="len" | "sum" | "int" | "F"), args=[inner, *_]):
            return word(inner)
        case ast.BoolOp(values=[first, *_]):
            return word(first)
        case _:
            return "?"
    name = re.sub(r"^(n_|sum_)|_tokens$", "", name)
    return {"prompt_tokens_repaid": "repaid", "trained_tokens_lost": "lost", "trained_tokens_wrong": "wrong"}.get(
        name, name
    )


def sums(node: ast.AST) -> Iterator[str]:
    """What a node computes, in short: ``sampled - lost``, ``Sum lost``, ``count loss_mask``, ``100 * x :.1f %``."""
    signs = {ast.Add: "+", ast.Sub: "-", ast.Div: "/"}
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in signs:
            yield f"{word(left)} {signs[type(op)]} {word(right)}"
        case ast.Call(func=ast.Name(id="Sum" | "Avg" as name), args=[column, *_]):
            yield f"{name} {word(column)}"
        case ast.Call(func=ast.Attribute(attr="count_nonzero"), args=[ast.Attribute(attr="loss_mask")]):
            yield "count loss_mask"
        case ast.Call(func=ast.Attribute(attr="sum", value=ast.Attribute(attr="loss_mask"))):
            yield "count loss_mask"
        case ast.JoinedStr(values=values):
            for value, following in itertools.pairwise(values):
                if isinstance(value, ast.FormattedValue) and str(getattr(following, "value", "")).startswith(" %"):
                    spec = ast.unparse(value.format_spec)[2:-1] if value.format_spec else ""
                    yield f"{ast.unparse(value.value)} :{spec} %"


def functions(module: str, tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Dotted name of each function or class, and its nodes without those of functions in it."""

    def own(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            is_inner = isinstance(child, ast.FunctionDef | ast.ClassDef)
            inner = f"{name}.{child.name}" if is_inner else name  # type: ignore[attr-defined]
            yield inner, child
            yield from own(child, inner)

    return own(tree, module)


def computed_twice(module: str, source: str) -> list[str]:
    """Functions of a module that compute a figure of another function."""
    owner = {figure: function for figure, _, function, _ in table()}
    found = []
    for name, node in functions(module, ast.parse(source)):
        for text in sums(node):
            for figure, pattern, houses in TWICE:
                if houses and module.split(".")[0] not in houses.split():
                    continue
                is_own = name == owner[figure] or name.rpartition(".")[0] == owner[figure].rpartition(".")[0]
                if re.fullmatch(pattern, text) and not is_own and name not in ALSO:
                    found.append(f"{name}: {text} is the figure “{figure}” of {owner[figure]}")
    return found


def test_no_second_function_computes_a_figure() -> None:
    assert [line for module, source in modules().items() for line in computed_twice(module, source)] == []


def test_a_second_function_would_be_found() -> None:
    for source in (
        "def f(run): return run.n_rows / run.n_steps",
        "def f(run): return run.n_finished + run.n_failed",
        "def f(run): return run.reward_sum / run.n_rewards",
        "def f(rewards): return sum(rewards) / len(rewards)",
        "def f(found): return found.aggregate(mean=Avg('reward'))",
        "def f(line): return line['sampled'] - line['lost']",
        "def f(cost): return (cost.trained_tokens_lost or 0) + (cost.trained_tokens_wrong or 0)",
        "def f(n, of): return f'{100 * n / of:.1f} %'",
        "def f(found): return found.aggregate(lost=Sum('n_lost', default=0))",
        "class A:\n    def f(self, found): return found.annotate(again=Sum('prompt_tokens_repaid'))",
        "def f(gap): return gap.total_abs / gap.tokens",
    ):
        assert len(computed_twice("inspector.runs.new_page", source)) == 1, source
    assert computed_twice("rollouts.jobs.new", "def f(row): return int(row.loss_mask.sum())")
    assert not computed_twice("inspector.runs.new_page", "def f(run): return rows_per_call(run.n_rows, run.n_steps)")
