"""Hostile tokenizers: each costs a sentence and its own limited process, never this process or another user's time."""

import os
import signal
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from rollout_inspector.streams.trajectory import Request, Step, Trajectory
from rollout_inspector.text.processes import Faults
from rollout_inspector.text.tokenizers import TokenizerUnusable, check_folder, limited, load, unpack_zip
from rollout_inspector.text.tokenizers.validate import examined
from rollouts.jobs.diagnosis import diagnosis_for
from rollouts.jobs.replays import run_replays
from rollouts.store.chat_templates.chat_templates import register_chat_template
from tests.attack.hostile_uploads import BOMBS, NESTED, bomb, changed
from tests.conftest import ROOT, wait_until
from tests.web.trajectory_samples import Maker

WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
PIECES = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
          "max_input_chars_per_word": 100}
HOSTILE: dict[str, dict[str, Any]] = {
    "replace an empty text": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "replace an empty pattern": {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}},
    "a precompiled map that is cut": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a precompiled map of nothing": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "a precompiled map of zeros": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "A" * 64}},
    "pieces of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "words without their unknown token": {"model": WORDS, "added_tokens": []},
    "pieces without their unknown token": {"model": PIECES, "added_tokens": []},
}


POISON = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
"""It panics on a long run of x alone."""


def processes() -> set[int]:
    """The tokenizers' processes that this process has started and that live."""
    return {
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and any("tokenizers/worker" in word for word in child.cmdline())
    }


@pytest.fixture
def quick() -> Iterator[pytest.MonkeyPatch]:
    """Little time for each load and text. The tokenizers that other tests use are loaded again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limited, "LOAD_SECONDS", 1)
        patch.setattr(limited, "TEXT_SECONDS", 0)
        yield patch


@pytest.mark.parametrize(("change", "said"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_costs_a_sentence_and_its_own_process(
    quick: pytest.MonkeyPatch, change: dict[str, Any], said: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """H3, all rows: this process neither grows nor waits for longer than the limits say."""
    if "computing time" not in said:  # a slow machine needs more than a moment for what ends otherwise
        quick.setattr(limited, "LOAD_SECONDS", 30)
        quick.setattr(limited, "TEXT_SECONDS", 30)
    folder = bomb(tiny_tokenizer, tmp_path / "bomb", dict(change))
    limited.close()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = psutil.Process().memory_info().rss
    with pytest.raises(TokenizerUnusable, match=said):
        examined(folder)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) * 1000 - before < 30_000_000
    limited.close()
    assert processes() == set()


def test_a_folder_that_failed_is_not_tried_for_each_page(
    quick: pytest.MonkeyPatch, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bomb(tiny_tokenizer, tmp_path / "bomb", {"pre_tokenizer": NESTED})
    started, real = [], limited.LimitedProcess
    with monkeypatch.context() as patch:
        patch.setattr(limited, "LimitedProcess", lambda *of: started.append(of) or real(*of))
        for _ in range(5):
            with pytest.raises(TokenizerUnusable, match="computing time"):
                load(folder).encode("x" * 300)
        assert len(started) == Faults.MAX
        (folder / "tokenizer.json").write_text("{")
        for _ in range(3):
            with pytest.raises(TokenizerUnusable, match="not valid JSON"):
                load(folder)
    assert len(started) == Faults.MAX + 1
    (folder / "tokenizer.json").write_bytes((tiny_tokenizer / "tokenizer.json").read_bytes())
    assert len(load(folder).encode("hello"))


def test_a_bomb_does_not_keep_another_tokenizer_waiting(quick: None, tiny_tokenizer: Path, tmp_path: Path) -> None:
    """H3: one lock was held while a hostile tokenizer was loaded, and another user's page waited 34 s."""
    folder = bomb(tiny_tokenizer, tmp_path / "bomb", {"pre_tokenizer": NESTED})
    ends: list[str] = []

    def check() -> None:
        check_folder(folder)
        ends.append("the bomb")

    thread = threading.Thread(target=check)
    thread.start()
    assert len(load(changed(tiny_tokenizer, tmp_path / "other", {})).encode("hello"))
    ends.append("the other")
    thread.join()
    assert ends == ["the other", "the bomb"]


@pytest.mark.django_db
def test_a_third_check_at_once_gets_a_sentence(tiny_tokenizer: Path, admin_client: Any) -> None:
    """H3: at most two uploads are checked at a time, so uploads cannot take all cores and memory."""
    upload = SimpleUploadedFile("tokenizer.json", (tiny_tokenizer / "tokenizer.json").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limited.VALIDATIONS, "_seconds", 0.05)
        with limited.VALIDATIONS.one(), limited.VALIDATIONS.one():
            answer = admin_client.post("/tokenizers.json", {"upload": upload, "name": "third"})
        assert answer.status_code == 422 and "Two other tokenizers are being checked" in answer.text
        upload.seek(0)
        assert admin_client.post("/tokenizers.json", {"upload": upload, "name": "third"}).status_code == 201


def test_a_tokenizer_that_is_often_too_slow_rests(
    quick: None, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H3: a page or a diagnosis of a thousand trajectories does not pay for the same pattern a thousand times."""
    slow = {**NESTED, "pattern": {"Regex": "(?:z{0,30}){4}y|z"}}
    tokenizer = load(changed(tiny_tokenizer, tmp_path / "slow", {"pre_tokenizer": slow}))
    for _ in range(Faults.MAX):
        with pytest.raises(TokenizerUnusable, match="computing time that a text may take"):
            tokenizer.encode("z" * 200)
    started: list[object] = []
    monkeypatch.setattr(limited, "LimitedProcess", lambda *of: started.append(of))
    with pytest.raises(TokenizerUnusable, match="not tried again"):
        tokenizer.encode("hello")
    assert not started


def test_a_process_that_was_killed_is_started_again(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """H2: whatever ends the process, the next text finds another one."""
    tokenizer = load(changed(tiny_tokenizer, tmp_path / "killed", {}))
    ids = tokenizer.encode("hello").tolist()
    limited.close()
    tokenizer.encode("hello")
    for pid in processes():
        os.kill(pid, signal.SIGKILL)
    assert tokenizer.encode("hello").tolist() == ids


def test_a_process_that_rested_ends_and_is_started_again(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """An attacker who uploads many tokenizers leaves no processes behind."""
    limited.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limited, "IDLE_SECONDS", 0.5)
        tokenizer = load(changed(tiny_tokenizer, tmp_path / "rests", {}))
    ids = tokenizer.encode("hello").tolist()
    wait_until(lambda: not processes(), 240, "the process has ended")
    assert tokenizer.encode("hello").tolist() == ids


def test_only_so_many_tokenizers_are_warm(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """Each takes some 100 MB: the one that rested longest ends first, and comes back when it is asked."""
    limited.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limited, "MAX_PROCESSES", 2)
        held = [load(changed(tiny_tokenizer, tmp_path / str(n), {})) for n in range(3)]
        assert len(processes()) == 2
        assert len({tuple(one.encode("hello").tolist()) for one in held}) == 1 and len(processes()) == 2


def test_a_forked_process_uses_no_process_of_its_parent(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """gunicorn and Celery fork; both sides go on with their own processes."""
    folder = changed(tiny_tokenizer, tmp_path / "forked", {})
    program = (
        "import os, sys; from rollout_inspector.text.tokenizers import load; "
        "one = load(sys.argv[1]); ids = one.encode('hello');"
        "held = one._process._turn; held.acquire(); child = os.fork(); child and held.release();"
        "same = one.encode('hello').tolist() == ids.tolist();"
        "child or os._exit(0 if same else 1);"
        "assert same and os.waitpid(child, 0)[1] == 0;"
        "assert not {'tokenizers', 'fastokens', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, cwd=ROOT, timeout=60)


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


@pytest.mark.django_db
def test_a_panic_in_a_replay_refuses_its_trajectory(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """H2: the other trajectories of the run are replayed."""
    make = Maker(changed(tiny_tokenizer, tmp_path / "poison", {"pre_tokenizer": POISON}))
    said: list[Step] = []
    for text in ("x" * 40, "hello"):
        request, reply = Request(({"role": "user", "content": text},)), {"role": "assistant", "content": "hello"}
        said.append(Step(make.ids("hello"), make.ids("hello"), None, request=request, reply=reply))
    run = make.run([Trajectory(str(n), (step,)) for n, step in enumerate(said)])
    run.chat_template = register_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    run.save()
    report = run_replays.new_report(run)
    assert list(run_replays.replay_run(run, report)) == [0, 1]
    refused = [line for line in report["strategies"] if "The tokenizer library failed" in str(line["why"])]
    assert refused and all(line["refused"] == 1 and line["trajectories"] == 2 for line in refused), report
