"""A process of this machine, told apart from a later one with the same number.

The two differ in when they started, counted from the machine's start: /proc/PID/stat's field 22, in clock ticks. The
wall clock is unfit, because it may be set while a run goes on, and /proc/stat's `btime`, from which seconds since the
epoch are computed, moves with it. Where there is no /proc, psutil's seconds since the epoch are used all the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_PROC = Path("/proc")
HAS_PROC = (_PROC / "self" / "stat").is_file()
# The states of a process that has ended and for which its parent has not waited.
_ENDED = ("Z", "X", "x")


@dataclass(frozen=True)
class Process:
    pid: int
    started: float  # clock ticks from the machine's start, or seconds since the epoch where there is no /proc

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process with that number. Raises psutil.NoSuchProcess where there is none."""
        state = _state_of(pid)
        if state is None:
            raise psutil.NoSuchProcess(pid)
        return cls(pid, state[1])

    @classmethod
    def me(cls) -> Self:
        return cls.of(os.getpid())

    @property
    def lives(self) -> bool:
        """Whether it still runs; False also for a process that has ended and for which its parent has not waited."""
        state = _state_of(self.pid)
        return state is not None and state[0] not in _ENDED and state[1] == self.started


def numbering() -> str:
    """A name for the PID namespace of this process. Two processes can look at each other only if theirs are equal.

    Names differ between machines, even between machines with the same host name. They also differ between containers on
    one machine if each container has a PID namespace of its own, as with `apptainer exec --containall`.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # where there is no /proc
        parts.append((_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip())
        parts.append(str((_PROC / "self" / "ns" / "pid").readlink()))
    return " ".join(parts)


class ProcessorWaits:
    """How long this process' threads wait for a processor that others use, by /proc/self/task/TID/schedstat.

    A thread in a system call, as in a collective, does not count as waiting; one that computes and gets no processor
    does.
    """

    def __init__(self) -> None:
        self._seen = _nanoseconds_waited()

    def since_last(self) -> float:
        """Seconds since the last call that a thread waited, of the one that waited longest; 0 without /proc."""
        seen, self._seen = self._seen, _nanoseconds_waited()
        return max((waited - seen.get(thread, waited) for thread, waited in self._seen.items()), default=0) / 1e9


def _nanoseconds_waited() -> dict[str, int]:
    """By the number of each thread: the nanoseconds in which the thread was ready to run but had no processor."""
    waited = {}
    for path in (_PROC / "self" / "task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread has ended, or the kernel keeps no counts
            waited[path.parent.name] = int(path.read_text().split()[1])
    return waited


def seconds_since_start(now: Callable[[], float] | None = None) -> float:
    """How long ago this process started. `now`: gives the seconds from the machine's start, sleep included."""
    started = Process.me().started
    if not HAS_PROC:
        return max(0.0, time.time() - started)
    since_boot = now() if now is not None else time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, since_boot - started / os.sysconf("SC_CLK_TCK"))


def state_in(stat: str) -> tuple[str, int]:
    """(State, clock ticks from the machine's start to the process' own) of a line of /proc/PID/stat.

    The command's name, in parentheses, may hold anything, parentheses included.
    """
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _state_of(pid: int) -> tuple[str, float] | None:
    if HAS_PROC:
        try:
            return state_in((_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            return None
    try:
        process = psutil.Process(pid)
        return "Z" if process.status() == psutil.STATUS_ZOMBIE else "R", process.create_time()
    except psutil.Error:
        return None
