"""The finding when a strategy refused a chat template before anything was sampled."""

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.finding_makers import bounded
from rollout_inspector.diagnose.thinking import lone_block
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.strategies.protocol import TemplateRewrites

KINDS_OF_REFUSAL = ("empty_think_toggled", "template_not_append_only")
REMEDY = (
    "Launch again with a repaired template: the template check looks for a repair and offers it. Or choose a "
    "strategy that does not need a prefix-preserving template."
)


def finding_of_refusal(codec: Codec, refused: TemplateRewrites) -> Finding:
    """The finding shows both renders of the smallest conversation, from their first difference. It has neither step nor
    row, because nothing was sampled. Offsets count in the shorter render of the probe."""
    shorter, longer = refused.shorter[refused.shared :], refused.longer[refused.shared :]
    before, after = codec.decode(refused.shorter), codec.decode(refused.longer)
    toggled = [body for pair in ((before, after), (after, before)) if (body := lone_block(*pair)) is not None]
    kind = "empty_think_toggled" if toggled and not toggled[0].strip() else "template_not_append_only"
    return Finding(
        Axis.STREAM, kind, Severity.ERROR, start=refused.shared, stop=len(refused.shorter),
        expected_ids=bounded(shorter), actual_ids=bounded(longer), expected_text=codec.decode(bounded(shorter)),
        actual_text=codec.decode(bounded(longer)), evidence=str(refused), remedy=REMEDY,
    )
