"""The gallery: a small bundled run with one trajectory for each cause worth seeing, and one that is right.

The demo policy sampled every completion. A trajectory whose fault is not made by a strategy has the fault that a faulty
harness would have made: the policy read the faulty prompt and answered it. ``manage.py make_gallery`` writes the file.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
BUNDLE = FOLDER / "trajectories.jsonl"
"""In this project's own JSON Lines. The ids are those of the demo policy's tokenizer."""
CLEAN = "clean"
"""The name of the trajectory that has nothing wrong. Every other one is called after the kind of finding it shows."""


def chat_templates() -> dict[str, str]:
    """Name -> text of the chat templates that steps of the gallery use beside the demo policy's."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
