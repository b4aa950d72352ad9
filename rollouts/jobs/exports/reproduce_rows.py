"""The variables and assertions of a script about a training row, for each kind of row fault."""

from collections.abc import Callable, Mapping
from typing import Any

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.diagnose.media import FAMILIES, recorded_media
from rollout_inspector.diagnose.row_checks import (
    ROUTING, columns_shifted, routing_rows, step_versions, trained_versions
)
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.align import sampled_places
from rollout_inspector.streams.trajectory import REWARD_COLUMNS, Origin, Row, Trajectory

Check = tuple[str, str]
"""An expression that is true while the fault is there, and the sentence that is shown when it is not."""
Data = dict[str, Any]

MASKED_HERE = ("all(LOSS_MASK[START:STOP])", "not all of these tokens are under the gradient")
NOT_SAMPLED: dict[str, Check] = {
    "ORIGIN": ('"sampled" not in ORIGIN[START:STOP]', "the policy sampled tokens of this stretch"),
    "SAMPLED": (
        "not any(i in range(a, b) for a, b in SAMPLED for i in range(START, STOP))",
        "a step sampled tokens of this stretch",
    ),
}
SAMPLED_HERE: dict[str, Check] = {
    "ORIGIN": ('set(ORIGIN[START:STOP]) == {"sampled"}', "nobody sampled these tokens"),
    "SAMPLED": (
        "all(any(i in range(a, b) for a, b in SAMPLED) for i in range(START, STOP))",
        "no step sampled these tokens",
    ),
}

TURNS = '''
def ids_of(messages, generation_prompt):
    text = tokenizer.apply_chat_template(
        messages, chat_template=CHAT_TEMPLATE, tokenize=False, add_generation_prompt=generation_prompt,
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def header_of():
    """What opens the assistant's turn; empty when the chat template does not tell."""
    question = [{"role": "user", "content": "Question one"}]
    try:
        without, whole = ids_of(question, False), ids_of(question, True)
    except Exception as error:
        print("the chat template refuses a plain question:", error)
        return []
    return whole[len(without):] if whole[: len(without)] == without else []


HEADER = header_of()
OPENED = [i for i in range(len(IDS)) if HEADER and IDS[i : i + len(HEADER)] == HEADER]


def is_outside_turn(place):
    """Whether the assistant's last turn before a place had ended, or none had begun."""
    before = [i + len(HEADER) for i in OPENED if i + len(HEADER) <= place]
    return not before or any(i in tokenizer.all_special_ids for i in IDS[before[-1] : place])

'''
"""Used if neither steps nor origins tell who wrote a token: then the headers of the chat template tell."""

SHIFT = '''
def misfit(values, lag):
    """Places where a column says something and the mask, moved by a lag, does not; or the other way round."""
    says = [value == value and value != 0 for value in values]
    return sum(says[i] != bool(LOSS_MASK[i - lag]) for i in range(len(says)) if 0 <= i - lag < len(LOSS_MASK))


def is_shifted(values):
    """Whether a lag explains most of what differs at the edges of the mask."""
    lag = min((1, -1, 2, -2), key=lambda lag: misfit(values, lag))
    here = misfit(values, 0)
    return here >= 2 and 5 * (here - misfit(values, lag)) >= 3 * misfit(LOSS_MASK, lag)

'''

DISTRIBUTION = """
import statistics

pairs = [(s, t) for s, t, m in zip(LOGPROBS, TRAINER_LOGPROBS, LOSS_MASK) if m and -inf < s < 0 and -inf < t < inf]
sampler, trainer = [s for s, _ in pairs], [t for _, t in pairs]
apart = [t - s for s, t in pairs]
shift, spread = statistics.median(apart), statistics.pstdev(apart)
slope = sum(s * t for s, t in pairs) / sum(s * s for s in sampler)
print(f"the trainer's lie {shift:+.3f} off (spread {spread:.3f}), or are {slope:.3f} times the sampler's")

"""


def row_material(finding: Finding, trajectory: Trajectory) -> tuple[Data, list[Check], str]:
    """The variables, the assertions, and the code between them. A kind without a check here has no assertion."""
    place = _of_step if finding.step is not None else _of_row
    return place(finding, trajectory)


def _of_row(finding: Finding, trajectory: Trajectory) -> tuple[Data, list[Check], str]:
    rows = rows_of(trajectory)
    index = finding.row if finding.row is not None else 0
    if index >= len(rows):
        return {}, [], ""
    row = rows[index]
    data: Data = {
        "IDS": row.ids, "LOSS_MASK": row.loss_mask.astype(int), "LOGPROBS": row.logprobs,
        "COLUMNS": {**dict(row.columns), **_odd_columns(row)},
    }
    if row.origin is not None:
        data["ORIGIN"] = [Origin(value).slug for value in row.origin.tolist()]
    elif row.step_indices and (places := sampled_places(trajectory.steps, row)) is not None:
        data["SAMPLED"] = [[start, stop] for start, stop, _ in places]
    check = ROW_SCRIPTS.get(finding.kind)
    checks_and_code = check(finding, trajectory, row, data) if check is not None else ([], "")
    return data, *checks_and_code


ChecksAndCode = tuple[list[Check], str]


def _odd_columns(row: Row) -> Data:
    """Columns of another length than the row. Readers keep them in ``extra`` as the source has them."""
    return {
        name: value for name, value in row.extra.items()
        if isinstance(value, list) and ("advantage" in name or "logprob" in name or "log_prob" in name)
    }


def _known(checks: dict[str, Check], data: Data) -> list[Check]:
    return [check for name, check in checks.items() if name in data]


def _lengths(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    columns = "(IDS, LOSS_MASK, LOGPROBS, ORIGIN, *COLUMNS.values())"
    data.setdefault("ORIGIN", None)
    return [(f"len({{len(x) for x in {columns} if x is not None}}) > 1", "all columns of the row have one length")], ""


def _foreign(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    """Trained tokens that the policy did not sample."""
    not_sampled = _known(NOT_SAMPLED, data)
    if not_sampled:
        return [MASKED_HERE, *not_sampled], ""
    outside = ("not HEADER or is_outside_turn(START)", "the stretch begins inside a turn of the assistant")
    header = (
        "not OPENED or any(i < STOP and START < i + len(HEADER) for i in OPENED)",
        "no assistant header stands in this stretch",
    )
    check = {"observation_trained": outside, "generation_prompt_trained": header}.get(finding.kind)
    return ([MASKED_HERE, check], TURNS) if check is not None else ([MASKED_HERE], "")


def _separator(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    stretches = "(IDS[START:STOP], IDS[START - 1 : START])"  # blank, or behind a control token
    blank = (f"not TOKENIZER or not all(tokenizer.decode(i, skip_special_tokens=True).strip() for i in {stretches})",
             "the stretch holds text, and no control token stands before it")
    return [MASKED_HERE, *_known(NOT_SAMPLED, data), blank], ""


def _appended(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    checks = [MASKED_HERE, ("STOP == len(IDS)", "it is not the end of the row"), *_known(NOT_SAMPLED, data)]
    if len(checks) == 2 and row.logprobs is not None:
        checks.append(("LOGPROBS[STOP - 1] == 0", "the last token has a logprob of its own: it was sampled"))
    return checks, ""


def _masked(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    return [
        ("not any(LOSS_MASK[START:STOP])", "tokens of this stretch are under the gradient"),
        *_known(SAMPLED_HERE, data),
    ], ""


def _stop_masked(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    if row.loss_mask[finding.start]:
        return [("not any(LOSS_MASK[STOP:])", "a token behind it is under the gradient")], ""
    return [
        ("not LOSS_MASK[START] and LOSS_MASK[START - 1]", "the stop token has the mask of what stands before it"),
        *_known(SAMPLED_HERE, data),
    ], ""


def _bos(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    if finding.start == finding.stop:
        return [("tokenizer.bos_token_id not in IDS", "BOS stands in the row")], ""
    return [("IDS[START - 1] == IDS[START]", "BOS stands there once")], ""


def _cut(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    return [("all(LOSS_MASK[START:STOP])", "tokens of this stretch are masked")], ""


def _overrun(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    if not row.loss_mask.any():
        return [("not any(LOSS_MASK)", "some tokens are under the gradient")], ""
    return [("STOP == len(IDS) and all(LOSS_MASK[START:])", "the mask does not run to the end of the row")], ""


def _shifted(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    if columns_shifted(row) is None:
        return _mask_shifted(data)
    spoken = [name for name in row.columns if "advantage" in name]
    data["SPOKEN"] = spoken
    columns = "[*([LOGPROBS] if LOGPROBS else []), *(COLUMNS[name] for name in SPOKEN)]"
    return [(f"any(is_shifted(values) for values in {columns})", "every column fits the mask where it stands")], SHIFT


def _mask_shifted(data: Data) -> ChecksAndCode:
    """The columns moved with the mask, so only what was sampled, or the header before it, shows the shift."""
    sampled = {
        "ORIGIN": '[name == "sampled" for name in ORIGIN]',
        "SAMPLED": "[any(a <= i < b for a, b in SAMPLED) for i in range(len(IDS))]",
    }
    for name, says in sampled.items():
        if name in data:
            return [(f"is_shifted({says})", "the mask fits what was sampled where it stands")], SHIFT
    opened = "[i + len(HEADER) for i in OPENED]"
    near = f"any(LOSS_MASK.index(1) - lag in {opened} for lag in (1, -1, 2, -2))"
    return [
        (f"not HEADER or LOSS_MASK.index(1) not in {opened}", "the mask begins right behind an assistant header"),
        (f"not OPENED or {near}", "the mask does not begin near an assistant header"),
    ], TURNS


def _logprobs(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    trained = "[p for p, m in zip(LOGPROBS, LOSS_MASK) if m]"
    wrong = f"not all(-1000 < p <= 1e-3 for p in {trained}) or not any({trained})"
    return [(wrong, "every trained token has a sound logprob")], ""


def _distribution(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    name = next((name for name in TRAINER_LOGPROBS if name in row.columns), None)
    if name is None:
        return [], ""
    data["TRAINER_LOGPROBS"] = row.columns[name]
    constant = "abs(shift) > 0.2 and spread < abs(shift) / 4"
    scaled = "abs(slope - 1) > 0.15 and statistics.correlation(sampler, trainer) > 0.97"
    return [(f"{constant} or {scaled}", "the two are of one distribution")], DISTRIBUTION


def _advantages(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    fitting = (name for name, values in row.columns.items() if "advantage" in name and len(values) == len(row.ids))
    name = next(fitting, None)
    if name is None:
        return [], ""
    says = f"[a == a and a != 0 for a in COLUMNS[{name!r}]]"
    return [(f"{says} != [bool(m) for m in LOSS_MASK]", "trained tokens have an advantage, and no others have")], ""


def _rewards(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    names = [name for name in REWARD_COLUMNS if len(row.columns.get(name, ())) == len(row.ids)]
    data |= {"REWARDS": [row.columns[name] for name in names], "IS_LAST_STEP": row.extra.get("is_last_step", True)}
    inside = "START + 1 < len(IDS) and (not LOSS_MASK[START] or LOSS_MASK[START + 1])"
    return [
        ("any(rewards[START] for rewards in REWARDS)", "the token has no reward"),
        (f"not IS_LAST_STEP or ({inside})", "the token ends a turn of the last step"),
    ], ""


def _media(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    edges = ({getattr(family, edge) for family in FAMILIES} - {""} for edge in ("opens", "ends"))
    data["OPENS"], data["ENDS"] = map(sorted, edges)
    data["COUNTS"], data["RANGES"] = recorded_media(row.extra, trajectory.extra)
    before, behind = "tokenizer.decode([IDS[START - 1]])", "tokenizer.decode([IDS[STOP]])"
    cut = f"STOP == len(IDS) or {behind} not in ENDS or {before} not in OPENS"
    count = "COUNTS and IDS[START:STOP].count(IDS[START]) not in COUNTS"
    here = f"IDS[START:] and IDS[START] in tokenizer.all_special_ids and ({cut} or {count})"
    beyond = "any(offset + length > len(IDS) for offset, length in RANGES)"
    return [(f"{beyond} or ({here})", "the placeholders are whole, and as many as the source says")], ""


def _split(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    data["PROMPT_LENGTH"] = row.extra.get("prompt_length", row.extra.get("n_prompt"))
    if not row.loss_mask[: data["PROMPT_LENGTH"]].any():
        return [
            ("START < PROMPT_LENGTH", "the assistant wrote nothing before the end of the prompt"),
            ("not HEADER or not is_outside_turn(START)", "no turn of the assistant stands there"),
        ], TURNS
    return [
        ("PROMPT_LENGTH == LOSS_MASK.count(0)", "the prompt's length is no count of masked tokens"),
        ("any(LOSS_MASK[:PROMPT_LENGTH])", "no trained token stands before the end of the prompt"),
    ], ""


def _routing(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    data["ROUTING_ROWS"] = _routing_rows({**trajectory.extra, **row.extra})
    return [("ROUTING_ROWS not in (len(IDS) - 1, len(IDS))", "there is a routing row for each token but the last")], ""


def _not_sampled(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    steps = tuple(index for index in row.step_indices if index < len(trajectory.steps))
    if not steps:
        return [], ""
    data["STREAM"] = trajectory.steps[steps[-1]].stream
    data["COMPLETIONS"] = [trajectory.steps[index].completion_ids for index in steps]
    trained = "[i for i, m in zip(IDS, LOSS_MASK) if m]"
    return [
        (f"IDS != STREAM or {trained} != sum(COMPLETIONS, [])", "the row is what its steps read and sampled"),
        ("all(LOSS_MASK[START:STOP]) or IDS[:START] == STREAM[:START]", "the two differ before this place"),
    ], ""


def _flags(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    data["IS_LAST_STEP"] = [row.extra.get("is_last_step") for row in trajectory.rows]
    data["PLACES"] = [row.extra.get("batch_index", n) for n, row in enumerate(trajectory.rows)]
    right = "[False] * (len(IS_LAST_STEP) - 1) + [True]"
    apart = "any(b - a != 1 for a, b in zip(PLACES, PLACES[1:]))"
    return [
        (f"IS_LAST_STEP != {right} or {apart}", "the rows stand together and the last alone is marked as the last")
    ], ""


def _versions(finding: Finding, trajectory: Trajectory, row: Row, data: Data) -> ChecksAndCode:
    steps = (trajectory.steps[i] for i in row.step_indices if i < len(trajectory.steps))
    data["VERSIONS"] = [version for step in steps for version in step_versions(step)] or trained_versions(row)
    return [("len({version for version in VERSIONS if version}) > 1", "one version sampled the whole row")], ""


ROW_SCRIPTS: dict[str, Callable[[Finding, Trajectory, Row, Data], ChecksAndCode]] = {
    "bos_mismatch": _bos, "truncated_trained": _cut,
    "length_mismatch": _lengths, "observation_trained": _foreign, "generation_prompt_trained": _foreign,
    "separator_trained": _separator, "appended_eos_trained": _appended, "sampled_masked": _masked,
    "stop_token_untrained": _stop_masked, "mask_overrun": _overrun, "columns_shifted": _shifted,
    "logprob_invalid": _logprobs, "logprobs_other_distribution": _distribution, "advantage_misplaced": _advantages,
    "prompt_split_wrong": _split, "routing_misaligned": _routing, "row_not_sampled": _not_sampled,
    "reward_misplaced": _rewards, "media_tokens_wrong": _media, "step_order_invalid": _flags,
    "mixed_policy_versions": _versions,
}


def _of_step(finding: Finding, trajectory: Trajectory) -> tuple[Data, list[Check], str]:
    """A row fault that names a step: its offsets count in the stream of the step."""
    index = finding.step or 0
    if index >= len(trajectory.steps):
        return {}, [], ""
    step = trajectory.steps[index]
    data: Data = {"PROMPT": step.prompt_ids, "COMPLETION": step.completion_ids}
    check = STEP_SCRIPTS.get(finding.kind)
    checks_and_code = check(trajectory, index, data) if check is not None else ([], "")
    return data, *checks_and_code


def _step_routing(trajectory: Trajectory, index: int, data: Data) -> ChecksAndCode:
    data["ROUTING_ROWS"] = _routing_rows({**trajectory.extra, **trajectory.steps[index].extra})
    n = "len(PROMPT + COMPLETION)"
    return [(f"ROUTING_ROWS not in ({n} - 1, {n})", "there is a routing row for each token but the last")], ""


def _past_stop_string(trajectory: Trajectory, index: int, data: Data) -> ChecksAndCode:
    step = trajectory.steps[index]
    reply = step.reply or {}
    spoken = str(msg.text_of(reply.get("content")) or msg.reasoning_of(reply)).strip()
    data |= {"TEXT": spoken if step.text is None else step.text, "STOP_STRING": step.stop_reason}
    checks = [
        ("TEXT in DECODED", "the ids do not hold the text that was returned"),
        ("STOP_STRING in DECODED", "the ids do not hold the stop string"),
        ("DECODED.find(TEXT) + len(TEXT) < len(DECODED)", "the ids end with the text that was returned"),
    ]
    decoded = "tokenizer.decode(COMPLETION, skip_special_tokens=False, clean_up_tokenization_spaces=False)"
    return checks, f"DECODED = {decoded}\n"


def _twice(trajectory: Trajectory, index: int, data: Data) -> ChecksAndCode:
    data["TRAINED"] = trained_in(trajectory, index)
    return [("any(sum(flags) > 1 for flags in zip(*TRAINED))", "no token is trained in more than one row")], ""


def _never(trajectory: Trajectory, index: int, data: Data) -> ChecksAndCode:
    data["TRAINED"] = trained_in(trajectory, index)
    return [("COMPLETION and not any(map(any, TRAINED))", "a row trains what this step sampled")], ""


def _truncated(trajectory: Trajectory, index: int, data: Data) -> ChecksAndCode:
    data["TRAINED"] = trained_in(trajectory, index)
    data["FINISH_REASON"] = trajectory.steps[index].finish_reason
    data["MASK_TRUNCATED"] = bool(trajectory.extra.get("mask_truncated"))
    return [
        ('FINISH_REASON == "length" and MASK_TRUNCATED', "it was not cut, or cut ones are to be trained"),
        ("any(map(any, TRAINED))", "no token of the completion is under the gradient"),
    ], ""


STEP_SCRIPTS: dict[str, Callable[[Trajectory, int, Data], ChecksAndCode]] = {
    "routing_misaligned": _step_routing, "stop_string_misaligned": _past_stop_string, "trained_twice": _twice,
    "never_trained": _never, "truncated_trained": _truncated,
}

NEEDS_TOKENIZER = {"stop_string_misaligned", "media_tokens_wrong"}
"""Kinds whose script asserts something about the text, so that it needs the tokenizer."""


def trained_in(trajectory: Trajectory, index: int) -> list[Any]:
    """The loss mask of a step's completion in each row that holds the completion."""
    masks = []
    for row in rows_of(trajectory):
        places = sampled_places(trajectory.steps, row) if index in row.step_indices else None
        masks += [row.loss_mask[start:stop].astype(int) for start, stop, step in places or () if step == index]
    return masks


def _routing_rows(extra: Mapping[str, Any]) -> int | None:
    counts = (routing_rows(extra.get(name)) for name in ROUTING)
    return next((n for n in counts if n is not None), None)
