"""A tokenizer's folder as JSON: the definition for the encoders, the named tokens and the chat template. Only JSON and
the text of the chat template are read. Nothing in the folder is ever executed."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_inspector.text.tokenizers.files import MAX_TEMPLATE_BYTES, WANTED, TokenizerUnusable, size_limit

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The attributes that ``transformers`` passes to a chat template when the tokenizer has them."""
MAX_ADDED = 100_000  # Added tokens of one tokenizer; real ones have up to 6,500.


@dataclass(frozen=True, eq=False)
class Definition:
    """What a folder says about its tokenizer."""

    sha256: str  # The SHA-256 of the bytes of tokenizer.json.
    tokenizer: Mapping[str, Any]
    """tokenizer.json without truncation and padding, plus the tokens that only tokenizer_config.json adds."""
    text: str  # ``tokenizer`` as JSON text. The encoders are built from it.
    named_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token``, ... as the chat template sees them. A token that the tokenizer lacks is absent."""
    chat_template: str | None
    stop_token_ids: tuple[int, ...]  # The end-of-sequence ids of generation_config.json; empty when there are none.
    tokenizer_class: str = ""  # The class of ``transformers`` that tokenizer_config.json names.

    def added(self) -> Iterator[tuple[int, str, bool]]:
        """Id, text and special flag of each added token."""
        for token in self.tokenizer.get("added_tokens") or ():
            yield int(token["id"]), str(token["content"]), bool(token.get("special"))

    def base(self) -> Iterator[tuple[int, str]]:
        """Id and piece of each token of the model's own vocabulary."""
        vocab = self.tokenizer["model"].get("vocab") or {}
        if isinstance(vocab, Mapping):
            yield from ((int(token_id), piece) for piece, token_id in vocab.items())
        else:
            yield from ((token_id, piece) for token_id, (piece, _score) in enumerate(vocab))


def read_files(folder: Path) -> dict[str, bytes]:
    """The bytes of each wanted file that the folder has. Raises :class:`TokenizerUnusable`."""
    files = {}
    for name in WANTED:
        path = folder / name
        if path.is_file():
            if path.stat().st_size > size_limit(name):
                raise TokenizerUnusable(f"{name} is larger than {size_limit(name) // 1_000_000} MB, the limit.")
            files[name] = path.read_bytes()
    return files


def parse_definition(files: Mapping[str, bytes]) -> Definition:
    """What the files of a folder say about its tokenizer. Raises :class:`TokenizerUnusable`."""
    raw = files["tokenizer.json"]
    tokenizer = _parsed("tokenizer.json", raw)
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise TokenizerUnusable("tokenizer.json has no model with a vocabulary; no fast tokenizer wrote it.")
    if not tokenizer["model"].get("vocab"):
        raise TokenizerUnusable("tokenizer.json has no vocabulary.")
    config = _optional_object(files, "tokenizer_config.json")
    as_written = tokenizer
    tokenizer = {**tokenizer, "truncation": None, "padding": None}
    try:
        tokenizer["added_tokens"] = _added_tokens(tokenizer, config)
        # Writing 10 MB of JSON takes longer than reading it, and hardly any tokenizer needs it.
        changed = any(tokenizer[key] != as_written.get(key) for key in ("truncation", "padding", "added_tokens"))
        text = json.dumps(tokenizer) if changed else raw.decode("utf-8")
        eos = _optional_object(files, "generation_config.json").get("eos_token_id")
        stops = tuple(int(i) for i in (eos if isinstance(eos, list) else [eos]) if i is not None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerUnusable(f"The folder's JSON does not describe a tokenizer: {error!r}") from error
    if len(tokenizer["added_tokens"]) > MAX_ADDED:
        raise TokenizerUnusable(f"The tokenizer has more than {MAX_ADDED:,} added tokens; no tokenizer has so many.")
    return Definition(
        sha256=hashlib.sha256(raw).hexdigest(), tokenizer=tokenizer, text=text,
        named_tokens=_named_tokens(files, config), chat_template=_chat_template(files, config), stop_token_ids=stops,
        tokenizer_class=str(config.get("tokenizer_class") or "")[:200],
    )


def _parsed(name: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerUnusable(f"{name} is not valid JSON: {error}") from error


def _optional_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    value = _parsed(name, files[name]) if name in files else {}
    if not isinstance(value, dict):
        raise TokenizerUnusable(f"{name} must hold one JSON object.")
    return value


def _added_tokens(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of tokenizer.json, and those that only tokenizer_config.json has."""
    added = [dict(token) for token in tokenizer.get("added_tokens") or ()]
    contents = {token["content"] for token in added}
    vocab = tokenizer["model"]["vocab"]
    pieces = set(vocab) if isinstance(vocab, Mapping) else {piece for piece, _ in vocab}
    used = {int(token["id"]) for token in added}
    for token_id, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        content = token["content"]
        if content in contents or int(token_id) in used or (content in pieces and not token.get("special")):
            continue
        flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        added.append({"id": int(token_id), "content": content, **flags, "special": bool(token.get("special"))})
    return sorted(added, key=lambda token: int(token["id"]))


def _text(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by attribute name, as ``transformers`` passes them to a template."""
    source = {**_optional_object(files, "special_tokens_map.json"), **{k: v for k, v in config.items() if v}}
    texts = {name: text for name in NAMED_TOKENS if (text := _text(source.get(name))) is not None}
    for extra in (config.get("extra_special_tokens"), config.get("model_specific_special_tokens")):
        if isinstance(extra, Mapping):
            texts.update({name: text for name, token in extra.items() if (text := _text(token)) is not None})
    return texts


def _chat_template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """The text of chat_template.jinja, else of tokenizer_config.json (of several the one named ``default``)."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise TokenizerUnusable("chat_template.jinja is not UTF-8 text.") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = templates.get("default") or templates.get("tool_use") or next(iter(templates.values()), None)
    if not isinstance(template, str):
        return None
    if len(template) > MAX_TEMPLATE_BYTES:
        raise TokenizerUnusable("The chat template is larger than 2 MB; no chat template is that large.")
    return template
