"""Imports point down only, and docs/architecture.md says the same as this file."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.conftest import ROOT
from tests.samples.product import HOUSES, modules, package_of, source_files

FLOORS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (0, ("rollout_inspector.refusal", "rollout_inspector.outputs")),
    (0, ("rollout_inspector.client", "rollout_inspector.streams")),
    (0, ("rollout_inspector.diagnose",)),
    (0, ("rollout_inspector.text",)),
    (0, ("rollout_inspector.formats",)),
    (0, ("rollout_inspector.guard",)),
    (0, ("rollout_inspector.gauntlet",)),
    (0, ("rollout_inspector.opened",)),
    (0, ("rollout_inspector.commands",)),
    (1, ("rollouts.apps", "rollouts.store")),
    (1, ("rollouts.models",)),
    (2, ("rollouts.sampling",)),
    (2, ("rollouts.gallery",)),
    (3, ("rollouts.jobs",)),
    (4, ("rollouts.recorder", "rollouts.worker")),
    (4, ("rollouts.management",)),
    (5, ("inspector.server",)),
    (5, ("inspector.web",)),
    (5, ("inspector.html",)),
    (5, ("inspector.chat_templates",)),
    (5, ("inspector.runs",)),
    (5, ("inspector.trajectories",)),
    (5, ("inspector.search", "inspector.team")),
    (5, ("inspector.api",)),
    (5, ("inspector.apps", "inspector.celery", "inspector.management")),
    (5, ("inspector.settings", "inspector.urls", "inspector.wsgi")),
)
"""(floor, packages) from the ground up. A package imports itself and what stands in an earlier line."""

LINE = {name: number for number, (_, names) in enumerate(FLOORS) for name in names}
STORAGE = {name for floor, names in FLOORS if floor == 1 for name in names}
PURE = {
    "rollout_inspector.refusal": set[str](),
    "rollout_inspector.outputs": set[str](),
    "rollout_inspector.client": {"rollout_inspector"},
    "rollout_inspector.streams": {"numpy"},
    "rollout_inspector.diagnose": {"numpy", "rollout_inspector"},
}
"""Packages that import only themselves, the standard library and these."""


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
    """What a module imports that it may not."""
    here = package_of(module)
    if here not in LINE:
        return (
            []
            if module in HOUSES or module == "rollout_inspector.__main__"
            else [f"{module} has no floor: name it in FLOORS and docs/architecture.md"]
        )
    found = []
    for name in imports(module, source):
        there = package_of(name)
        if here.startswith("rollout_inspector.") and name.split(".")[0] == "django":
            found.append(f"{module} imports {name}: the library knows no Django")
        if here in PURE and there != here and name.split(".")[0] not in {*PURE[here], *sys.stdlib_module_names}:
            found.append(
                f"{module} imports {name}: {here} knows {', '.join([*PURE[here], 'the standard library'])} only"
            )
        if name.split(".")[0] in ("tools", "tests", "benchmarks"):
            found.append(f"{module} imports {name}, which is not shipped")
        if name.split(".")[0] not in HOUSES or there == here:
            continue
        if there not in LINE:
            found.append(f"{module} imports {name}, which has no floor")
        elif LINE[there] >= LINE[here]:
            found.append(f"{module} imports {name}, which does not lie below it")
        elif here == "rollouts.sampling" and there in STORAGE:
            found.append(f"{module} imports {name}: what samples never imports storage")
    return found


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Groups of modules that import each other, imports in functions and for type checkers included."""
    arrows: dict[str, set[str]] = {}
    for module, source in sources.items():
        named = {name if name in sources else name.rpartition(".")[0] for name in imports(module, source)}
        arrows[module] = {name for name in named if name in sources} - {module}
    reach: dict[str, set[str]] = {}
    for start in arrows:
        seen, todo = set[str](), [start]
        while todo:
            todo += [name for name in arrows[todo.pop()] if name not in seen and not seen.add(name)]  # type: ignore[func-returns-value]
        reach[start] = seen
    found = {
        frozenset(name for name in reach[start] if start in reach[name]) for start in reach if start in reach[start]
    }
    return sorted(sorted(circle) for circle in found)


def test_imports_point_down_only() -> None:
    assert [breach for module, source in modules().items() for breach in breaches(module, source)] == []


def test_a_wrong_import_would_be_found() -> None:
    assert breaches("rollout_inspector.streams.prefix", "from rollouts.store.models import Run")
    assert breaches("rollout_inspector.streams.prefix", "import torch")
    assert breaches("rollout_inspector.guard.shard_audit", "def f():\n    import django")
    assert breaches("rollout_inspector.commands.check", "from rollouts.store import text")
    assert breaches("rollout_inspector.client.client", "import numpy")
    assert breaches("rollouts.sampling.engines.vllm_engine", "from rollouts.store.runs import runs")
    assert breaches("rollouts.worker.jobs", "def f():\n    import inspector.runs")
    assert breaches("rollouts.stray", "import os")
    assert breaches("rollouts.jobs.gallery", "from tools.gallery import make")
    assert breaches("rollouts.jobs.launch", "from rollouts.worker import jobs")
    assert not breaches("rollouts.worker.jobs", "from rollouts.sampling.engines import engine_thread")


def test_commands_without_a_server_import_none_of_its_packages() -> None:
    """One string, in one function, names what runs a command of the server."""
    room = "rollout_inspector.commands"
    sources = {module: source for module, source in modules().items() if package_of(module) == room}
    names = {name.split(".")[0] for module, source in sources.items() for name in imports(module, source)}
    assert "argparse" in names and not names & {"celery", "django", "inspector", "redis", "torch", "transformers"}
    importing = [module for module, source in sources.items() if "import_module" in source]
    assert importing == ["rollout_inspector.commands.main"]


def test_native_encoders_run_in_limited_processes_alone() -> None:
    """Elsewhere only the training of the demo policy makes a tokenizer, of text that is ours."""
    importing = {
        module
        for module, source in modules().items()
        for name in imports(module, source)
        if name.split(".")[0] in ("tokenizers", "fastokens")
    }
    assert importing and all(
        module.startswith(("rollout_inspector.text.tokenizers.worker.", "rollouts.sampling.engines.vllm_parsers."))
        for module in importing
    ), importing


def test_no_circle() -> None:
    assert circles(modules()) == []


def test_a_circle_would_be_found() -> None:
    sources = {
        "a.b": "from a import c",
        "a.c": "def f():\n    from a.d import x",
        "a.d": "import a.b",
        "a.e": "import a.b",
    }
    assert circles(sources) == [["a.b", "a.c", "a.d"]]


def test_the_documentation_has_the_same_floors() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d) \| ((?:`(?:rollout_inspector|rollouts|inspector)\.\w+`(?:, )?)+) \|", text, re.MULTILINE
    )
    assert [(int(floor), tuple(re.findall(r"`([\w.]+)`", names))) for floor, names in rows] == list(FLOORS)


def test_every_package_has_a_floor() -> None:
    assert {
        package_of(module) for module in modules() if "." in module and module != "rollout_inspector.__main__"
    } == set(LINE)


def test_a_house_is_entered_without_importing_anything() -> None:
    for house in ("rollout_inspector", "rollouts"):
        source = (ROOT / house / "__init__.py").read_text(encoding="utf-8")
        assert {name.split(".")[0] for name in imports(house, source)} <= sys.stdlib_module_names


def test_vllm_is_imported_in_two_files_and_lazily() -> None:
    holders = {
        module
        for module, source in modules().items()
        for name in imports(module, source)
        if name.split(".")[0] == "vllm"
    }
    assert holders == {"rollouts.sampling.engines.vllm_engine", "rollouts.sampling.engines.vllm_parsers.serving"}
    for module in holders:
        tree = ast.parse(modules()[module])
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        assert not {name.split(".")[0] for name in imports(module, ast.unparse(top))} & {
            "vllm",
            "torch",
            "transformers",
        }


QUERIES = {
    "aggregate", "annotate", "bulk_create", "bulk_update", "defer", "exclude", "filter", "get_or_create", "in_bulk",
    "only", "order_by", "prefetch_related", "refresh_from_db", "select_for_update", "select_related",
    "update_or_create", "values_list",
}
"""Methods that read or write the database through a model, a manager or a queryset."""
MANAGERS = {"objects", "_base_manager", "_default_manager"}
SHORTCUTS = {"get_list_or_404", "get_object_or_404"}
MAY_QUERY = ("rollouts.store", "rollouts.migrations", "rollout_inspector")
"""The library knows no database, so that a method of such a name is another one there."""


def queries(source: str) -> list[str]:
    """The managers that a module names, and the methods of querysets and models that it calls."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in MANAGERS:
            found.append(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # A model is saved without an argument in place; a file storage takes a name and a file.
            if node.func.attr in QUERIES or (node.func.attr == "save" and not node.args):
                found.append(node.func.attr)
        elif isinstance(node, ast.Name) and node.id in SHORTCUTS:
            found.append(node.id)
    return found


def test_the_store_alone_reads_and_writes_the_database() -> None:
    querying = {
        module: found
        for module, source in modules().items()
        if not module.startswith(MAY_QUERY) and (found := queries(source))
    }
    assert querying == {}


def test_a_query_would_be_found() -> None:
    assert queries("Run.objects.all()") == ["objects"]
    assert queries("run.jobs.order_by('pk')") == ["order_by"] and queries("get_object_or_404(Run)")
    assert queries("run.save(update_fields=['name'])") == ["save"] and queries("storage.save(name, file)") == []
    assert queries("@register.filter\ndef number(value): ...") == []


MAX_ROOMS = 10
MAX_FILES = 25


def crowded(paths: Iterable[Path]) -> dict[str, int]:
    """Houses of too many rooms and folders of too many modules, by their number."""
    folders = Counter(path.parent for path in paths)
    houses = Counter(folder.parent.as_posix() for folder in folders if folder.parent.as_posix() in HOUSES)
    return {house: n for house, n in houses.items() if n > MAX_ROOMS} | {
        folder.as_posix(): n for folder, n in folders.items() if n > MAX_FILES
    }


def test_no_house_and_no_folder_is_crowded() -> None:
    paths = [path.relative_to(ROOT) for path in source_files() if "migrations" not in path.parts]
    assert len(paths) > 500 and crowded(paths) == {}


def test_a_crowd_would_be_found() -> None:
    assert crowded(Path(f"rollouts/room/file{n}.py") for n in range(26)) == {"rollouts/room": 26}
    assert crowded(Path(f"rollouts/room{n}/file.py") for n in range(11)) == {"rollouts": 11}


def test_production_python_stays_below_its_ceiling() -> None:
    """A capability pays for its place: what a new part makes superfluous goes in the same change."""
    product = [path for path in source_files() if path.relative_to(ROOT).parts[0] in HOUSES]
    lines = sum(len(path.read_bytes().splitlines()) for path in product)
    assert 50_000 < lines < 92_000
