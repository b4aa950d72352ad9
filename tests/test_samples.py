"""What tests share lies in ``tests/samples``: no module imports a test module, and a sample holds no test."""

import ast

from tests.conftest import ROOT

SAMPLES = ROOT / "tests" / "samples"


def imported_tests(source: str) -> list[str]:
    """The test modules, and names of them, that a module imports, wherever in its text."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names += [f"{base}.{alias.name}" for alias in node.names]
    ours = [name.split(".") for name in names if name.startswith((".", "tests.", "benchmarks."))]
    return [".".join(parts) for parts in ours if any(part.startswith("test_") for part in parts)]


def test_no_module_imports_a_test_module() -> None:
    modules = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    imports = {str(path.relative_to(ROOT)): imported_tests(path.read_text(encoding="utf-8")) for path in modules}
    assert len(imports) > 300
    assert {name: tests for name, tests in imports.items() if tests} == {}


def test_an_import_of_a_test_module_would_be_found() -> None:
    assert imported_tests("def f():\n    from tests.web.test_runs import page") == ["tests.web.test_runs.page"]
    assert imported_tests("from tests.web import test_runs") and imported_tests("import tests.web.test_runs as runs")
    assert imported_tests("from .test_runs import page")
    assert not imported_tests("from tests.samples.pages import share\nfrom tests.conftest import ROOT")


def test_samples_hold_no_tests() -> None:
    for path in SAMPLES.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert ast.get_docstring(tree) and not [name for name in names if name.startswith("test_")], path.name
