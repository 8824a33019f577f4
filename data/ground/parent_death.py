"""What the kernel does for processes that end out of turn. Linux only; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_at_parents_death(number: int, *, parent: int | None = None) -> None:
    """Send this process the signal `number` when its parent dies, at once if it already has; 0 asks for none.

    parent: the process id that the parent had when this process began; None means the parent of this moment.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number)) == 0 and number and os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Have this process take in what its children leave behind when they end, so that it can wait for all of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
