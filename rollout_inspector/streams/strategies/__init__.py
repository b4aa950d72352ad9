"""Strategies: the ways in use to build a multi-turn token stream. A strategy is one class and one line in
``STRATEGIES``. The class holds everything about it: slug, sentence, needs."""

from rollout_inspector.streams.strategies.appending import (
    Bridge, FixedBase, SingleMessage, StepWise, StepWiseMerged, ToolDelta
)
from rollout_inspector.streams.strategies.protocol import Context, Strategy, StrategyRefused, TemplateRewrites, start
from rollout_inspector.streams.strategies.rendering import EosSplice, MessageDelta, PerMessage, Reconcile, Retokenize
from rollout_inspector.streams.strategies.role_formats import RoleFormats

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.slug: strategy
    for strategy in (
        ToolDelta, FixedBase, SingleMessage, Retokenize, MessageDelta, PerMessage, RoleFormats, EosSplice, Bridge,
        StepWise, StepWiseMerged, Reconcile,
    )
}
"""Every strategy by its slug, in the order of forms and pages."""


def about_strategy(slug: str) -> str:
    """The sentence about a strategy; empty for a slug that is no longer in the registry."""
    return STRATEGIES[slug].about if slug in STRATEGIES else ""


__all__ = ["STRATEGIES", "Context", "Strategy", "StrategyRefused", "TemplateRewrites", "about_strategy", "start"]
