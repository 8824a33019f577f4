"""What the kernel does for processes that end out of turn. Linux only; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_at_parents_death(number: int, *, parent: int | None = None) -> None:
    """Have this process get signal `number` then, or now if `parent` (a process id) is gone already; 0: no signal.

    parent: for a process that began some time ago; None: who is the parent at this moment.
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
