"""Token bytes are the bytes that the encoder read, on every token of every tokenizer."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rollout_inspector.text.tokenizers import load, open_table, write_table
from rollout_inspector.text.tokenizers.byte_table import TABLE_FILES
from rollout_inspector.text.tokenizers.worker.encoders import SAMPLE
from rollout_inspector.text.tokenizers.worker.vocabulary import byte_level_bytes, is_control, metaspace_bytes
from tests.tokenizers.oracles import encoder_input, reference

NAMES = ("deepseek-r1", "gpt-oss", "llama3.1", "mistral-nemo", "qwen2.5", "qwen3")
relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("name", NAMES)
def test_every_token_of_the_corpus_is_byte_true(corpus: Path, name: str) -> None:
    tokenizer = load(corpus / "tokenizers" / name)
    definition, encoder = reference(tokenizer.path)
    ids = np.arange(tokenizer.vocab_size, dtype=np.int32)
    pieces = tokenizer.token_bytes(ids)
    decoded = encoder.raw.decode_batch([[int(i)] for i in ids], skip_special_tokens=False)
    for token_id, piece, text in zip(ids.tolist(), pieces, decoded, strict=True):
        assert piece.decode("utf-8", "replace") == text, (token_id, piece, text)
    assert all(pieces[token_id] == content.encode() for token_id, content, _ in definition.added())


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_its_encoders_input(corpus: Path, name: str) -> None:
    tokenizer = load(corpus / "tokenizers" / name)
    for text in SAMPLE:
        assert tokenizer.table.join(tokenizer.encode(text)) == encoder_input(tokenizer, text)


@relaxed
@given(text=st.text(max_size=60), token=st.sampled_from(["<|im_end|>", "</s>", "<think>", "x"]))
@pytest.mark.parametrize("name", ["qwen3", "mistral-nemo", "sentencepiece", "unigram"])
def test_any_text_is_its_encoders_input(
    corpus: Path, sentencepiece: Path, unigram: Path, name: str, text: str, token: str
) -> None:
    folder = {"sentencepiece": sentencepiece, "unigram": unigram}.get(name, corpus / "tokenizers" / name)
    tokenizer = load(folder)
    if name == "unigram":  # it has no bytes to fall back on, so its own letters are all it can spell
        text = "".join(char for char in text if char in "Hello there what is two plus")
        token = "</s>" if token == "</s>" else " "
    text = text.replace("▁", "_") + token + text[::-1].replace("▁", "_")
    assert tokenizer.table.join(tokenizer.encode(text)) == encoder_input(tokenizer, text)


def test_a_sentencepiece_encoder_adds_a_space_and_says_so(sentencepiece: Path) -> None:
    tokenizer = load(sentencepiece)
    ids = tokenizer.encode("Hello")
    assert tokenizer.table.join(ids) == b" Hello" == encoder_input(tokenizer, "Hello")
    assert tokenizer.decode(ids) == "Hello"
    euro = tokenizer.encode("€")[-3:]
    assert tokenizer.token_bytes(euro) == [b"\xe2", b"\x82", b"\xac"]


def test_other_decoders_are_asked(wordpiece: Path) -> None:
    tokenizer = load(wordpiece)
    assert tokenizer.table.kind == "decoded"
    assert tokenizer.table.join(tokenizer.encode("hello working world")).strip() == b"hello working world"


def test_pieces() -> None:
    assert byte_level_bytes("Ġhello") == b" hello"
    assert byte_level_bytes("Ċ") == b"\n"
    assert byte_level_bytes("ðŁ") == b"\xf0\x9f"
    assert byte_level_bytes("日") == "日".encode()
    assert metaspace_bytes("▁a▁") == b" a "
    assert metaspace_bytes("<0x0A>") == b"\n"
    assert metaspace_bytes("<0xZZ>") == b"<0xZZ>"


def test_control_tokens_are_not_added_words() -> None:
    assert is_control("<think>", False)
    assert is_control("eos", True)
    assert not is_control("    ", False)
    assert not is_control("word", False)


def test_ids_outside_the_vocabulary_have_no_bytes(corpus: Path) -> None:
    tokenizer = load(corpus / "tokenizers" / "qwen3")
    assert tokenizer.token_bytes([-1, 9707, tokenizer.vocab_size, 2**31 - 1]) == [b"", b"Hello", b"", b""]
    assert tokenizer.token_bytes([]) == []


def test_the_table_is_written_and_mapped(corpus: Path, tmp_path: Path) -> None:
    folder = corpus / "tokenizers" / "qwen3"
    write_table(load(folder).table, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TABLE_FILES)
    table = open_table(tmp_path)
    assert table.token_bytes([151645, 198]) == [b"<|im_end|>", b"\n"]
    assert table.special[151645] and not table.special[198]
    assert table.vocab_size == 151669


def test_opening_a_table_needs_no_tokenizer_library(corpus: Path, tmp_path: Path) -> None:
    folder = corpus / "tokenizers" / "qwen2.5"
    code = (
        "import sys; from pathlib import Path; from rollout_inspector.text.tokenizers import open_table;"
        f"table = open_table(Path({str(tmp_path)!r}));"
        "assert table.join([9707, 1879]) == b'Hello world', table.join([9707, 1879]);"
        "heavy = {'tokenizers', 'fastokens', 'transformers', 'torch', 'django'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    write_table(load(folder).table, tmp_path)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_joined_bytes_are_those_of_the_tokens(tiny_tokenizer: Path) -> None:
    table = load(tiny_tokenizer).table
    ids = np.array([5, table.vocab_size, 900, -1, 0, 5], dtype=np.int32)
    pieces = table.token_bytes(ids)
    data, ends = table.joined(ids)
    assert data == b"".join(pieces) and ends.tolist() == np.cumsum([len(piece) for piece in pieces]).tolist()
    assert table.joined(ids[:0]) == (b"", pytest.approx([]))
