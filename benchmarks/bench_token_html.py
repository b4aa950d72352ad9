"""Token HTML of one window, beside a Django template loop that writes the same elements; the run view of a long row.

Prints ratios and sizes of one run; asserts no time.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from django.template import engines

from rollout_inspector.streams.trajectory import Tokens
from rollout_inspector.text.html.tokens import NO_LOGPROB, TokenPainter, logprob_classes
from rollout_inspector.text.tokenizers import load

pytestmark = pytest.mark.bench

LOOP = """{% for token in tokens %}<i{% if token.classes %} class="{{ token.classes }}"{% endif %}>\
{% if token.newline %}<b class=n></b>{% elif token.space %}<b></b>{% endif %}{{ token.text }}</i>{% endfor %}"""


def best(work: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of some runs."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def sample(folder: Path, n: int) -> Tokens:
    """A stretch of real text with every kind of state."""
    tokenizer = load(folder)
    words = tokenizer.encode(
        "<|im_start|>assistant\nLet me compute 253 * 86 with the calculator: é 漢字.\n<|im_end|>\n" * 40
    )
    ids = np.resize(words, n).astype(np.int32)
    rng = np.random.default_rng(0)
    origin = np.repeat(rng.integers(0, 4, n // 64 + 1), 64)[:n].astype(np.uint8)
    sampled = origin == 1
    logprobs = np.where(sampled, -rng.exponential(0.7, n), np.nan).astype(np.float32)
    return Tokens(0, ids, origin, sampled, logprobs)


def test_a_window_against_a_template_loop(tiny_tokenizer: Path, tmp_path: Path) -> None:
    table = load(tiny_tokenizer).table
    tokens = sample(tiny_tokenizer, 4096)
    painter = TokenPainter(table)
    template = engines["django"].from_string(LOOP)

    def loop() -> str:
        classes = logprob_classes(tokens.logprobs, len(tokens))
        return template.render(
            {
                "tokens": [
                    {
                        "text": piece.decode("utf-8", "replace"),
                        "newline": b"\n" in piece,
                        "space": b" " in piece,
                        "classes": " ".join(
                            name
                            for name in (
                                f"o{origin}" if origin else "",
                                "m" if trained else "",
                                f"q{quantile}" if quantile != NO_LOGPROB else "",
                                "x" if 0 <= token_id < len(table.special) and table.special[token_id] else "",
                            )
                            if name
                        ),
                    }
                    for token_id, piece, origin, trained, quantile in zip(
                        tokens.ids.tolist(), table.token_bytes(tokens.ids), tokens.origin.tolist(),
                        tokens.loss_mask.tolist(), classes.tolist(), strict=True,
                    )
                ]
            }
        )

    cold = best(lambda: TokenPainter(table).window(tokens), 3)
    warm = best(lambda: painter.window(tokens))
    slow = best(loop, 3)
    size = len(painter.window(tokens).encode())
    print(
        f"\nwindow of 4,096 tokens: {warm * 1e3:.2f} ms ({cold * 1e3:.2f} ms cold), template loop {slow * 1e3:.1f} ms: "
        f"{slow / warm:.0f}x ({slow / cold:.0f}x cold); {size / 1000:.0f} kB"
    )


def test_the_run_view_of_300k_tokens(tiny_tokenizer: Path, tmp_path: Path) -> None:
    painter = TokenPainter(load(tiny_tokenizer).table)
    for n in (1_000, 300_000, 1_000_000):
        tokens = sample(tiny_tokenizer, n)
        seconds = best(lambda tokens=tokens: list(painter.blocks(tokens)), 3)
        size = sum(len(html.encode()) for _, _, html in painter.blocks(tokens))
        print(f"\nrun view of {n:,} tokens: {seconds * 1e3:.0f} ms, {size / 1e6:.2f} MB, {size / n:.1f} bytes a token")
