"""A tokenizer's folder as JSON: the definition for the encoders, the named tokens and the chat template.

Only JSON and the text of the chat template are read. Nothing in the folder is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The attributes that ``transformers`` passes to a chat template when the tokenizer has them."""

MAX_JSON_BYTES = 200_000_000
MAX_TEMPLATE_BYTES = 2_000_000


class TokenizerUnusable(ValueError):
    """The folder holds no tokenizer that can be read. The message names the file and what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Definition:
    """What a folder says about its tokenizer."""

    folder: Path
    sha256: str
    """The SHA-256 of the bytes of tokenizer.json."""
    tokenizer: Mapping[str, Any]
    """tokenizer.json without truncation and padding, plus the tokens that only tokenizer_config.json adds."""
    text: str
    """``tokenizer`` as JSON text. The encoders are built from it."""
    named_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token``, ... as the chat template sees them. A token that the tokenizer lacks is absent."""
    chat_template: str | None
    stop_token_ids: tuple[int, ...]
    """The end-of-sequence ids of generation_config.json; empty when there are none."""
    tokenizer_class: str = ""
    """The class of ``transformers`` that tokenizer_config.json names."""

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


def tokenizer_folder(path: str | Path) -> Path:
    """The folder that holds tokenizer.json, from the path of the folder or of the file.

    Raises :class:`TokenizerUnusable` when there is none.
    """
    path = Path(path)
    folder = path.parent if path.name == "tokenizer.json" else path
    if not folder.is_dir():
        raise TokenizerUnusable(f"There is no folder {folder}. Name a folder that holds a tokenizer.json.")
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerUnusable(
            f"The folder {folder} has no tokenizer.json. Save the model's fast tokenizer there (save_pretrained)."
        )
    return folder


def file_marks(folder: Path, names: Iterable[str]) -> tuple[object, ...]:
    """For each of these files of a folder what changes when the file changes; None for a file that is missing."""
    stats = [path.stat() if (path := folder / name).is_file() else None for name in names]
    return tuple(stat and (stat.st_mtime_ns, stat.st_size) for stat in stats)


@contextmanager
def whole_folder(target: Path, last: str) -> Iterator[Path]:
    """Yields a draft that becomes the folder ``target``: whole or not at all, also when two processes write it.

    The process that comes second drops its draft: the file ``last`` is there already.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:
            if not (target / last).is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises :class:`TokenizerUnusable` when the file is too large or not JSON."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise TokenizerUnusable(f"{path.name} is larger than {MAX_JSON_BYTES // 1_000_000} MB, the limit.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerUnusable(f"{path.name} is not valid JSON: {error}") from error


def read_definition(path: str | Path) -> Definition:
    """Read a tokenizer's folder. Raises :class:`TokenizerUnusable`."""
    folder = tokenizer_folder(path)
    tokenizer = read_json(folder / "tokenizer.json")
    raw = (folder / "tokenizer.json").read_bytes()
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise TokenizerUnusable("tokenizer.json has no model; it was not written by a fast tokenizer.")
    if not tokenizer["model"].get("vocab"):
        raise TokenizerUnusable("tokenizer.json has no vocabulary.")
    config = _optional_object(folder / "tokenizer_config.json")
    as_written = tokenizer
    tokenizer = {**tokenizer, "truncation": None, "padding": None}
    try:
        tokenizer["added_tokens"] = _added_tokens(tokenizer, config)
        # Writing 10 MB of JSON takes longer than reading it, and hardly any tokenizer needs it.
        changed = any(tokenizer[key] != as_written.get(key) for key in ("truncation", "padding", "added_tokens"))
        text = json.dumps(tokenizer) if changed else raw.decode("utf-8")
        generation = _optional_object(folder / "generation_config.json")
        eos = generation.get("eos_token_id")
        stops = tuple(int(i) for i in (eos if isinstance(eos, list) else [eos]) if i is not None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerUnusable(f"The folder's JSON does not describe a tokenizer: {error!r}") from error
    return Definition(
        folder=folder,
        sha256=hashlib.sha256(raw).hexdigest(),
        tokenizer=tokenizer,
        text=text,
        named_tokens=_named_tokens(folder, config),
        chat_template=read_chat_template(folder, config),
        stop_token_ids=stops,
        tokenizer_class=str(config.get("tokenizer_class") or ""),
    )


def _optional_object(path: Path) -> dict[str, Any]:
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise TokenizerUnusable(f"{path.name} must hold one JSON object.")
    return value


def _added_tokens(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of tokenizer.json, and those that only tokenizer_config.json has."""
    added = [dict(token) for token in tokenizer.get("added_tokens") or ()]
    known = {token["content"] for token in added}
    vocab = tokenizer["model"]["vocab"]
    pieces = set(vocab) if isinstance(vocab, Mapping) else {piece for piece, _ in vocab}
    used = {int(token["id"]) for token in added}
    for token_id, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        content = token["content"]
        if content in known or int(token_id) in used or (content in pieces and not token.get("special")):
            continue
        flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        added.append({"id": int(token_id), "content": content, **flags, "special": bool(token.get("special"))})
    return sorted(added, key=lambda token: int(token["id"]))


def _text(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by attribute name, as ``transformers`` passes them to a template."""
    source = {**_optional_object(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v}}
    named = {name: text for name in NAMED_TOKENS if (text := _text(source.get(name))) is not None}
    for extra in (config.get("extra_special_tokens"), config.get("model_specific_special_tokens")):
        if isinstance(extra, Mapping):
            named.update({name: text for name, token in extra.items() if (text := _text(token)) is not None})
    return named


def read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The text of chat_template.jinja, else of tokenizer_config.json (of several the one named ``default``)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise TokenizerUnusable("chat_template.jinja is larger than 2 MB; no chat template is that large.")
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default") or named.get("tool_use") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None
