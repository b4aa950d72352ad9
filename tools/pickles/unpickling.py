"""Opens a pickle with arrays, tensors and plain records alone: no other class is looked up."""

from __future__ import annotations

import importlib
import io
import pickle
import re
import tarfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import IO, Any

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
MODULES = ("encodings.latin_1", "numpy.char", "numpy.dtypes", *sorted({module for module, _ in _ALLOWED}))
"""What is imported before the process is confined, because no import works after it."""
_OF_TORCH_SAVE = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)
"""The records of an archive of ``torch.save``. One of ``torch.jit`` or ``torch.export`` has others, its code."""
TORCH_MAGIC = 0x1950A86A20F9469CFC6C
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


def load(file: IO[bytes]) -> Any:
    """The value of a pickle, or of a file of ``torch.save``. Raises :class:`Refusal`."""
    try:
        is_archive = file.read(2) == b"PK"
        file.seek(0)
        if is_archive:
            return _torch_load(file)
        value = Restricted(file).load()
        if value == TORCH_MAGIC:
            file.seek(0)
            return _torch_load(file)
        return value
    except (Refusal, MemoryError):
        raise
    except Exception as error:
        raise Refusal(f"It is no pickle that could be opened. {type(error).__name__}: {str(error)[:300]}") from error


def load_tensor(data: bytes) -> Any:
    return _torch_load(io.BytesIO(data))


def _torch_load(file: IO[bytes]) -> Any:
    try:
        import torch
    except ImportError as error:
        raise Refusal("It was written by torch.save. Install torch to open it.") from error
    start = file.tell()
    is_archive = file.read(2) == b"PK"
    file.seek(start)
    if is_archive:
        # What torch.load asks itself, before it hands an archive of code to torch.jit.
        names = torch._C.PyTorchFileReader(file).get_all_records()
        if foreign := next((name for name in names if not _OF_TORCH_SAVE.fullmatch(name)), None):
            raise Refusal(
                f"It is an archive with {foreign[:100]!r}, which torch.save does not write. It may hold a program."
            )
    elif tarfile.is_tarfile(file):  # torch.load would unpack it into a folder
        raise Refusal("It is a tar archive of an old torch. Open it there, and save it again with torch.save.")
    file.seek(start)

    def load_restricted(stream: Any, **more: Any) -> Any:
        return Restricted(stream, **more).load()

    ours = SimpleNamespace(Unpickler=Restricted, load=load_restricted, __name__="pickle")
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=ours)
