"""The fastest exact encoder: ``fastokens`` where it agrees with ``tokenizers`` on a sample, else ``tokenizers``."""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from rollout_inspector.streams.trajectory import Ids

logger = logging.getLogger(__name__)

SAMPLE = (
    "", " ", "  ", "\n", "\n\n", " \n \n", "\t\tx", "hello world", "Hello, World!  It's 3.14159 (approx.)\r\n",
    "HAVING count(*) > 3", "don't DON'T I'll we've", "12345678901234567890", "1,234.50 €", "x" * 300, "ab" * 120,
    "naïve café, e\u0301 and é, ﬁ ligature, Å Å", "Ελληνικά русский עברית العربية हिन्दी ไทย",
    "日本語のテキスト、中文混合。한국어", "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 🙂", "\u202eright to left\u202c zero\u200bwidth \ufeffbom",
    "a\u0300\u0301\u0302\u0303 combining", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈", "\x00\x01\x7f\x85\u2028\u2029", "\ufffd \ue000",
    "def f(x):\n    return {'a': [1, 2], \"b\": None}  # comment\n\n\nif __name__ == '__main__':\n\tprint(f(3))\n",
    '{"name": "calc", "arguments": {"expr": "2+2", "exact": false}}\n', "<div class='x'>&nbsp;</div>\n\n",
    "https://example.org/a/b?c=d&e=f#g", "  leading and trailing  ", "CamelCaseWords snake_case_words kebab-case",
    "<0x0A> <|not_a_token|> ▁low ▁line", "   \n\n   three\n   ", "…—–‘’“”", "½ ² ㎏ ①",
)
"""Awkward texts on which encoders differ."""


class Encoder(Protocol):
    """Text to ids. Control tokens are recognised; nothing is added."""

    name: str

    def encode(self, text: str) -> Ids: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...


def is_of_library(error: BaseException) -> bool:
    """Whether the native library raised this: a panic, which is no ``Exception``, or a bare ``Exception``."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _ids(values: Sequence[int]) -> Ids:
    return np.array(values, dtype=np.int32)


class Reference:
    """The ``tokenizers`` library: other encoders must return the same ids."""

    name = "tokenizers"

    def __init__(self, definition: str) -> None:
        from tokenizers import Tokenizer

        self.raw = Tokenizer.from_str(definition)

    def encode(self, text: str) -> Ids:
        return _ids(self.raw.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [_ids(e.ids) for e in self.raw.encode_batch_fast(list(texts), add_special_tokens=False)]

    def offsets(self, text: str) -> tuple[Ids, list[tuple[int, int]]]:
        """Ids and, for each id, the characters ``[start, stop)`` of the text that it covers."""
        encoding = self.raw.encode(text, add_special_tokens=False)
        return _ids(encoding.ids), list(encoding.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return str(self.raw.decode(ids, skip_special_tokens=False))


class Fast:
    """``fastokens``: the same ids, many times faster."""

    name = "fastokens"

    def __init__(self, definition: str) -> None:
        import fastokens

        self.raw = fastokens.Tokenizer.from_json_str(definition)

    def encode(self, text: str) -> Ids:
        return _ids(self.raw.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """All ids arrive in one buffer, without a Python object for each."""
        data, offsets = self.raw.encode_batch_flat(list(texts))
        ids = np.frombuffer(data, dtype="<u4").astype(np.int32)
        return [ids[start:stop] for start, stop in pairwise(np.frombuffer(offsets, dtype="<u8").tolist())]


def sample_texts(definition: Mapping[str, Any]) -> list[str]:
    """The sample, and texts with this tokenizer's control tokens inside words, side by side and damaged."""
    added = [token["content"] for token in definition.get("added_tokens") or ()]
    chosen = added if len(added) <= 40 else [*added[:20], *added[-20:]]
    texts = [*SAMPLE, "".join(chosen), " ".join(chosen), "\n".join(chosen)]
    texts += [f"a {token}b{token[:-1]} {token[1:]}\n{token}\n\n" for token in chosen]
    return [*texts, "".join(SAMPLE)]


def fast_encoder(definition: str, sample: Sequence[str], reference: Reference) -> Fast | None:
    """``fastokens`` for a definition if it loads and returns the reference's ids for the whole sample, else None."""
    try:
        fast = Fast(definition)
        for text_of_sample, expected, actual in zip(
            sample, reference.encode_batch(sample), fast.encode_batch(sample), strict=True
        ):
            if not np.array_equal(expected, actual):
                logger.info(
                    "fastokens differs from tokenizers on %r; the reference encoder is used", text_of_sample[:80]
                )
                return None
    except BaseException as error:
        if not (is_of_library(error) or isinstance(error, ValueError)):
            raise
        logger.info("fastokens does not load this tokenizer (%s); the reference encoder is used", error)
        return None
    return fast
