"""One row for each step, or rows merged while the prefix holds. The prompts of a launched run are built like those of
``tool_delta``. A recorded run keeps its prompts: each is the context that the model saw, even if it does not extend the
step before."""

from collections.abc import Sequence

import numpy as np

from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.strategies.appending import ToolDelta
from rollout_inspector.streams.strategies.protocol import KeepsSteps
from rollout_inspector.streams.trajectory import Floats, Mask, Origin, Origins, Row, Step


class StepWise(KeepsSteps, ToolDelta):
    """One row per step: prompt with mask 0, completion with mask 1. Training cost grows with the turns squared."""

    slug = "step_wise"
    about = (
        "Every engine call is one row, with its prompt masked and its completion trained. The cost grows with the "
        "square of the turns."
    )
    rows_follow_from_steps = False

    def take_recorded(self, steps: Sequence[Step]) -> None:
        """Take the recorded steps. A row holds what the engine read, even if history was rewritten."""
        self._steps = list(steps)

    def rows(self) -> list[Row]:
        last = len(self._steps) - 1
        return [_row(step, index, is_last=index == last) for index, step in enumerate(self._steps)]


class StepWiseMerged(StepWise):
    """The step-wise rows. Neighbours are merged while the next prompt starts with prompt and response (SkyRL)."""

    slug = "step_wise_merged"
    about = "Step-wise rows, merged while the next prompt starts with the prompt and completion before it."
    rows_follow_from_steps = True

    def rows(self) -> list[Row]:
        return merged_rows(self._steps)


def _row(step: Step, index: int, is_last: bool) -> Row:
    ids, n_prompt = step.stream, len(step.prompt_ids)
    mask: Mask = np.zeros(len(ids), dtype=np.bool_)
    mask[n_prompt:] = True
    origin: Origins = np.empty(len(ids), dtype=np.uint8)
    origin[:n_prompt], origin[n_prompt:] = int(Origin.PROMPT), int(Origin.SAMPLED)
    logprobs: Floats | None = None
    if step.logprobs is not None:
        logprobs = np.empty(n_prompt + len(step.logprobs), dtype=np.float32)
        logprobs[:n_prompt], logprobs[n_prompt:] = np.nan, step.logprobs
    return Row(ids, mask, logprobs, origin, step_indices=(index,), extra={"is_last_step": is_last})
