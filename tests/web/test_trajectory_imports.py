"""The web process stays light: the trajectory pages encode and render without torch and transformers."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import django
django.setup()
import inspector.urls
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
tokenizer = load(sys.argv[1])
assert len(tokenizer.encode("12 * 7"))
conversation = Conversation([{"role": "user", "content": "12 * 7"}])
assert "12 * 7" in renderer(tokenizer, tokenizer.chat_template).render_text(conversation)
print(sorted({"torch", "transformers", "vllm"} & set(sys.modules)))
"""


def test_the_web_process_compares_and_renders_without_heavy_libraries(tiny_tokenizer: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_tokenizer)],
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
