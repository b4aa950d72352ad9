"""Parser comparisons: what every parser reads of one completion. A worker reads; the result is stored with its key."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.db import transaction

from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.refusal import Refusal, Remedy
from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.streams.messages import ToolCall, as_text
from rollout_inspector.streams.recorded_renders import parsed
from rollout_inspector.streams.trajectory import Step, Trajectory
from rollout_inspector.text import chat_templates
from rollout_inspector.text.replies.audit import Completion, ParserReading, ReadingAudit, audit, reading_of
from rollout_inspector.text.replies.parsing import form_of, parser_of, plain_message
from rollout_inspector.text.tokenizers import LoadedTokenizer
from rollouts.jobs.replays.replay_context import template_text
from rollouts.sampling.engines.vllm_parsers import VllmParsers
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.database import save_columns
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, ask_job, end_job, is_active
from rollouts.store.models import Job, ParserAudit, StoredTrajectory
from rollouts.store.text import storable_text, without_paths
from rollouts.store.trajectories.replays import find_parser_audit, parser_audit_of, parser_audit_of_job
from rollouts.store.trajectories.trajectories import load_trajectories

VERSION = 1  # Raise it when a comparison says other things than before: stored ones are then stale.
MAX_CHARACTERS = 1_500_000  # Of a completion's text. A longer one is read by no parser.
KEPT_CHARACTERS = 2_000  # Of each text of a stored reading.
KEPT_CALLS = 50
MAX_NESTED = 300  # Opening brackets in the arguments of a call, up to which they are read as JSON.
TEMPLATE = "the chat template's form"  # The name of the reader that the chat template teaches.


def key_of(trajectory: StoredTrajectory) -> str:
    """The hash of all that comparisons of a trajectory depend on, but for the version of vLLM, which the worker has."""
    run = trajectory.run
    parts = (
        VERSION, trajectory.attempt, trajectory.n_steps, trajectory.n_tokens, trajectory.status,
        run.tokenizer.sha256 if run.tokenizer else "", hashlib.sha256((template_text(run) or "").encode()).hexdigest(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def ask(trajectory: StoredTrajectory, step: int, user: Any = None) -> tuple[ParserAudit, bool]:
    """The comparison of a step's reply, and whether a worker has to be sent. One that has ended is made again."""
    key = key_of(trajectory)
    with transaction.atomic():
        audit = parser_audit_of(trajectory, step, key)
        audit.job, is_new = ask_job(audit, KIND.slug, user=user)
        if is_new:
            audit.key, audit.report = key, None
            save_columns(audit, "key", "report")
    return audit, is_new


def current(trajectory: StoredTrajectory, step: int) -> ParserAudit | None:
    """The stored comparison of a step's reply if it is not stale or a worker is making it now; else None. One query."""
    audit = find_parser_audit(trajectory, step)
    return audit if audit is not None and (audit.key == key_of(trajectory) or is_active(audit.job)) else None


def do_job(job: Job, beat: Beat) -> None:
    """Read the reply of a job's comparison with every parser, and store what each one read."""
    audit = parser_audit_of_job(job)
    beat(progress="the parsers are started")
    audit.key = key_of(audit.trajectory)
    (audit.report,) = compare_steps(
        audit.trajectory, [audit.step_index], lambda note: beat.now_and_then(progress=note[:200])
    )
    with transaction.atomic():
        if not end_job(job, Job.Status.DONE):
            raise JobLost
        save_columns(audit, "key", "report")


def missing(trajectory: StoredTrajectory) -> Refusal | None:
    """Why no reply of a trajectory can be read by a parser; None = its replies can."""
    if not trajectory.n_steps:
        return Refusal(
            "It came as training rows without steps, so no reply is known. Import what the rollout side recorded."
        )
    if trajectory.run.tokenizer is None:
        return Refusal("The run has no tokenizer.", Remedy.CHOOSE_TOKENIZER)
    return None


def compare_steps(
    record: StoredTrajectory, indices: Sequence[int] | None = None, say: Callable[[str], object] = lambda _: None
) -> list[dict[str, Any]]:
    """What each parser reads of these steps' completions; None = of all. One process of vLLM serves them all. Raises
    :class:`Refusal` with a sentence."""
    if refusal := missing(record):
        raise refusal
    assert record.run.tokenizer is not None
    (value,) = load_trajectories([record])
    try:
        codec = load_tokenizer(record.run.tokenizer.files_sha256)
    except (ValueError, OSError) as error:
        raise Refusal(without_paths(f"The tokenizer cannot be used: {error}")) from error
    case, notes = DiagnosisContext(value, codec, None), list[str]()
    try:
        parsers: VllmParsers | None = VllmParsers(codec.path)
    except Refusal as error:
        notes.append(without_paths(str(error)))
        parsers = None
    try:
        return [
            _compared(record, value, codec, case, index, parsers, notes, say)
            for index in (range(len(value.steps)) if indices is None else indices)
        ]
    finally:
        if parsers is not None:
            parsers.close()


def _compared(
    record: StoredTrajectory, value: Trajectory, codec: LoadedTokenizer, case: DiagnosisContext, index: int,
    parsers: VllmParsers | None, notes: Sequence[str], say: Callable[[str], object],
) -> dict[str, Any]:
    if not 0 <= index < len(value.steps):
        raise Refusal(f"There is no step {index}: steps run from 0 to {len(value.steps) - 1}.")
    step, notes = value.steps[index], list(notes)
    completion = Completion(step.completion_ids, codec, codec.stop_ids)
    if len(completion.text) > MAX_CHARACTERS:
        n = len(completion.text)
        raise Refusal(f"The reply has {n:,} characters, and parsers are given at most {MAX_CHARACTERS:,}.")
    message = case.message_of(index)
    stored = None if message is None else reading_of(message)
    tools = None if step.request is None or step.request.tools is None else [dict(tool) for tool in step.request.tools]
    read = (
        [("template", TEMPLATE, reading)] if (reading := _by_template(record, codec, step, notes)) is not None else []
    )
    if parsers is not None:
        for kind, name, answer in parsers.read_all(completion.text, tools, say):
            calls = tuple(ToolCall(call["name"], _value(call["arguments"])) for call in answer.get("calls", ()))
            error = storable_text(without_paths(answer.get("error", "")))
            reading = ParserReading(answer.get("content", ""), answer.get("reasoning", ""), calls, error)
            read.append((kind, name, reading))
    say("what they read is looked for in the tokens")
    start = len(step.prompt_ids)
    return {
        "trajectory": record.code,
        "step": index,
        "tokens": [start, start + len(step.completion_ids)],
        "run_reads": str(record.run.settings.get("tool_calls", "")),
        "vllm_version": parsers.version if parsers is not None else "",
        "message_of": "" if message is None else "reply" if step.reply is not None else "next request",
        "message": None if stored is None else _told(stored, audit(completion, stored), start),
        "readings": _grouped(completion, read, stored, start),
        "unusable": [{"kind": kind, "parser": name, "reason": item.error} for kind, name, item in read if item.error],
        "notes": notes,
    }


def _by_template(
    record: StoredTrajectory, codec: LoadedTokenizer, step: Step, notes: list[str]
) -> ParserReading | None:
    text = template_text(record.run)
    if text is None:
        notes.append("The run has no chat template, so nothing was read in its form.")
        return None
    try:
        renderer = chat_templates.renderer(codec, text)
        if note := form_of(codec, renderer)[2]:
            notes.append(note)
        tools = None if step.request is None else step.request.tools
        reading = reading_of(parser_of(codec, renderer)(step.prompt_ids, step.completion_ids, tools))
        _ = reading.key  # fails here where it would fail later
        return reading
    except RecursionError:
        notes.append("The reply nests too deeply to be read in the form of the chat template.")
        return None
    except (RenderFailed, ValueError) as error:
        notes.append(without_paths(f"Nothing was read in the form of the chat template: {error}"))
        return None


def _grouped(
    completion: Completion, read: Sequence[tuple[str, str, ParserReading]], stored: ParserReading | None, start: int
) -> list[dict[str, Any]]:
    """The readings, equal ones together: those that agree with the stored message first, then by number of parsers."""
    groups: dict[tuple[bool, str], list[tuple[str, str, ParserReading]]] = {}
    for kind, name, reading in read:
        if not reading.error:
            groups.setdefault((kind == "reasoning", reading.key), []).append((kind, name, reading))
    groups_json = []
    for (is_reasoning, _), members in groups.items():
        reading = members[0][2]
        differs = None if stored is None else differences(reading, stored, is_reasoning)
        group = {"kind": "reasoning" if is_reasoning else "tool", "parsers": [name for _, name, _ in members]}
        groups_json.append({**group, "differs": differs, **_told(reading, audit(completion, reading), start)})
    return sorted(
        groups_json,
        key=lambda one: (one["kind"] == "reasoning", bool(one["differs"]), one["n_lost"], -len(one["parsers"])),
    )


def differences(reading: ParserReading, stored: ParserReading, is_reasoning: bool) -> list[str]:
    """In what a reading differs from the stored message: ``calls``, ``content``, ``reasoning``; empty = it agrees. A
    parser of reasoning reads no calls, and a parser of calls no reasoning: that is not compared."""
    if is_reasoning:
        return ["reasoning"] if reading.reasoning.split() != stored.reasoning.split() else []
    differs = ["calls"] if [*map(_plain, reading.calls)] != [*map(_plain, stored.calls)] else []
    content = reading.content
    if not reading.reasoning:
        content = plain_message(content, lambda text, _: (text, []))["content"]
    return [*differs, *(["content"] if content.split() != stored.content.split() else [])]


def _plain(call: ToolCall) -> tuple[str, Any]:
    return call.name, {} if call.arguments in (None, "") else call.arguments


def _told(reading: ParserReading, found: ReadingAudit, start: int) -> dict[str, Any]:
    """A reading as JSON. Places are ``[start, stop)`` in the stream of the step."""

    def places(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
        return [[start + a, start + b] for a, b in spans]

    pieces: list[Mapping[str, Any]] = [
        {"kind": kind, "text": _clipped(text), "characters": len(text), "tokens": places(spans)}
        | ({"arguments": _clipped(as_text(arguments))} if kind == "call" else {})
        for kind, text, arguments, spans in found.pieces
    ]
    return {
        "pieces": pieces[: KEPT_CALLS + 2],
        "n_calls": len(reading.calls),
        "lost": [
            {"text": _clipped(text), "characters": len(text), "tokens": [start + first, start + stop]}
            for text, first, stop in found.lost
        ],
        "n_lost": found.n_lost,
        "added": [_clipped(text) for text in found.added],
        "n_unread_tokens": found.n_unread_tokens,
    }


def _clipped(text: str) -> str:
    return storable_text(text[:KEPT_CHARACTERS])


def _value(arguments: str) -> Any:
    """Arguments as a value. Text that nests deeply stays text, because nothing else could be done with the value."""
    return arguments if arguments.count("[") + arguments.count("{") > MAX_NESTED else parsed(arguments)


KIND = JobKind("audit_parsers", "Audit Parsers", do_job, activity="parser audit started")
"""Every parser reads the reply of one step."""
