"""Imports point down only; see docs/architecture.md."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "rollouts.tito": 0, "rollouts.processes": 0,
    "rollouts.chat_templates": 1, "rollouts.tokenizers": 1, "rollouts.formats": 1,
    "rollouts.replies.parsing": 1, "rollouts.replies.tool_calls": 1,
    "rollouts.models": 2, "rollouts.fields": 2, "rollouts.selectors": 2, "rollouts.services": 2,
    "rollouts.migrations": 2,
    "rollouts.apps": 2, "rollouts.engines": 3, "rollouts.environments": 3, "rollouts.demo_policy": 3,
    "rollouts.loop": 4,
    "rollouts": 5, "inspector": 6,
}  # fmt: skip
STORAGE = {name for name, floor in FLOORS.items() if floor == 2}


def floor_of(module: str) -> str | None:
    """The longest name of FLOORS that the module lies in."""
    return max((name for name in FLOORS if f"{module}.".startswith(f"{name}.")), key=len, default=None)


def imports(module: str, source: str) -> Iterator[str]:
    """Every dotted name that a module imports, wherever in its text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def breaches(module: str, source: str) -> list[str]:
    """What a module imports that lies above it."""
    here = floor_of(module)
    found = []
    for name in imports(module, source):
        there = floor_of(name)
        if here == "rollouts.tito" and name.split(".")[0] not in {"rollouts", "numpy", *sys.stdlib_module_names}:
            found.append(f"{module} imports {name}: tito knows numpy and the standard library only")
        if here is None or there is None or here == there:
            continue
        if FLOORS[there] > FLOORS[here] or (FLOORS[there] == FLOORS[here] == 3 and there == "rollouts.engines"):
            found.append(f"{module} imports {name}, which lies above it")
        if here in ("rollouts.engines", "rollouts.environments") and there in STORAGE:
            found.append(f"{module} imports {name}: engines and environments never import storage")
    return found


def modules() -> Iterator[tuple[str, str]]:
    for path in [*ROOT.glob("rollouts/**/*.py"), *ROOT.glob("inspector/**/*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        # A package keeps its last part, so that a relative import in it resolves as in its modules.
        yield ".".join(parts), path.read_text(encoding="utf-8")


def test_imports_point_down_only() -> None:
    assert [breach for module, source in modules() for breach in breaches(module, source)] == []


def test_an_upward_import_would_be_found() -> None:
    assert breaches("rollouts.tito.prefix", "from rollouts.models import Run")
    assert breaches("rollouts.tito.prefix", "import torch")
    assert breaches("rollouts.engines.vllm", "from ..services import save_steps")
    assert breaches("rollouts.tasks", "import inspector.trajectories.place")
    assert not breaches("rollouts.tasks", "from rollouts.engines import worker")


def test_the_package_is_empty() -> None:
    assert (ROOT / "rollouts" / "__init__.py").read_text() == ""


def test_vllm_is_imported_in_one_file_and_lazily() -> None:
    holders = {
        module for module, source in modules() for name in imports(module, source) if name.split(".")[0] == "vllm"
    }
    assert len(holders) <= 1
    for module, source in modules():
        heavy = {"vllm", "torch", "transformers"}
        if module in holders:
            top = ast.Module(
                [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)], []
            )
            assert not {name.split(".")[0] for name in imports(module, ast.unparse(top))} & heavy


QUERIES = {
    "aggregate", "annotate", "defer", "exclude", "filter", "get_or_create", "only", "order_by", "prefetch_related",
    "refresh_from_db", "save", "select_related", "values_list",
}  # fmt: skip
"""Methods that read or write the database through a model, a manager or a queryset."""
SHORTCUTS = {"get_list_or_404", "get_object_or_404"}


def queries(source: str) -> list[str]:
    """The managers that a module names, and the methods of querysets and models that it calls."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "objects":
            found.append("objects")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in QUERIES:
            found.append(node.func.attr)
        elif isinstance(node, ast.Name) and node.id in SHORTCUTS:
            found.append(node.id)
    return found


def test_pages_query_through_selectors_and_services_alone() -> None:
    asking = {
        module: found for module, source in modules() if module.startswith("inspector.") and (found := queries(source))
    }
    assert asking == {}


def test_a_query_would_be_found() -> None:
    assert queries("Run.objects.all()") == ["objects"]
    assert queries("run.jobs.order_by('pk')") == ["order_by"] and queries("get_object_or_404(Run)")
    assert queries("@register.filter\ndef number(value): ...") == []
