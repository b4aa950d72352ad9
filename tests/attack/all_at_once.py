"""The attacks of this folder on one server at once, for ``benchmarks.measures.gets_under_attack --attack all``."""

from __future__ import annotations

import contextlib
import http.client
import tempfile
import threading
from collections import Counter
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING

from tests.attack import hostile_bodies, slow_clients
from tests.attack.hostile_uploads import BOMBS, FOREVER, bomb

if TYPE_CHECKING:
    from benchmarks.measures.gets_under_attack import Server

MODEL = Path(__file__).resolve().parents[2] / "rollouts" / "sampling" / "demo_policy" / "model"
PAUSE_SECONDS = 0.2
"""Between two forms of a client."""
BOUNDARY = "0123456789abcdef"
CSRF = "c" * 32
"""The cookie and the header must agree; the server made neither."""


def tokenizers(server: Server, stop: Event) -> None:
    """Two clients upload tokenizers that are bombs."""
    with tempfile.TemporaryDirectory() as folder:
        made = [bomb(MODEL, Path(folder) / str(n), dict(change)) for n, (change, _) in enumerate(BOMBS.values())]
        bodies = [_form({"name": "bomb"}, {"upload": (one / "tokenizer.json").read_bytes()}) for one in made]
    _post_forms(server, stop, "/tokenizers.json", bodies)


def checks(server: Server, stop: Event) -> None:
    """Two clients ask for twenty checks of templates that take all the time they get, and ask again for them."""
    bodies = [_form({"chat_template": f"{FOREVER}{n}"}, {}) for n in range(20)]
    _post_forms(server, stop, "/templates.json", bodies)


def exports(server: Server, stop: Event) -> None:
    """Two clients read exports of their run, one after the other."""

    def client() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                server.get(f"/runs/{server.run}/export?format=own_jsonl")

    for _ in range(2):
        threading.Thread(target=client, daemon=True).start()
    stop.wait()


def everything(server: Server, stop: Event) -> None:
    """Hostile pushes, tokenizers, templates, exports, and 200 clients that stop in the middle of a head."""
    attacks = (hostile_bodies.push_them, tokenizers, checks, exports, slow_clients.half_heads)
    threads = [threading.Thread(target=attack, args=(server, stop), daemon=True) for attack in attacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _form(fields: dict[str, str], files: dict[str, bytes]) -> bytes:
    """The body of a form with files."""
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts += [f'name="{name}"; filename="tokenizer.json"\r\n\r\n'.encode() + data for name, data in files.items()]
    joined = b"".join(f"--{BOUNDARY}\r\nContent-Disposition: form-data; ".encode() + part + b"\r\n" for part in parts)
    return joined + f"--{BOUNDARY}--\r\n".encode()


def _post_forms(server: Server, stop: Event, path: str, bodies: list[bytes], n_clients: int = 2) -> None:
    """Clients of a member post the bodies again and again, each the next one. Prints what was answered."""
    headers = {
        "Cookie": f"{server.cookie}; csrftoken={CSRF}",
        "X-CSRFToken": CSRF,
        "Content-Type": f"multipart/form-data; boundary={BOUNDARY}",
    }
    answers: Counter[str] = Counter()

    def client(first: int) -> None:
        turn = first
        while not stop.is_set():
            try:
                status, said = server.post(path, bodies[turn % len(bodies)], headers)
                answers[f"POST {path}: {status} {said[:150].decode(errors='replace')}"] += 1
            except (OSError, http.client.HTTPException) as error:
                answers[f"POST {path}: {error!r}"] += 1
            turn += n_clients
            stop.wait(PAUSE_SECONDS)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(n_clients)]
    for thread in threads:
        thread.start()
    stop.wait()
    for name, count in sorted(answers.items()):
        print(f"{count:4} x {name}", flush=True)
