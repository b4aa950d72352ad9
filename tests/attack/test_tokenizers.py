"""Hostile tokenizers: each costs a sentence, never a process."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.tito.trajectory import Step, Trajectory
from rollouts.tokenizers import TokenizerUnusable, check_folder, load, unpack_zip
from rollouts.work.diagnosis import diagnosis_for
from tests.web.trajectory_samples import Maker

WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
PIECES = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
          "max_input_chars_per_word": 100}  # fmt: skip
HOSTILE: dict[str, dict[str, Any]] = {
    "replace an empty text": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "replace an empty pattern": {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}},
    "a precompiled map that is cut": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "pieces of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "words without their unknown token": {"model": WORDS, "added_tokens": []},
    "pieces without their unknown token": {"model": PIECES, "added_tokens": []},
}


POISON = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
"""It panics on a long run of x alone."""


def changed(tiny_tokenizer: Path, folder: Path, change: dict[str, Any]) -> Path:
    definition = json.loads((tiny_tokenizer / "tokenizer.json").read_text())
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({**definition, **change}))
    return folder


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_definition_that_panics_is_refused_with_a_sentence(
    change: dict[str, Any], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    (problem,) = check_folder(changed(tiny_tokenizer, tmp_path / "hostile", change))
    assert "cannot be" in problem or "library failed" in problem


def test_a_text_on_which_a_registered_tokenizer_panics_is_an_error(tiny_tokenizer: Path, tmp_path: Path) -> None:
    folder = changed(tiny_tokenizer, tmp_path / "poison", {"pre_tokenizer": POISON})
    assert check_folder(folder) == []
    poison = load(folder)
    for encode in (poison.encode, lambda text: poison.encode_batch([text]), poison.encode_offsets):
        with pytest.raises(TokenizerUnusable, match="The tokenizer library failed"):
            encode("x" * 40)
    assert len(poison.encode("hello")), "it goes on with other texts"


@pytest.mark.parametrize("damage", ["crc", "data", "method"])
def test_a_damaged_zip_is_refused_with_a_sentence(damage: str, tiny_tokenizer: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.zip"
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tiny_tokenizer / "tokenizer.json", "tokenizer.json")
    raw = bytearray(whole.read_bytes())
    listed = raw.rindex(b"PK\x01\x02")
    if damage == "crc":
        raw[listed + 16 : listed + 20] = raw[14:18] = struct.pack("<I", 1)
    elif damage == "data":
        raw[60:200] = bytes(140)
    else:
        raw[listed + 10 : listed + 12] = raw[8:10] = struct.pack("<H", 97)
    (tmp_path / "damaged.zip").write_bytes(raw)
    with pytest.raises(TokenizerUnusable, match="cannot be unpacked"):
        unpack_zip(tmp_path / "damaged.zip", tmp_path / "out")


@pytest.mark.django_db
def test_a_panic_in_a_page_or_diagnosis_is_a_sentence(tiny_tokenizer: Path, tmp_path: Path, admin_client: Any) -> None:
    make = Maker(changed(tiny_tokenizer, tmp_path / "poison", {"pre_tokenizer": POISON}))
    (x,) = make.ids("x")
    step = Step(make.ids("hello"), np.append(make.ids("hello "), np.full(40, x, np.int32)), None)
    run = make.run([Trajectory("a", (step,))])
    answer = admin_client.get(f"/trajectories/{run.trajectories.get().code}/compare.json?step=0")
    assert answer.status_code == 200 and "The tokenizer library failed" in answer.json()["notices"][-1]
    kinds = {finding.kind: finding.evidence for finding in diagnosis_for(Trajectory("a", (step,)), run).findings}
    assert any("The tokenizer library failed" in evidence for evidence in kinds.values()), kinds
