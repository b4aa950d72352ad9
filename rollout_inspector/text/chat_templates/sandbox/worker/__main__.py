"""Starts the sandbox's program: ``python -I FOLDER/__main__.py BYTES``, with BYTES of memory. The folder is loaded as a
package by its path. So ``sys.path`` stays as ``-I`` leaves it, without a folder of ours."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
NAME = "sandbox_worker"


def load(name: str, path: Path) -> ModuleType:
    """The module or package of a file, importable by a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    load(NAME, FOLDER / "__init__.py")
    confinement = load("confinement", FOLDER.parents[2] / "confinement.py")
    importlib.import_module(f"{NAME}.serving").main(int(sys.argv[1]), confinement.confine)
