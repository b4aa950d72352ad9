"""The fifteen properties, each a function from what was asked, sampled and captured to a verdict. Then the verdicts as
text, JSON and JUnit XML."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from xml.etree import ElementTree

import numpy as np

from rollout_inspector.gauntlet.captured import CapturedStep, Evidence, scenario_of
from rollout_inspector.gauntlet.engine import COMPLETIONS, EngineCall, answer_of, body_of, events_of
from rollout_inspector.gauntlet.harness import exact_json, joined
from rollout_inspector.gauntlet.vocabulary import decode
from rollout_inspector.outputs import line_of, plain

MAX_NAMED = 3  # Faults that the evidence of a property names; the others are counted.
MAX_FAULT = 300  # Characters of each.
MAX_DIFFERING = 6  # Ids on each side of a difference that are printed.
ENDED = ("stop", "length", "tool_calls")  # Reasons that say that a completion came to its end.
ASKED_FOR = ("logprobs", "return_token_ids")
"""Fields of a request that a gateway sets to learn what it captures, where the client did not."""


class PropertyOutcome(StrEnum):
    """What is known of a property."""

    HELD = "held"
    BROKEN = "broken"
    NOT_OFFERED = "not offered"


@dataclass(frozen=True)
class Verdict:
    """What is known of one property, and from what."""

    name: str
    outcome: PropertyOutcome
    evidence: str
    is_undecided: bool = False  # It should be decided, and could not be.


class NotOffered(Exception):
    """The gateway does not do what a property is about, with a sentence that says so."""


Check = Callable[[Evidence, str], Iterator[str]]
"""Yields what is broken in a scenario, a sentence without its full stop each. Raises :class:`NotOffered`."""


@dataclass(frozen=True)
class Property:
    """One property of a gateway."""

    name: str
    claim: str
    checks: tuple[Check, ...]
    scenario: str = ""  # Empty = called like the property.
    is_required: bool = True  # Every gateway that captures calls offers it.


# -- what several properties ask -------------------------------------------------------------------


def _differs(where: str, ids: Sequence[int], expected: Sequence[int]) -> Iterator[str]:
    """That ids are not those of the engine, and where."""
    if list(ids) != list(expected):
        pairs = enumerate(zip(ids, expected, strict=False))
        start = next((n for n, (a, b) in pairs if a != b), min(len(ids), len(expected)))
        stop = start + MAX_DIFFERING
        yield (f"{where}: {len(ids)} ids captured, {len(expected)} of the engine; from token {start} on "
               f"{list(ids[start:stop])} for {list(expected[start:stop])}")


def _captured_once(evidence: Evidence, scenario: str, others: Sequence[CapturedStep] = ()) -> Iterator[str]:
    """Each answer of a scenario is captured once and as it was; nothing but ``others`` is captured besides."""
    serials: set[int] = set()
    for call, sampled, steps in evidence.served(scenario):
        where = f"call {call.mark}"
        serials.add(sampled.serial)
        if len(steps) != 1:
            yield f"{where} (answer {sampled.serial}) is captured {len(steps)} times"
        for step in [captured.step for captured in steps[:1]]:
            yield from _differs(f"{where}, prompt", step.prompt_ids.tolist(), call.prompt_ids)
            yield from _differs(f"{where}, completion", step.completion_ids.tolist(), sampled.ids)
            if step.logprobs is not None and step.logprobs.tolist() != sampled.logprobs:
                yield f"{where}: its {len(step.logprobs)} log-probabilities are not those of the engine"
            if step.finish_reason not in ("", sampled.finish_reason):
                yield f"{where}: it ended by {step.finish_reason!r}, and the engine said {sampled.finish_reason!r}"
            if step.stop_reason not in ("", str(sampled.stop_reason)):
                yield f"{where}: it stopped at {step.stop_reason!r}, and the engine said {sampled.stop_reason!r}"
    for stray in evidence.steps(scenario):
        if stray.serial not in serials and stray not in others:
            yield f"a step of {stray.mark} is captured that is no whole answer of the engine"


def _captured_part(step: CapturedStep, calls: Sequence[EngineCall]) -> Iterator[str]:
    """A step of an answer that broke off holds what had come, and does not say that it ended."""
    ids = step.step.completion_ids.tolist()
    if not any(ids == call.choices[0].ids[: len(ids)] for call in calls):
        yield f"the answer to {step.mark} that broke off is captured with other ids"
    if step.step.finish_reason in ENDED:
        yield f"the answer to {step.mark} that broke off is captured as ended by {step.step.finish_reason!r}"
    for call in calls[:1]:
        yield from _differs(f"call {step.mark}, prompt", step.step.prompt_ids.tolist(), call.prompt_ids)


def _answered(evidence: Evidence, scenario: str) -> Iterator[str]:
    """The clients of a scenario got whole answers. A gateway may lack the address of text completions."""
    for answer in evidence.asked(scenario):
        if answer.path == COMPLETIONS and answer.status == 404:
            continue
        if answer.status != 200 or not answer.is_whole or not answer.serials:
            yield f"the client of {answer.mark} got {answer}"


def _grouped(evidence: Evidence, scenario: str, family: Mapping[str, str] | None = None) -> Iterator[str]:
    """The calls of a session are one trajectory, in their order, and no other's. ``family``: session -> its parent."""
    marks = {(step.trajectory.external_id, step.mark) for step in evidence.captured}
    if max(Counter(trajectory for trajectory, _ in marks).values()) < 2:
        raise NotOffered("each captured call stands by itself: nothing says which calls are of one session")
    session_of = _sessions(evidence, scenario)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for step in evidence.captured:
        if step.serial in session_of:
            groups[step.trajectory.external_id, session_of[step.serial]].append(step.serial)
    families: dict[str, set[str]] = defaultdict(set)
    trajectories: dict[str, set[str]] = defaultdict(set)
    for (trajectory, session), serials in groups.items():
        name = (family or {}).get(session, session)
        families[trajectory].add(name)
        trajectories[name].add(trajectory)
        if serials != sorted(serials):
            yield f"the calls of session {session} are captured in the order {serials}"
    for trajectory, names in families.items():
        if len(names) > 1:
            yield f"trajectory {trajectory!r} mixes the sessions {', '.join(sorted(names))}"
    for name, members in trajectories.items():
        if len(members) > 1:
            yield f"the calls of session {name} lie in {len(members)} trajectories"


def _sessions(evidence: Evidence, scenario: str) -> dict[int, str]:
    """The session of each answer, by its number."""
    return {serial: answer.session for answer in evidence.asked(scenario) for serial in answer.serials}


# -- the properties --------------------------------------------------------------------------------


def _streamed(evidence: Evidence, scenario: str) -> Iterator[str]:
    for call in evidence.calls:
        if scenario_of(call.mark) == scenario and not call.request.get("stream"):
            yield f"call {call.mark} reached the engine as no stream"
        if call.is_held_back:
            yield f"the client of {call.mark} saw nothing until the whole answer had come"
    for answer in evidence.asked(scenario):
        if answer.content_type != "text/event-stream":
            yield f"the client of {answer.mark} got {answer.content_type or 'nothing'} for a stream"


def _retries(evidence: Evidence, scenario: str) -> Iterator[str]:
    cut_calls = [call for call in evidence.calls if scenario_of(call.mark) == scenario and not call.is_whole]
    cut_steps = [step for step in evidence.steps(scenario) if step.mark == "retries.2" and not step.serial]
    for step in cut_steps:
        yield from _captured_part(step, cut_calls)
    yield from _captured_once(evidence, scenario, cut_steps[: len(cut_calls)])
    answers = evidence.asked(scenario)
    serials = [serial for answer in answers if answer.mark == "retries.1" for serial in answer.serials]
    if len(set(serials)) != 2:
        yield f"a request that was sent twice got the answers {serials}: the engine gave each another number"
    for answer in {answer.mark: answer for answer in answers}.values():
        if answer.status != 200 or not answer.is_whole:
            yield f"the client of {answer.mark} got {answer}, each time"
    for answer in answers:
        if answer.status not in (0, 200, 503):
            yield f"the engine said 503, and the client of {answer.mark} got {answer}"
        if any(call.mark == answer.mark and answer.is_whole and answer.serials in ([], [call.choices[0].serial])
               for call in cut_calls):
            yield f"the answer to {answer.mark} broke off, and the client was told that it is whole"


def _cancel(evidence: Evidence, scenario: str) -> Iterator[str]:
    calls = [call for call in evidence.calls if scenario_of(call.mark) == scenario]
    steps = evidence.steps(scenario)
    for call in calls:
        if not call.is_left:
            yield f"the client left, and the engine went on to sample {len(call.choices[0].ids)} tokens"
    if len(steps) != 1:
        yield f"the call that was left is captured {len(steps)} times"
    for answer in evidence.asked(scenario):
        n_seen = sum('"content"' in text for text in answer.payloads) - 1
        if answer.status != 200:
            yield f"the client got {answer} for a stream"
        for step in steps:
            yield from _captured_part(step, calls)
            if len(step.step.completion_ids) < n_seen:
                yield f"the client saw {n_seen} tokens before it left, and {len(step.step.completion_ids)} are captured"


def _choices(evidence: Evidence, scenario: str) -> Iterator[str]:
    for answer in evidence.asked(scenario):
        if 400 <= answer.status < 500:
            raise NotOffered(f"a request for several choices is answered with {answer}")
        if len(answer.serials) != 3:
            yield f"the client of {answer.mark} asked for 3 choices and got {len(answer.serials)}"
        serials = [step.serial for step in evidence.captured if step.mark == answer.mark]
        if serials != sorted(serials):
            yield f"the choices of {answer.mark} are captured in the order {serials}"


def _sub_agents(evidence: Evidence, scenario: str) -> Iterator[str]:
    session_of = _sessions(evidence, scenario)
    agents = set(session_of.values()) - {"main-agent"}
    steps = [step for step in evidence.captured if step.serial in session_of]
    trajectories = [{step.trajectory.external_id for step in steps if (session_of[step.serial] in agents) == is_agent}
                    for is_agent in (False, True)]
    if trajectories[0].isdisjoint(trajectories[1]):
        yield from _grouped(evidence, scenario)
        if not all("main-agent" in _about(step) for step in steps if session_of[step.serial] in agents):
            raise NotOffered("the calls of a sub-agent do not name the session that began it")
        return
    yield from _grouped(evidence, scenario, dict.fromkeys(agents, "main-agent"))
    for step in steps:
        session, names = session_of[step.serial], {agent for agent in agents if agent in _about(step)}
        if names != {session} & agents:
            yield f"a call of {session} is captured as one of {', '.join(sorted(names)) or 'its parent'}"


def _about(step: CapturedStep) -> str:
    """What a step and its trajectory say of themselves beside tokens and messages."""
    about = {name: value for name, value in step.step.extra.items() if name not in ("request", "response")}
    return json.dumps([about, dict(step.trajectory.extra)], default=str)


def _arguments(evidence: Evidence, scenario: str) -> Iterator[str]:
    for answer in evidence.asked(scenario):
        call = evidence.call_of(answer)
        sampled = [call.choices[0].tool[1]] if call is not None and call.choices[0].tool[0] else []
        if _arguments_in([answer.message]) != sampled:
            yield f"the client of {answer.mark} got the arguments {_arguments_in([answer.message])}"
        requests = [answer.request, *([call.request] if call is not None else [])]
        forms = [_arguments_in(request.get("messages", ())) for request in requests]
        for step in [captured.step for captured in evidence.steps(scenario) if captured.mark == answer.mark]:
            if step.reply is not None and _arguments_in([step.reply]) != sampled:
                yield f"call {answer.mark}: the arguments are captured as {_arguments_in([step.reply])}"
            if step.request is not None and _arguments_in(step.request.messages) not in forms:
                yield f"call {answer.mark}: the arguments of its request are captured in a form that nobody sent"


def _arguments_in(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [str((call.get("function") or {}).get("arguments")) for call in calls]


def _versions(evidence: Evidence, scenario: str) -> Iterator[str]:
    steps = [captured.step for captured in evidence.captured]
    if not any(step.policy_version or step.extra.get("policy_versions") for step in steps):
        raise NotOffered("no captured call tells the version of the weights")
    for call, sampled, captured_steps in evidence.served(scenario):
        runs = [[span["version"], span["end"] - span["start"]] for span in sampled.versions]
        for step in [captured.step for captured in captured_steps]:
            spans = step.extra.get("policy_versions") or [[step.policy_version, len(step.completion_ids)]]
            if [[str(version), int(n)] for version, n in spans] != runs:
                yield f"call {call.mark}: versions {spans} are captured, and the engine told {runs}"


def _lost(evidence: Evidence, _: str) -> Iterator[str]:
    served = list(evidence.served())
    marks = [call.mark for call, _, steps in served if not steps]
    if marks:
        names = ", ".join(sorted(set(marks))[:MAX_DIFFERING])
        yield f"{len(marks)} of {len(served)} answers that the engine gave are in no captured file ({names})"
    yield from (f"a line was not read: {reason}" for reason in evidence.rejected)


def _doubled(evidence: Evidence, _: str) -> Iterator[str]:
    for call, sampled, steps in evidence.served():
        if len(steps) > 1:
            yield f"call {call.mark} (answer {sampled.serial}) is captured {len(steps)} times"
    requests = Counter(answer.mark for answer in evidence.answers)
    for mark, n in Counter(call.mark for call in evidence.calls if call.is_served).items():
        if mark and n > requests[mark]:
            yield f"the client asked {mark} {requests[mark]} times, and the gateway asked the engine {n} times"


def _of_request(evidence: Evidence, scenario: str) -> Iterator[str]:
    for answer in evidence.asked(scenario):
        call = evidence.call_of(answer)
        if call is None or (call.path == answer.path and call.request["messages"] != answer.request["messages"]):
            yield f"the client of {answer.session} got an answer to another request"


def _unchanged(evidence: Evidence, scenario: str) -> Iterator[str]:
    for answer in evidence.answers:
        call = evidence.call_of(answer)
        if call is None and scenario_of(answer.mark) == scenario:
            yield f"the client of {answer.mark} got {answer}, of no call of the engine"
        if call is not None and call.is_served and not answer.is_whole:
            yield f"the client of {answer.mark} got {answer}"
        if call is None or not answer.is_whole or call.script.is_endless:
            continue
        for name, value in answer.request.items() if call.path == answer.path else ():
            if call.request.get(name) != value and not (name in ASKED_FOR and not value):
                yield f"the field {name} of {answer.mark} reached the engine as {call.request.get(name)!r:.80}"
        if call.error:
            if (answer.status, answer.body) != (call.script.refused, call.error):
                yield f"the engine answered {answer.mark} with {call.script.refused}, and the client got {answer}"
            continue
        value, expected = _solid(answer.value), _solid(_expected(call, answer.request))
        if value != expected:
            yield f"the answer to {answer.mark} differs in {_first_difference(value, expected)}"


def _expected(call: EngineCall, request: Mapping[str, Any]) -> Any:
    if request.get("stream"):
        return joined([exact_json(body_of(event)) for event in events_of(call, request)])
    return exact_json(body_of(answer_of(call, request)))


def _solid(value: Any) -> Any:
    """A value without what is null or an empty list: those say the same as a field that is not there."""
    if isinstance(value, dict):
        return {name: _solid(item) for name, item in value.items() if item not in (None, [])}
    return [_solid(item) for item in value] if isinstance(value, list) else value


def _first_difference(value: Any, expected: Any, where: str = "") -> str:
    pairs: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(value, dict) and isinstance(expected, dict):
        pairs = ((f".{name}", value.get(name), expected.get(name)) for name in sorted({*value, *expected}))
    elif isinstance(value, list) and isinstance(expected, list) and len(value) == len(expected):
        pairs = ((f"[{n}]", *pair) for n, pair in enumerate(zip(value, expected, strict=True)))
    for name, left_value, right_value in pairs:
        if left_value != right_value:
            return _first_difference(left_value, right_value, f"{where}{name}")
    return f"{where.lstrip('.') or 'everything'}: {value!r:.60} for {expected!r:.60}"


def _masks(evidence: Evidence, scenario: str) -> Iterator[str]:
    rows = evidence.rows(scenario)
    if not rows:
        raise NotOffered("no training row and no call with ids of this session is captured")
    logprobs = {tuple(sampled.ids): sampled.logprobs for _, sampled, _ in evidence.served(scenario)}
    trained: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask.astype(np.int8), [0]])))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            ids = tuple(row.ids[start:stop].tolist())
            trained[ids] += 1
            values = [] if row.logprobs is None else row.logprobs[start:stop].tolist()
            if values and not np.isnan(values).all() and values != logprobs.get(ids, values):
                yield f"the log-probabilities of a row from token {start} on are not those of its tokens"
    for ids, n in (trained - Counter(list(logprobs))).items():
        yield f"{n} stretch of {len(ids)} trained tokens ({decode(ids)[:40]!r}) is no completion of the engine"
    for ids in logprobs.keys() - trained.keys():
        yield f"a completion of {len(ids)} tokens ({decode(ids)[:40]!r}) is not trained as it was sampled"


_CALLS = (_captured_once, _answered)
PROPERTIES = (
    Property("ids equal", "The captured ids are those that the engine read and sampled.", _CALLS, "ids"),
    Property("streams", "A stream is captured like a whole answer, and passes as it comes.", (*_CALLS, _streamed)),
    Property("retries", "A request that is sent again is a call of its own; errors are none.", (_retries,)),
    Property("cancel", "A client that leaves stops the engine; what came is kept.", (_cancel,)),
    Property("choices", "Each choice of a call is a step with the same prompt.", (_choices, _captured_once),
             is_required=False),
    Property("compaction", "A conversation that is summed up stays one.", (*_CALLS, _grouped), is_required=False),
    Property("sub-agents", "The calls of a sub-agent name their parent.", (*_CALLS, _sub_agents), is_required=False),
    Property("rewritten arguments", "Arguments stand as they were written.", (*_CALLS, _arguments),
             "rewritten-arguments"),
    Property("version change", "Each token has its version of the weights.", (_versions, *_CALLS),
             "version-change", False),
    Property("wrong stop token", "A completion ends as it was sampled.", _CALLS, "wrong-stop"),
    Property("lost call", "Every answer of the engine is captured.", (_answered, _lost), "lost-call"),
    Property("doubled call", "Every answer is captured once, and asked for once.", (*_CALLS, _doubled),
             "doubled-call"),
    Property("order", "Sessions at once stay apart, and each keeps its order.", (_answered, _grouped, _of_request),
             is_required=False),
    Property("answers unchanged", "Requests and answers pass as they were sent.", (_unchanged,), "answers-unchanged"),
    Property("masks", "What is trained is what was sampled, stop token included.", (_answered, _masks)),
)


def decide(evidence: Evidence) -> list[Verdict]:
    """The verdict of each property."""
    return [_verdict(property_, evidence) for property_ in PROPERTIES]


def _verdict(property_: Property, evidence: Evidence) -> Verdict:
    scenario = property_.scenario or property_.name
    faults: dict[str, None] = {}
    reason = ""
    try:
        if not evidence.captured and _masks not in property_.checks:
            raise NotOffered("the files hold training rows and no calls")
        for check in property_.checks:
            for fault in check(evidence, scenario):
                faults[f"{fault:.{MAX_FAULT}}"] = None
    except NotOffered as error:
        reason = str(error)
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # a gateway may write and send anything
        faults[f"something was captured or sent in a shape that no client knows ({error!r:.200})"] = None
    if faults:
        more = f" And {len(faults) - MAX_NAMED} more." if len(faults) > MAX_NAMED else ""
        return Verdict(property_.name, PropertyOutcome.BROKEN, f"{'; '.join([*faults][:MAX_NAMED])}.{more}")
    if reason:
        evidence_text = f"{reason[0].upper()}{reason[1:]}."
        return Verdict(property_.name, PropertyOutcome.NOT_OFFERED, evidence_text, property_.is_required)
    n = len(evidence.asked(scenario))
    return Verdict(property_.name, PropertyOutcome.HELD, f"{property_.claim} {n} request{'s' * (n != 1)}.")


def n_broken(verdicts: Sequence[Verdict]) -> int:
    """Properties that are broken."""
    return sum(verdict.outcome is PropertyOutcome.BROKEN for verdict in verdicts)


def as_text(verdicts: Sequence[Verdict]) -> str:
    """A line for each property, and one in the end."""
    lines = [f"{verdict.outcome.value:12} {verdict.name:20} {line_of(verdict.evidence)}" for verdict in verdicts]
    n = n_broken(verdicts)
    end = f"{n} of {len(verdicts)} properties are broken." if n else "No property is broken."
    if names := ", ".join(verdict.name for verdict in verdicts if verdict.is_undecided):
        end += f" Not decided, although every gateway should offer it: {names}."
    return "\n".join([*lines, "", end, ""])


def as_json(verdicts: Sequence[Verdict]) -> str:
    """One object."""
    properties = [
        {"name": verdict.name, "verdict": verdict.outcome.value, "evidence": verdict.evidence} for verdict in verdicts
    ]
    return json.dumps({"properties": properties, "broken": n_broken(verdicts)}, indent=1) + "\n"


def as_junit(verdicts: Sequence[Verdict]) -> str:
    """A test case for each property."""
    suite = ElementTree.Element("testsuite", name="rollout-inspector gauntlet", tests=str(len(verdicts)))
    tag_of = {PropertyOutcome.BROKEN: "failure", PropertyOutcome.NOT_OFFERED: "skipped"}
    tags = ["error" if verdict.is_undecided else tag_of.get(verdict.outcome, "system-out") for verdict in verdicts]
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(tags.count(tag)))
    for verdict, tag in zip(verdicts, tags, strict=True):
        case = ElementTree.SubElement(suite, "testcase", classname="gauntlet", name=verdict.name)
        ElementTree.SubElement(case, tag, message=line_of(verdict.evidence))
    ElementTree.indent(suite)
    return plain(ElementTree.tostring(suite, encoding="unicode")) + "\n"
