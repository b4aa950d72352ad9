import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollout_inspector.streams.canonical import canonical_check, canonical_check_batch
from rollout_inspector.streams.trajectory import ids_array
from rollout_inspector.text.tokenizers import LoadedTokenizer, load
from tests.samples.model_setups import tokenizer_folder
from tests.tokenizers.oracles import encode_plain

KINDS = ("bytes", "pieces")


def small(kind: str) -> LoadedTokenizer:
    return load(tokenizer_folder(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_encoder_gives_is_canonical(kind: str) -> None:
    codec = small(kind)
    for text in ("", "In Cusco, someone asks", "<|open|>user\nhi<|shut|>\n", "札幌 🧪", " lead", "\n\n"):
        assert not canonical_check(codec.encode(text), codec)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_token_is_one_drift(kind: str) -> None:
    codec = small(kind)
    whole = codec.encode("what is the answer<|shut|>")
    pieces = codec.token_bytes(whole)
    place = max(range(len(whole) - 1), key=lambda i: len(pieces[i]))
    bytes_of = {piece: i for i, piece in enumerate(codec.token_bytes(np.arange(codec.vocab_size)))}
    letters = [bytes_of[bytes([byte])] for byte in pieces[place]]
    assert len(letters) > 1
    ids = ids_array([*whole[:place].tolist(), *letters, *whole[place + 1 :].tolist()])
    (drift,) = canonical_check(ids, codec)
    assert (drift.start, drift.stop) == (place, place + len(letters))
    assert drift.actual_ids.tolist() == letters
    assert drift.expected_ids.tolist() == whole[place : place + 1].tolist()
    assert not drift.invalid_utf8


def test_half_a_character_is_said_to_be_one() -> None:
    codec = small("bytes")
    half = codec.encode("🧪")[:1]
    ids = np.concatenate([codec.encode("a sign "), half, codec.encode(" more<|shut|>")])
    drifts = canonical_check(ids, codec)
    assert [drift.invalid_utf8 for drift in drifts] == [True]
    assert ids[drifts[0].start : drifts[0].stop].tolist() == drifts[0].actual_ids.tolist()


def test_control_text_in_ordinary_tokens_drifts() -> None:
    codec = small("bytes")
    plain = encode_plain(codec, "<|shut|>")
    (drift,) = canonical_check(plain, codec)
    assert drift.expected_ids.tolist() == codec.encode("<|shut|>").tolist()


def test_ids_outside_the_vocabulary_drift_and_do_not_raise() -> None:
    codec = small("bytes")
    assert canonical_check(ids_array([codec.vocab_size + 5]), codec)
    assert canonical_check(ids_array([-1, *codec.encode("answer").tolist()]), codec)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(KINDS), picks=st.lists(st.integers(0, 10_000), max_size=30))
def test_mending_every_drift_gives_what_the_encoder_gives(kind: str, picks: list[int]) -> None:
    codec = small(kind)
    ids = ids_array([pick % codec.vocab_size for pick in picks])
    drifts = canonical_check(ids, codec)
    mended = ids.tolist()
    for drift in reversed(drifts):
        assert mended[drift.start : drift.stop] == drift.actual_ids.tolist()
        mended[drift.start : drift.stop] = drift.expected_ids.tolist()
    assert bool(drifts) == (mended != ids.tolist())
    if kind == "bytes":
        text = b"".join(codec.token_bytes(ids)).decode("utf-8", "replace")
        assert mended == codec.encode(text).tolist()


def test_corpus_vectors(corpus: Path) -> None:
    for path in sorted((corpus / "vectors").glob("drift_*.jsonl")):
        codec = load(corpus / "tokenizers" / path.stem.removeprefix("drift_"))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        checked = canonical_check_batch([ids_array(row["ids"]) for row in rows], codec)
        for row, drifts in zip(rows, checked, strict=True):
            assert bool(drifts) == row["drift"], (path.name, row)
            mended = list(row["ids"])
            for drift in reversed(drifts):
                mended[drift.start : drift.stop] = drift.expected_ids.tolist()
            assert mended == row["reencode"], (path.name, row)
