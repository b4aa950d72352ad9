"""Folders of the server that a member names: only tokenizers below the folders allowed are read, and nothing else."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from inspector.server.env import EnvironmentReader
from rollout_inspector.text import tokenizers
from rollout_inspector.text.tokenizers import TokenizerUnusable, server_folder
from rollouts.store.chat_templates.tokenizers import hub_tokenizer
from rollouts.store.models import Tokenizer

SECRET = "the-secret-key-of-this-server"


@pytest.fixture
def room(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    """`root/model` holds a tokenizer; `data` and `outside` lie beside the root and hold one as well, and a secret."""
    for place in ("root/model", "data/tokenizers/abc", "outside/model"):
        shutil.copytree(tiny_tokenizer, tmp_path / place)
    for place in ("data/secret_key", "outside/secret_key", "root/secret_key"):
        (tmp_path / place).write_text(SECRET)
    return tmp_path


def copied(room: Path, named: str | Path) -> Path:
    data = room / "data"
    return tokenizers.copy_from_server(named, [room / "root", data], kept_out=data, target=room / "copies")


def test_a_folder_below_a_root_is_copied(room: Path) -> None:
    (room / "latest").symlink_to(room / "root" / "model")
    for named in (room / "root/model", room / "root/model/../model", room / "latest"):
        copy = copied(room, named)
        assert copy.name == "model" and tokenizers.check_folder(copy) == []
        shutil.rmtree(room / "copies")


@pytest.mark.parametrize("named", [
    "outside/model", "root/../outside/model", "data/tokenizers/abc", "root/to_outside", "root/to_data/tokenizers/abc",
    "root/circle", "root/none", "root/model/tokenizer.json", "root", "root/model\0",
])
def test_m6_every_folder_outside_gets_one_sentence(named: str, room: Path) -> None:
    (room / "root/to_outside").symlink_to(room / "outside" / "model")
    (room / "root/to_data").symlink_to(room / "data")
    (room / "root/circle").symlink_to(room / "root/circle")
    with pytest.raises(TokenizerUnusable) as refused:
        copied(room, f"{room}/{named}")
    assert str(refused.value) == server_folder.NOT_READ


@pytest.mark.parametrize("named", ["/proc/self/root", "/proc/self/cwd", "/dev/fd", "/etc", "/"])
def test_m6_folders_of_the_system_get_the_same_sentence(named: str, room: Path) -> None:
    with pytest.raises(TokenizerUnusable) as refused:
        copied(room, named)
    assert str(refused.value) == server_folder.NOT_READ


def to_secret_key(path: Path, room: Path) -> None:
    path.symlink_to(room / "data" / "secret_key")


def to_a_file_of_the_root(path: Path, room: Path) -> None:
    path.symlink_to(Path("../secret_key"))


def to_blobs_that_are_a_link(path: Path, room: Path) -> None:
    (room / "blobs").symlink_to(room / "data")
    (room / "root/blobs").symlink_to(room / "data")
    path.symlink_to("../../blobs/secret_key")


def hard_link(path: Path, room: Path) -> None:
    os.link(room / "data" / "secret_key", path)


def pipe(path: Path, room: Path) -> None:
    os.mkfifo(path)


def too_large(path: Path, room: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10_000_000_000)


@pytest.mark.parametrize("place", [
    to_secret_key, to_a_file_of_the_root, to_blobs_that_are_a_link, hard_link, pipe, too_large
])
def test_m6_a_file_that_is_no_file_of_the_folder_is_refused(place: Callable[[Path, Path], None], room: Path) -> None:
    path = room / "root/model/chat_template.jinja"
    path.unlink(missing_ok=True)
    place(path, room)
    with pytest.raises(TokenizerUnusable) as refused:
        copied(room, room / "root/model")
    assert str(room) not in str(refused.value) and SECRET not in str(refused.value)


@pytest.mark.parametrize("swapped", ["model", "model/chat_template.jinja"])
def test_m6_a_link_that_is_put_there_after_the_check_is_not_followed(
    swapped: str, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (room / "data/tokenizers/abc/chat_template.jinja").write_text(SECRET)
    opened = os.open

    def swap(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if path == Path(swapped).name:
            target = room / "root" / swapped
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            target.symlink_to(room / "data/tokenizers/abc" / Path(swapped).relative_to("model"))
        return opened(path, flags, *more, **options)

    (room / "root/model/chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(server_folder.os, "open", swap)
    with pytest.raises(TokenizerUnusable):
        copied(room, room / "root/model")


def test_the_cache_of_the_hub_can_be_named(room: Path, tiny_tokenizer: Path) -> None:
    snapshot, blobs = room / "root/hub/models--a--b/snapshots/abc", room / "root/hub/models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in tiny_tokenizer.iterdir():
        shutil.copy(file, blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    assert tokenizers.check_folder(copied(room, snapshot)) == []


@pytest.mark.django_db
def test_m6_the_form_shows_no_secret_key(room: Path, admin_client: Client, settings: Any) -> None:
    settings.TOKENIZER_FOLDERS, settings.INSPECTOR_DATA = [room], room / "data"
    template = room / "root/model/chat_template.jinja"
    template.unlink(missing_ok=True)
    template.symlink_to(room / "data/secret_key")
    for folder in (room / "root/model", room / "data/tokenizers/abc"):
        answer = admin_client.post("/tokenizers.json", {"folder": str(folder)})
        assert answer.status_code == 422 and SECRET not in answer.content.decode()
    assert not Tokenizer.objects.exists()
    settings.TOKENIZER_FOLDERS = []
    assert b'name="folder"' not in admin_client.get("/tokenizers").content
    assert admin_client.post("/tokenizers.json", {"folder": str(room / "outside/model")}).status_code == 422


@pytest.mark.django_db
@pytest.mark.parametrize("revision", ["main", "../../../x", "a/../../b"])
def test_m6_a_hub_id_is_never_taken_for_a_path(
    revision: str, room: Path, admin_client: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.HUB_ALLOWED = True
    (room / "root/at").mkdir()
    (room / "root/model").rename(room / "root/at/x@main")
    monkeypatch.chdir(room / "root")
    asked: list[str] = []

    def download(hub_id: str, revision: str, **_: Any) -> str:
        asked.append(f"{hub_id}@{revision}")
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for hub_id in (f"{room}/root/at/x", "at/x", "..", "../at/x"):
        answer = admin_client.post("/templates", {"hub_id": hub_id, "revision": revision, "chat_template": "a"})
        assert answer.status_code in (200, 400, 422) and not Tokenizer.objects.exists()
    assert asked == (["at/x@main"] if revision == "main" else [])
    with pytest.raises(ValueError, match="hub id"):
        hub_tokenizer(f"{room}/root/at/x", "main")


def test_the_default_folders_are_those_of_the_owner_on_a_machine_of_ones_own() -> None:
    reader = EnvironmentReader({"INSPECTOR_TOKENIZER_FOLDERS": "/models, /, relative"})
    assert reader.folders("INSPECTOR_TOKENIZER_FOLDERS") == [Path("/models")] and len(reader.problems) == 1
    unset = EnvironmentReader({})
    assert unset.folders("INSPECTOR_TOKENIZER_FOLDERS", [Path("/"), Path("/home/me")]) == [Path("/home/me")]
    assert not unset.problems
