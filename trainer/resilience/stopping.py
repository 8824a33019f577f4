"""When a run should stop early: signals, a wall-clock limit, a stop file, or a launcher that is gone.

In each case the run finishes the current step, saves a checkpoint and writes STOPPED into the run folder, and every
rank exits with STOPPED_CODE, which job scripts turn into a requeue. Requests reach the ranks at different times, so the
loop agrees on a reason in the small sum over ranks that it takes in every step anyway.

- Schedulers send SIGTERM and SIGUSR1. Python runs its handlers between bytecodes of the main thread, which may be in a
  collective, so a separate thread reads the interpreter's wakeup file. A second signal ends the process at once.
  Launchers and schedulers may both pass a signal on, so signals within SAME_SIGNAL_SECONDS count as one.
- The time limit is counted from the process' start, by clocks that nobody sets.
- Where only the job's direct task gets signals (Slurm with proctrack/cgroup), a wrapper makes the file that the
  environment variable BARISTA_STOP_FILE names.
- A launcher that is killed leaves its ranks behind, and the next start would find them still training. The kernel
  signals a parent's death. The `deepspeed` command above `deepspeed.launcher.launch` is no parent of ranks, so they
  check that it is still there. Either may have died before a rank checks for the first time. A study or a selection of
  seeds may start training without a launcher, and names itself in the environment variable BARISTA_STARTED_BY.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from data.ground.errors import CommandEnd
from data.ground.parent_death import signal_at_parents_death
from trainer.resilience.processes import Process, seconds_since_start

STOPPED_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
STOP_FILE_VARIABLE = "BARISTA_STOP_FILE"
STARTER_VARIABLE = "BARISTA_STARTED_BY"  # the process with which runs must end, with launchers between or without
SAME_SIGNAL_SECONDS = 3.0
# In order of priority, for ranks that have different reasons.
REASONS = ("SIGTERM", "SIGUSR1", "stop file", "clock", "launcher gone")
_SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}
_PARENT_DIED = signal.SIGUSR2
_LOOK_SECONDS = 0.5
_GONE = Process(os.getpid(), -1.0)  # no process has this start time


class Stopped(CommandEnd):
    """The run was asked to stop, and did so with a checkpoint; not an error."""

    exit_code = STOPPED_CODE
    prefix = ""


class NotSaved(CommandEnd):
    """At the end of a run its checkpoint, its model, DONE or STOPPED could not be written; for a job, a crash, which it
    tries again a few times. All ranks raise it.
    """


class StopRequests:
    """Listens for requests while it is entered; `wanted` says whether this rank was asked to stop, and why."""

    def __init__(
        self,
        *,
        after_minutes: float = 0.0,
        stop_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """after_minutes: the time limit, counted from this process' start; 0: no limit."""
        self._clock = clock
        self._deadline = clock() - seconds_since_start() + 60 * after_minutes if after_minutes else float("inf")
        self._file = Path(stop_file) if stop_file else None
        self._asked: set[str] = set()
        self._first_signal: float | None = None
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        """Must be called by the main thread, which alone may set signal handlers."""
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        # The handlers do nothing, but the interpreter writes a signal's number only where there is a handler.
        handled = [*_SIGNALS, _PARENT_DIED]
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
        self._launchers = _launchers()
        # The kernel signals the end of the thread that started this process, which in a study is not the main one.
        self._told_by_kernel = bool(self._launchers) and "RANK" in os.environ
        if self._told_by_kernel:
            signal_at_parents_death(_PARENT_DIED)
        threads = [self._read_signals, self._watch_launchers]
        self._threads = [threading.Thread(target=target, daemon=True) for target in threads]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._closed.set()
        signal.set_wakeup_fd(self._wakeup)
        if self._told_by_kernel:
            signal_at_parents_death(0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):
            self._write.send(b"\0")
        for thread in self._threads:
            thread.join()
        self._read.close()
        self._write.close()

    def wanted(self) -> str | None:
        """Why this rank was asked to stop, or None."""
        if self._file is not None and self._file.exists():
            self._asked.add("stop file")
        if self._clock() >= self._deadline:
            self._asked.add("clock")
        return next((reason for reason in REASONS if reason in self._asked), None)

    def _read_signals(self) -> None:
        while not self._closed.is_set():
            for number in self._read.recv(64):
                if number in _SIGNALS:
                    self._signalled(number)
                elif number == _PARENT_DIED:
                    self._asked.add("launcher gone")

    def _signalled(self, number: int) -> None:
        now, name = time.monotonic(), _SIGNALS[signal.Signals(number)]
        if self._first_signal is None:
            self._first_signal = now
        elif now - self._first_signal > SAME_SIGNAL_SECONDS:
            os.write(2, f"a second signal ({name}): leaving without a checkpoint\n".encode())
            os._exit(128 + number)
        self._asked.add(name)

    def _watch_launchers(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if not all(launcher.lives for launcher in self._launchers):
                self._asked.add("launcher gone")
                return


def started_by_me() -> dict[str, str]:
    """What to add to the environment of training that must not outlive this process."""
    me = Process.me()
    return {STARTER_VARIABLE: f"{me.pid} {me.started}"}


def _starter() -> list[Process]:
    pid, _, started = os.environ.get(STARTER_VARIABLE, "").partition(" ")
    try:
        return [Process(int(pid), float(started))]
    except ValueError:
        return []


def _launchers() -> list[Process]:
    """This rank's launcher processes: none where no launcher started it."""
    found = _starter()
    if "RANK" not in os.environ:
        return found
    with contextlib.suppress(psutil.Error, OSError):
        parents = _above(os.getpid())
        found += [_as_now(process) for process in parents[:1]]
        launch = next((each for each in parents if "deepspeed.launcher.launch" in each.cmdline()), None)
        # A shell above a launcher may end, as after nohup; the `deepspeed` command stays while its launch.py runs.
        above = parents[1:2] if launch in parents[:1] else []
        found += [_as_now(each) for each in above if any("deepspeed" in Path(w).name for w in each.cmdline()[:2])]
        if _died_before(launch):
            found.append(_GONE)
    return found


def _above(pid: int) -> list[psutil.Process]:
    """A process' parent, its parent's parent and so on. psutil's own `parents` would compare wall-clock times."""
    found: list[psutil.Process] = []
    while pid := psutil.Process(pid).ppid():
        found.append(psutil.Process(pid))
    return found


def _as_now(process: psutil.Process) -> Process:
    try:
        return Process.of(process.pid)
    except psutil.NoSuchProcess:
        return _GONE


def _died_before(launch: psutil.Process | None) -> bool:
    """Whether the launcher, or its parent, died while this rank was starting: an ancestor is missing."""
    if launch is None:
        # Only the `deepspeed` launcher passes this argument.
        return any(word.startswith("--local_rank=") for word in sys.argv)
    above = launch.ppid()
    # A process is in its parent's session unless it began one, or its parent died and another process adopted it.
    return above != 0 and os.getsid(launch.pid) not in (launch.pid, os.getsid(above))
