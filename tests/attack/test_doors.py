"""Attacks on the doors: bodies of strangers, full disks, odd names, and what logs and search engines learn."""

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.contrib.sessions.backends.base import UpdateError
from django.contrib.sessions.backends.db import SessionStore
from django.core.cache import cache
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connection
from django.db.backends.signals import connection_created
from django.test import Client

from inspector.server.logs import TextLineFormatter
from inspector.web.forms import LimitedUploadHandler
from rollout_inspector.formats import FORMATS
from rollouts.jobs import pushes
from rollouts.jobs.exports.reproduce import script
from rollouts.store.models import Run
from rollouts.store.people.accounts import local_user
from rollouts.store.people.shares import create_api_key
from rollouts.store.runs.runs import create_run
from tests.faults import SmallDisk
from tests.people import make_member
from tests.ports import HeldPort
from tests.web.samples import trajectory
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db

PLACES = ["/import", "/import.json", "/tokenizers", "/runs/new", "/login", "/health", "/runs/zzzz", "/s/unknown"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk", 1)
    disk.fill()
    yield disk
    disk.close()


@pytest.fixture
def kept(settings: Any, tmp_path: Path) -> Path:
    """The folder of uploads, empty."""
    settings.FILE_UPLOAD_TEMP_DIR = str(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", PLACES)
def test_no_byte_of_a_strangers_file_is_kept(place: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[bytes] = []
    monkeypatch.setattr(LimitedUploadHandler, "receive_data_chunk", lambda self, data, start: stored.append(data))
    stranger = Client(enforce_csrf_checks=True)
    token = stranger.get("/login").cookies["csrftoken"].value
    form = {"csrfmiddlewaretoken": token, "files": SimpleUploadedFile("a.jsonl", b"{}" * 5000)}
    answer = stranger.post(place, form)
    assert answer.status_code in (302, 401, 403, 404) and not stored and not any(kept.iterdir())


def test_a_members_file_is_received(member: Client, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[bytes] = []
    monkeypatch.setattr(LimitedUploadHandler, "receive_data_chunk", lambda self, data, start: stored.append(data))
    member.post("/import", {"files": SimpleUploadedFile("a.jsonl", b"{}" * 5000)})
    assert b"".join(stored) == b"{}" * 5000


def test_a_suffix_of_300_characters_is_cut(member: Client, kept: Path) -> None:
    answer = member.post("/import.json", {"files": SimpleUploadedFile(f"a.{'x' * 300}", b"{}")})
    assert answer.status_code < 500 and answer.json()


@pytest.mark.parametrize("place", ["/import", "/tokenizers"])
def test_an_upload_that_fills_the_disk_leaves_nothing_there(
    place: str, member: Client, settings: Any, full_disk: SmallDisk
) -> None:
    settings.FILE_UPLOAD_TEMP_DIR = str(full_disk.folder)
    before = set(full_disk.folder.iterdir())
    answer = member.post(place, {"files": SimpleUploadedFile("a.jsonl", b"{}" * 9)})
    assert answer.status_code == 507 and b"The disk of the server is full" in answer.content
    assert set(full_disk.folder.iterdir()) == before


def test_a_push_on_a_full_disk_says_so(settings: Any, full_disk: SmallDisk) -> None:
    settings.INSPECTOR_DATA = full_disk.folder
    settings.FILE_UPLOAD_TEMP_DIR = str(full_disk.folder)
    answer = _push(create_run(Run.Kind.IMPORT, "grpo", status=Run.Status.DONE))
    assert answer.status_code == 507 and "disk of the server is full" in answer.json()["error"], answer.content


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_push_into_a_full_database_says_so() -> None:
    run = create_run(Run.Kind.IMPORT, "grpo", status=Run.Status.DONE)
    _, token = create_api_key(make_member("trainer"), "trainer")
    write, lines = FORMATS["own_jsonl"].write, io.BytesIO()
    assert write is not None
    write((trajectory(f"t{n}") for n in range(300)), lines)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM")
        cursor.execute("PRAGMA page_count")
        n_pages = int(cursor.fetchone()[0])
    connection.close()

    def allow_no_page_more(**named: Any) -> None:
        with named["connection"].cursor() as cursor:
            cursor.execute(f"PRAGMA max_page_count = {n_pages + 8}")

    connection_created.connect(allow_no_page_more)
    try:
        answer = _push(run, token, lines.getvalue())
    finally:
        connection_created.disconnect(allow_no_page_more)
        connection.close()
    assert answer.status_code == 507 and "disk of the server is full" in answer.json()["error"], answer.content


def test_a_login_on_a_full_disk_says_so(django_user_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: Django takes a session that cannot be written for one that was deleted meanwhile, which is a 400."""
    make_member("ada", password="the right password")
    client = Client()
    client.force_login(django_user_model.objects.get())

    def save(*_: Any, **__: Any) -> None:  # a full SQLite still updates a row that does not grow
        try:
            raise OperationalError("database or disk is full")
        except OperationalError as error:
            raise UpdateError from error

    monkeypatch.setattr(SessionStore, "save", save)
    answer = client.post("/login", {"username": "ada", "password": "the right password"})
    assert answer.status_code == 507 and "disk of the server is full" in answer.content.decode()


def test_a_push_to_a_run_that_is_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(Run.Kind.IMPORT, "grpo", status=Run.Status.DONE)

    def delete(*_: Any) -> None:
        Run.objects.filter(pk=run.pk).delete()
        raise IntegrityError("FOREIGN KEY constraint failed")

    monkeypatch.setattr(pushes, "add_new_trajectories", delete)
    answer = _push(run)
    assert answer.status_code == 410 and "was deleted while you pushed" in answer.json()["error"]


def _push(
    run: Run, token: str = "", line: bytes = b'{"id": "a", "steps": [{"prompt_ids": [1], "completion_ids": [2]}]}\n'
) -> Any:
    token = token or create_api_key(make_member("trainer"), "trainer")[1]
    return Client().post(
        f"/api/runs/{run.code}/trajectories?format=own_jsonl",
        line,
        content_type="application/x-ndjson",
        HTTP_AUTHORIZATION=f"Bearer {token}",
    )


def test_passwords_are_tried_ten_times(django_user_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache.clear()
    make_member("ada", password="the right password")

    def tried(name: str, password: str) -> int:
        return Client().post("/login", {"username": name, "password": password}).status_code

    assert [tried("ada", f"wrong {n}") for n in range(10)] == [200] * 10
    assert tried("ada", "the right password") == 429, "the password is not even looked at"
    assert tried("bob", "wrong") == 200, "another account is not locked"
    failures = [record for record in caplog.records if record.message == "login failed"]
    assert [(one.user, one.address) for one in failures] == [  # type: ignore[attr-defined]
        *[("ada", "127.0.0.1")] * 10, ("bob", "127.0.0.1")
    ]
    assert not any("wrong" in str(vars(record)) for record in failures), "no password is logged"
    cache.clear()


def test_each_spelling_of_a_name_counts_for_the_same_account(django_user_model: Any) -> None:
    """M4: the form removes blanks and takes the compatible form of each letter; so does the count."""
    cache.clear()
    make_member("ada", password="the right password")
    spellings = [
        "ada",
        " ada",
        "ada ",
        "\u2003ada",
        "\uff41da",
        "a\uff44a",
        "ad\uff41",
        "\u24d0da",
        "\u1d43da",
        "a\u217ea",
    ]
    tries = [{"username": name, "password": "wrong"} for name in spellings]
    assert [Client().post("/login", one).status_code for one in tries] == [200] * 10
    assert Client().post("/login", {"username": "\uff41\uff44a", "password": "the right password"}).status_code == 429
    cache.clear()


def test_a_stranger_does_not_lock_the_account_of_somebody_elsewhere(django_user_model: Any) -> None:
    """M4: ten tries count for an account and an address; a hundred for an account from all addresses."""
    cache.clear()
    make_member("ada", password="the right password")

    def tried(password: str, address: str) -> int:
        return Client(REMOTE_ADDR=address).post("/login", {"username": "ada", "password": password}).status_code

    assert [tried("wrong", "10.0.0.1") for _ in range(12)][-2:] == [429, 429]
    assert tried("the right password", "10.0.0.2") == 302
    cache.clear()


def test_a_nul_in_the_query_is_no_error(member: Client) -> None:
    for address in ("/templates/compare?a=%00&b=%00", "/runs?text=%00", "/templates/matrix?tokenizer=%00"):
        assert member.get(address).status_code in (200, 302, 404), address


def test_no_log_line_holds_a_share_token(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for address in ("/s/loBGAzdd8qMHNWAZyuAvhN0X", "/runs/abcd", "/login?token=loBGAzdd8qMHNWAZyuAvhN0X"):
            Client().get(address)
    written = "\n".join(TextLineFormatter().format(record) for record in caplog.records)
    assert "path=/s/..." in written and "Not Found: /s/..." in written and "path=/runs/abcd" in written
    assert "loBGAzdd8qMHNWAZyuAvhN0X" not in written


def test_search_engines_and_shared_caches_keep_nothing(member: Client) -> None:
    assert Client().get("/robots.txt").content == b"User-agent: *\nDisallow: /\n"
    for address in ("/", "/runs", "/templates", "/templates/matrix.csv", "/workers", "/help"):
        answer = member.get(address)
        assert answer["X-Robots-Tag"] == "noindex, nofollow", address
        assert {"private", "no-store"} & set(answer["Cache-Control"].split(", ")), address


def test_a_terminal_gets_no_escape_sequence_and_no_forged_line(tiny_tokenizer: Path) -> None:
    hostile = "a\x1b]0;owned\x07\nerror    forged  \u202eb"
    make = Maker(tiny_tokenizer)
    trajectory, (finding,) = make.broken(hostile)
    run = make.run([trajectory], [[replace(finding, evidence=hostile)]])
    create_api_key(local_user(), hostile)
    for command in (["findings", run.code], ["api_token", "--list"]):
        out = io.StringIO()
        call_command(*command, stdout=out)
        said = out.getvalue()
        assert "a\\x1b]0;owned\\x07\\nerror    forged  \\u202eb" in said
        assert all(char.isprintable() or char == "\n" for char in said)
        assert not any(line.startswith("error    forged") for line in said.splitlines())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script(replace(finding, evidence=hostile), trajectory), {})
    assert all(char.isprintable() or char == "\n" for char in printed.getvalue()) and "owned" in printed.getvalue()


@pytest.mark.django_db(transaction=True)
def test_a_database_that_is_away_is_said_with_503(
    port: HeldPort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(raise_request_exception=False)
    client.force_login(make_member("ada"))
    is_server = connection.vendor == "postgresql"
    away = {"HOST": "127.0.0.1", "PORT": port.number} if is_server else {"NAME": tmp_path}
    connection.close()
    with monkeypatch.context() as patch:
        for name, value in away.items():
            patch.setitem(connection.settings_dict, name, value)
        for path in ("/", "/runs.json", "/api/v1/runs", "/s/link", "/go?q=a"):
            answer = client.get(path)
            assert (answer.status_code, answer["Retry-After"]) == (503, "30"), path
            assert "The database did not answer" in answer.content.decode(), path
    connection.close()
    assert client.get("/").status_code == 200
