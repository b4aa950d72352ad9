"""Names why trainer and sampler disagree: a closed list of causes, decided from stored columns.

Rules of one place come first: a re-tokenized row, placeholder values, shifted columns, repeated routing, mixed
versions, the context limit, few heavy tokens. What they explain is left out. Then the rules of the whole run look at
the rest: temperature, renormalised top-p, a stale cache, weights that were not delivered. A rest that still disagrees
is ``unexplained``. A cause whose column the source lacks is undecided, with a sentence. docs/gap.md lists the rules.
"""

from __future__ import annotations

from rollout_inspector.diagnose.gap.cause_case import Cause, CauseCase
from rollout_inspector.diagnose.gap.cause_kinds import CAUSES
from rollout_inspector.diagnose.gap.place_rules import PLACE_RULES
from rollout_inspector.diagnose.gap.run_rules import RUN_RULES
from rollout_inspector.diagnose.gap.tokens import GapTokens


def causes_of(tokens: GapTokens) -> tuple[list[Cause], dict[str, str]]:
    """The causes of the gap of a run in the order of the rules, and the undecided ones with a sentence why.

    No cause = sampler and trainer agree to rounding. The sentence says what is missing to decide a cause.
    """
    if not len(tokens):
        return [], {}
    case = CauseCase(tokens)
    for rule in (*PLACE_RULES, *RUN_RULES):
        rule(case)
    order = {name: n for n, name in enumerate(CAUSES)}
    names = {cause.cause for cause in case.causes}
    undecided = {name: case.undecided[name] for name in CAUSES if name in case.undecided.keys() - names}
    return sorted(case.causes, key=lambda cause: order[cause.cause]), undecided
