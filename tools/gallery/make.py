"""Makes the bundle of the gallery: every trajectory is checked to show its kind of finding and nothing else."""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from rollout_inspector.diagnose import KINDS, diagnose
from rollout_inspector.diagnose.finding import Finding, Severity
from rollout_inspector.formats.readers.inspector_jsonl import write
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.gallery import CLEAN, EXAMPLES
from tools.gallery.cases import CASES, NATURAL, natural
from tools.gallery.sampling import FaultyTurn, Policy, sha256_of
from tools.gallery.trees import TREES

MAX_TRIES = 40
"""Questions that are tried for one case."""
NATURAL_STRATEGY = "retokenize"


def make(path: Path, say: Callable[[str], object] = lambda _: None, only: Collection[str] = ()) -> int:
    """Write the bundle. Returns how many. Raises ``LookupError`` for a case that no question shows.

    ``only``: the names to make; empty = all. What is made under a name depends on no other name.
    """
    policy = Policy()
    own = policy.context.renderer
    others = {sha256_of(text): policy.renderer(name) for name, text in policy.templates.items()}

    def found(one: Trajectory) -> list[Finding]:
        return diagnose(one, policy.codec, lambda sha256: others.get(sha256) if sha256 else own)

    trajectories, missing = [], []
    for name in (name for name in _order() if not only or name in only):
        say(name)
        trajectory = next(
            (trajectory for trajectory in _tries(policy, name) if _shows(trajectory, name, found(trajectory))), None
        )
        if trajectory is None:
            missing.append(name)
        else:
            trajectories.append(replace(trajectory, external_id=name))
    if missing:
        raise LookupError(f"No question was found that shows this and nothing else: {', '.join(missing)}.")
    with path.open("wb") as file:
        return write(trajectories, file)


def _order() -> list[str]:
    """The clean trajectory, the kinds in the order of their registry, then the trees."""
    names = {*CASES, *NATURAL}
    return [CLEAN, *(slug for slug in KINDS if slug in names), *TREES]


def _tries(policy: Policy, name: str) -> Iterator[Trajectory]:
    """The case made from one question after the other. They follow from its name: a new case changes no other one."""
    number = crc32(name.encode()) % 1000
    if name in NATURAL:
        yield from natural(policy, NATURAL_STRATEGY)
        return
    for n in range(MAX_TRIES):
        place = (number + 7 * n) % len(policy.tasks)
        turn = FaultyTurn(policy, policy.tasks[place], 100 * number + 3 * n, temperature=float(n < MAX_TRIES // 4))
        with suppress(LookupError):  # another question may show it
            if turn.reply.get("tool_calls"):
                yield (TREES.get(name) or CASES[name])(turn)


def _shows(one: Trajectory, name: str, findings: list[Finding]) -> bool:
    """Whether the trajectory has the finding of its name and no other, and ends with an answer.

    A completion that no encoder would choose is no fault, but it is a finding too.
    """
    kinds = {finding.kind for finding in findings if finding.kind != "not_decidable" or name == finding.kind}
    errors = {finding.kind for finding in findings if finding.severity == Severity.ERROR}
    last = one.steps[-1]
    reply = last.reply or {}  # in a think block that stays open, all of it is reasoning
    answered = (
        "answer is" in f"{reply.get('content')} {reply.get('reasoning_content')}" and last.finish_reason == "stop"
    )
    if name in EXAMPLES:
        return kinds == {EXAMPLES[name].kind} - {""} and answered
    if name in NATURAL:
        return name in errors and errors <= {name, "row_not_sampled"} and answered
    if name == "truncated_trained":
        return kinds == {name} and last.finish_reason == "length"
    if name in _CONFUSED:
        return name in kinds and kinds <= {name, "noncanonical_sampling"}
    return kinds == {name} and answered


_CONFUSED = frozenset(
    ("boundary_merge", "invalid_utf8", "generation_prompt_missing", "context_truncated", "empty_think_toggled")
)
"""Cases whose prompts are so unlike those of the training that the policy samples odd tokens, which is worth seeing."""
