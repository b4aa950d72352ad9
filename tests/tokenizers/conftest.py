"""Small tokenizers of the kinds that the corpus lacks, trained on a few sentences."""

import json
from pathlib import Path

import pytest

TEXTS = [
    "Hello there, what is two plus two?",
    "The tool answers 4. Übermut tut selten gut.",
    "def f(x):\n    return x",
] * 40


def save(tokenizer: object, folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-2 style: BPE with byte fallback; the encoder puts a space first and the decoder takes it away."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    # Real files mark only the first three as added; the byte pieces are plain vocabulary.
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = definition["added_tokens"][:3]
    plain = Tokenizer.from_str(json.dumps(definition))
    plain.add_tokens([AddedToken("<tool>", normalized=False)])
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    return save(plain, tmp_path_factory.mktemp("tokenizers") / "sentencepiece", config)


@pytest.fixture(scope="session")
def unigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Unigram model behind a Metaspace pre-tokenizer that prepends at the start of a text only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = sorted({char for text in TEXTS for char in text})
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return save(tokenizer, tmp_path_factory.mktemp("tokenizers") / "unigram", {"eos_token": "</s>"})


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT style: neither bytes nor a metaspace."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {word: n for n, word in enumerate(["[UNK]", "hello", "world", "##ing", "work", "!"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return save(tokenizer, tmp_path_factory.mktemp("tokenizers") / "wordpiece", {})
