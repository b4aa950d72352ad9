"""Code of the published trainers, run without what the packages themselves want: ray, CUDA and cloud clients."""

import __future__

import ast
import importlib
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import missing

FOLDER = Path(os.environ.get("INSPECTOR_TEST_WRITERS") or Path(sys.prefix) / "writers")
"""Where ``requirements-writers.txt`` is installed; `make writers-newest` names a folder with newer versions."""


def path_of(package: str, path: str) -> Path:
    """A file of a package: in the folder of writers, else where Python has installed the package."""
    file = FOLDER / path
    if not file.exists():
        try:
            file = Path(str(metadata.distribution(package).locate_file(path)))
        except metadata.PackageNotFoundError:
            file = Path()
    if not file.exists() or file == Path():
        missing(f"{package} has no {path} here; `make .venv/.installed-dev` installs tests/formats/requirements-*.txt")
    return file


def taken_from(
    package: str, path: str, names: list[str], around: Mapping[str, Any],
    methods: Mapping[str, Sequence[str]] | None = None, lazy: bool = True,
) -> Any:
    """Functions and classes of a published file, run among the names that they use; nothing is imported.

    A class of ``methods`` has these methods alone, and the base ``Base``. ``lazy``: annotations are not evaluated.
    """
    found = [
        node for node in ast.parse(path_of(package, path).read_text("utf-8")).body if getattr(node, "name", "") in names
    ]
    assert {getattr(node, "name", "") for node in found} == set(names), "the package names them otherwise now"
    for node in found:
        if isinstance(node, ast.ClassDef) and methods and node.name in methods:
            node.body = [one for one in node.body if getattr(one, "name", "") in methods[node.name]]
            node.bases, node.decorator_list = [ast.Name("Base", ast.Load())], []
    flags = __future__.annotations.compiler_flag if lazy else 0
    space: dict[str, Any] = {"__name__": __name__, "Base": object, **around}
    tree = ast.fix_missing_locations(ast.Module(found, []))
    exec(compile(tree, path, "exec", flags=flags, dont_inherit=True), space)
    return SimpleNamespace(**{name: space[name] for name in names})


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_AnyClass):
    """Whatever a module that is not installed would hold: a class, a base, a decorator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *values: Any, **_: Any) -> Any:
        return values[0] if len(values) == 1 and callable(values[0]) else self


class _Absent(MetaPathFinder, Loader):
    """Finds modules that are not installed, as modules of :class:`Anything`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(Anything, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def importable(*packages: str, absent: Sequence[str] = ()) -> Iterator[Any]:
    """Modules of these packages can be imported, without what ``__init__`` does; yields ``importlib.import_module``.

    ``absent`` names what need not be installed. All of it is forgotten at the end.
    """
    before, path, finder = set(sys.modules), list(sys.path), _Absent(absent)
    for name in packages:
        module = types.ModuleType(name)
        module.__version__ = "published"  # type: ignore[attr-defined]
        module.__path__ = [str(path_of(name.split(".")[0], f"{name.replace('.', '/')}/__init__.py").parent)]
        sys.modules[name] = module
    sys.path.append(str(FOLDER))
    sys.meta_path.append(finder)
    try:
        yield importlib.import_module
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = path
        tops = {name.split(".")[0] for name in packages} | set(absent)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in tops:
                del sys.modules[name]
