"""Opens a pickle with arrays, tensors and plain records alone: no other class is looked up."""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollout_inspector.refusal import Refusal

_ALLOWED = frozenset(
    {
        ("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "set"), ("builtins", "frozenset"),
        ("builtins", "bytearray"), ("builtins", "complex"), ("builtins", "slice"), ("_codecs", "encode"),
        ("torch", "Size"), ("torch", "Tensor"), ("torch", "device"), ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor"), ("torch._utils", "_rebuild_parameter"),
        ("torch.storage", "_load_from_bytes"), ("torch.storage", "TypedStorage"), ("torch.storage", "UntypedStorage"),
        ("numpy", "ndarray"), ("numpy", "dtype"),
        *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    }
)
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
"""The first bytes of files of torch.save before they were zip archives."""


class Restricted(pickle.Unpickler):
    """Looks up arrays and tensors, and makes a record of everything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_storage = module in ("torch", "torch.cuda") and name.endswith("Storage")
        is_dtype = module in ("torch", "numpy", "numpy.dtypes") and name.isidentifier() and _is_dtype(module, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return load_tensor  # torch's own function opens any pickle inside this one
        if (module, name) in _ALLOWED or is_storage or is_dtype:
            return getattr(importlib.import_module(module), name)
        return type(name, (Record,), {"__module__": "converted", "origin": f"{module}.{name}"})


class Record(dict[Any, Any]):
    """What is left of an object whose class is not looked up: its arguments, items and state."""

    origin = ""

    def __new__(cls, *arguments: Any, **named: Any) -> Record:
        return dict.__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__()
        self["__arguments__"] = arguments
        self.update(named)

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                self.update(part)

    def append(self, item: Any) -> None:
        self.setdefault("__items__", []).append(item)

    def extend(self, items: Any) -> None:
        self.setdefault("__items__", []).extend(items)


def _is_dtype(module: str, name: str) -> bool:
    value = getattr(importlib.import_module(module), name, None)
    if module == "torch":
        return type(value).__name__ == "dtype"
    return isinstance(value, type) and issubclass(value, np.generic | np.dtype)


def load(path: Path) -> Any:
    """The value of a pickle, or of a file of ``torch.save``. Raises :class:`Refusal`."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
            file.seek(0)
            if head == b"PK\x03\x04":
                return _torch_load(file)
            value = Restricted(file).load()
            if value == _TORCH_MAGIC:
                file.seek(0)
                return _torch_load(file)
            return value
    except (OSError, Refusal):
        raise
    except Exception as error:
        raise Refusal(f"{path} could not be opened: {type(error).__name__}: {str(error)[:300]}") from error


def load_tensor(data: bytes) -> Any:
    return _torch_load(io.BytesIO(data))


def _torch_load(file: Any) -> Any:
    try:
        import torch
    except ImportError as error:
        raise Refusal("The file was written by torch.save. Install torch to open it.") from error

    def load_restricted(stream: Any, **more: Any) -> Any:
        return Restricted(stream, **more).load()

    ours = SimpleNamespace(Unpickler=Restricted, load=load_restricted, __name__="pickle")
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=ours)
