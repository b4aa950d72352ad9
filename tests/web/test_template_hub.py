"""A template check of a hub id at a revision, with the real client against a hub on this machine; and its history."""

import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from django.test import Client

from rollouts.jobs import template_checks
from rollouts.store.models import TemplateCheck, Tokenizer
from tests.samples.chat_templates import BROKEN, SAFE
from tests.samples.template_command import run

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite_only]  # its queries are those of other pages


class Hub(BaseHTTPRequestHandler):
    """What the client asks of the hub: the files of a revision, and each file's head and content."""

    revisions: dict[str, dict[str, bytes]] = {}
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/lab/tiny/revision/"):
            commit = self.commit(path.rpartition("/")[2])
            siblings = [{"rfilename": name} for name in self.revisions.get(commit, {})]
            body = json.dumps({"id": "lab/tiny", "modelId": "lab/tiny", "sha": commit, "siblings": siblings}).encode()
            found = body if commit in self.revisions else None
        elif path.startswith("/api/models/lab/tiny/tree/"):
            commit = self.commit(path.rpartition("/")[2])
            files = [
                {"type": "file", "path": name, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                for name, text in self.revisions.get(commit, {}).items()
            ]
            found = json.dumps(files).encode() if commit in self.revisions else None
        else:
            _, _, _, _, revision, name = [*path.split("/", 5), "", ""][:6]
            commit = self.commit(revision)
            found = self.revisions.get(commit, {}).get(name)
        self.send_response(200 if found is not None else 404)
        if found is None:
            self.send_header("X-Error-Code", "RevisionNotFound")
        content = found or b""
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    @staticmethod
    def commit(revision: str) -> str:
        """A revision's commit: a name stands for the hash of its name."""
        return revision if len(revision) == 40 else hashlib.sha1(revision.encode()).hexdigest()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path, answered: None
) -> Iterator[None]:
    """A hub with two revisions of one model: the template of the first breaks prefixes, that of the second does not."""
    plain = {one.name: one.read_bytes() for one in tiny_tokenizer.iterdir() if one.suffix == ".json"}
    config = json.loads(plain["tokenizer_config.json"])
    config.pop("chat_template", None)
    plain["tokenizer_config.json"] = json.dumps(config).encode()
    Hub.revisions = {
        Hub.commit(name): {**plain, "chat_template.jinja": text.encode()}
        for name, text in (("v1", BROKEN), ("v2", SAFE))
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    download = functools.partial(
        huggingface_hub.snapshot_download, endpoint=f"http://127.0.0.1:{server.server_address[1]}", token=False
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(template_checks, "_repaired", lambda loaded, report, beat: report)
    settings.HUB_ALLOWED = True
    settings.INSPECTOR_DATA = tmp_path
    yield
    server.shutdown()
    server.server_close()


def test_two_revisions_of_a_hub_id_are_checked_and_stand_side_by_side(web: Client, hub: None) -> None:
    for revision in ("v1", "v2"):
        answer = web.post("/templates", {"hub_id": "lab/tiny", "revision": revision})
        assert answer.status_code == 302, answer.content.decode()
    assert list(Tokenizer.objects.order_by("pk").values_list("name", "revision")) == [
        ("lab/tiny@v1", "v1"), ("lab/tiny@v2", "v2"),
    ]
    # Both stay, and what turned between them is told.
    found = web.get("/templates/matrix.json").json()
    assert [(one["name"], one["prefix_preserving"]) for one in found["tokenizers"]] == [
        ("lab/tiny@v1", False), ("lab/tiny@v2", True),
    ]
    (change,) = found["revisions"]
    turned = {probe["name"]: (probe["before"], probe["after"]) for probe in change["turned"]}
    assert turned["tool_append"] == ("broken", "ok")
    page = web.get("/templates/matrix").content.decode()
    assert "broken → ok" in page and "A tool result after a call" in page
    newest = web.get("/templates/matrix.json?revisions=newest").json()
    assert [one["name"] for one in newest["tokenizers"]] == ["lab/tiny@v2"] and newest["revisions"]
    # The same question has the same check, and asks the hub for nothing.
    Hub.revisions = {}
    web.post("/templates", {"hub_id": "lab/tiny", "revision": "v2"})
    assert TemplateCheck.objects.count() == 2


def test_the_command_takes_a_hub_id_with_its_revision(hub: None) -> None:
    status, out, err = run("--tokenizer", "lab/tiny@v1", "--json")
    assert (status, err) == (1, "") and json.loads(out)["prefix_preserving"] is False
    assert Tokenizer.objects.get().revision == "v1"
    status, _, err = run("--tokenizer", "lab/tiny@v9")
    assert status == 2 and "lab/tiny at v9 could not be fetched" in err


def test_a_revision_that_is_not_there_is_told(web: Client, hub: None) -> None:
    answer = web.post("/templates", {"hub_id": "lab/tiny", "revision": "v9"})
    assert answer.status_code == 400 and "lab/tiny at v9 could not be fetched" in answer.content.decode()
    assert not Tokenizer.objects.exists()
