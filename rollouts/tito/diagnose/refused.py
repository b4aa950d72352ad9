"""The finding of a chat template that a strategy refused before anything was sampled."""

from __future__ import annotations

from rollouts.tito.diagnose.finding import Axis, Finding, Severity
from rollouts.tito.diagnose.thinking import lone_block
from rollouts.tito.diagnose.verdict import bounded
from rollouts.tito.interfaces import Codec
from rollouts.tito.strategies.protocol import TemplateRewrites

KINDS_OF_REFUSAL = ("empty_think_toggled", "template_not_append_only")
REMEDY = (
    "Launch again with a repaired template: the check of this one looks for a repair and offers it. Or choose a "
    "strategy that does not need a prefix-preserving template."
)


def finding_of_refusal(codec: Codec, refused: TemplateRewrites) -> Finding:
    """The finding: both renders of the smallest conversation, from where they part.

    It has neither step nor row, because nothing was sampled: offsets count in the probe's shorter render.
    """
    shorter, longer = refused.shorter[refused.shared :], refused.longer[refused.shared :]
    before, after = codec.decode(refused.shorter), codec.decode(refused.longer)
    toggled = [body for sides in ((before, after), (after, before)) if (body := lone_block(*sides)) is not None]
    kind = "empty_think_toggled" if toggled and not toggled[0].strip() else "template_not_append_only"
    return Finding(
        Axis.STREAM,
        kind,
        Severity.ERROR,
        start=refused.shared,
        stop=len(refused.shorter),
        expected_ids=bounded(shorter),
        actual_ids=bounded(longer),
        expected_text=codec.decode(bounded(shorter)),
        actual_text=codec.decode(bounded(longer)),
        evidence=str(refused),
        remedy=REMEDY,
    )
