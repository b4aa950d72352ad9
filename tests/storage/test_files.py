"""The file storage: a folder and a bucket pass the same tests."""

import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from inspector.server.system_checks import check_files
from rollout_inspector.outputs import draft_file
from rollouts.store import files
from rollouts.store.files import StorageDown, cache
from rollouts.store.files.bucket import BucketStorage
from rollouts.store.outages import is_outage, said_of
from tests.conftest import wait_until

pytestmark = pytest.mark.sqlite_only


@pytest.fixture(params=["folder", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, settings: Any) -> Iterator[str]:
    settings.INSPECTOR_DATA = tmp_path / "data"
    named = str(tmp_path / "files") if request.param == "folder" else request.getfixturevalue("bucket")
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": named}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    yield request.param


@pytest.fixture
def in_bucket(bucket: str, tmp_path: Path, settings: Any) -> str:
    settings.INSPECTOR_DATA = tmp_path / "data"
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": bucket}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    return bucket


@contextmanager
def local_copy(key: str) -> Iterator[Path]:
    """The file on this machine. Its copy in the cache is in use while the context is open, as if its process ended."""
    folder, _, name = key.rpartition("/")
    path = files.local_folder(f"{folder}/", name) / name
    try:
        yield path
    finally:
        if path.parent in cache._held:
            os.close(cache._held.pop(path.parent))


def test_what_is_put_is_read(storage: str, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    files.put("uploads/abc/a b.jsonl.gz", io.BytesIO(data))
    assert files.exists("uploads/abc/a b.jsonl.gz") and files.size("uploads/abc/a b.jsonl.gz") == len(data)
    with files.open_file("uploads/abc/a b.jsonl.gz") as file:
        assert file.read(10) == data[:10]
        file.seek(-7, os.SEEK_END)
        assert file.read() == data[-7:] and file.tell() == len(data)
        file.seek(1_000_000)
        assert file.read(900_000) == data[1_000_000:1_900_000]
        file.seek(0)
        assert file.read() == data
    assert files.read_range("uploads/abc/a b.jsonl.gz", 5, 9) == data[5:9]
    assert files.read_range("uploads/abc/a b.jsonl.gz", len(data) - 3, len(data) + 9) == data[-3:]
    assert files.read_range("uploads/abc/a b.jsonl.gz", len(data), len(data) + 9) == b""
    with local_copy("uploads/abc/a b.jsonl.gz") as path:
        assert path.name == "a b.jsonl.gz" and path.read_bytes() == data
    source = tmp_path / "source"
    source.write_bytes(b"kept")
    files.put("exports/x", source)
    files.put("exports/y", source, move=True)
    assert not source.exists() and files.read_range("exports/x", 0, 9) == files.read_range("exports/y", 0, 9) == b"kept"


def test_a_file_that_is_put_again_is_replaced(storage: str) -> None:
    for data in (b"first, and long", b"second"):
        files.put("a/b", io.BytesIO(data))
    assert [one[:2] for one in files.listed("")] == [("a/b", 6)]


def test_files_are_listed_and_removed(storage: str) -> None:
    for key in ("runs/b/2", "runs/b/sub/1", "runs/a/1", "runs/bb/1", "other/1"):
        files.put(key, io.BytesIO(key.encode()))
    listed = list(files.listed("runs/b/"))
    assert [(one.key, one.size) for one in listed] == [("runs/b/2", 8), ("runs/b/sub/1", 12)]
    assert all(one.changed_at is not None and one.changed_at.tzinfo is not None for one in listed)
    files.delete("runs/b/2")
    files.delete("runs/b/2")
    assert not files.exists("runs/b/2") and not files.exists("runs/b")
    files.delete_all("runs/b/")
    files.delete_all("runs/b/")
    assert [one.key for one in files.listed("")] == ["other/1", "runs/a/1", "runs/bb/1"]
    assert list(files.listed("nothing/")) == []


def test_a_file_that_is_missing(storage: str) -> None:
    asks: list[Callable[[], object]] = [
        lambda: files.open_file("no/file"), lambda: files.size("no/file"), lambda: files.read_range("no/file", 0, 1),
        lambda: files.local_folder("no/", "file"),
    ]
    for ask in asks:
        with pytest.raises(FileNotFoundError):
            ask()


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "a/../b", "..", "a//b", "a/", ".hidden", "a/.b", "a\0b", "a\nb", "a\\b", "é" * 150, "a/" * 400],
)
def test_a_key_cannot_leave_its_folder(storage: str, key: str) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        files.put(key, io.BytesIO(b""))
    with pytest.raises(ValueError):
        files.delete_all(key + "/")


def test_what_is_written_is_private(tmp_path: Path, settings: Any) -> None:
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": str(tmp_path / "deep" / "files")}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    files.put("a/b/c", io.BytesIO(b"secret"))
    (tmp_path / "given").write_bytes(b"secret")
    (tmp_path / "given").chmod(0o644)
    files.put("a/b/d", tmp_path / "given", move=True)
    for path in (tmp_path / "deep").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


class _Breaks(io.BytesIO):
    def read(self, *_: Any) -> bytes:
        if self.tell():
            raise RuntimeError("the source broke")
        return super().read(10)


def test_a_file_is_whole_or_not_there(storage: str) -> None:
    with pytest.raises(RuntimeError):
        files.put("a/b", _Breaks(b"x" * 100))
    assert list(files.listed("")) == []


def test_a_draft_of_a_dead_writer_is_removed(tmp_path: Path, settings: Any) -> None:
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": str(tmp_path)}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    files.put("a", io.BytesIO(b"1"))
    dead = tmp_path / ".drafts" / f".draft.{'0' * 16}.part"
    dead.write_bytes(b"half")
    with draft_file(tmp_path / ".drafts", "other") as alive:
        os.utime(alive.name, (1, 1))
        assert list(files.left_drafts()) == [dead]
        files.put("b", io.BytesIO(b"1"))
        assert not dead.exists() and Path(alive.name).exists()
    assert [one.key for one in files.listed("")] == ["a", "b"]


def test_an_outage_is_told_as_a_sentence_and_passes(in_bucket: str, s3: Any) -> None:
    files.put("a/b", io.BytesIO(b"1" * 600_000))
    reader = files.open_file("a/b")
    assert reader.read(1) == b"1"
    s3.stop()
    try:
        asks: list[Callable[[], object]] = [
            lambda: files.put("a/c", io.BytesIO(b"2")), lambda: files.size("a/b"), lambda: files.exists("a/b"),
            lambda: files.read_range("a/b", 0, 1), lambda: list(files.listed("a/")), lambda: files.delete("a/b"),
            lambda: files.local_folder("a/", "b"), reader.read,
        ]
        for ask in asks:
            with pytest.raises(StorageDown) as caught:
                ask()
            assert is_outage(caught.value) and said_of(caught.value).startswith("The file storage did not answer")
    finally:
        s3.start()
    assert files.read_range("a/b", 0, 1) == b"1"


def test_a_bucket_that_is_not_there_is_an_outage(in_bucket: str, settings: Any) -> None:
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": in_bucket.replace("inspector-test", "no-such")}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    with pytest.raises(StorageDown, match="NoSuchBucket"):
        files.put("a", io.BytesIO(b"1"))


def test_the_cache_is_bounded_and_keeps_what_is_used(in_bucket: str, settings: Any) -> None:
    settings.CACHE_BYTES = 2500
    for name in "abcd":
        files.put(f"{name}/f", io.BytesIO(name.encode() * 1000))
    with local_copy("a/f") as in_use:
        for name in "bcd":
            with local_copy(f"{name}/f") as path:
                assert path.read_bytes() == name.encode() * 1000
        assert in_use.read_bytes() == b"a" * 1000
    assert sum(path.is_dir() for path in cache.folder().iterdir()) == 2
    with local_copy("c/f"):
        pass
    assert sum(path.is_dir() for path in cache.folder().iterdir()) == 2
    assert not in_use.exists()


def test_a_fetch_that_was_killed_is_never_used(in_bucket: str) -> None:
    files.put("x/a", io.BytesIO(b"whole"))
    with local_copy("x/a") as path:
        entry = path.parent
    entry.rename(entry.with_suffix(".draft"))
    (entry.with_suffix(".draft") / "a").write_bytes(b"ha")
    with local_copy("x/a") as path:
        assert path.read_bytes() == b"whole"
    assert not entry.with_suffix(".draft").exists()


@pytest.mark.parametrize(
    "named, sentence",
    [
        ("ftp://x/y", "begins with 'ftp'"), ("s3://", "names no bucket"), ("s3://b/p?key=1", "'key' in its query"),
        ("s3://b?endpoint_url=x", "http"), ("relative/folder", "begin at the root"), ("/", "is the root itself"),
        ("s3://b?endpoint_url=https://", "with a host"), ("s3://b?endpoint_url=http://[::1", "cannot be read"),
        ("s3://b?endpoint_url=http://%zz", "with a host"), ("s3://b?endpoint_url=http://h:99999", "cannot be read"),
        ("s3://b/../p", "a prefix that"), ("s3://b/p//q", "a prefix that"), (f"s3://b/{'p' * 301}", "a prefix that"),
        ("s3://b?addressing_style=x", "addressing_style"), ("s3://b?region_name=a b", "region_name"),
        ("s3://b?access_key=SECRET", "without the other"), ("~nobody-such/files", "begin at the root"),
        ("s3://user:SECRET@b/p", "names no bucket"), ("s3://b?secret_key=SECRET&x=SECRET", "'x' in its query"),
    ],
)
def test_a_wrong_setting_is_told(named: str, sentence: str) -> None:
    env = EnvironmentReader({"INSPECTOR_FILES": named})
    assert file_storage(env)["OPTIONS"] == {}
    assert sentence in env.problems[0][0] and "SECRET" not in repr(env.problems)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, settings: Any) -> None:
    (tmp_path / "plain").write_text("a file")
    for named, found in ((tmp_path / "plain" / "files", ["inspector.E010"]), (tmp_path / "new" / "files", [])):
        entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": str(named)}))
        settings.STORAGES = {**settings.STORAGES, "default": entry}
        assert [one.id for one in check_files()] == found


def test_a_bucket_is_read_from_the_setting() -> None:
    env = EnvironmentReader({"INSPECTOR_FILES": "s3://b/some/prefix?endpoint_url=http://h:9000&region_name=eu"})
    assert file_storage(env)["OPTIONS"] == {
        "bucket_name": "b", "location": "some/prefix", "endpoint_url": "http://h:9000", "region_name": "eu",
    }
    assert not env.problems


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("403", "lacks a right"),
        ("AccessDenied", "lacks a right"),
        ("RequestTimeTooSkewed", "clock of this machine is wrong"),
        ("SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        ("SlowDown", r"refused \(SlowDown\)\.$"),
    ],
)
def test_a_refusal_of_a_bucket_names_the_way_out(
    in_bucket: str, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 403}}

    def refuse(self: Any, operation: str, arguments: Any) -> None:
        raise ClientError(answer, operation)

    monkeypatch.setattr(BaseClient, "_make_api_call", refuse)
    for ask in (
        lambda: files.size("a"),
        lambda: files.exists("a"),
        lambda: files.read_range("a", 0, 1),
        lambda: list(files.listed("")),
        lambda: files.delete("a"),
    ):
        with pytest.raises(StorageDown, match=said):
            ask()


def test_a_bucket_that_is_missing_holds_no_lost_files(in_bucket: str, settings: Any, tmp_path: Path) -> None:
    """Otherwise pages would say that a segment is lost, and imports would end for good."""
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": in_bucket.replace("s3://", "s3://no-")}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    for ask in (
        lambda: files.size("a"),
        lambda: files.exists("a"),
        lambda: files.open_file("a"),
        lambda: files.put("a", io.BytesIO(b"x")),
        lambda: list(files.listed("")),
    ):
        with pytest.raises(StorageDown, match="there is no such bucket"):
            ask()


def test_a_bucket_that_says_nothing_is_asked_for_half_a_minute(in_bucket: str) -> None:
    config = files.default_storage.client.meta.config
    assert config.retries["total_max_attempts"] * (config.connect_timeout + config.read_timeout) <= 30


def test_threads_that_wait_for_a_bucket_without_an_answer_ask_once(
    in_bucket: str, monkeypatch: pytest.MonkeyPatch, who_locks: Callable[[], int]
) -> None:
    files.put("x/a", io.BytesIO(b"a"))
    asked: list[str] = []
    real = BucketStorage.fetch

    def away(self: BucketStorage, name: str, target: Path) -> None:
        asked.append(name)
        wait_until(lambda: who_locks() == 4, 240, "the others have come to the lock")
        raise StorageDown("The file storage did not answer.")

    def use() -> None:
        with pytest.raises(StorageDown):
            files.local_folder("x/", "a")

    monkeypatch.setattr(BucketStorage, "fetch", away)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    monkeypatch.setattr(BucketStorage, "fetch", real)
    with local_copy("x/a") as path:  # who asks later asks again
        assert path.read_bytes() == b"a"
