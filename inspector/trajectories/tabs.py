"""The pages of a trajectory, in the order of their tabs. Addresses, views and the header follow from this list."""

from inspector.trajectories.compare.compare_page import compare_page
from inspector.trajectories.compare.deltas_page import deltas_page
from inspector.trajectories.compare.strategies_page import strategies_page
from inspector.trajectories.forks_page import forks_page
from inspector.trajectories.frame import Tab
from inspector.trajectories.parsers_page import parsers_page
from inspector.trajectories.record_page import record_page
from inspector.trajectories.tokens.mask_page import mask_page
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import StoredTrajectory


def is_text_only(trajectory: StoredTrajectory) -> bool:
    """The source holds steps and no token ids, so that the trajectory opens as a conversation."""
    return bool(trajectory.n_steps) and not trajectory.n_tokens and not is_active(trajectory)


TOKENS = Tab("tokens", "Tokens", is_offered=lambda trajectory: not is_text_only(trajectory))

TABS = (
    TOKENS,
    Tab("record", "Conversation", "conversation", record_page),
    Tab("compare", "Side by side", "side by side", compare_page),
    Tab("deltas", "Template deltas", "template deltas", deltas_page),
    Tab("mask", "Mask, explained", "mask, explained", mask_page),
    Tab(
        "parsers",
        "Parsers",
        "parsers",
        parsers_page,
        is_kept=False,
        is_offered=lambda trajectory: bool(trajectory.n_steps) and not is_text_only(trajectory),
    ),
    Tab(
        "forks",
        "What if",
        "what if",
        forks_page,
        is_kept=False,
        is_offered=lambda trajectory: not is_text_only(trajectory),
    ),
    Tab("strategies", "Strategies", "strategies", strategies_page, is_kept=False),
)
