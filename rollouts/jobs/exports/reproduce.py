"""Writes a finding as a Python script with the ids, the request and the assertions. It needs transformers alone."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rollout_inspector.diagnose.finding import Axis, Finding
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.prefix import link_steps
from rollout_inspector.streams.trajectory import Step, Trajectory
from rollout_inspector.text.chat_templates import is_renderer
from rollouts.jobs.exports.reproduce_rows import NEEDS_TOKENIZER, TURNS, Check, row_material

NEEDS_ENCODER = {"noncanonical_sampling"}

_HEAD = '''\
"""{title}: a finding of Rollout Inspector, reproduced.

Needs: pip install transformers. Run: python {run}
The ids are copied from trajectory {trajectory}; nothing is fetched but the tokenizer.
"""

import json

nan, inf = float("nan"), float("inf")
'''

_FROM_HUB = """
TOKENIZER = {tokenizer}  # a hub id or a folder
REVISION = {revision}
"""

_FROM_ARGUMENT = """
import hashlib
import pathlib
import sys

NAME, SHA256 = {name}, {sha256}
if len(sys.argv) != 2:
    sys.exit(f"Name the folder of the tokenizer {{NAME}}, whose tokenizer.json has the SHA-256 {{SHA256}}.")
TOKENIZER, REVISION = sys.argv[1], None
if hashlib.sha256(pathlib.Path(TOKENIZER, "tokenizer.json").read_bytes()).hexdigest() != SHA256:
    sys.exit(f"The tokenizer.json in {{TOKENIZER}} is another one: its SHA-256 is not {{SHA256}}.")
"""

_TOKENIZER = '''
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, revision=REVISION)


def shown(ids):
    """Ids with their text."""
    known = [i for i in ids if 0 <= i < len(tokenizer)]
    return f"{ids} = {tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)!r}"


if EXPECTED:
    print("expected:", shown(EXPECTED))
print("actual:  ", shown(ACTUAL))
'''

_RENDER = '''

def with_objects(message):
    """Servers hand a template the arguments of calls as objects."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                pass
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


# What the chat template gives for the same request today, beside the prompt that was read.
try:
    text = tokenizer.apply_chat_template(
        [with_objects(message) for message in MESSAGES], tools=TOOLS, chat_template=CHAT_TEMPLATE,
        tokenize=False, add_generation_prompt=True, **TEMPLATE_KWARGS,
    )
    rendered = tokenizer(text, add_special_tokens=False)["input_ids"]
except Exception as error:
    print("the chat template refuses this request:", error)
else:
    shorter = min(len(rendered), len(PROMPT))
    at = next((i for i in range(shorter) if rendered[i] != PROMPT[i]), shorter)
    if rendered == PROMPT:
        print("the prompt is what the chat template gives for its messages")
    else:
        print("the prompt leaves the template's render at token", at)
'''

_CANONICAL = """
again = tokenizer(
    tokenizer.decode(COMPLETION, skip_special_tokens=False, clean_up_tokenization_spaces=False),
    add_special_tokens=False,
)["input_ids"]
assert again != COMPLETION, "the completion is what the encoder gives for its text"
"""


_END = """
# Foreign text is shown without control characters.
print("Reproduced:", "".join(char if char.isprintable() else ascii(char)[1:-1] for char in EVIDENCE))
"""


def script(
    finding: Finding,
    trajectory: Trajectory,
    *,
    tokenizer: str = "",
    revision: str = "",
    named: tuple[str, str] | None = None,
    chat_template: str | None = None,
    name: str = "finding.py",
    title: str = "",
) -> str:
    """The script of one finding. It exits with 0 when the fault is there, and with an ``AssertionError`` when not.

    ``tokenizer``: a hub id or a folder. ``named``: name, and SHA-256 of tokenizer.json, of a tokenizer whose folder the
    script takes as its argument, because it lies elsewhere for each reader. Neither: it compares ids and shows no text.
    Raises :class:`Refusal` when nothing in the stored data can be asserted.
    """
    data, checks, code = _material(finding, trajectory)
    step = trajectory.steps[finding.step or 0] if _has_step(finding, trajectory) else None
    # At a break the sampled ids stand in the step before. There the break itself is asserted.
    has_tokenizer = bool(tokenizer or named)
    encoder = has_tokenizer and step is not None and finding.kind in NEEDS_ENCODER and "BEFORE" not in data
    if (not checks and not encoder) or (finding.kind in NEEDS_TOKENIZER and not has_tokenizer):
        raise Refusal(
            f"This finding ({finding.kind}) says what the source lacks or what lies outside the stored ids; there is "
            "nothing that a script could assert."
        )
    parts = [
        _HEAD.format(
            title=_plain(title or finding.kind.replace("_", " ").capitalize()),
            run=_plain(name) + (" FOLDER_OF_THE_TOKENIZER" if named else ""), trajectory=_plain(trajectory.external_id),
        )
    ]
    if named:
        parts.append(_FROM_ARGUMENT.format(name=ascii(_plain(named[0])), sha256=ascii(named[1])))
    elif tokenizer:
        parts.append(_FROM_HUB.format(tokenizer=ascii(tokenizer), revision=ascii(revision or None)))
    parts.append(_literal("EVIDENCE", finding.evidence))
    parts += [_literal(key, value) for key, value in data.items()]
    of_code = is_renderer(chat_template or "")  # the script renders by transformers, so such a render is left out
    if has_tokenizer:
        parts.append(_literal("CHAT_TEMPLATE", chat_template) + _TOKENIZER)
        if step is not None and step.request is not None and finding.axis != Axis.ROW and not of_code:
            parts.append(_literal("MESSAGES", list(step.request.messages)))
            parts.append(_literal("TOOLS", list(step.request.tools) if step.request.tools is not None else None))
            parts.append(_literal("TEMPLATE_KWARGS", dict(step.request.chat_template_kwargs)) + _RENDER)
    if code == TURNS and (of_code or not has_tokenizer):
        code = "HEADER = OPENED = []\n"  # without a tokenizer nothing is rendered
    parts.append(code)
    parts += [f"assert {expression}, {message!r}\n" for expression, message in checks]
    if encoder:
        parts.append(_CANONICAL)
    parts.append(_END)
    return "".join(parts)


def _material(finding: Finding, trajectory: Trajectory) -> tuple[dict[str, Any], list[Check], str]:
    """The variables of the script, the assertions about them, and the code that the assertions need."""
    data: dict[str, Any] = {
        "START": finding.start, "STOP": finding.stop, "EXPECTED": finding.expected_ids, "ACTUAL": finding.actual_ids,
    }
    if finding.axis == Axis.ROW:
        row_data, checks, code = row_material(finding, trajectory)
        return data | row_data, checks, code
    checks = []
    if _has_step(finding, trajectory):
        assert finding.step is not None
        step = trajectory.steps[finding.step]
        data |= {"PROMPT": step.prompt_ids, "COMPLETION": step.completion_ids}
        checks += _of_step(finding, step, data)
        checks += _of_break(finding, trajectory, data)
    return data, checks, ""


def _has_step(finding: Finding, trajectory: Trajectory) -> bool:
    return finding.step is not None and finding.step < len(trajectory.steps)


def _of_step(finding: Finding, step: Step, data: dict[str, Any]) -> Iterator[Check]:
    stream, span = step.stream, slice(finding.start, finding.stop)
    if len(finding.actual_ids) and np.array_equal(stream[span], finding.actual_ids):
        yield "(PROMPT + COMPLETION)[START:STOP] == ACTUAL", "the stream holds other ids at this place"
    actual = stream[finding.start : finding.start + len(finding.expected_ids)]
    if len(finding.expected_ids) and not np.array_equal(actual, finding.expected_ids):
        yield (
            "(PROMPT + COMPLETION)[START : START + len(EXPECTED)] != EXPECTED",
            "what is expected stands there: the fault is mended",
        )
    if step.logprobs is not None and len(step.logprobs) != len(step.completion_ids):
        data["SAMPLED_LOGPROBS"] = step.logprobs
        yield "len(SAMPLED_LOGPROBS) != len(COMPLETION)", "every sampled id has its logprob"
    if finding.kind == "token_ids_missing":
        if not len(step.prompt_ids) or not len(step.completion_ids):
            yield "not PROMPT or not COMPLETION", "the call has its ids"
        elif any(len(ids) > 1 and len(np.unique(ids)) == 1 for ids in (step.prompt_ids, step.completion_ids)):
            yield "len(set(PROMPT)) == 1 or len(set(COMPLETION)) == 1", "the ids differ from each other"


def _of_break(finding: Finding, trajectory: Trajectory, data: dict[str, Any]) -> Iterator[Check]:
    assert finding.step is not None
    link = link_steps(trajectory.steps[: finding.step + 1])[-1]
    if finding.axis != Axis.STREAM or link.parent is None:
        return
    before = trajectory.steps[link.parent]
    if not link.extends:
        data["BEFORE"] = before.stream
        yield (
            "PROMPT[: len(BEFORE)] != BEFORE",
            "the prompt starts with what was read and sampled before: the stream does not break",
        )
    elif np.array_equal(trajectory.steps[finding.step].prompt_ids, before.prompt_ids):
        data["BEFORE"] = before.prompt_ids
        yield "PROMPT == BEFORE", "the two calls have different prompts"


def _plain(text: str) -> str:
    """The text without characters that could end the docstring around it."""
    return ascii(text)[1:-1].replace('"', "'").replace("\\", "/")


def _literal(name: str, value: Any) -> str:
    """An assignment that Python reads back as the same value. It is ASCII alone, so that no character is invisible."""
    value = _python(value)
    if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        body = textwrap.fill(", ".join(map(ascii, value)), 110, initial_indent="    ", subsequent_indent="    ")
        return f"{name} = [\n{body}\n]\n" if len(value) > 12 else f"{name} = {value!a}\n"
    return f"{name} = {value!a}\n"


def _python(value: Any) -> Any:
    """Arrays and tuples as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _python(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_python(item) for item in value]
    return value
