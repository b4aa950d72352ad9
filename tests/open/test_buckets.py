"""A bucket is opened like a folder: its objects are fetched into the cache, and nothing in it changes."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import rollout_inspector
from rollout_inspector.commands.main import main
from rollout_inspector.opened import bucket as buckets, index as opened_index
from rollout_inspector.opened.bucket import Bucket, read_address
from rollout_inspector.opened.index import FileIndex
from rollout_inspector.refusal import Refusal
from tests.conftest import ROOT, wait_until
from tests.faulty_bucket import FaultyBucket
from tests.ports import HeldPort
from tests.s3 import S3Server
from tests.samples.formats import jsonl
from tests.samples.opened_files import FILES, own_lines, own_parquet, read_all
from tests.samples.product import modules
from tests.samples.server import LINK, Visitor, gym_lines
from tests.samples.trainer_formats import TRAINED, episode, update

Usage = namedtuple("Usage", "total used free")
LARGE = b"".join(own_lines(f"large-{n}") for n in range(3000))


def put(address: str, files: dict[str, bytes]) -> None:
    """Put objects below the prefix of an address. A name that begins with a slash begins at the bucket."""
    place = Bucket(**read_address(address, "it"))
    for name, data in files.items():
        key = name.removeprefix("/") if name.startswith("/") else place.top + name
        place.client.put_object(Bucket=place.bucket_name, Key=key, Body=data)


def remove(address: str, name: str) -> None:
    place = Bucket(**read_address(address, "it"))
    place.client.delete_object(**place.place(name))


def held(address: str) -> list[tuple[str, str, Any]]:
    """Name, ETag and time of what lies below an address."""
    place = Bucket(**read_address(address, "it"))
    return [(name, entry["ETag"], entry["LastModified"]) for name, entry in place.objects("")]


def files_below(folder: Path) -> dict[str, int]:
    """Name and time of every file."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def faulty(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyBucket]:
    monkeypatch.setattr(buckets, "READ_SECONDS", 1)
    proxy = FaultyBucket(s3.url)
    yield proxy
    proxy.close()


def test_objects_are_read_as_their_files_are(bucket: str, tmp_path: Path) -> None:
    """In whatever order they come: annotations lie beside the traces that they belong to, and no file stands alone."""
    kinds = ("lines.jsonl", "gym.jsonl", "calls.jsonl", "rows.jsonl", "traces.jsonl")
    files = {f"run/{name}": FILES[name] for name in kinds} | {
        "run/step_10.jsonl.gz": gzip.compress(own_lines("ten")), "run/step_9.parquet": own_parquet("nine"),
        "prime/stream/00000.jsonl": jsonl(episode("p"), episode("q")),
        "prime/annotations/trainer/00000.jsonl": jsonl(update("p", trainer_logprobs=TRAINED)),
        "prime/stream/index.jsonl": jsonl({"line": 1, "id": "p"}),
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    others = {"notes.txt": b"no rollout", ".hidden/a.jsonl": own_lines("hidden"), "/some/prefix2.jsonl": b"{}"}
    put(bucket, files | others)
    before = held(bucket)
    with rollout_inspector.open(bucket) as run, rollout_inspector.open(tmp_path) as local:
        assert repr(run) == f"<run {bucket.partition('?')[0]}>"
        table, expected = run.trajectories.to_dict(), local.trajectories.to_dict()
        paths = [path.partition("/some/prefix/")[2] for path in table.pop("file")]
        assert paths == [os.path.relpath(path, tmp_path) for path in expected.pop("file")] and table == expected
        assert [one.reason for one in run.index.rejected()] == [one.reason for one in local.index.rejected()]
        row, other = run["p"].rows[0], local["p"].rows[0]
        assert row.ids.tolist() == other.ids.tolist()
        assert "trainer_logprobs" in row.columns.keys() & other.columns.keys()
    assert held(bucket) == before


def test_an_address_may_name_one_object_or_the_whole_bucket(bucket: str) -> None:
    put(bucket, {"a.jsonl": own_lines("a"), "a.jsonl.gz": b"", "b.jsonl": own_lines("b"), "/c.jsonl": own_lines("c")})
    for place, names in (("/some/prefix/a.jsonl", ["a"]), ("", ["c", "a", "b"]), ("/some", ["a", "b"])):
        with rollout_inspector.open(bucket.replace("/some/prefix", place)) as run:
            assert run.trajectories.to_dict()["id"] == names


def test_objects_that_arrive_change_and_go_are_followed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_index, "STILL_SECONDS", 0.0)
    put(bucket, {"a.jsonl": own_lines("a", "b"), "x.parquet": own_parquet("x")})
    index = FileIndex([bucket])
    assert read_all(index) == ["a", "b", "x"]
    put(bucket, {"c.jsonl": own_lines("c"), "a.jsonl": own_lines("a", "b", "d"), "x.parquet": own_parquet("y")})
    assert sorted(read_all(index)) == ["a", "b", "c", "d", "y"]
    put(bucket, {"c.jsonl": own_lines("e")})
    remove(bucket, "a.jsonl")
    assert sorted(read_all(index)) == ["e", "y"]
    (gone,) = index.rejected()
    assert (gone.file, gone.reason) == (
        f"{bucket.partition('?')[0]}/a.jsonl", "It is no longer in the bucket.")
    put(bucket, {"a.jsonl": own_lines("f")})
    assert sorted(read_all(index)) == ["e", "f", "y"] and not index.rejected()


def test_what_was_fetched_is_not_fetched_again(bucket: str, cache: Path) -> None:
    put(bucket, {"a.jsonl": own_lines("a"), "b.jsonl": own_lines("b")})
    (root,) = FileIndex([bucket]).paths
    read_all(FileIndex([bucket]))
    times = files_below(root)
    (root / "b.jsonl").unlink()
    index = FileIndex([bucket])
    assert read_all(index) == ["a", "b"] and index.mirrors[0].pending == {}
    assert files_below(root)["a.jsonl"] == times["a.jsonl"] and files_below(root)["b.jsonl"] > times["b.jsonl"]
    assert not list(cache.rglob("*.part"))


def test_a_key_that_leaves_the_folder_is_refused(bucket: str, cache: Path) -> None:
    hostile = ["../up.jsonl", "a/../../../up.jsonl", "/some/prefix//abs.jsonl", "./here.jsonl", "a//b.jsonl"]
    odd = {f"{'n' * 300}.jsonl": own_lines("n"), "f.jsonl": own_lines("f"), "f.jsonl/g.jsonl": own_lines("g")}
    put(bucket, {name: own_lines("up") for name in hostile} | odd)
    index = FileIndex([bucket])
    (root,) = index.paths
    assert read_all(index) == ["f"]
    reasons = {one.file.removeprefix(bucket.partition("?")[0] + "/"): one.reason for one in index.rejected()}
    assert len(reasons) == len(hostile) + 2
    assert sum("would leave the folder" in reason for reason in reasons.values()) == len(hostile)
    assert "cannot lie in the cache" in reasons["f.jsonl/g.jsonl"] and "cannot lie" in reasons[f"{'n' * 300}.jsonl"]
    assert [name for name in files_below(cache) if "sqlite3" not in name] == [os.path.relpath(root / "f.jsonl", cache)]
    assert not (cache.parent / "up.jsonl").exists()


def test_an_object_that_may_not_be_read_stops_no_other(bucket: str) -> None:
    put(bucket, {"a.jsonl": own_lines("a"), "b.jsonl": own_lines("b")})
    place = Bucket(**read_address(bucket, "it"))
    place.client.copy_object(
        Bucket=place.bucket_name, Key=f"{place.top}a.jsonl", StorageClass="GLACIER",
        CopySource=f"{place.bucket_name}/{place.top}a.jsonl",
    )
    index = FileIndex([bucket])
    assert read_all(index) == ["b"] and not index.problem and list(index.mirrors[0].pending) == ["/a.jsonl"]
    (refused,) = index.rejected()
    assert "refused (InvalidObjectState): the object is archived" in refused.reason


def test_a_full_disk_is_told_with_the_object(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bucket, {"1.jsonl": own_lines("a"), "2.jsonl": LARGE, "3.jsonl": own_lines("c")})
    index = FileIndex([bucket])
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: Usage(10, 0, 10_000))
        assert read_all(index) == ["a"]
        assert "/some/prefix/2.jsonl was not fetched, nor what follows" in index.problem
        assert "No space left" in index.problem and "ROLLOUT_INSPECTOR_CACHE" in index.problem
    assert len(read_all(index)) == 1000 and not index.problem


@pytest.mark.parametrize("fault", ["500", "reset", "stall"])
def test_a_bucket_that_fails_in_the_middle(
    faulty: FaultyBucket, bucket: str, fault: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = faulty.in_front_of(bucket)
    put(bucket, {"1.jsonl": own_lines("a"), "2.jsonl": LARGE})
    faulty.fault, faulty.way, faulty.most = fault, "read", 100_000
    with rollout_inspector.open(address) as run:
        assert run.trajectories[0].id == "a"
        with pytest.raises(Refusal, match=r"/some/prefix/2\.jsonl "):
            len(run.trajectories)
        assert main(["open", address, "--json"]) == 2
        said = capsys.readouterr()
        figures = json.loads(said.out)
        assert (figures["trajectories"], figures["objects_not_fetched"]) == (1, 1)
        assert said.err.count("\n") == 1 and "2.jsonl" in said.err
        faulty.fault = ""
        wait_until(lambda: not run.index.problem, 60, "the rest is fetched")
        assert len(run.trajectories) == 3001 and not list(cache.rglob("*.part"))


def test_a_bucket_that_vanishes_is_told_and_what_was_fetched_stays(s3: S3Server) -> None:
    address = s3.new_bucket()
    put(address, {"a.jsonl": own_lines("a")})
    index = FileIndex([address])
    assert read_all(index) == ["a"]
    remove(address, "a.jsonl")
    place = Bucket(**read_address(address, "it"))
    place.client.delete_bucket(Bucket=place.bucket_name)
    assert read_all(index) == ["a"] and "there is no such bucket. Make it" in index.problem


def test_what_cannot_be_opened_is_one_sentence(
    bucket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held_port, (plain, _, query) = HeldPort(), bucket.partition("?")
    nobody = f"{plain}?endpoint_url={quote(held_port.url, safe='')}"
    no_key = bucket.replace("&access_key=test&secret_key=test", "")
    assert no_key != bucket
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for address, words in (
        (bucket.replace("inspector-test", "no-such"), "there is no such bucket. Make it"),
        (bucket, "holds no objects that end in .jsonl"),
        (nobody + "&access_key=a&secret_key=PASSPHRASE", "did not answer (EndpointConnectionError). Look at"),
        (no_key, "There is no key of s3://"),
        (f"{plain}?{query}&more=PASSPHRASE", "'more' in its query"),
        ("s3://", "names no bucket"),
        ("s3://b/run#1", "The address of the bucket has a prefix that is not made of"),
        ("gs://bucket/run", "Of addresses, those that begin with s3://"),
    ):
        for options in (["--json"], ["--no-browser"]):
            assert main(["open", address, *options]) == 2, address
            said = capsys.readouterr()
            assert (said.out, said.err.count("\n")) == ("", 1), said
            assert words in said.err and "PASSPHRASE" not in said.err
        with pytest.raises(Refusal):
            rollout_inspector.open(address)
    held_port.close()
    buckets._client_of.cache_clear()
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(Refusal, match=r"pip install 'rollout-inspector\[s3\]'"):
        rollout_inspector.open(bucket)


def test_an_object_that_cannot_be_read_has_the_address_of_the_bucket(bucket: str) -> None:
    """Not the path of the cache, which nobody typed."""
    put(bucket, {"torn.jsonl": b"{", "lines.jsonl": own_lines("a") + b"{\n"})
    top = bucket.partition("?")[0]
    for address in (bucket, bucket.replace("/some/prefix", "")):
        index = FileIndex([address])
        assert read_all(index) == ["a"]
        assert {(one.file, one.line) for one in index.rejected()} == {
            (f"{top}/torn.jsonl", None), (f"{top}/lines.jsonl", 2)
        }


def test_the_command_counts_what_it_fetched(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(bucket, {"a.jsonl": own_lines("a", "b"), "calls.jsonl": FILES["calls.jsonl"]})
    assert main(["open", bucket, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0 < figures.pop("first_list_seconds") < 60
    assert figures == {"trajectories": 5, "formats": ["own_jsonl", "recorded_calls"], "objects_not_fetched": 0}


def test_no_page_and_no_request_names_a_bucket() -> None:
    """Who types the command alone says what is opened: the index is made of what the command hands on."""
    making = {name for name, source in modules().items() if "FileIndex(" in source or "BucketMirror(" in source}
    assert making == {
        "rollout_inspector.commands.open", "rollout_inspector.opened.runs", "rollout_inspector.opened.index",
        "rollout_inspector.opened.bucket_mirror", "rollouts.jobs.opened",
    }
    source = modules()["rollouts.jobs.opened"]
    assert source.count("FileIndex(") == 1 and "opened = opened_files()" in source.partition("FileIndex(")[0]
    setting = {name for name, text in modules().items() if "INSPECTOR_OPENED" in text}
    assert setting == {"inspector.settings", "rollout_inspector.commands.open", "rollouts.jobs.opened"}


@pytest.mark.skipif(sys.platform != "linux", reason="as the command over a folder")
def test_the_command_serves_pages_over_a_bucket(bucket: str, tmp_path: Path, cache: Path) -> None:
    put(bucket, {"step_1.jsonl": gym_lines(0, 3), "step_2.jsonl": gym_lines(3, 3)})
    names = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "ROLLOUT_INSPECTOR_CACHE")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    said = tmp_path / "said"
    with said.open("w") as output, HeldPort() as port:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout_inspector", "open", bucket, "--no-browser", f"--port={port.number}"],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: bool(LINK.search(said.read_text())) or process.poll() is not None, 180, "it is ready")
        link = LINK.search(said.read_text())
        assert link is not None, said.read_text()
        visitor = Visitor(link[1])
        (run,) = visitor.ask("/runs.json").json()["runs"]
        path = f"/runs/{run['code']}"
        wait_until(lambda: visitor.ask(f"{path}.json").json()["run"]["status"] == "done", 120, "all is listed")
        listed = visitor.ask(f"{path}.json").json()
        assert (listed["run"]["name"], len(listed["trajectories"])) == ("prefix", 6)
        assert "toks" in visitor.ask(f"/trajectories/{listed['trajectories'][4]['code']}").text
        put(bucket, {"step_3.jsonl": gym_lines(6, 2)})
        wait_until(lambda: visitor.ask(f"{path}.json").json()["run"]["trajectories"] == 8, 120, "it grew")
        remove(bucket, "/step_2.jsonl".removeprefix("/"))
        wait_until(lambda: "It is no longer in the bucket." in visitor.ask(path).text, 120, "it is said")
        page = visitor.ask(path).text
        assert "step_2.jsonl" in page and "secret_key" not in page and "endpoint_url" not in page
        assert visitor.submit(f"{path}/check-files").status_code == 302
        (root,) = FileIndex([bucket]).paths
        data = FileIndex([bucket]).folder
        wait_until(lambda: (data / "audit" / "audit.json").exists(), 180, "all is checked")
        assert json.loads((data / "audit" / "audit.json").read_text())["trajectories"] == 5
        assert sorted(files_below(root)) == ["step_1.jsonl", "step_3.jsonl"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130, -signal.SIGINT)
    finally:
        process.kill()
