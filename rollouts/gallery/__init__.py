"""The gallery: a small bundled run with one trajectory for each kind of finding, a clean one and two trees. The demo
policy sampled every completion. A trajectory whose fault is not made by a strategy has the fault that a faulty harness
would have made: the policy read the faulty prompt and answered it. ``manage.py make_gallery`` writes the file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.sampling.environments.calculator import CalculatorEnvironment
from rollouts.sampling.environments.protocol import Task

BUNDLE = Path(__file__).parent / "trajectories.jsonl"
"""In this project's own JSON Lines. The ids are those of the demo policy's tokenizer."""
N_TASKS, TASKS_SEED = 60, 7  # The tasks of the calculator that its conversations begin with.
CLEAN = "clean"  # The name of the trajectory that has nothing wrong.


@dataclass(frozen=True)
class Example:
    """A trajectory of the gallery that is not called after a kind of finding."""

    title: str
    meaning: str  # What happened.
    consequence: str  # What it does to training.
    kind: str = ""  # The kind of all its findings; empty = it has none.


EXAMPLES = {
    CLEAN: Example(
        "Nothing wrong",
        "Every prompt starts with what was sampled before it, and the template wrote the rest.",
        "The gradient is on the tokens that the model chose, and on no others.",
    ),
    "sub_agent": Example(
        "Sub-agent",
        "A sub-agent with a prompt of its own answered the tool call. The first agent read its last reply.",
        "Nothing is wrong: each of the two conversations is a row of its own, and both are trained with one reward.",
        "branch",
    ),
    "compaction": Example(
        "Compaction",
        "The model was asked for a summary. The conversation began again with it in place of the history.",
        "The first row ends with the summary, and the second one begins with it. In one row, the later answers would "
        "be trained after tokens that the model did not read.",
        "history_rewritten",
    ),
}
"""Name of a trajectory that is not called after a kind -> what it shows. Every other name is a kind of finding."""
FIRST = (
    "tool_call_reserialized", "thinking_stripped", "observation_trained", "stop_token_untrained",
    "logprobs_other_distribution",
)
"""What a newcomer looks at first: text encoded again, a template, a mask, an end that is never learned, the gap."""
MISSING = {
    "bos_mismatch": "The tokenizer of the bundled model has no begin-of-sequence token, so no prompt of it has two.",
    "media_tokens_wrong": "The bundled model reads text alone: its tokenizer has no placeholder of an image.",
}
"""Kind of finding -> why the gallery has no trajectory of it."""


def task_asked(messages: Sequence[Mapping[str, Any]]) -> Task | None:
    """The task of the gallery whose question a conversation holds; None = it holds none."""
    texts = [str(message.get("content")) for message in messages if message.get("role") == "user"]
    tasks = CalculatorEnvironment().tasks(N_TASKS, TASKS_SEED)
    return next((task for task in tasks if any(task.messages[-1]["content"] in text for text in texts)), None)


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
"""Name of a chat template -> what it writes in place of what the demo policy's one writes. Well-known templates have
these faults."""


def chat_templates() -> dict[str, str]:
    """Name -> text of the chat templates that steps of the gallery use beside the demo policy's."""
    own = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    templates = dict.fromkeys(_FAULTS, own)
    for name, changes in _FAULTS.items():
        for old, new in changes:
            if templates[name].count(old) != 1:
                raise ValueError(f"The demo policy's chat template does not hold this once: {old}")
            templates[name] = templates[name].replace(old, new)
    return templates


FOLDER = Path(__file__).with_name("training")
STEPS = 30
SHARED: dict[str, Any] = {"groups": 2, "group_size": 4, "repeated": 1, "rate": 2.5e-4, "temperature": 1.2, "seed": 1}
"""Settings of every run, as ``tools.demo_policy.grpo.GrpoSettings`` takes them."""


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """A bundled run of training."""

    name: str  # Of its file.
    title: str  # Of the run that it becomes.
    fault: dict[str, Any]  # The settings that differ from those of the clean run.
    cause: str  # What the gap is to be named; empty = nothing.

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.jsonl.gz"


TRAINING_RUNS = (
    TrainingRun("clean", "GRPO, clean", {}, ""),
    TrainingRun("retokenized", "GRPO, rows encoded again", {"strategy": "retokenize"}, "row_retokenized"),
    TrainingRun("undelivered", "GRPO, weights not delivered", {"deliver_every": 0}, "weights_not_delivered"),
    TrainingRun("stale_cache", "GRPO, cache never reset", {"reset_cache": False}, "stale_cache"),
    TrainingRun("temperature", "GRPO, trainer at another temperature", {"trainer_temperature": 1.0}, "temperature"),
)
"""In the order in which they are told."""
