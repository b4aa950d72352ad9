"""Makes the bundle of the gallery: every trajectory is checked to show its kind of finding and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rollouts.formats.readers.inspector_jsonl import write
from rollouts.gallery import CLEAN
from rollouts.gallery.cases import CASES, NATURAL, natural
from rollouts.gallery.sampling import FaultyTurn, Policy, sha256_of
from rollouts.tito.diagnose import KINDS, diagnose
from rollouts.tito.diagnose.finding import Finding, Severity
from rollouts.tito.trajectory import Trajectory

MAX_TRIES = 40
"""Questions that are tried for one case."""
NATURAL_STRATEGY = "retokenize"


def make(path: Path, say: Callable[[str], object] = lambda _: None) -> int:
    """Write the bundle. Returns how many. Raises ``LookupError`` for a case that no question shows."""
    policy = Policy()
    own = policy.context.renderer
    others = {sha256_of(text): policy.renderer(name) for name, text in policy.templates.items()}

    def found(one: Trajectory) -> list[Finding]:
        return diagnose(one, policy.codec, lambda sha256: others.get(sha256) if sha256 else own)

    made, missing = [], []
    for number, name in enumerate(_order()):
        say(name)
        one = next((one for one in _tries(policy, name, number) if _shows(one, name, found(one))), None)
        if one is None:
            missing.append(name)
        else:
            made.append(replace(one, external_id=name))
    if missing:
        raise LookupError(f"No question was found that shows this and nothing else: {', '.join(missing)}.")
    with path.open("wb") as file:
        return write(made, file)


def _order() -> list[str]:
    """The clean trajectory, then the kinds in the order of their registry."""
    named = {CLEAN, *CASES, *NATURAL}
    return [CLEAN, *(slug for slug in KINDS if slug in named)]


def _tries(policy: Policy, name: str, number: int) -> Iterator[Trajectory]:
    """The case made from one question after the other."""
    if name in NATURAL:
        yield from natural(policy, NATURAL_STRATEGY)
        return
    for n in range(MAX_TRIES):
        place = (number + 7 * n) % len(policy.tasks)
        turn = FaultyTurn(policy, policy.tasks[place], 100 * number + 3 * n, temperature=float(n < MAX_TRIES // 4))
        if turn.reply.get("tool_calls"):
            yield CASES[name](turn)


def _shows(one: Trajectory, name: str, findings: list[Finding]) -> bool:
    """Whether the trajectory has the finding of its name and no other, and ends with an answer.

    A completion that no encoder would choose is no fault, but it is a finding too.
    """
    kinds = {finding.kind for finding in findings if finding.kind != "not_decidable"}
    errors = {finding.kind for finding in findings if finding.severity == Severity.ERROR}
    last = one.steps[-1]
    answered = "answer is" in str((last.reply or {}).get("content", "")) and last.finish_reason == "stop"
    if name == CLEAN:
        return not kinds and answered
    if name in NATURAL:
        return name in errors and errors <= {name, "row_not_sampled"} and answered
    if name in _CONFUSED:
        return name in kinds and kinds <= {name, "noncanonical_sampling"}
    return kinds == {name} and answered


_CONFUSED = frozenset(
    ("boundary_merge", "invalid_utf8", "generation_prompt_missing", "context_truncated", "empty_think_toggled")
)
"""Cases whose prompts are so unlike those of the training that the policy samples odd tokens, which is worth seeing."""
