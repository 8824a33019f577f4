"""Linux kernel features for the unexpected death of a parent or child; on other systems these functions do nothing."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_at_parents_death(number: int, *, parent: int | None = None) -> None:
    """Send this process the signal `number` when its parent dies, at once if it already has; 0 switches this off.

    parent: the parent's process id when this process began; None means the current parent.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number)) == 0 and number and os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents die, so that it can wait for all of them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
