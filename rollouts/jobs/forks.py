"""Continuing a trajectory from one of its tokens, and from both sides of a break. A fork is a launched run."""

import json
import secrets
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from rollout_inspector.diagnose.context import MAX_STRETCH
from rollout_inspector.diagnose.finding import Axis, Severity
from rollout_inspector.formats.containers.json_text import json_problem
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import NO_IDS, Ids, ids_array
from rollouts.gallery import task_asked
from rollouts.jobs.launch import (
    LaunchRefused, LaunchSettings, launch, model_tokenizer, out_of_bounds, served_models, setting
)
from rollouts.sampling.environments import Task
from rollouts.sampling.loop import ForkStart
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Fork, Run, StoredStep, StoredTrajectory, new_code
from rollouts.store.runs.forks import find_fork
from rollouts.store.runs.gallery import KEY
from rollouts.store.token_arrays.reading import fork_prefix, stream_ids
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary, numbered_finding, rows_and_steps

NO_ENVIRONMENT = "prompts"
"""The environment of what has none: its episode ends after one completion, and a task without an answer scores none."""
MAX_SAMPLES = 512
MAX_TEXT = 20_000  # Characters of another observation.
NOTHING_READ = (
    "This finding changes no token that the policy reads, or it is not known what should stand there: there are no "
    "two sides to continue from."
)


@dataclass(frozen=True)
class ForkSettings:
    """From where a trajectory is continued, and how. Form, commands and API are made from these fields."""

    finding: int | None = setting(
        "Both sides of a finding", None, "Its number, from 1, in place of a token.", least=1, most=2**31 - 1
    )
    row: int = setting("Row", 0, "Counted from 0.", least=0, most=2**31 - 1)
    at: int = setting("Token", 1, "The first token that is sampled again: its offset in the row.", least=0, most=2**31)
    token: int | None = setting("Another token here", None, "Its id. It stands at this place.", least=0, most=2**31 - 1)
    text: str = setting("Another text of this observation", "", "In place of what the environment answered.")
    samples: int = setting("Continuations", 16, "How many; of a finding on each side.", least=1, most=MAX_SAMPLES)
    seed: int | None = setting("Seed", None, "Empty: one is drawn and kept.", least=0, most=2**31 - 1)
    temperature: float | None = setting("Temperature", None, "Empty: that of the trajectory.", least=0, most=10)
    model: str = setting("Model", "", "Empty: the model of the run, or the one that has its tokenizer.")
    engine: str = setting("Engine", "", "Empty: the one of the run or of the model.")
    strategy: str = setting("Strategy", "", "Empty: the one of the run, or tool_delta.")
    chat_template: str = setting("Chat template", "", "Hash of a registered one. Empty: the one of the run.")
    goes_on: bool = setting(
        "Go on where the environment answers otherwise", False, "It then goes on from the recorded answers."
    )


class _Place(NamedTuple):
    row: RowSummary
    before: Ids  # The ids of the row before the place.
    step: StepSummary | None  # The step that read or sampled the token of the place.
    turn_start: int  # Where the completion of that step begins in the row.
    parent: StepSummary | None  # The step before it in the row.


def fork(trajectory: StoredTrajectory, settings: ForkSettings, user: Any = None, enqueue: bool = True) -> list[Run]:
    """Launch a run whose trajectories continue this one from a token. Raises :class:`Refusal`. Of a finding two runs
    with the same seeds: from what was sampled, then from what was made of it."""
    if (number := settings.finding) is not None:
        settings = replace(settings, seed=secrets.randbelow(2**31) if settings.seed is None else settings.seed)
        pair = {"pair": new_code(), "finding": number, "goes_on": settings.goes_on}
        name = f"Finding {number} of {trajectory.external_id}"
        return [
            _launch(trajectory, settings, columns | pair | {"side": side}, f"{name}: the {side} side", user, enqueue)
            for side, columns in _break_starts(trajectory, number).items()
        ]
    place = _place(trajectory, settings.row, settings.at)
    columns: dict[str, Any] = {
        "row": settings.row, "offset": settings.at, "n_shared": settings.at, "tail_ids": NO_IDS,
        "base_step_id": place.step.pk if place.step and place.row.follows_steps else None,
        "step_index": place.step.index if place.step else None, "goes_on": settings.goes_on,
    }
    if settings.token is not None:
        columns |= {"token_id": settings.token, "tail_ids": ids_array([settings.token])}
    columns["prompt_length"] = min(place.turn_start, settings.at + len(columns["tail_ids"]))
    if settings.text:
        if settings.token is not None:
            raise LaunchRefused({"text": "Choose another token or another text, not both."})
        if len(settings.text) > MAX_TEXT or (problem := json_problem(settings.text)):
            why = f"Write at most {MAX_TEXT:,} characters." if len(settings.text) > MAX_TEXT else f"This {problem}."
            raise LaunchRefused({"text": why})
        if place.parent is None or not place.row.follows_steps or settings.at >= place.turn_start:
            raise LaunchRefused({"text": "This token is in no observation that a step of this row read."})
        # The whole reply is shared. The strategy writes what comes behind it again, with the other text.
        shared = place.parent.prompt_length + place.parent.completion_length
        columns |= {
            "text": settings.text, "n_shared": shared, "base_step_id": place.parent.pk,
            "prompt_length": place.parent.prompt_length,
        }
    name = f"Fork of {trajectory.external_id} at token {settings.at:,}"
    return [_launch(trajectory, settings, columns, name, user, enqueue)]


def fork_start(run: Run) -> ForkStart | None:
    """Where the trajectories of a run begin; None for a run that continues none. Raises :class:`Refusal`."""
    if (stored := find_fork(run)) is None:
        return None
    if stored.parent is None:
        raise Refusal("The trajectory that this run continues was deleted, so the run cannot go on.")
    prefix, at = fork_prefix(stored), stored.step_index
    steps = load_trajectory(stored.parent).steps if at is not None else ()
    request = None if at is None else steps[at].request
    messages = request.messages if request else ()
    # The harness may have sent a reply back otherwise than the environment answered it.
    replies = {len(step.request.messages): step.reply for step in steps[:at] if step.request and step.reply}
    if stored.text is None:
        return ForkStart(prefix, stored.prompt_length, messages, replies, stored.goes_on)
    last = max((n for n, message in enumerate(messages) if message.get("role") == "assistant"), default=None)
    if last is None:
        raise Refusal("The source holds no messages of this turn, so what was observed cannot be written again.")
    observed = (*messages[last + 1 : -1], {**messages[-1], **({"content": stored.text} if stored.text else {})})
    return ForkStart(prefix, stored.prompt_length, messages[:last], replies, stored.goes_on, messages[last], observed)


def _launch(
    trajectory: StoredTrajectory, asked: ForkSettings, columns: dict[str, Any], name: str, user: Any,
    enqueue: bool,
) -> Run:
    run = trajectory.run
    if is_active(trajectory):
        raise Refusal("This trajectory has not ended yet. Continue it when it has.")
    if problems := out_of_bounds(asked):
        raise LaunchRefused(problems)
    model = chosen_model(run, asked)
    settings, task = _inherited(trajectory, columns["step_index"])
    changes = {
        field.name: value
        for field in fields(ForkSettings)
        if field.name in LaunchSettings.__dataclass_fields__ and (value := getattr(asked, field.name)) not in (None, "")
    }
    engine = asked.engine or (settings.engine if model == run.model else "")
    settings = replace(
        settings, **changes | {"model": model, "engine": engine, "prompts": 1, "group": asked.samples, "compare": "off"}
    )
    if problems := settings.problems():
        raise LaunchRefused(problems)
    tokenizer = model_tokenizer(served_models()[model], run.project)
    if run.tokenizer is None or tokenizer.sha256 != run.tokenizer.sha256:
        raise LaunchRefused({"model": f"The model {model} has another tokenizer than this run: it would read other "
                                      "text in these ids. Choose a model that has the tokenizer of the run."})
    token = columns.get("token_id")
    if token is not None and token >= tokenizer.vocab_size:
        raise LaunchRefused({"token": f"The ids of this tokenizer run from 0 to {tokenizer.vocab_size - 1:,}."})
    return launch(
        settings, name[:200], user, enqueue, project=run.project, fork=(task, {"parent": trajectory, **columns})
    )


def chosen_model(run: Run, settings: ForkSettings) -> str:
    """The model that continues a run: the chosen one, that of the run, else a served one with its tokenizer. Raises
    :class:`LaunchRefused`."""
    models = served_models()
    if settings.model or run.model in models:
        return settings.model or run.model
    for name, model in models.items():
        if run.tokenizer is not None and not model.faults():
            try:
                if model_tokenizer(model, run.project).sha256 == run.tokenizer.sha256:
                    return name
            except Refusal:
                continue
    raise LaunchRefused({"model": "No served model has the tokenizer of this run, so none can continue it. Serve the "
                                  "model that sampled it, or register the tokenizer of the run if it has none."})


def _inherited(trajectory: StoredTrajectory, step_index: int | None) -> tuple[LaunchSettings, Task]:
    """The settings and the task of the trajectory that is continued. What an import lacks has the usual values."""
    run = trajectory.run
    if trajectory.task is not None:
        return LaunchSettings.of(run.settings), Task(**json.loads(trajectory.task.body))
    steps = load_trajectory(trajectory).steps
    request = None if step_index is None else steps[step_index].request
    messages = [dict(message) for message in request.messages] if request else []
    tools = None if request is None or request.tools is None else [dict(tool) for tool in request.tools]
    settings = LaunchSettings(environment=NO_ENVIRONMENT, chat_template=run.chat_template_id or "")
    if step_index is not None:
        step = steps[step_index]
        sampling = {name: getattr(step, name) for name in ("temperature", "top_p", "top_k")}
        sampling["max_tokens"] = max(settings.max_tokens, 2 * max(len(step.completion_ids) for step in steps))
        sampling["template_kwargs"] = dict(request.chat_template_kwargs) if request else {}
        settings = replace(settings, **{name: number for name, number in sampling.items() if number is not None})
    if KEY in run.settings and (task := task_asked(messages)) is not None:
        return replace(settings, environment="calculator"), task
    return settings, Task(messages, tools)


def _place(trajectory: StoredTrajectory, row_index: int, offset: int) -> _Place:
    rows, steps = rows_and_steps(trajectory)
    row = next((row for row in rows if row.index == row_index), None)
    if row is None:
        raise LaunchRefused({"row": f"This trajectory has {len(rows)} rows, counted from 0; there is no row "
                                    f"{row_index}."})
    if not 1 <= offset <= row.n_tokens:
        raise LaunchRefused({"at": f"Choose a token from 1 to {row.n_tokens:,}: something must stand before it."})
    chain = [step for step in steps if step.index in row.steps]
    if row.follows_steps:
        ends = [step.prompt_length + step.completion_length for step in chain]
        n = min(int(np.searchsorted(ends, offset, side="right")), len(chain) - 1)
        before = row_window(trajectory, row.handle, 0, offset, steps).ids
        return _Place(row, before, chain[n], chain[n].prompt_length, chain[n - 1] if n else None)
    # A row of its own: each stretch of trained tokens is the completion of a step.
    window = row_window(trajectory, row.handle, 0, row.n_tokens, steps)
    edges = np.diff(window.loss_mask.astype(np.int8), prepend=0, append=0)
    starts, ends_of_turns = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    n = int(np.searchsorted(ends_of_turns, offset, side="right"))
    step = chain[min(n, len(chain) - 1)] if chain and len(chain) == len(starts) else None
    return _Place(row, window.ids[:offset], step, int(starts[n]) if n < len(starts) else offset, None)


def _break_starts(trajectory: StoredTrajectory, number: int) -> dict[str, dict[str, Any]]:
    """Side of a finding -> where it begins. The sampled side has the expected ids in place of the actual ones."""
    finding = numbered_finding(trajectory, number)
    if finding is None:
        raise Refusal(f"This trajectory has {trajectory.n_findings} findings, counted from 1; there is no {number}.")
    start, stop, expected, actual = finding.start, finding.stop, finding.expected_ids, finding.actual_ids
    if finding.severity == Severity.INFO:
        raise Refusal("This finding is a note: nothing is broken, so there are no two sides to continue from.")
    if (finding.axis == Axis.ROW and not len(expected)) or (len(expected) and np.array_equal(expected, actual)):
        raise Refusal(NOTHING_READ)
    if max(len(expected), len(actual), stop - start) >= MAX_STRETCH:
        raise Refusal(f"The two sides differ in {MAX_STRETCH} tokens or more, and only the first are kept. Continue "
                      "from a token instead.")
    _, steps = rows_and_steps(trajectory)
    step = None if finding.step_index is None else steps[finding.step_index]
    if step is not None:
        row, turn_start = step.row, step.prompt_length
        end = max(stop, start) if stop > turn_start or start >= turn_start else turn_start
        handle = StoredStep(pk=step.pk, trajectory_id=trajectory.pk, index=step.index)
        whole, place = stream_ids(handle, step.prompt_length + step.completion_length), None
    else:
        if finding.row_index is None:
            raise Refusal(NOTHING_READ)
        place = _place(trajectory, finding.row_index, max(stop, 1))
        end = max(place.turn_start, stop)
        whole = _place(trajectory, finding.row_index, max(end, 1)).before
        row, turn_start = finding.row_index, place.turn_start
    of_place = step or (place and place.step)
    common: dict[str, Any] = {
        "row": row, "offset": start, "step_index": None if of_place is None else of_place.index,
        "base_step_id": None if step is None else step.pk, "tail_ids": NO_IDS,
    }
    as_it_is, mended = common | {"n_shared": end}, common | {"n_shared": start}
    if step is not None and finding.axis == Axis.DELTA and not len(expected):
        parent = steps[step.parent] if step.parent is not None else None
        if parent is None or step.shared_length < step.parent_length:
            raise Refusal(NOTHING_READ)
        # What should stand there is not stored. The strategy writes the recorded messages as the template does.
        mended |= {"n_shared": step.parent_length, "base_step_id": parent.pk, "text": ""}
        mended["prompt_length"], as_it_is["prompt_length"] = parent.prompt_length, end
        return {Fork.Side.SAMPLED.value: mended, Fork.Side.BROKEN.value: as_it_is}
    if step is not None and start >= turn_start and not len(expected):
        raise Refusal(NOTHING_READ)
    mended["tail_ids"] = np.concatenate([expected, whole[stop:end]]).astype(np.int32)
    for columns in (as_it_is, mended):
        length = columns["n_shared"] + len(columns["tail_ids"])
        columns["prompt_length"] = turn_start if start >= turn_start else length
    # What a step sampled stands as it was sampled; the expected ids are what encoding its text would make of it.
    was_sampled = step is not None and start >= step.prompt_length
    sampled, broken = (as_it_is, mended) if was_sampled else (mended, as_it_is)
    return {Fork.Side.SAMPLED.value: sampled, Fork.Side.BROKEN.value: broken}
