"""Tokenizers and chat templates that are small as files and take all that they get."""

import json
from pathlib import Path
from typing import Any

FOREVER = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}{{ messages }}"
"""It takes all the processor seconds that the sandbox allows."""
DOUBLE = {"type": "Replace", "pattern": {"String": "l"}, "content": "ll"}
NESTED = {"type": "Split", "pattern": {"Regex": "(?:x{0,30}){4}y|x"}, "behavior": "Isolated", "invert": False}
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "each l is doubled 22 times": (
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 22}},
        "computing time|process down|more memory",
    ),
    "each l is doubled 14 times": (
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 14}},
        "16,387 ids of a text of 5 bytes",
    ),
    "a pattern that tries everything": ({"pre_tokenizer": NESTED}, "computing time"),
    "a decoder that cuts more than there is": (
        {"decoder": {"type": "Strip", "content": "l", "start": 0, "stop": 2**62}},
        "library failed",
    ),
    "45 MB of empty lists": ({"odd": "[],"}, "computing time|process down|more memory|MB"),
    "nested lists": ({"odd": "["}, "not valid JSON"),
    "a token of 100,000 letters": ({"long": 1}, "computing time|token of 100,000 bytes"),
    "more added tokens than any tokenizer has": ({"many": 1}, "added tokens"),
}


def changed(tiny_tokenizer: Path, folder: Path, change: dict[str, Any]) -> Path:
    definition = json.loads((tiny_tokenizer / "tokenizer.json").read_text())
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({**definition, **change}))
    return folder


def added(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def bomb(tiny_tokenizer: Path, folder: Path, change: dict[str, Any]) -> Path:
    """A folder with a tokenizer.json that is small as an upload and grows when it is read or used."""
    before = json.loads((tiny_tokenizer / "tokenizer.json").read_text())["added_tokens"]
    if "long" in change:
        change = {"added_tokens": [*before, added(5000, "x" * 100_000)]}
    if "many" in change:
        change = {"added_tokens": [added(n, f"<{n}>") for n in range(100_001)]}
    odd = change.pop("odd", "") if "odd" in change else ""
    file = changed(tiny_tokenizer, folder, change) / "tokenizer.json"
    if odd:
        nested = "[" + odd * (15_000_000 if odd == "[]," else 100_000)
        file.write_text(f'{file.read_text()[:-1]}, "odd": {nested}0{"]" * (1 + nested.count("[") * (odd == "["))}}}')
    return folder
