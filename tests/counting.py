"""Work counted in place of time: the same on every machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(do: Callable[[], object]) -> int:
    """The instructions of Python that a call executes. What it spends inside C is not counted."""
    n = 0

    def count(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        nonlocal n
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        n += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        do()
    finally:
        sys.settrace(before)
    return n


def growth(work: Callable[[int], Callable[[], object]], small: int, factor: int = 4) -> float:
    """How many times as much work ``factor`` times the size is, divided by ``factor``: about 1 for linear work.

    ``work(n)`` makes the input of size ``n`` and returns what is to be counted.
    """
    return instructions(work(small * factor)) / instructions(work(small)) / factor
