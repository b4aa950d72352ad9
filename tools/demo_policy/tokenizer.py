"""Builds the demo policy's tokenizer: a byte-level BPE with the usual special tokens and separate digits."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1200
MODEL_MAX_LENGTH = 2048

ENDOFTEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CONTROL_TOKENS = (ENDOFTEXT, IM_START, IM_END)
"""Special for the decoder too: ``skip_special_tokens`` drops them."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One id each, but the decoder treats them as text, so that a parser still sees them."""

# Digits and operators are separate tokens: a number is copied digit by digit, which a small model learns.
_PIECES = r" ?\p{L}+|\p{N}| ?[-+*/%()=]|'\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant", "content": ""},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            # The white space around a call belongs to the template, not to the content beside it.
            "open_pattern": r"\s*<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            # A call that is not JSON stays visible as text; the environment answers it with an error.
            "content_args": {"allow_non_json": True},
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {
            "close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text", "repeats": True, "join": "",
        },
    },
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE learned from texts. Markup is cut out of them first, because it has separate ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    added = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=2,
    )
    markup = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS + MARKUP_TOKENS))
    tokenizer.train_from_iterator((piece for text in texts for piece in markup.split(text) if piece), trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # This class takes tokenizer.json as it is; the Qwen classes would replace its pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": ENDOFTEXT,
        "unk_token": None,
        "additional_special_tokens": [IM_START],
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "response_template": RESPONSE_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
