"""Starts the sandbox's program: ``python -I FOLDER/__main__.py BYTES``, with BYTES of memory.

The folder is loaded as a package by its path. So ``sys.path`` stays as ``-I`` leaves it, without a folder of ours.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

NAME = "sandbox_worker"


def load_package() -> None:
    """Make this folder importable as ``sandbox_worker``."""
    spec = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name("__init__.py"))
    assert spec is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    load_package()
    importlib.import_module(f"{NAME}.serving").main(int(sys.argv[1]))
