"""Encoding in pieces gives the ids of the whole text, in whatever order texts come."""

import json
from pathlib import Path

import pytest

from rollout_inspector.text.tokenizers import load
from rollout_inspector.text.tokenizers.pieces import PieceEncoder
from rollout_inspector.text.tokenizers.worker.encoders import SAMPLE
from rollout_inspector.text.tokenizers.worker.vocabulary import cut_at

WORDS = ["What is 2+2?", "naïve 漢字 🙂\n\n", " and  blanks ", "\ud800 alone", "", *SAMPLE[6:14]]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1", "mistral-nemo", "deepseek-r1", "gpt-oss"])
def test_growing_texts_are_encoded_as_wholes_are(corpus: Path, name: str) -> None:
    tokenizer = load(corpus / "tokenizers" / name)
    cuts, _ = tokenizer.pieces()
    pieces = PieceEncoder(tokenizer)
    assert pieces._pattern is not None
    texts = [""]
    for n in range(40):
        # Some of these are beginnings of a control token that the next text completes.
        glue = (cuts[n % len(cuts)], cuts[n % len(cuts)][:-1], "\n", cuts[0] + cuts[-1])[n % 4]
        texts.append(texts[-1] + WORDS[n % len(WORDS)] * 3 + glue)
    for text in (*texts, *texts[::-1], *(text[7:] for text in texts[::5])):
        assert pieces.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_what_was_prefetched_is_not_asked_for_again(tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(tiny_tokenizer)
    pieces = PieceEncoder(tokenizer)
    texts = ["".join(f"<|im_start|>user\nWhat is {n}?<|im_end|>\n" for n in range(k)) for k in range(1, 30)]
    expected = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    pieces.prefetch(texts)
    monkeypatch.setattr(pieces, "_encode_batch", None)
    assert [pieces.encode(text).tolist() for text in texts] == expected


def test_a_longer_control_token_may_begin_where_the_last_text_was_cut(tiny_tokenizer: Path, tmp_path: Path) -> None:
    definition = json.loads((tiny_tokenizer / "tokenizer.json").read_text())
    longer = {**definition["added_tokens"][0], "id": 1200, "content": "<|im_end|>\nand more"}
    definition["added_tokens"].append(longer)
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load(tmp_path)
    pieces = PieceEncoder(tokenizer)
    before = "<|im_start|>user\n" + "What is it? " * 60 + "<|im_end|>"
    for text in (before, before + "\nand", before + "\nand more", before + "\nand less"):
        assert pieces.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert 1200 in pieces.encode(before + "\nand more")


def test_rules_that_reach_across_a_control_token_forbid_cutting(sentencepiece: Path, unigram: Path) -> None:
    for folder in (sentencepiece, unigram):
        tokenizer = load(folder)
        assert tokenizer.pieces()[0] == []
        text = "Hello there</s>what is two</s>" * 30
        assert PieceEncoder(tokenizer).encode(text).tolist() == tokenizer.encode(text).tolist()
    token = {"content": "<x>", "normalized": False, "lstrip": True}
    assert cut_at({"added_tokens": [token]}) == [] and cut_at({"added_tokens": [{**token, "lstrip": False}]}) == ["<x>"]
