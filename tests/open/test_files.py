"""Files are read where they lie: the same trajectories as a whole reading, and no byte of them changes."""

import hashlib
import json
import os
import sys
from collections import Counter
from functools import partial
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import rollout_inspector
from rollout_inspector import formats
from rollout_inspector.commands.main import main
from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.formats import Source
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.guard.shard_audit import cut_files
from rollout_inspector.opened import index as opened_index
from rollout_inspector.opened.index import FileIndex, line_places, read_diagnosis
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Row, Trajectory, ids_array
from tests.conftest import ROOT
from tests.samples.formats import own_line
from tests.samples.opened_files import FILES, own_lines, own_parquet, read_all, trajectory


@pytest.mark.parametrize("name", FILES)
def test_every_container_reads_as_the_whole_file_does(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    _, items = formats.read(Source.of_path(tmp_path / name))
    whole = {item.external_id: item for item in items if isinstance(item, Trajectory)}
    with rollout_inspector.open(tmp_path) as run:
        opened = list(run.trajectories)
        assert len(run.trajectories) == len(whole) == len({one.id for one in opened})
        for one in reversed(opened):
            value = next(value for key, value in whole.items() if one.id == key or one.id.endswith(f":{key}"))
            assert one.reward == value.reward
            for row, other in zip(one.rows, rows_of(value), strict=True):
                assert row.ids.tolist() == other.ids.tolist() and row.loss_mask.tolist() == other.loss_mask.tolist()
                assert (row.logprobs is None) == (other.logprobs is None)


def test_a_run_in_python(tmp_path: Path) -> None:
    (tmp_path / "step_3.jsonl").write_bytes(own_lines("a", "b", "c", "d"))
    with rollout_inspector.open(str(tmp_path)) as run:
        assert run.trajectories.to_polars()["id"].to_list() == ["a", "b", "c", "d"]
        table = run.trajectories[1:3].to_pandas()
        assert table["reward"].tolist() == [3.0, 3.0] and table["training_step"].tolist() == [3, 3]
        assert [one.id for one in run.trajectories[::-2]] == ["d", "b"] and run.trajectories[-1].id == "d"
        row = run["b"].rows[0]
        assert row.ids.dtype == np.int32 and row.loss_mask.tolist() == [False, False, False, True, True, False, True]
        assert np.nan_to_num(row.logprobs).tolist() == [0, 0, 0, -0.5, -0.25, 0, -1.0]
        assert [finding.kind for finding in run["b"].findings] == ["not_decidable"]
        with pytest.raises(KeyError, match="has no trajectory 'z'"):
            run["z"]
        with pytest.raises(IndexError):
            run.trajectories[4]


def test_findings_are_kept(tmp_path: Path) -> None:
    bad = Row(ids_array([1, 2, 3]), np.array([False, True], np.bool_))
    file = tmp_path / "rows.jsonl"
    file.write_bytes(own_line(Trajectory("a", rows=(bad,))))
    with rollout_inspector.open(file) as run:
        kinds = [finding.kind for finding in run["a"].findings]
    assert "length_mismatch" in kinds
    index = FileIndex([file])
    line = index.find("a")
    assert line is not None
    file.unlink()
    assert [finding.kind for finding in index.diagnosed(line["id"])[0]] == kinds
    with pytest.raises(Refusal, match="changed since 'a'"):
        index.load(line["id"])


def test_an_audit_of_opened_files_is_what_they_tell_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bad = Row(ids_array([1, 2, 3]), np.array([False, True], np.bool_))
    for name, data in {**FILES, "rows.jsonl": own_line(Trajectory("a", rows=(bad,)))}.items():
        (tmp_path / name).write_bytes(data)
    index, output = FileIndex([tmp_path]), tmp_path_factory.mktemp("audit")
    names = read_all(index)
    monkeypatch.setattr("rollout_inspector.commands.audit.cut_files", partial(cut_files, n_bytes=400))
    options = ["--output", str(output), "--index", str(index.folder), "--processes", "1"]
    assert main(["audit", str(tmp_path), *options]) == 0
    query = "SELECT id, findings, checks FROM trajectory WHERE state = 1 AND findings IS NOT NULL"
    assert not index.all(query)
    index.take_checked()
    checked = {row["id"]: read_diagnosis(row) for row in index.all(query)}
    assert len(checked) == len(names) and not index.all("SELECT * FROM checked")
    monkeypatch.setenv("ROLLOUT_INSPECTOR_CACHE", str(tmp_path_factory.mktemp("other")))
    other = FileIndex([tmp_path])
    assert read_all(other) == names
    kinds = Counter[str]()
    for key, (findings, checks) in checked.items():
        computed = other.diagnosed(key)
        assert ([str(one) for one in findings], checks) == ([str(one) for one in computed[0]], computed[1])
        kinds.update({one.kind for one in findings if (one.kind, one.severity) != ("not_decidable", Severity.INFO)})
    counts = json.loads((output / "audit.json").read_text())["kinds"]
    assert kinds == {kind: count["trajectories"] for kind, count in counts.items()} and kinds["length_mismatch"]


def test_a_missing_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(own_lines("a"))
    monkeypatch.setitem(sys.modules, "polars", None)
    with rollout_inspector.open(tmp_path) as run, pytest.raises(Refusal, match="pip install polars"):
        run.trajectories.to_polars()


def states(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_the_bytes_of_the_folder_stay_and_it_may_be_read_only(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    state = states(tmp_path)
    tmp_path.chmod(0o555)
    with rollout_inspector.open(tmp_path) as run:
        for one in run.trajectories:
            assert one.rows is not None and one.findings is not None
    tmp_path.chmod(0o755)
    assert states(tmp_path) == state


def test_growing_files_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_index, "STILL_SECONDS", 0.0)
    file = tmp_path / "a.jsonl"
    file.write_bytes(own_lines("a", "b"))
    index = FileIndex([tmp_path])
    assert read_all(index) == ["a", "b"]
    half = own_lines("c")
    with file.open("ab") as out:
        out.write(half[:20])
    assert read_all(index) == ["a", "b"]  # the last line is being written
    with file.open("ab") as out:
        out.write(half[20:] + own_lines("d"))
    (tmp_path / "b.parquet").write_bytes(own_parquet("x"))
    assert sorted(read_all(index)) == ["a", "b", "c", "d", "x"]
    (tmp_path / "b.parquet").write_bytes(own_parquet("x", "y", "z"))
    file.write_bytes(own_lines("e"))  # written anew
    assert sorted(read_all(index)) == ["e", "x", "y", "z"]
    file.unlink()
    assert read_all(FileIndex([tmp_path])) == ["x", "y", "z"]


def sparse(path: Path, n: int, apart: int) -> None:
    with path.open("wb") as file:
        for k in range(n):
            file.seek(k * apart)
            file.write(own_lines(f"{path.stem}-{k}"))
        file.truncate(n * apart)


def test_holes_of_sparse_files_are_not_read(tmp_path: Path) -> None:
    for n in range(3):
        sparse(tmp_path / f"step_{n}.jsonl", 40, 1 << 30)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 120 << 30
    with rollout_inspector.open(tmp_path) as run:
        assert len(run.trajectories) == 120
        assert run["step_1-39"].rows[0].ids.tolist() == run["step_0-0"].rows[0].ids.tolist()


@pytest.mark.parametrize("apart", [100, 4096, 5000, 1 << 20])
def test_lines_between_holes(tmp_path: Path, apart: int) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        for k in range(5):
            file.seek(k * apart)
            file.write(b"line %d\n" % k)
    with path.open("rb", 0) as raw:
        places = list(line_places(raw, 0, 1, path.stat().st_size))
        texts = [os.pread(raw.fileno(), place.size, place.start) for place in places]
        assert texts == [b"line %d" % k for k in range(5)]
        assert [place.number for place in places] == [1, 2, 3, 4, 5]


def test_ids_that_files_share_and_lines_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(own_lines("a", "a") + b"{broken\n")
    (tmp_path / "2.jsonl").write_bytes(own_lines("a"))
    (tmp_path / "config.json").write_text("{}")
    index = FileIndex([tmp_path])
    assert read_all(index) == ["a", "1.jsonl:a", "2.jsonl:a"]
    assert {(Path(one.file).name, one.line) for one in index.rejected()} == {("1.jsonl", 3), ("config.json", None)}


HOSTILE = '</script><script>alert(1)</script>"\'><img src=x onerror=alert(1)>\u202e'


def test_a_notebook_draws_hostile_text_escaped(tmp_path: Path) -> None:
    hostile = Trajectory(HOSTILE, trajectory("x").steps, error=HOSTILE, group=HOSTILE)
    (tmp_path / "a.jsonl").write_bytes(own_line(hostile))
    with rollout_inspector.open(tmp_path) as run:
        frame = run.trajectories[0]._repr_html_()
        assert frame.startswith("<iframe sandbox srcdoc=") and "<script" not in frame and "\u202e" not in frame
        for html in (unescape(frame.removeprefix("<iframe sandbox ")), run._repr_html_()):
            assert "<script" not in html and "<img" not in html and "\u202e" not in html
        assert 'class="toks blk"' in unescape(frame)


def test_the_command_prints_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(own_lines("a", "b"))
    (tmp_path / "calls.jsonl").write_bytes(FILES["calls.jsonl"])
    assert main(["open", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"trajectories", "formats", "first_list_seconds"}
    assert figures["trajectories"] == 5 and figures["formats"] == ["own_jsonl", "recorded_calls"]
    assert main(["open", str(tmp_path / "nothing"), "--json"]) == 2
    assert main(["open", "gs://bucket/run", "--json"]) == 2
    assert "those that begin with s3:// are read" in capsys.readouterr().err


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step_1.jsonl").write_bytes(own_lines("a", "b"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    cells = json.loads((ROOT / "docs" / "open.ipynb").read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["sampled"] is not None and len(names["sampled"]) == 3  # type: ignore[arg-type]
