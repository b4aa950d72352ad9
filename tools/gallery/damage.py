"""The damage of each kind of finding of the gallery to the gradient of the demo policy, as a table of the docs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollout_inspector.diagnose import KINDS, diagnose
from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.diagnose.loss_weights.damage import damage_case
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.align import align_ids, sampled_stream
from rollout_inspector.streams.prefix import merge_steps
from rollout_inspector.streams.trajectory import Row, Trajectory
from tools.gallery.sampling import Policy, sha256_of

BEGIN, END = "<!-- damage: begin -->", "<!-- damage: end -->"
"""Between these lines of the case study the command writes."""
NOISE, SMALL = 0.01, 0.1
"""Relative errors below these are called noise, and small."""


@dataclass(frozen=True)
class KindDamage:
    """A kind of finding with its damage. None = not measured, and ``why`` says why."""

    kind: str
    rows: str
    """How the rows hold it."""
    cosine: float | None = None
    relative_error: float | None = None
    norm_ratio: float | None = None
    share: float | None = None
    """Of the difference, which findings of this kind explain."""
    ratio_error: float | None = None
    """The relative error under GRPO, whose ratio reads the sampler's log-probabilities."""
    why: str = ""


Case = tuple[str, str, Trajectory, list[Finding]]


def cases(policy: Policy, trajectories: Iterable[Trajectory]) -> Iterator[Case]:
    """Kind, how the rows hold it, trajectory and its findings, of each trajectory that is called after a kind."""
    others = {sha256_of(text): policy.renderer(name) for name, text in policy.templates.items()}

    def placed(trajectory: Trajectory) -> list[Finding]:
        own = policy.context.renderer
        return diagnose(trajectory, policy.codec, lambda sha256: others.get(sha256) if sha256 else own)

    for trajectory in trajectories:
        kind = trajectory.external_id
        if kind not in KINDS:
            continue
        yield kind, "as stored", trajectory, placed(trajectory)
        if not trajectory.rows and len(merge_steps(trajectory.steps)) > 1 and kind not in ("branch", "duplicate_call"):
            broken = replace(trajectory, rows=(over_breaks(trajectory),))
            yield kind, "one row over the break", broken, placed(broken)


def damages(policy: Policy, trajectories: Iterable[Trajectory], say: Callable[[str], object]) -> Iterator[KindDamage]:
    """The damage of each trajectory of the gallery that is called after a kind, in their order."""
    for kind, rows, trajectory, findings in cases(policy, trajectories):
        say(f"{kind}, {rows}")
        yield _damage(policy, trajectory, kind, rows, findings)


def over_breaks(trajectory: Trajectory) -> Row:
    """The row of a trainer that keeps the last prompt alone: its tokens stand in for the sampled ones."""
    steps = trajectory.steps
    last = steps[-1].stream
    row = Row(last, np.zeros(len(last), np.bool_), step_indices=tuple(range(len(steps))))
    stream = sampled_stream(steps, row)
    assert stream is not None
    ids, sampled = stream
    for group in align_ids(ids, last):
        left = sampled[group.left_start : group.left_stop]
        row.loss_mask[group.right_start : group.right_stop] = left if group.equal else left.any()
    return row


def _damage(
    policy: Policy, trajectory: Trajectory, kind: str, rows: str, findings: list[Finding]
) -> KindDamage:
    try:
        measured = policy.engine.damage(damage_case(trajectory, findings, None, "uncorrected"))
        ratio = policy.engine.damage(damage_case(trajectory, findings, None, "grpo"))["relative_error"]
    except Refusal as error:
        return KindDamage(kind, rows, why=str(error))
    own = [measured["shares"].get(n, 0.0) for n, one in enumerate(findings, start=1) if one.kind == kind]
    share = sum(own) if measured["shares"] and own else None
    return KindDamage(
        kind, rows, measured["cosine"], measured["relative_error"], measured["norm_ratio"], share, ratio
    )


def table(lines: list[KindDamage]) -> str:
    """The table as Markdown, a line for each kind, the largest damage first."""
    text = [
        "| kind | verdict | error, as stored | error, one row over the break | cosine | norms | share | GRPO |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_kind: dict[str, list[KindDamage]] = {}
    for line in lines:
        by_kind.setdefault(line.kind, []).append(line)
    worst = {kind: max(both, key=lambda line: line.relative_error or -1.0) for kind, both in by_kind.items()}
    for kind, line in sorted(worst.items(), key=lambda pair: (-(pair[1].relative_error or -1.0), pair[0])):
        errors = [*(one.relative_error for one in by_kind[kind]), None][:2]
        figures = (*errors, line.cosine, line.norm_ratio, line.share, line.ratio_error)
        text.append(f"| `{kind}` | {verdict(line)} | {' | '.join(map(_number, figures))} |")
    missing = dict.fromkeys(line.why for line in lines if line.why)
    return "\n".join([*text, *(f"\nNot measured: {sentence}" for sentence in missing)])


def verdict(line: KindDamage) -> str:
    """Whether a break matters, in a word."""
    if line.relative_error is None:
        return "not measured"
    if line.relative_error == 0:
        return "none"
    return "noise" if line.relative_error < NOISE else "small" if line.relative_error < SMALL else "matters"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.3f}" if abs(value) >= NOISE else f"{value:.0e}"


def written(text: str, table_text: str) -> str:
    """The case study with another table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table_text}\n\n{END}{rest.partition(END)[2]}"
