"""The gallery: a small bundled run with one trajectory for each kind of finding, and one that is right.

The demo policy sampled every completion. A trajectory whose fault is not made by a strategy has the fault that a faulty
harness would have made: the policy read the faulty prompt and answered it. ``manage.py make_gallery`` writes the file.
"""

from __future__ import annotations

from pathlib import Path

from rollouts.demo_policy import MODEL_DIR

BUNDLE = Path(__file__).parent / "trajectories.jsonl"
"""In this project's own JSON Lines. The ids are those of the demo policy's tokenizer."""
CLEAN = "clean"
"""The name of the trajectory that has nothing wrong. Every other one is called after the kind of finding it shows."""
MISSING = {
    "bos_mismatch": "The demo policy's tokenizer has no begin-of-sequence token, so no prompt of it has one too many.",
}
"""Kind of finding -> why the gallery has no trajectory of it."""

_TITLE = "chat template. Appending a message never changes what was rendered before it."
_FAULTS: dict[str, tuple[tuple[str, str], ...]] = {
    "empty_think": (
        (_TITLE, "chat template with a fault: an empty think block is written, and taken back when messages follow."),
        (
            "{{- said -}}",
            (
                "{%- if loop.last and not message.reasoning_content -%}"
                "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{{- said -}}"
            ),
        ),
        (
            "{%- if add_generation_prompt -%}\n    {{- '<|im_start|>assistant\\n' -}}",
            "{%- if add_generation_prompt -%}\n    {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}",
        ),
    ),
    "reminder": (
        (_TITLE, "chat template with a fault: a reminder stands behind the last user message alone."),
        ("content) ~ '<|im_end|>", "content) ~ (' Use the calculator.' if loop.last else '') ~ '<|im_end|>"),
    ),
    "thinking": (
        (_TITLE, "chat template that opens a think block, with a fault: it leaves out reasoning when messages follow."),
        ("{%- if message.reasoning_content -%}", "{%- if message.reasoning_content and loop.last -%}"),
        (
            "{%- if add_generation_prompt -%}\n    {{- '<|im_start|>assistant\\n' -}}",
            "{%- if add_generation_prompt -%}\n    {{- '<|im_start|>assistant\\n<think>\\n' -}}",
        ),
    ),
}
"""Name of a chat template -> what it writes in place of what the demo policy's one writes.

Well-known templates have these faults."""


def chat_templates() -> dict[str, str]:
    """Name -> text of the chat templates that steps of the gallery use beside the demo policy's."""
    own = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    made = dict.fromkeys(_FAULTS, own)
    for name, changes in _FAULTS.items():
        for old, new in changes:
            if made[name].count(old) != 1:
                raise ValueError(f"The demo policy's chat template does not hold this once: {old}")
            made[name] = made[name].replace(old, new)
    return made
