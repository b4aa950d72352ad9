"""Loading a tokenizer: exact ids, the fastest encoder that gives them, and a sentence where there is none."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.text.tokenizers import LoadedTokenizer, TokenizerUnusable, from_hub, limited, load
from rollout_inspector.text.tokenizers.worker.encoders import Reference, fast_encoder, sample_texts
from tests.conftest import ROOT
from tests.tokenizers.oracles import encode_plain, reference

NAMES = ("deepseek-r1", "gpt-oss", "llama3.1", "mistral-nemo", "qwen2.5", "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(corpus: Path, name: str) -> None:
    tokenizer = load(corpus / "tokenizers" / name)
    codec: Codec = tokenizer
    hf = tokenizer.hf
    lines = (corpus / "vectors" / f"drift_{name}.jsonl").read_text().splitlines()
    vectors = [json.loads(line) for line in lines]
    texts = [vector["text"] for vector in vectors if "\ufffd" not in vector["text"]][:150]
    texts += [tokenizer.decode(sorted(tokenizer.special_ids)[:50])]
    expected = hf(texts, add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in codec.encode_batch(texts)] == expected
    tokenizer.fastest()
    assert [ids.tolist() for ids in codec.encode_batch(texts)] == expected
    assert [codec.encode(text).tolist() for text in texts] == expected
    assert all(ids.dtype == np.int32 for ids in codec.encode_batch(texts))
    sample = [vector["ids"] for vector in vectors[:300]]
    assert [tokenizer.decode(ids) for ids in sample] == hf.batch_decode(sample, skip_special_tokens=False)
    encoded = codec.encode_batch([vector["text"] for vector in vectors])
    assert [ids.tolist() for ids in encoded] == [vector["reencode"] for vector in vectors]
    assert dict(tokenizer.named_tokens) == dict(hf.special_tokens_map)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (hf.bos_token_id, hf.eos_token_id)
    assert tokenizer.chat_template == hf.chat_template


def test_a_tokenizer_of_the_general_class_is_loaded_without_torch(tiny_tokenizer: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from rollout_inspector.text.tokenizers import load; hf = load(sys.argv[1]).hf;"
        "print('torch' in sys.modules, hf.encode('What is 2 + 3?'), type(hf).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_tokenizer)], cwd=ROOT, capture_output=True, text=True
    )
    expected = AutoTokenizer.from_pretrained(tiny_tokenizer)
    assert done.stdout.split("\n")[0] == f"False {expected.encode('What is 2 + 3?')} {type(expected).__name__}"
    folder = shutil.copytree(tiny_tokenizer, tmp_path / "own")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert type(load(folder).hf) is type(AutoTokenizer.from_pretrained(folder)) is not type(expected)


def test_content_is_encoded_with_control_tokens_split(corpus: Path) -> None:
    tokenizer = load(corpus / "tokenizers" / "qwen3")
    text = "a<|im_end|>b<tool_call>"
    assert 151645 in tokenizer.encode(text)
    plain = encode_plain(tokenizer, text)
    assert not tokenizer.special_ids & set(plain.tolist())
    assert tokenizer.table.join(plain) == text.encode()


def test_the_reference_is_used_where_the_fast_encoder_differs(corpus: Path) -> None:
    tokenizer = load(corpus / "tokenizers" / "qwen3")
    assert tokenizer.fastest() == tokenizer.encoder == "fastokens"

    class Wrong(Reference):
        def encode_batch(self, texts):  # type: ignore[no-untyped-def]
            return [np.array([0], dtype=np.int32) for _ in texts]

    definition, right = reference(tokenizer.path)
    sample = sample_texts(definition.tokenizer)
    assert fast_encoder(definition.text, sample, right) is not None
    assert fast_encoder(definition.text, sample, Wrong(definition.text)) is None
    assert fast_encoder("{}", sample, right) is None


def test_much_text_brings_the_fast_encoder_and_a_new_process_begins_with_the_reference(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = LoadedTokenizer(shutil.copytree(tiny_tokenizer, tmp_path / "own"))
    monkeypatch.setattr(limited, "REFERENCE_BYTES", 1000)
    text = "a word " * 100
    first = tokenizer.encode(text).tolist()
    assert tokenizer.encoder == "tokenizers"
    assert tokenizer.encode(text).tolist() == first and tokenizer.encoder == "fastokens"
    tokenizer.close()
    assert tokenizer.decode(first) == text and tokenizer.pieces()[0] and tokenizer.encoder == "tokenizers"
    assert tokenizer.encode(text).tolist() == first
    running = tokenizer._process._process
    assert running is not None
    running.process.kill()
    assert tokenizer.fastest() == tokenizer.encoder == "fastokens"


def test_stop_ids_and_tokens_that_only_the_config_knows(tiny_tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    shutil.copy(tiny_tokenizer / "tokenizer.json", folder)
    size = load(tiny_tokenizer).vocab_size
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        "added_tokens_decoder": {str(size): {"content": "<extra>", "special": True}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    tokenizer = load(folder)
    assert tokenizer.stop_ids == {tokenizer.eos_id, 3, 5}
    assert tokenizer.chat_template == "D"
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode("<extra>").tolist() == [size]
    assert tokenizer.token_bytes([size + 1, size]) == [b"", b"<extra>"]


def test_the_cache_sees_a_changed_file(tiny_tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_tokenizer, folder)
    first = load(folder)
    assert load(folder / "tokenizer.json") is first
    (folder / "chat_template.jinja").write_text("{{ 'another' }}")
    assert load(folder).chat_template == "{{ 'another' }}"
    assert load(folder).sha256 == first.sha256


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no tokenizer.json"),
        ("{", "not valid JSON"),
        ("[]", "no model"),
        ('{"model": {"type": "BPE", "vocab": {}}}', "no vocabulary"),
        ('{"model": {"type": "Nonsense", "vocab": {"a": 0}}}', "cannot be loaded"),
    ],
)
def test_what_is_no_tokenizer_gets_a_sentence(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerUnusable, match=said):
        load(tmp_path)


def test_the_hub_is_asked_only_when_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerUnusable, match="does not fetch"):
        from_hub("Qwen/Qwen3-4B", "main", tmp_path)
    with pytest.raises(TokenizerUnusable, match="not a hub id"):
        from_hub("../../etc", "main", tmp_path, allowed=True)
    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(TokenizerUnusable, match="offline"):
        from_hub("Qwen/Qwen3-4B", "main", tmp_path, allowed=True)
