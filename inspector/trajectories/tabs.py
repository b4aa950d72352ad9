"""The pages of a trajectory, in the order of their tabs. Addresses, views and the header follow from this list."""

from __future__ import annotations

from inspector.trajectories.compare_page import compare_page
from inspector.trajectories.deltas_page import deltas_page
from inspector.trajectories.frame import Tab
from inspector.trajectories.mask_page import mask_page
from inspector.trajectories.record_page import record_page
from inspector.trajectories.strategies_page import strategies_page

TOKENS = Tab("tokens", "Tokens")

TABS = (
    TOKENS,
    Tab("compare", "Side by side", "side by side", compare_page),
    Tab("deltas", "Template deltas", "template deltas", deltas_page),
    Tab("mask", "Mask, explained", "mask, explained", mask_page),
    Tab("strategies", "Strategies", "strategies", strategies_page, is_kept=False),
    Tab("record", "As recorded", "as recorded", record_page),
)
