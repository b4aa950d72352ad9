"""Files of a trainer that grow while somebody watches them."""

import json
import os
import time
from pathlib import Path

from tests.adapters.conftest import FakeServer


def line(name: str) -> bytes:
    return json.dumps({"token_ids": [1], "rollout_id": name}).encode() + b"\n"


def write(path: Path, *names: str, age: float = 60.0, mode: str = "wb", end: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(b"".join(map(line, names)) + end)
    changed = time.time() - age
    os.utime(path, (changed, changed))
    return path


def names(server: FakeServer) -> list[str]:
    return [one["rollout_id"] for one in server.records]
