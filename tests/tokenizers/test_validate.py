"""What may be registered, and every reason why something may not."""

import io
import json
import os
import zipfile
from pathlib import Path

import pytest

from rollout_inspector.text.tokenizers import TokenizerUnusable, check_folder, load, unpack_zip


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_a_folder_a_file_and_a_zip_pass(tiny_tokenizer: Path, tmp_path: Path) -> None:
    definition = (tiny_tokenizer / "tokenizer.json").read_bytes()
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(definition)
    (folder / "README.md").write_text("ignored")
    assert check_folder(folder) == []
    assert check_folder(folder / "tokenizer.json") == []
    archive = zipped(tmp_path / "model.zip", {"model/tokenizer.json": definition, "model/README.md": b"x"})
    assert check_folder(archive) == []
    target = unpack_zip(archive, tmp_path / "unpacked")
    assert sorted(path.name for path in target.iterdir()) == ["tokenizer.json"]
    assert load(target).vocab_size == load(tiny_tokenizer).vocab_size


def test_code_and_links_are_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "weights.pkl").write_bytes(b"\x80\x04.")
    os.symlink("/etc/passwd", tmp_path / "chat_template.jinja")
    problems = " ".join(check_folder(tmp_path))
    assert "weights.pkl can carry code" in problems
    assert "chat_template.jinja is a link" in problems


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../tokenizer.json", "outside its folder"),
        ("/tokenizer.json", "outside its folder"),
        ("a\\..\\..\\tokenizer.json", "outside its folder"),
        ("model.pickle", "can carry code"),
        ("config.json", "no tokenizer.json"),
    ],
)
def test_hostile_zips_are_refused_unopened(tmp_path: Path, name: str, said: str) -> None:
    archive = zipped(tmp_path / "bad.zip", {name: b"{}"})
    assert any(said in problem for problem in check_folder(archive))
    with pytest.raises(TokenizerUnusable, match=said):
        unpack_zip(archive, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "bomb.zip", {"tokenizer.json": b" " * 50_000_000})
    assert any("grows more than" in problem for problem in check_folder(archive))


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "link.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        entry = zipfile.ZipInfo("tokenizer.json")
        entry.external_attr = 0o120777 << 16
        writer.writestr(entry, "/etc/passwd")
    assert any("is a link" in problem for problem in check_folder(archive))


def test_junk_gets_a_sentence(tmp_path: Path) -> None:
    junk = tmp_path / "junk.json"
    junk.write_bytes(os.urandom(100))
    assert "not valid JSON" in check_folder(junk)[0]
    junk.write_text(json.dumps({"model": 1}))
    assert "no model" in check_folder(junk)[0]
    junk.write_text("[" * 100_000)
    assert "not valid JSON" in check_folder(junk)[0]
    other = tmp_path / "x.txt"
    other.write_bytes(io.BytesIO(b"hello").getvalue())
    assert "neither a tokenizer.json nor a zip" in check_folder(other)[0]
    assert "There is no" in check_folder(tmp_path / "missing")[0]
