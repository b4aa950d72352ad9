"""What the gateway captured: its files, read by our readers, and the answer of the engine that each step is of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_inspector import formats
from rollout_inspector.formats import FileRefused, Rejected, Source
from rollout_inspector.formats.folders import files_of
from rollout_inspector.gauntlet.engine import EngineCall, Sampled
from rollout_inspector.gauntlet.harness import Answer, GauntletHarness
from rollout_inspector.gauntlet.vocabulary import decode, is_of_another, mark_of, serial_of
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Step, Trajectory


def scenario_of(mark: str) -> str:
    """The scenario that a mark is of."""
    return mark.rpartition(".")[0]


@dataclass(frozen=True)
class CapturedStep:
    """A step of a trajectory."""

    trajectory: Trajectory
    step: Step
    mark: str  # What was asked; empty where neither the prompt nor the request tells it.
    serial: int  # The number of the engine's answer; 0 where the completion tells none.


@dataclass(frozen=True)
class Evidence:
    """The three sides: what clients asked and got, what the engine read and sampled, what was captured."""

    answers: Sequence[Answer]
    calls: Sequence[EngineCall]
    trajectories: Sequence[Trajectory]  # All of the captured files.
    rejected: Sequence[str]  # Why lines of them were not read.
    captured: Sequence[CapturedStep]  # The steps of this game.
    game: str  # Signs the marks.

    def asked(self, scenario: str) -> list[Answer]:
        """The requests of a scenario, with their answers."""
        return [answer for answer in self.answers if scenario_of(answer.mark) == scenario]

    def served(self, scenario: str = "") -> Iterator[tuple[EngineCall, Sampled, list[CapturedStep]]]:
        """Each answer that the engine gave to its end, in a scenario or in all, with the steps captured of it."""
        for call in self.calls:
            if call.is_served and call.mark and scenario in ("", scenario_of(call.mark)):
                for sampled in call.choices:
                    steps = [step for step in self.captured if step.serial == sampled.serial]
                    yield call, sampled, [step for step in steps if step.mark in (call.mark, "")]

    def steps(self, scenario: str) -> list[CapturedStep]:
        """The captured steps of a scenario."""
        return [step for step in self.captured if scenario_of(step.mark) == scenario]

    def call_of(self, answer: Answer) -> EngineCall | None:
        """The call that an answer is of, by its number; else the only one of its mark."""
        calls = [call for call in self.calls if call.mark == answer.mark]
        return next((call for call in calls if call.choices[0].serial in answer.serials),
                    calls[0] if len(calls) == 1 else None)

    def rows(self, scenario: str) -> list[Row]:
        """The training rows that hold a call of a scenario: those of the files, else those that follow from steps."""

        def are_of(rows: Sequence[Row]) -> list[Row]:
            return [row for row in rows if scenario_of(mark_of(decode(row.ids.tolist()), self.game)) == scenario]

        rows = are_of([row for trajectory in self.trajectories for row in trajectory.rows])
        return rows or are_of([row for trajectory in self.trajectories for row in merged_rows(trajectory.steps)])


def read_captured(path: str | Path, harness: GauntletHarness, format_name: str = "auto") -> Evidence:
    """The evidence with a file, or the files of a folder; steps of another game are left out. Raises :class:`Refusal`
    where there is no file, none is recognised, or none holds anything of this game."""
    engine = harness.engine
    trajectories: list[Trajectory] = []
    rejected: list[str] = []
    try:
        for file in files_of(Path(path)):
            for item in formats.read(Source.of_path(file), format_name)[1]:
                if isinstance(item, Rejected):
                    rejected.append(item.reason)
                else:
                    trajectories.append(item)
    except FileRefused as error:
        raise Refusal(f"What the gateway captured cannot be read: {error}") from error
    placed = [_placed(trajectory, step, engine.game) for trajectory in trajectories for step in trajectory.steps]
    steps = [step for step in placed if step is not None]
    if not any(step.mark or step.serial for step in steps) and not any(trajectory.rows for trajectory in trajectories):
        reason = f" {rejected[0]}" if rejected else ""
        raise Refusal(f"{path} holds no call of this test, so nothing can be decided.{reason}")
    return Evidence(harness.answers, engine.calls, trajectories, rejected, steps, engine.game)


def _placed(trajectory: Trajectory, step: Step, game: str) -> CapturedStep | None:
    """The step with its mark and its number; None where it is of another game."""
    prompt, completion = decode(step.prompt_ids.tolist()), decode(step.completion_ids.tolist())
    if step.request is not None and not mark_of(prompt, game):
        prompt = " ".join(str(message.get("content")) for message in step.request.messages)
    if is_of_another(prompt, game):
        return None
    completion = completion or str(step.text or (step.reply or {}).get("content"))
    return CapturedStep(trajectory, step, mark_of(prompt, game), serial_of(completion))
