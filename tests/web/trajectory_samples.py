"""Stored trajectories for the tests of the trajectory pages, with real text of the demo policy's tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np

from rollout_inspector.diagnose.finding import Axis, Cost, Finding, Severity
from rollout_inspector.streams.trajectory import Request, Row, Step, Trajectory, ids_array
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import byte_table, load_tokenizer, register_tokenizer
from rollouts.store.runs.runs import create_run, end_run
from rollouts.store.trajectories.save_trajectories import save_trajectories

HOSTILE = '<script>alert(1)</script> &amp; "quoted" \u202eevil\u202c zero\u200bwidth \t tab\r\n naïve 漢字 🙂'
TOOLS = ({"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}},)


def logprobs(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return -rng.exponential(0.8, n).astype(np.float32)


class Maker:
    """Builds streams of one tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.record = register_tokenizer(folder, name=f"demo-{models.Tokenizer.objects.count()}")
        self.tokenizer = load_tokenizer(self.record.files_sha256)
        self.table = byte_table(self.record.files_sha256)

    def ids(self, text: str) -> np.ndarray:
        return self.tokenizer.encode(text)

    def conversation(
        self, name: str, turns: int = 3, size: int = 30, hostile: bool = False, **fields: Any
    ) -> Trajectory:
        """Steps that extend each other: prompt, completion, delta, completion, ..."""
        prompt = self.ids("<|im_start|>user\nWhat is 12 * 7?<|im_end|>\n<|im_start|>assistant\n")
        words = self.ids("I compute 12 * 7 with the tool and check the result.\n" * (size // 10 + 1))[:size]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 12 * 7?"}]
        steps, stream = [], prompt
        for turn in range(turns):
            body = np.concatenate([self.ids(HOSTILE), words]) if hostile and not turn else words
            completion = np.concatenate([body, self.ids("<|im_end|>")])
            steps.append(
                Step(stream, completion, logprobs(len(completion), turn), "processed", "stop",
                     request=Request(tuple(messages), TOOLS), temperature=1.0)
            )
            delta = self.ids("\n<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n")
            call = {"type": "function", "function": {"name": "calculator", "arguments": {}}}
            messages = [
                *messages,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "calculator", "content": "84"},
            ]
            stream = np.concatenate([stream, completion, delta])
        return Trajectory(name, tuple(steps), reward=1.0, stop_reason="answered", group="g0", **fields)

    def broken(self, name: str) -> tuple[Trajectory, list[Finding]]:
        """Two steps; the second's prompt lacks the first's last sampled tokens."""
        whole = self.conversation(name, 2)
        first, second = whole.steps
        cut = len(first.prompt_ids) + len(first.completion_ids) - 5
        prompt = np.concatenate([second.prompt_ids[:cut], second.prompt_ids[cut + 2 :]])
        steps = (first, Step(prompt, second.completion_ids, second.logprobs, finish_reason="stop"))
        finding = Finding(
            Axis.STREAM, "unclassified", Severity.ERROR, step=1, start=cut, stop=cut + 2,
            expected_ids=second.prompt_ids[cut : cut + 2], actual_ids=prompt[cut : cut + 2],
            evidence="The prompt leaves the stream.", remedy="Extend by ids.", cost=Cost(5, 0, 2, len(prompt)),
        )
        return Trajectory(name, steps, reward=0.0, stop_reason="answered", group="g0"), [finding]

    def run(self, trajectories: list[Trajectory], findings: Any = None, **fields: Any) -> models.Run:
        fields.setdefault("tokenizer", self.record)
        fields.setdefault("chat_template", self.record.chat_template)
        run = create_run("import", "sample", **fields)
        save_trajectories(
            run,
            trajectories,
            findings or [[] for _ in trajectories],
            token_table=self.table if fields["tokenizer"] else None,
        )
        end_run(run, models.Run.Status.DONE)
        run.refresh_from_db()
        return run


def own_row(n: int = 40, **columns: np.ndarray) -> Trajectory:
    """A trainer's row without steps: a prompt, then trained and masked stretches in turn."""
    mask = np.arange(n) // 10 % 2 == 1
    sampled = np.full(n, -1.0, np.float32) if columns else None
    return Trajectory("row", rows=(Row(ids_array(range(300, 300 + n)), mask, sampled, columns=columns),))
