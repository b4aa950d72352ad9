"""Names why trainer and sampler disagree: a closed list of causes, decided from stored columns.

Rules of one place come first: a re-tokenized row, placeholder values, shifted columns, repeated routing, mixed
versions, the context limit, few heavy tokens. What they explain is left out. Then the rules of the whole run look at
the rest: temperature, renormalised top-p, a stale cache, weights that were not delivered. A rest that still disagrees
is ``unexplained``. A cause whose column the source lacks is undecided, with a sentence. docs/gap.md lists the rules.
"""

from collections.abc import Callable

from rollout_inspector.diagnose.gap.cause_case import QUIET_STEPS, QUIET_TIMES, Cause, CauseCase
from rollout_inspector.diagnose.gap.cause_kinds import CAUSES
from rollout_inspector.diagnose.gap.place_rules import PLACE_RULES, heavy_behind
from rollout_inspector.diagnose.gap.run_rules import RUN_RULES
from rollout_inspector.diagnose.gap.tokens import GapTokens

OVER_ALL = frozenset(
    ("temperature", "top_p_renormalised", "weights_not_delivered", "weights_rounded_away", "unexplained")
)
"""Causes that move all tokens, so that others may lie behind them."""
HIDDEN = ("routing_repeated", "near_context_limit", "first_token", "heavy_tokens")
"""Causes of some tokens, which a cause of all tokens may hide."""


def causes_of(tokens: GapTokens) -> tuple[list[Cause], dict[str, str]]:
    """The causes of the gap of a run in the order of the rules, and the undecided ones with a sentence why. No cause =
    sampler and trainer agree to rounding. The sentence says what is missing to decide a cause."""
    if not len(tokens):
        return [], {}
    case, behind = CauseCase(tokens), CauseCase(tokens)
    for rule in (*PLACE_RULES, *RUN_RULES):
        rule(case)
    if any(cause.cause in OVER_ALL for cause in case.causes):
        for rule in PLACE_RULES:
            _also_in_quiet_steps(rule, behind)
        heavy_behind(behind)
        for rule in RUN_RULES:
            rule(behind)
        names, more = ({cause.cause for cause in view.causes} for view in (case, behind))
        if more > names - {"unexplained"} and "unexplained" not in more:
            case = behind
    order = {name: n for n, name in enumerate(CAUSES)}
    names = {cause.cause for cause in case.causes}
    if hiding := [name for name in CAUSES if name in names & (OVER_ALL - {"unexplained"})]:
        for name in HIDDEN:
            case.undecided.setdefault(name, f"“{CAUSES[hiding[0]].title}” moves all tokens and may hide it. Mend that "
                                      "first.")
    undecided = {
        name: " ".join(filter(None, (case.undecided[name], CAUSES[name].decides_now)))
        for name in CAUSES if name in case.undecided.keys() - names
    }
    return sorted(case.causes, key=lambda cause: order[cause.cause]), undecided


def _also_in_quiet_steps(rule: Callable[[CauseCase], None], case: CauseCase) -> None:
    """Look in all steps, and where nothing shows in those that agree best."""
    n, everywhere = len(case.causes), case.scope
    rule(case)
    for times, nth in (*((times, QUIET_STEPS) for times in QUIET_TIMES), (QUIET_TIMES[-1], 1)):
        if len(case.causes) == n:
            case.scope = case.quiet(times, nth)
            rule(case)
    case.scope = everywhere
