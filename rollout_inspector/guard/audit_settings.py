"""What files are compared with: the tokenizer, the chat template and the training step."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache

from rollout_inspector.diagnose import VERSION
from rollout_inspector.text import chat_templates, tokenizers
from rollout_inspector.text.chat_templates import TemplateRenderer
from rollout_inspector.text.tokenizers import LoadedTokenizer
from rollout_inspector.text.tokenizers.files import WANTED, tokenizer_folder


@dataclass(frozen=True)
class AuditSettings:
    """What an audit compares with. Every machine that audits a shard must find the tokenizer at the same path."""

    tokenizer: str = ""  # The folder of the tokenizer; empty = none, and what needs text is not decided.
    template: str = ""  # The text of the chat template; empty = the tokenizer's own.
    format_name: str = "auto"
    step: int | None = None  # The training step of all that is read.
    pattern: str = ""  # Finds the training step in the path of a file; see :class:`TrainingStepRule`.

    def digest(self, table: str = "") -> str:
        """A hash of what decides the result beside the files: settings, tokenizer's files, version, the ``table``."""
        digest = hashlib.sha256(json.dumps([VERSION, table, asdict(self)]).encode())
        if self.tokenizer:
            for name in WANTED:
                path = tokenizer_folder(self.tokenizer) / name
                digest.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"-")
        return digest.hexdigest()


@lru_cache(maxsize=1)
def tools_of(tokenizer: str, template: str) -> tuple[LoadedTokenizer | None, TemplateRenderer | None]:
    """The tokenizer of a folder and the renderer of a template, by default the tokenizer's; None without a folder."""
    if not tokenizer:
        return None, None
    codec = tokenizers.load(tokenizer)
    text = template or codec.chat_template
    return codec, chat_templates.renderer(codec, text) if text else None
