"""Strategies: every way in use of building a multi-turn token stream. One line in ``STRATEGIES`` adds one."""

from __future__ import annotations

from collections.abc import Callable

from rollouts.tito.strategies.appending import FixedBase, SingleMessage, ToolDelta
from rollouts.tito.strategies.bridge import Bridge
from rollouts.tito.strategies.protocol import Context, Strategy, StrategyRefused, TemplateRewrites
from rollouts.tito.strategies.rendering import EosSplice, MessageDelta, PerMessage, Reconcile, Retokenize
from rollouts.tito.strategies.step_wise import StepWise, StepWiseMerged
from rollouts.tito.strategies.two_templates import start

STRATEGIES: dict[str, Callable[[Context], Strategy]] = {
    "tool_delta": ToolDelta,
    "fixed_base": FixedBase,
    "single_message": SingleMessage,
    "retokenize": Retokenize,
    "message_delta": MessageDelta,
    "per_message": PerMessage,
    "eos_splice": EosSplice,
    "bridge": Bridge,
    "step_wise": StepWise,
    "step_wise_merged": StepWiseMerged,
    "reconcile": Reconcile,
}

__all__ = ["STRATEGIES", "Context", "Strategy", "StrategyRefused", "TemplateRewrites", "start"]
