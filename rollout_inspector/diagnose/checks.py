"""What the diagnosis checks, and what each check came to. A check that lacks a field is not decidable, never passed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_inspector.diagnose.context import REFUSED, DiagnosisContext
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS, GapFigures
from rollout_inspector.streams.canonical import EncodedAgain
from rollout_inspector.streams.trajectory import REWARD_COLUMNS

CHECKS: dict[str, str] = {
    "token_ids": "Every call has its token ids, and all of them are in the vocabulary.",
    "text": "The ids of every call fit its messages, its text and its log-probabilities.",
    "reply": "The message of every reply holds all text that was sampled.",
    "first_prompt": "The run's tokenizer made the first prompts.",
    "prefix": "Every prompt starts with what was sampled before it.",
    "canonical": "Every completion is canonical: the encoder would choose the same tokens.",
    "delta": "Between two completions stands what the chat template writes.",
    "control_text": "No text of a message became a control token.",
    "policy_versions": "One policy version sampled all tokens of a row.",
    "lengths": "The columns of a row are of one length, and the rows are in order.",
    "sampled": "The rows hold what the steps sampled, and train each token once.",
    "mask": "The loss mask covers the stop tokens, and nothing that was not sampled.",
    "columns": "Log-probabilities and advantages stand where the mask is.",
    "logprobs": "The log-probabilities under the gradient are possible values.",
    "trainer_logprobs": "Sampler and trainer mean the same distribution.",
    "advantages": "Trained tokens have an advantage, and no other tokens have one.",
    "rewards": "A reward of a token stands where the trainer reads it.",
    "media": "The placeholders of images, videos and sound are whole, and as many as the source says.",
}
"""Name of each check -> what is true when it passes, in the order of lists. The names are stored."""

_CHECK_OF_KIND = {
    "token_ids_missing": "token_ids",
    **dict.fromkeys(("engine_ids_inconsistent", "stop_string_misaligned"), "text"),
    "reply_text_lost": "reply",
    "special_tokens_injected": "control_text",
    "mixed_policy_versions": "policy_versions",
    **dict.fromkeys(("length_mismatch", "step_order_invalid", "prompt_split_wrong", "routing_misaligned"), "lengths"),
    **dict.fromkeys(("row_not_sampled", "sampled_masked", "trained_twice", "never_trained"), "sampled"),
    "columns_shifted": "columns",
    "logprob_invalid": "logprobs",
    "logprobs_other_distribution": "trainer_logprobs",
    "advantage_misplaced": "advantages",
    "reward_misplaced": "rewards",
    "media_tokens_wrong": "media",
}
_CHECK_OF_AXIS = {Axis.STREAM: "prefix", Axis.DELTA: "delta", Axis.ROW: "mask"}
_OF_ROWS = ("lengths", "sampled", "mask", "columns", "logprobs", "trainer_logprobs", "advantages")
MUST_DECIDE = {REFUSED: "the chat template refuses the messages of the file"}
"""What a check may lack although the file and the options hold its fields, and why: such a file has not passed."""
# What hides other faults of the same row: those checks, and what they lack.
_HIDES = {
    "length_mismatch": (_OF_ROWS[1:], "columns of one length"),
    "columns_shifted": (("sampled", "mask", "advantages"), "columns in their place"),
    "mask_overrun": (("columns",), "mask over a part of the row"),
}

Outcome = str | list[str]
"""``passed``, ``noted`` (info findings alone), ``failed``, or the fields that the check lacks."""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of a trajectory, and what each check came to."""

    findings: tuple[Finding, ...] = ()  # In reading order.
    lacks: Mapping[str, list[str]] = field(default_factory=dict)
    """Each check that has something to check -> the fields that it lacks."""
    gap: GapFigures | None = None
    """The gap between trainer and sampler; None = no row has the log-probabilities of both."""

    again: tuple[EncodedAgain, ...] = ()
    """What encoding the text of completions and rows again would change; without a tokenizer nothing is known."""

    @property
    def checks(self) -> dict[str, Outcome]:
        """Name of a check -> its outcome. A check that has nothing to check is left out."""
        worst: dict[str, str] = {}
        hidden: dict[str, str] = {}
        for finding in self.findings:
            if finding.kind == "not_decidable":
                continue
            name = check_of(finding)
            if finding.severity is not Severity.INFO:
                worst[name] = "failed"
            worst.setdefault(name, "noted")
            names, missing = _HIDES.get(finding.kind, ((), ""))
            hidden |= dict.fromkeys(names, missing)
        outcomes: dict[str, Outcome] = {}
        for name in CHECKS:
            missing_fields = [*self.lacks.get(name, ()), *([hidden[name]] if name in hidden else ())]
            if worst.get(name) == "failed" or (name in worst and not missing_fields):
                outcomes[name] = worst[name]
            elif name in self.lacks:
                outcomes[name] = missing_fields or "passed"
        return outcomes


def failed_diagnosis(evidence: str) -> Diagnosis:
    """The diagnosis of a trajectory on which the diagnosis itself failed: no check is decided."""
    failure = Finding(
        Axis.STREAM, "not_decidable", Severity.WARNING, evidence=evidence,
        remedy="Nothing can be said about it. Please report it together with the file.",
        missing="a diagnosis that works",
    )
    return Diagnosis((failure,), {name: [failure.missing] for name in CHECKS})


def check_of(finding: Finding) -> str:
    """The check that a finding belongs to."""
    if finding.kind == "noncanonical_sampling" and finding.severity is Severity.INFO:
        return "canonical"
    if finding.kind in ("tokenizer_mismatch", "bos_mismatch") and not finding.step:
        return "first_prompt"
    return _CHECK_OF_KIND.get(finding.kind, _CHECK_OF_AXIS[finding.axis])


def lacks_of(case: DiagnosisContext) -> dict[str, list[str]]:
    """Each check that has something to check in this trajectory -> the fields that it lacks."""
    lacks = {**_lacks_of_steps(case), **(_lacks_of_rows(case) if case.trajectory.rows else {})}
    if case.media_lacks:
        lacks["media"] = sorted(filter(None, set(case.media_lacks)))
    return lacks


def _lacks_of_steps(case: DiagnosisContext) -> dict[str, list[str]]:
    steps = case.steps
    if not steps:
        names = list(CHECKS)[: list(CHECKS).index("policy_versions")]
        return {name: ["steps"] for name in names} if case.trajectory.rows else {}
    gone = {
        "token ids": any(not len(step.prompt_ids) for step in steps) or bool(case.no_ids),
        "tokenizer": case.codec is None,
        "text": any(step.text is None and step.reply is None for step in steps),
        "message of the reply": any(
            case.message_of(index) is None for index, step in enumerate(steps) if len(step.completion_ids)
        ),
        "request messages": any(step.request is None for step in steps),
        "chat template": any(case.renderer(step) is None for step in steps),
        "policy versions": any(not step.policy_version for step in steps),
        "logprobs": any(step.logprobs is None and len(step.completion_ids) for step in steps),
    }
    render = ["token ids", "tokenizer", "request messages", "chat template"]
    needs = {
        "token_ids": ["tokenizer"],
        "text": ["token ids", "tokenizer", "text"],
        "reply": ["token ids", "tokenizer", "message of the reply"],
        "first_prompt": render,
        "prefix": ["token ids"],
        "canonical": ["token ids", "tokenizer"],
        "delta": render,
        "control_text": render[:3],
        "policy_versions": ["policy versions"],
        "logprobs": ["logprobs"],
    }
    if len(steps) == 1:  # nothing follows
        del needs["prefix"], needs["delta"], needs["policy_versions"]
    lacks = {name: [field for field in fields if gone[field]] for name, fields in needs.items()}
    for name, missing in case.undecided.items():
        if not lacks.get(name, True):
            lacks[name] = [missing]
    return lacks


def _lacks_of_rows(case: DiagnosisContext) -> dict[str, list[str]]:
    rows = case.trajectory.rows
    has_steps = bool(case.steps) and all(row.step_indices for row in rows)
    if has_steps or all(row.origin is not None for row in rows):
        turns = ""
    else:
        turns = "tokenizer" if case.codec is None else "chat template" * (case.renderer_of(case.rows_template) is None)
    logprobs = any(row.logprobs is None for row in rows)
    advantages = any(not any("advantage" in name for name in row.columns) for row in rows)
    trainer = any(not any(name in row.columns for name in TRAINER_LOGPROBS) for row in rows)
    needs = {
        "lengths": "",
        "sampled": "steps" * (not has_steps),
        "mask": turns,
        "columns": "logprobs" * (logprobs and advantages),
        "logprobs": "logprobs" * logprobs,
        "trainer_logprobs": "trainer logprobs" * trainer or "logprobs" * logprobs,
        "advantages": "advantages" * advantages,
    }
    if "mask" in case.undecided:
        needs["mask"] = needs["mask"] or case.undecided["mask"]
    if any(name in row.columns for row in rows for name in REWARD_COLUMNS):
        needs["rewards"] = ""
    return {name: [missing] if missing else [] for name, missing in needs.items()}


@dataclass(frozen=True)
class CheckTotal:
    """What a check came to over some trajectories. A trajectory with nothing to check counts nowhere."""

    name: str
    """What the check is called on pages."""
    claim: str
    """What is true of a trajectory that passes."""
    checked: int = 0
    """Trajectories of which the check could decide, those that failed included."""
    failed: int = 0
    """Trajectories with an error or a warning of this check."""
    noted: int = 0
    """Trajectories with info findings of this check alone."""
    not_decidable: int = 0
    """Trajectories that lack a field which the check needs."""
    needs: list[str] = field(default_factory=list)
    """The fields that those trajectories lack."""


def totals(outcomes: Iterable[tuple[Mapping[str, Outcome] | None, int]]) -> list[CheckTotal]:
    """Add up the outcomes of checks, each with the number of trajectories that have it. None counts nowhere."""
    counts = {name: dict.fromkeys(("checked", "failed", "noted", "not_decidable"), 0) for name in CHECKS}
    needs: dict[str, set[str]] = {name: set() for name in CHECKS}
    for checks, n in outcomes:
        for name, outcome in (checks or {}).items():
            if name not in CHECKS:
                continue
            decided = isinstance(outcome, str)
            counts[name]["checked" if decided else "not_decidable"] += n
            if decided and outcome != "passed":
                counts[name][str(outcome)] += n
            needs[name].update(() if decided else outcome)
    return [
        CheckTotal(name, claim, **counts[name], needs=sorted(needs[name]))
        for name, claim in CHECKS.items()
        if any(counts[name].values())
    ]


def check_sentence(totals: Sequence[CheckTotal]) -> str:
    """What was checked, for every door: ``Passed 9 of 15 checks; 6 not decidable: no calls in the file.``"""
    if not totals:
        return "What was checked is not known; a new diagnosis of the run tells it."
    failed = sum(total.failed > 0 for total in totals)
    undecided = [total for total in totals if total.not_decidable and not total.failed]
    n, passed = len(totals), len(totals) - failed - len(undecided)
    lacking = dict.fromkeys(name for total in undecided for name in total.needs)
    gaps = ", ".join("no calls in the file" if name == "steps" else f"no {name}" for name in lacking)
    parts = [f"Passed {f'all {n}' if passed == n else f'{passed} of {n}'} check{'s' * (n != 1)}"]
    parts += [f"{failed} with findings"] * bool(failed) + [f"{len(undecided)} not decidable: {gaps}"] * bool(undecided)
    return "; ".join(parts) + "."


def all_clear(totals: Sequence[CheckTotal]) -> str:
    """What may be said where no finding is stored: what was checked, and what was not."""
    return f"None{'. ' if totals else ' is stored. '}{check_sentence(totals)}"
