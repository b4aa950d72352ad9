"""The demo policy: a tiny Qwen3-architecture model that uses the calculator, its tokenizer, and how both are made."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The trained model: loads with ``AutoModelForCausalLM`` and ``AutoTokenizer``, and in vLLM."""

STEPS = 1800
"""The default number of training batches. It is here so that the command can name it without importing torch."""
