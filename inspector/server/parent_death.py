"""Lets a child process end with its parent, even when the parent was killed."""

import ctypes
import sys


def die_with_parent(signum: int) -> None:
    """Have the kernel send `signum` to this process when its parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signum), 0, 0, 0)
