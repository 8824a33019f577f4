"""Ask the kernel to tell a process that its parent is gone, however it went. Linux only; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def signal_at_parents_death(number: int, *, parent: int | None = None) -> None:
    """Have this process get signal `number` then, or now if `parent` (a process id) is gone already; 0: no signal.

    parent: for a process that began some time ago; None: who is the parent at this moment.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number)) == 0 and number and os.getppid() != parent:
        os.kill(os.getpid(), number)
