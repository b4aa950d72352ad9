"""By what the weights of a model are known again: a digest of their files."""

import hashlib
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
MAX_WHOLE_BYTES = 64 << 20  # A larger file is read in parts: reading all of a large model takes as long as loading it.
PARTS = 256
PART_BYTES = 64 << 10


def weights_digest(folder: str | Path) -> str:
    """16 hexadecimal digits of the config and the weights in a model's folder; empty = it holds no weights. It reads
    small files whole. Of a larger one it reads its size and :data:`PARTS` parts at equal distances. A training step
    changes nearly every weight, so other weights have another digest."""
    paths = sorted(path for path in Path(folder).glob("*") if path.suffix in SUFFIXES and path.is_file())
    if not paths:
        return ""
    total = hashlib.sha256()
    for path in [Path(folder) / "config.json", *paths]:
        if path.is_file():
            size = path.stat().st_size
            total.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                if size <= MAX_WHOLE_BYTES:
                    total.update(file.read())
                    continue
                for n in range(PARTS):
                    file.seek((size - PART_BYTES) * n // (PARTS - 1))
                    total.update(file.read(PART_BYTES))
    return total.hexdigest()[:16]
