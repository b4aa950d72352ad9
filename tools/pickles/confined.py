"""The confined process that opens one pickle: ``python -I FILE PICKLE``.

It answers with frames: lines of trajectories, each behind an ``L``; at last ``R`` and JSON. That has ``n``, the number
of trajectories, or ``refusal``, a sentence.
"""

import importlib
import json
import os
import resource
import struct
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # ``-I`` leaves out the folder of the product

MEMORY_BYTES, MEMORY_OF_SIZE = 2_000_000_000, 6
"""Memory beyond what is mapped at the start, and so many times the size of the file."""
CPU_SECONDS, SECONDS_PER_MB = 120, 2
FRAME_BYTES = 1 << 20


class Frames:
    """A file whose bytes are sent in frames."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._pending = stream, bytearray()

    def send(self, kind: bytes, data: bytes | bytearray) -> None:
        """Send one frame now."""
        self._stream.write(struct.pack("<I", 1 + len(data)) + kind + data)
        self._stream.flush()

    def write(self, data: bytes) -> None:
        """As of a file."""
        self._pending += data
        if len(self._pending) >= FRAME_BYTES:
            self.send(b"L", self._pending)
            self._pending = bytearray()

    def finish(self, result: dict[str, Any]) -> None:
        """Send what is left, and the result."""
        self.send(b"L", self._pending)
        self.send(b"R", json.dumps(result).encode())


def main(path: Path, answers: Frames) -> None:
    """Open the pickle and send its trajectories."""
    from rollout_inspector.formats.readers import inspector_jsonl
    from rollout_inspector.refusal import Refusal
    from rollout_inspector.text.confinement import confine
    from tools.pickles.trainer_dumps import trajectories
    from tools.pickles.unpickling import MODULES, load

    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            needs_torch = _needs_torch(file)
            for name in MODULES:
                with suppress(ImportError):
                    if needs_torch or not name.startswith("torch"):
                        importlib.import_module(name)
            if needs_torch:
                _load_with_torch()
            seconds = CPU_SECONDS + SECONDS_PER_MB * (size >> 20)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            confine(MEMORY_BYTES + MEMORY_OF_SIZE * size)
            n = inspector_jsonl.write(trajectories(load(file), path.stem), answers)  # type: ignore[arg-type]
        if not n:
            raise Refusal("It holds no samples.")
        result: dict[str, Any] = {"n": n}
    except Refusal as refusal:
        result = {"refusal": str(refusal)}
    except OSError as error:
        result = {"refusal": f"It cannot be read: {error.strerror or error}."}
    except MemoryError:
        result = {"refusal": "It needs more memory than a conversion may use."}
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {str(error)[:300]}"
        result = {"refusal": f"It holds arrays or numbers of an unknown shape ({what})."}
    answers.finish(result)


def _needs_torch(file: IO[bytes]) -> bool:
    """Whether torch opens the file. Its import takes seconds, and later it cannot be imported."""
    from tools.pickles.unpickling import TORCH_MAGIC

    last, marks = b"", (b"torch", TORCH_MAGIC.to_bytes(10, "little"))
    while data := file.read(FRAME_BYTES):
        if any(mark in last + data for mark in marks) or (not last and data.startswith(b"PK")):
            break
        last = data[-10:]
    file.seek(0)
    return bool(data)


def _load_with_torch() -> None:
    """Import what torch imports when it opens a file."""
    with suppress(ImportError):
        import torch

        from tools.pickles.unpickling import load_tensor

        for zipped in (True, False):
            file = BytesIO()
            torch.save(torch.zeros(1), file, _use_new_zipfile_serialization=zipped)
            load_tensor(file.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Frames(sys.stdout.buffer))
